"""Choose: from plans by predicted time to plans by measurement, for all blocks of a graph.

In: the captured graph with its example inputs, proved regions, and how to plan a spec. Out: for each region a Plan, or
a Reject where its own nodes were faster. What the cache knows is neither collected nor compiled again; what it does
not know is measured on a workload that is collected once for the graph. Ranks choose together (agree.py), and an error
on one of them is an error on all.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from . import agree, journal
from .cache import Cache, Entry, Key
from .clock import Clock
from .cost import Load
from .hardware import Device
from .nodes import fake
from .options import Options, cache_folder
from .plan import OPEN_BUCKET, TOKEN_BUCKETS, Planning
from .providers import Candidate, Plan, Priced, keep_in, providers
from .replay import fingerprint
from .spec import ExpertsSpec
from .tune import Tuned, key_of, remembered, tune, tuned_of
from .verdict import Reject
from .workload import DRAWN, VARIED, ZIPF, Workload, collect

Bound = int | None
Planner = Callable[..., Planning]
NODES, OPERATOR = "nodes", "operator"
SLOWER = 1.02  # over the nodes' time, beside the spread of both: timings of one thing differ by as much

_caches: dict[str, Cache] = {}
_told: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a graph's choices depend on besides its specs. facts: of a torch device. launch: "graph" or "eager"."""

    options: Options
    facts: Callable[[torch.device], Device]
    launch: str


