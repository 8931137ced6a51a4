"""Tuning: which candidate of each token bucket is fastest on tokens that route like real ones.

In: a spec's short lists (plan.py), a workload (workload.py) and the cache. Out: for each bucket a Tuned, saved in the
cache as it comes. Two stages, each in interleaved rounds: the best tactic of each provider, then providers against
each other. What is timed is the operator as the graph will call it: checks, sorting, packing, both linears, the sum.
A winner is compared with the reference before it may win. Invariant: what the budget, an error or Ctrl-C leaves
unmeasured keeps the choice by predicted cost, and no bucket that was measured is lost.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from . import bench, reference
from . import ops as _registered  # noqa: F401  (the operator)
from .cache import Cache, Entry, Key
from .clock import Clock
from .journal import Trial, log
from .operands import ExpertWeights
from .progress import Progress
from .providers import Candidate, Priced, launcher, providers
from .replay import FAULTS
from .spec import ExpertsSpec

__all__ = ["Tuned", "compile_ahead", "experts_call", "faults", "key_of", "remembered", "tune", "tuned_of"]

CHECKED_ROWS = 1024  # of a batch, compared with the reference: each of E experts is a loop there
HOPELESS = 2.5  # times the fastest single call, and by more than launches on the host can differ:
LAUNCHES_SECONDS = 5e-4  # a call of a few launches more takes under 0.1 ms longer (H200, 2026-11-30)
RIGHT = 2  # so many of the fastest must be right: ranks that choose together may take the second
FEW, MANY = 5, 11  # rounds of the first and of the second stage
_HOPELESS, _WRONG = "hopeless", "wrong"  # how a trial's `why` begins
_CALLS = 8  # calls of a sample: of as many batches, over the model's layers, so that no cache holds what they read
_REPLAY_ROUTES = 1 << 16  # beyond so many routes in a sample, fewer calls
Bound = int | None


class Tokens(Protocol):
    """What tuning needs of a workload.Workload."""

    @property
    def kind(self) -> str: ...
    def batch(self, T: int, number: int = 0) -> Any: ...
    def reach(self, T: int) -> float: ...
    def forget(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A bucket's choice. tokens: the T that was measured. complete: no contender was left out for the budget's sake.

    cached: it was found, not measured. reach: experts that `tokens` rows reach, a mean. seconds: spent on it.
    """

    bound: Bound
    tokens: int
    chosen: Candidate
    trials: tuple[Trial, ...]
    workload: str
    reach: float
    complete: bool = True
    cached: bool = False
    seconds: float = 0.0

    def times(self) -> dict[str, float]:
        """Candidate's text -> measured microseconds, of those that were found right."""
        found = [t for t in self.trials if t.error is not None or t.candidate == str(self.chosen)]
        return {t.candidate: t.us for t in found if t.us is not None and not t.why}


def key_of(spec: ExpertsSpec, bound: Bound, device: str, launch: str, workload: str, names: Iterable[str]) -> Key:
    """The cache's key. names: the providers that compete."""
    return Key(
        spec=str(spec), tokens="*" if bound is None else str(bound), device=device, launch=launch, workload=workload,
        versions=tuple(sorted((n, providers()[n].version()) for n in names)),
    )  # fmt: skip


def remembered(cache: Cache, keys: Sequence[Key]) -> Entry | None:
    """The first of `keys` with a complete result, else the first with any."""
    found = [e for k in keys if (e := cache.get(k)) is not None]
    return next((e for e in found if e.complete), found[0] if found else None)