class _Group:
    """The regions of one spec on one device with the same bytes to copy into, and what is known about their plan."""

    def __init__(self, spec: ExpertsSpec, device: torch.device, copies_left: int, planning: Planning) -> None:
        self.spec, self.device, self.copies_left, self.planning = spec, device, copies_left, planning
        self.load: Load | None = None
        self.regions: dict[int, Any] = {}
        # Planning budgeted the bytes of some providers, so none may come in that copies more.
        self.permitted = {n for n, p in providers().items() if n in planning.within or not p.copies(spec)}
        self.predicted = planning.lists
        # Who competes is part of the cache's keys: the same whatever load a workload shows later.
        self.names = {p.candidate.provider for b in TOKEN_BUCKETS for p in self.offers(b)}
        self.tuned: dict[Bound, Tuned] = {}
        self.kept: dict[str, float] | None = None  # NODES and OPERATOR: microseconds; {}: the nodes can't be timed

    @property
    def first(self) -> Any:
        return next(iter(self.regions.values()))

    @property
    def tokens(self) -> int | None:
        """The graph's token count; None where it is dynamic."""
        count = fake(self.first.match.hidden).numel() // self.spec.H
        return count if isinstance(count, int) else None

    def offers(self, bound: Bound) -> tuple[Priced, ...]:
        """The bucket's short list."""
        found = [p for p in self.planning.lists[bound] if p.candidate.provider in self.permitted]
        return tuple(found or (p for p in self.predicted[bound] if p.candidate.provider in self.permitted))

    @property
    def bounds(self) -> list[Bound]:
        """The buckets that the graph's calls can fall into, the likeliest first."""
        if (T := self.tokens) is None:
            return list(TOKEN_BUCKETS)
        return [next(b for b in TOKEN_BUCKETS if b is None or b >= T)]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How regions of a spec were planned, for which load (None: uniform), and their plan or why they keep their nodes.

    trials: by bucket, what was measured there.
    """

    planning: Planning
    load: Load | None
    plan: Plan | Reject
    trials: Mapping[Bound, tuple[journal.Trial, ...]]


def choose(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    graph: int,
    regions: Mapping[int, Any],
    plan: Planner,
    setting: Setting,
) -> dict[int, Choice]:
    """The choice of each region (recognize.Found, by number).

    plan: (spec, device, bytes left to copy into, load or None) -> Planning. Raises what planning raises, and
    agree.Disagreement.
    """
    together = _together(setting.options, {r.device for r in regions.values()})
    try:
        groups = _planned(regions, plan, setting.options.weight_copy_bytes)
        if setting.options.tune != "off":
            _measured(gm, inputs, graph, groups, plan, setting)
    except BaseException as error:
        if together:
            _agree(None, f"{type(error).__name__}: {error}", setting)
        raise
    chosen = _agree(groups, "", setting) if together else {}
    choices: dict[int, Choice] = {}
    for g in groups:
        trials = {bound: t.trials for bound, t in g.tuned.items()}
        choice = Choice(planning=g.planning, load=g.load, plan=_plan_of(g, chosen), trials=trials)
        choices.update(dict.fromkeys(g.regions, choice))
    return dict(sorted(choices.items()))


def _planned(regions: Mapping[int, Any], plan: Planner, copies_left: int) -> list[_Group]:
    found: dict[Any, _Group] = {}
    for n, region in regions.items():
        key = (region.spec.experts, region.device, copies_left)
        if key not in found:
            found[key] = _Group(*key, plan(*key))
        found[key].regions[n] = region
        copies_left -= found[key].planning.copied_bytes
    return list(found.values())


def measures(options: Options, device: torch.device) -> bool:
    """Whether choices on `device` are measured."""
    return options.tune == "measure" or (options.tune == "auto" and device.type == "cuda")


def _measured(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], graph: int, groups: list[_Group], plan: Planner, setting: Setting
) -> None:
    cache = cache_of(setting.options)
    missing: list[_Group] = []
    for g in groups:
        known = _Known(g, cache, setting)
        for bound in g.bounds:
            if (tuned := known.bucket(bound)) is not None:
                g.tuned[bound] = tuned
                _tell(graph, g, tuned, "")
        # Who names a provider has chosen it over the nodes too.
        g.kept = known.beside(fingerprint(gm, g.first)) if setting.options.provider == "auto" else {}
        whole = all(b in g.tuned and g.tuned[b].complete for b in g.bounds)
        if measures(setting.options, g.device) and not (whole and g.kept is not None):
            missing.append(g)
    if missing:
        with torch.no_grad():
            _measure(gm, inputs, graph, missing, plan, cache, setting)
    for problem in cache.problems:
        if problem not in _told:
            _told.add(problem)
            warnings.warn(f"moe_compile: tuning cache: {problem}", stacklevel=2)


class _Known:
    """What the cache has of a group."""

    def __init__(self, group: _Group, cache: Cache, setting: Setting) -> None:
        self.group, self.cache = group, cache
        self.device = setting.facts(group.device).name
        self.launch = setting.launch if group.device.type == "cuda" else "eager"
        wish = setting.options.provider  # its results are no answer to another question
        self.suffix = "" if wish == "auto" else f" provider={wish}"

    def key(self, bound: Bound, workload: str) -> Key:
        return key_of(self.group.spec, bound, self.device, self.launch, workload + self.suffix, self.group.names)

    def bucket(self, bound: Bound) -> Tuned | None:
        """A measured result; of several workloads that of the most real tokens."""
        entry = remembered(self.cache, [self.key(bound, w) for w in (VARIED, DRAWN, ZIPF)])
        if entry is None:
            return None
        try:
            tuned = tuned_of(entry, bound)
        except ValueError:
            return None
        return tuned if tuned.chosen.provider in self.group.permitted else None

    def beside(self, nodes: str) -> dict[str, float] | None:
        entry = self.cache.get(self.key(self.group.bounds[0], f"beside:{nodes}"))
        return {k: float(v) for k, v in entry.facts.items() if k in (NODES, OPERATOR)} if entry else None


def _measure(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    graph: int,
    groups: list[_Group],
    plan: Planner,
    cache: Cache,
    setting: Setting,
) -> None:
    rows = max(b or OPEN_BUCKET for g in groups for b in g.bounds)
    regions = [r for g in groups for r in g.regions.values()]
    begun = time.monotonic()
    workloads = collect(gm, inputs, regions, rows=rows, seed=setting.options.data_parallel_rank)
    journal.log.info("collected %d rows in %.1f s", rows, time.monotonic() - begun)
    for g in groups:
        workload = workloads[g.spec, g.device]
        if isinstance(workload, Reject):
            journal.log.warning("no measurement for %s: %s", g.spec, workload)
            continue
        counts, of = workload.counts()  # the load is what prices depend on
        g.load = Load.of_counts(counts, of) if any(counts) else None
        g.planning = plan(g.spec, g.device, g.copies_left, g.load)
        known = _Known(g, cache, setting)
        clock = Clock(device=g.device, launch=setting.launch)
        missing = [b for b in g.bounds if b not in g.tuned or not g.tuned[b].complete]
        measured: list[Tuned] = []
        if missing:
            measured = tune(
                g.spec,
                {b: g.offers(b) for b in missing},
                {b: b or OPEN_BUCKET for b in missing},
                workload,
                device=g.device,
                clock=clock,
                key=functools.partial(known.key, workload=workload.kind),
                cache=cache,
                seconds=setting.options.tune_seconds,
            )
        for tuned in measured:
            g.tuned[tuned.bound] = tuned
            _tell(graph, g, tuned, workload.why)
        _beside(gm, graph, g, workload, clock, known, cache)
    if any(g.device.type == "cuda" for g in groups):
        torch.cuda.empty_cache()  # what the graphs of many candidates held is the model's again


def _beside(
    gm: torch.fx.GraphModule, graph: int, g: _Group, workload: Workload, clock: Clock, known: _Known, cache: Cache
) -> None:
    """Time the operator beside the block's own nodes, where those can be run, on the tokens of the example."""
    if g.kept is not None:
        return
    g.kept = {}
    if (original := workload.original) is not None:
        plan = str(_plan_of(g, {}))
        calls = {
            NODES: [original.call],
            OPERATOR: [lambda: torch.ops.moe_compile.experts(*original.arguments, str(g.spec), plan)],
        }
        try:
            timings = clock(calls, 11)
        except RuntimeError as error:  # nodes that read counts on the host can't be captured
            journal.log.info("the nodes of %s can't be timed: %s", g.spec, error)
        else:
            us = {name: 1e6 * t.median for name, t in timings.items()}
            spread = max(t.spread for t in timings.values())
            g.kept = {NODES: us[NODES] * (SLOWER + spread), OPERATOR: us[OPERATOR]}
            journal.record(
                journal.Beside(
                    graph=graph, regions=tuple(g.regions), tokens=len(original.arguments[0]), kept=_kept(g),
                    nodes_us=us[NODES], operator_us=us[OPERATOR],
                )
            )  # fmt: skip
    key = known.key(g.bounds[0], f"beside:{fingerprint(gm, g.first)}")
    cache.put(Entry(key=key, chosen=_kept(g), facts={name: round(us, 3) for name, us in g.kept.items()}))


def _kept(g: _Group) -> str:
    return min(g.kept, key=g.kept.__getitem__) if g.kept else OPERATOR


def _plan_of(g: _Group, chosen: Mapping[str, str]) -> Plan | Reject:
    """The group's plan: agreed choices, else measured ones, else predicted ones."""
    if (chosen.get(f"{_name(g)} {NODES}") or _kept(g)) == NODES:
        return Reject(
            "the block's own nodes were faster", "; ".join(f"{k} {us:.1f} us" for k, us in (g.kept or {}).items())
        )

    def candidate(bound: Bound) -> Candidate:
        if text := chosen.get(_question(g, bound)):
            return Candidate.parse(text)
        return g.tuned[bound].chosen if bound in g.tuned else g.offers(bound)[0].candidate

    return Plan.of((bound, candidate(bound)) for bound in TOKEN_BUCKETS)


def _tell(graph: int, g: _Group, tuned: Tuned, why: str) -> None:
    journal.record(
        journal.Tuned(
            graph=graph, regions=tuple(g.regions), spec=str(g.spec), at=tuned.tokens, chosen=str(tuned.chosen),
            tokens="*" if tuned.bound is None else str(tuned.bound), source="cache" if tuned.cached else "measured",
            workload=tuned.workload, why=why, reach=tuned.reach, complete=tuned.complete, seconds=tuned.seconds,
            trials=tuned.trials,
        )
    )  # fmt: skip


def cache_of(options: Options) -> Cache:
    """The process's cache of a folder; with moe.cache=off one that is only in memory."""
    folder = cache_folder(options.cache)
    if folder not in _caches:
        _caches[folder] = Cache(folder)
        keep_in(folder)
    return _caches[folder]


# ranks


def _together(options: Options, devices: Iterable[torch.device]) -> bool:
    if options.agree == "off" or agree.ranks() == 1:
        return False
    return options.agree == "on" or any(measures(options, d) for d in devices)


def _question(g: _Group, bound: Bound) -> str:
    return f"{_name(g)} {'*' if bound is None else bound}"


def _name(g: _Group) -> str:
    return f"{g.spec} copies={g.copies_left}"


def _agree(groups: list[_Group] | None, error: str, setting: Setting) -> dict[str, str]:
    options = setting.options
    specs = len({g.spec for g in groups or ()})
    seconds = options.agree_seconds + max(1, specs) * options.tune_seconds
    if groups is None:
        return agree.agree(None, error, seconds=seconds)
    times: dict[str, dict[str, float | None]] = {}
    for g in groups:
        for bound in TOKEN_BUCKETS:
            tuned = g.tuned.get(bound)
            predicted = {str(g.offers(bound)[0].candidate): None}
            times[_question(g, bound)] = dict(tuned.times()) if tuned else dict(predicted)
        times[f"{_name(g)} {NODES}"] = dict(g.kept) if g.kept else {OPERATOR: None}
    terms = {
        "specs and tokens": "; ".join(f"{g.spec} T={g.tokens or 'dynamic'}" for g in groups),
        "devices": "; ".join(setting.facts(g.device).name for g in groups),
        "launches": setting.launch,
    }
    return agree.agree(agree.Proposal(terms=terms, times=times), seconds=seconds)