def tuned_of(entry: Entry, bound: Bound) -> Tuned:
    """An entry's result; ValueError where its facts are not ours."""
    f = entry.facts
    try:
        trials = tuple(Trial(**t) for t in f["trials"])
        return Tuned(
            bound=bound, tokens=int(f["at"]), chosen=Candidate.parse(entry.chosen), trials=trials,
            workload=entry.key.workload, reach=float(f["reach"]), complete=entry.complete, cached=True,
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(f"an entry of the cache lacks {error}") from error


def tune(
    spec: ExpertsSpec,
    lists: Mapping[Bound, Sequence[Priced]],
    tokens_of: Mapping[Bound, int],
    workload: Tokens,
    *,
    device: torch.device,
    clock: Clock,
    key: Callable[[Bound], Key],
    cache: Cache,
    seconds: float,
) -> list[Tuned]:
    """Measure the short lists, in the order of `lists`, until `seconds` have passed. tokens_of: the T that stands for a
    bucket. A bucket that none of the candidates could run, or that the budget did not reach, is left out.
    """
    deadline = time.monotonic() + seconds
    done: list[Tuned] = []
    progress = Progress(f"tuning {spec.E} experts of {spec.H} x {spec.I}, {spec.K} a token", len(lists))
    try:
        for group in _groups(lists):
            if time.monotonic() >= deadline:
                break
            compile_ahead(spec, [(c, tokens_of[b]) for b in group for c in _candidates(lists[b])], workload, device)
            for bound in group:
                if time.monotonic() >= deadline:
                    break
                bucket = _Bucket(spec, bound, tokens_of[bound], workload, clock, deadline)
                try:
                    bucket.measure(lists[bound])
                except torch.OutOfMemoryError as error:
                    log.warning("no memory to measure %d tokens of %s: %s", tokens_of[bound], spec, error)
                finally:  # also on Ctrl-C, which goes on to the caller
                    if (tuned := bucket.result()) is not None:
                        done.append(tuned)
                        cache.put(_entry(key(bound), tuned))
                    workload.forget()
                progress.step(f"{tokens_of[bound]} tokens")
    finally:
        progress.end(f"{len(done)} of {len(lists)} buckets")
    return done


class _Bucket:
    """One bucket's measurement."""

    def __init__(
        self, spec: ExpertsSpec, bound: Bound, T: int, workload: Tokens, clock: Clock, deadline: float
    ) -> None:
        self.spec, self.bound, self.T, self.workload = spec, bound, T, workload
        self.clock, self.deadline, self.begun = clock, deadline, time.monotonic()
        self.trials: dict[Candidate, Trial] = {}
        self.best: Candidate | None = None
        self.complete = False
        self.want: tuple[torch.Tensor, torch.Tensor] | None = None

    def measure(self, offers: Sequence[Priced]) -> None:
        self.trials = {p.candidate: Trial(candidate=str(p.candidate), predicted_us=1e6 * p.seconds) for p in offers}
        single = {c: seconds for c in self.trials if (seconds := self._once(c)) is not None}
        offers, single = self._settle(offers, single)
        self._drop_hopeless(single)
        whole = self._stages(offers)
        right = self._right_ones()
        if not right and (again := [c for c in single if self.trials[c].why.startswith(_HOPELESS)]):
            # They were far behind candidates that are wrong.
            for c in again:
                self._note(c, us=None, why="")
            whole = self._stages(offers)
            right = self._right_ones()
        if not right and any(t.why.startswith(_WRONG) for t in self.trials.values()):
            raise RuntimeError(f"no candidate for {self.T} tokens of {self.spec} computes what the reference does")
        self.best = right[0] if right else None
        self.complete = whole

    def _settle(
        self, offers: Sequence[Priced], single: Mapping[Candidate, float]
    ) -> tuple[list[Priced], dict[Candidate, float]]:
        """Both with what open tactics came to in their first call, where a library's own tuner ran: that is timed and
        kept, so that every rank and every later process runs the same kernels without another search."""
        device, came_to = self.workload.batch(self.T).hidden_TH.device, {c: c for c in self.trials}
        for c in single:
            tactic = providers()[c.provider].settled(c.tactic, self.spec, device, self.T)
            came_to[c] = replace(c, tactic=tactic)
        self.trials = {came_to[c]: replace(t, candidate=str(came_to[c])) for c, t in self.trials.items()}
        return [replace(p, candidate=came_to[p.candidate]) for p in offers], {came_to[c]: s for c, s in single.items()}

    def _stages(self, offers: Sequence[Priced]) -> bool:
        """Time each provider's candidates, then the best of each; whether the deadline left all of it."""
        finalists = []
        whole = True
        for names in _by_provider(offers).values():
            whole = self._time([c for c in names if not self.trials[c].why], FEW) and whole
            if ranked := self._ranked(names):
                finalists.append(ranked[0])
        if len(finalists) > 1:
            whole = self._time(finalists, MANY) and whole
        return whole

    def _right_ones(self) -> list[Candidate]:
        """The fastest RIGHT of them that are right."""
        right: list[Candidate] = []
        for candidate in self._ranked(self.trials):
            right += [candidate] if self._right(candidate) else []
            if len(right) == RIGHT:
                break
        return right

    def result(self) -> Tuned | None:
        if self.best is None:
            return None
        return Tuned(
            bound=self.bound, tokens=self.T, chosen=self.best, trials=tuple(self.trials.values()),
            workload=self.workload.kind, reach=self.workload.reach(self.T), complete=self.complete,
            seconds=time.monotonic() - self.begun,
        )  # fmt: skip

    def _note(self, candidate: Candidate, **facts: Any) -> None:
        self.trials[candidate] = replace(self.trials[candidate], **facts)

    def _ranked(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        timed = [(t.us, c) for c in candidates if (t := self.trials[c]).us is not None and not t.why]
        return [c for _, c in sorted(timed, key=lambda pair: pair[0])]

    def _calls(self, candidate: Candidate, number: int) -> list[Callable[[], Any]]:
        arguments = [self.workload.batch(self.T, i).arguments() for i in range(number)]
        return [functools.partial(experts_call, *a, str(self.spec), f"*:{candidate}") for a in arguments]

    def _once(self, candidate: Candidate) -> float | None:
        """Seconds of a call, None where it fails."""
        try:
            return self.clock.once(self._calls(candidate, 1)[0])
        except faults() as error:
            self._note(candidate, why=f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            return None

    def _drop_hopeless(self, seconds: Mapping[Candidate, float]) -> None:
        """A candidate of several times the best one's single call costs more to time than all the others together."""
        best = min(seconds.values(), default=0.0)
        for candidate, once in seconds.items():
            if once > max(HOPELESS * best, best + LAUNCHES_SECONDS):
                self._note(
                    candidate, us=1e6 * once, why=f"{_HOPELESS}: {once / best:.1f} times the best, in a single call"
                )

    def _time(self, candidates: Sequence[Candidate], rounds: int) -> bool:
        """Whether all were timed; once the deadline has passed, none are."""
        if not candidates or time.monotonic() >= self.deadline:
            return not candidates
        number = max(2, min(_CALLS, _REPLAY_ROUTES // max(1, self.T * self.spec.K)))
        contenders = {str(c): self._calls(c, number) for c in candidates}
        try:
            timings = self.clock(contenders, rounds)
        except faults() as error:
            if len(candidates) == 1:
                self._note(candidates[0], why=f"failed: {type(error).__name__}: {error}")
                return True
            one_by_one = [self._time([c], rounds) for c in candidates]  # whose fault it was
            return all(one_by_one)
        level = bench.level(timings)
        for c in candidates:
            self._note(c, us=1e6 * level[str(c)].median, spread=timings[str(c)].spread)
        return True

    def _reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows from all over the batch, the reference's result for them)."""
        if self.want is None:
            batch = self.workload.batch(self.T)
            rows = torch.linspace(0, self.T - 1, min(self.T, CHECKED_ROWS), device=batch.ids_TK.device).round().long()
            weights = None if batch.weights_TK is None else batch.weights_TK[rows]
            experts = ExpertWeights.of(self.spec, *batch.rest)
            operands = (batch.hidden_TH[rows], batch.ids_TK[rows], weights, experts)
            # fp32 products may be tf32 ones if the user said so, which bf16 results don't notice
            compute = torch.float64 if self.spec.x == "f32" else None
            with torch.autocast(rows.device.type, enabled=False):
                want = reference.experts(self.spec, *operands, compute=compute)
            self.want = (rows, want.double())
        return self.want

    def _right(self, candidate: Candidate) -> bool:
        """Whether its result is the reference's."""
        rows, want = self._reference()
        got = self._calls(candidate, 1)[0]()[rows].double()
        finite = want.isfinite().all(-1)  # of a model whose numbers overflow there is nothing to compare
        got, want = got[finite], want[finite]
        if not len(want):
            return True
        rms = float((got - want).norm() / want.norm().clamp_min(1e-300))
        largest = float((got - want).abs().max() / want.abs().max().clamp_min(1e-300))
        rms_bound, max_bound = reference.tolerance(self.spec)
        if rms <= rms_bound and largest <= max_bound:
            self._note(candidate, error=rms)
            return True
        why = f"{_WRONG}: rms {rms:.1e} (bound {rms_bound:.1e}), largest {largest:.1e} (bound {max_bound:.1e})"
        log.warning("%s is left out for %d tokens of %s: %s", candidate, self.T, self.spec, why)
        self._note(candidate, error=rms, why=why)
        return False


def experts_call(*arguments: Any) -> Any:
    """The operator, by its arguments, spec and plan."""
    return torch.ops.moe_compile.experts(*arguments)


def _candidates(offers: Sequence[Priced]) -> list[Candidate]:
    return [p.candidate for p in offers]


def _by_provider(offers: Sequence[Priced]) -> dict[str, list[Candidate]]:
    found: dict[str, list[Candidate]] = {}
    for c in _candidates(offers):
        found.setdefault(c.provider, []).append(c)
    return found


def _groups(lists: Mapping[Bound, Sequence[Priced]]) -> Iterator[list[Bound]]:
    """Buckets whose candidates are compiled together: enough kernels to keep the cores busy, and no more, since the
    budget may end before the next group."""
    enough, group, new, known = 2 * _cores(), [], set(), set()  # type: ignore[var-annotated]
    for bound, offers in lists.items():
        group.append(bound)
        new |= set(_candidates(offers)) - known
        if len(new) >= enough:
            yield group
            known |= new
            group, new = [], set()
    if group:
        yield group


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_ahead(
    spec: ExpertsSpec, needed: Sequence[tuple[Candidate, int]], workload: Tokens, device: torch.device
) -> None:
    """Compile the kernels of (candidate, tokens) side by side: token counts differ in what kernels specialize on. What
    fails to compile fails again, and is noted, when it is run."""
    if device.type != "cuda":
        return
    begun = time.monotonic()
    from .kernels.launch import compiling

    try:
        with ThreadPoolExecutor(_cores()) as pool, compiling(pool):
            for candidate, T in sorted(needed, key=lambda pair: -pair[1]):  # tiles of many rows compile longest
                if candidate.provider.startswith("triton_"):
                    batch = workload.batch(T)
                    weights = ExpertWeights.of(spec, *batch.rest)
                    launcher(candidate, spec, device)(batch.hidden_TH, batch.ids_TK, batch.weights_TK, weights)
    except faults() as error:
        log.debug("not everything compiles: %s", error)
    log.info("compiled %d candidates in %.1f s", len({c for c, _ in needed}), time.monotonic() - begun)


@functools.lru_cache(None)
def _triton_faults() -> tuple[type[Exception], ...]:
    from triton.errors import TritonError

    return (TritonError,)


def faults() -> tuple[type[Exception], ...]:
    """What a candidate may raise; triton's errors are none of Python's."""
    return (*FAULTS, *(_triton_faults() if "triton" in sys.modules else ()))


def _entry(key: Key, tuned: Tuned) -> Entry:
    facts = {
        "at": tuned.tokens,
        "reach": round(tuned.reach, 2),
        "seconds": round(tuned.seconds, 3),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "trials": [vars(t) for t in tuned.trials],
    }
    return Entry(key=key, chosen=str(tuned.chosen), complete=tuned.complete, facts=facts)
