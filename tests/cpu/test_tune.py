"""Tuning: the fastest right candidate wins, what is done is kept whatever happens, and nothing is measured twice."""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import E, GroupedBlock, H
from forks import FORKS

from moe_compile import backend, choose, journal, tune
from moe_compile.activation import Activation
from moe_compile.bench import Timing
from moe_compile.cache import Cache, Key
from moe_compile.clock import Clock as RealClock
from moe_compile.explain import Report
from moe_compile.hardware import facts
from moe_compile.operands import ExpertWeights
from moe_compile.plan import plan_experts
from moe_compile.progress import Progress
from moe_compile.providers import Candidate, Priced, Tactic, providers
from moe_compile.providers.aten import Aten
from moe_compile.spec import ExpertsSpec
from moe_compile.workload import ZIPF, Workload, zipf

CPU = torch.device("cpu")
SPEC = ExpertsSpec(E=6, K=2, H=16, I=8, act=Activation.parse("swiglu"), x="f32", w="f32", out="f32")
HIT, BLOCKS = (Candidate(provider="aten", tactic=Tactic.of(path=p)) for p in ("hit", "blocks"))
BOUNDS = (1, 8, 64)


class Other(Aten):
    """A second provider of the same kernels; `flaw` is what is wrong with its results."""

    def __init__(self, name: str, flaw: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> None:
        self.name, self.flaw = name, flaw

    def build(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device) -> Any:
        launch = super().build(Tactic(), spec, device)
        return lambda *a: self.flaw(launch(*a))


def broken(out: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such instruction\nand more lines")


def half_zero(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[: len(out) // 2], torch.zeros_like(out[len(out) // 2 :])])


OTHERS = {"other": Other("other"), "broken": Other("broken", broken), "wrong": Other("wrong", half_zero)}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    choose._caches.clear()
    for name, provider in OTHERS.items():
        monkeypatch.setitem(providers(), name, provider)
    yield
    torch._dynamo.reset()


def pool(rows: int = 64) -> Workload:
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(*s, generator=generator) * 0.2 for s in SPEC.weight_shapes())
    rest = ExpertWeights(gate_up=(gate_up,), down=down).arguments()
    return Workload(spec=SPEC, kind=ZIPF, pools=(zipf(SPEC, rest, CPU, rows=rows, seed=0),), seed=0)


class Clock:
    """Timings by candidate instead of by clock (others: 1.0); remembers who was timed together, in how many rounds."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.asked, self.single = seconds, [], {}  # type: ignore[var-annotated]

    def once(self, call: Callable[[], Any]) -> float:
        call()
        return self.single.get(call.args[-1].removeprefix("*:"), 1.0)  # type: ignore[attr-defined]

    def __call__(self, contenders: Mapping[str, Sequence[Callable[[], Any]]], rounds: int) -> dict[str, Timing]:
        self.asked.append((list(contenders), rounds))
        for calls in contenders.values():
            calls[0]()
        return {
            c: Timing(samples=(self.seconds.get(c.replace("(path=", "_").strip(")"), 1.0),) * 3) for c in contenders
        }


def offers(*candidates: Candidate) -> tuple[Priced, ...]:
    work = providers()["aten"].tactics(SPEC, facts(CPU), 1)[0][1]
    return tuple(Priced(candidate=c, seconds=1e-6 * (i + 1), work=work) for i, c in enumerate(candidates))


def key(bound: int | None) -> Key:
    return tune.key_of(SPEC, bound, "cpu", "eager", ZIPF, ["aten"])


def run(
    cache: Cache, clock: Any, *candidates: Candidate, bounds: Sequence[int] = (8,), seconds: float = 60.0
) -> list[tune.Tuned]:
    lists = {b: offers(*(candidates or (HIT, BLOCKS))) for b in bounds}
    return tune.tune(
        SPEC, lists, {b: b for b in bounds}, pool(), device=CPU, clock=clock, key=key, cache=cache, seconds=seconds
    )


def named(*names: str) -> list[Candidate]:
    return [Candidate(provider=n) for n in names]


def test_the_best_of_each_provider_meet_in_a_final(tmp_path: Path) -> None:
    clock = Clock(aten_hit=3.0, aten_blocks=2.0, other=2.5)
    (tuned,) = run(Cache(tmp_path), clock, HIT, BLOCKS, *named("other"))
    assert tuned.chosen == BLOCKS and tuned.complete and not tuned.cached
    first, second = (["aten(path=hit)", "aten(path=blocks)"], tune.FEW), (["other"], tune.FEW)
    assert clock.asked == [first, second, (["aten(path=blocks)", "other"], tune.MANY)]
    assert [t.us for t in tuned.trials] == [3e6, 2e6, 2.5e6]
    assert [t.predicted_us for t in tuned.trials] == [1.0, 2.0, 3.0]


def test_with_the_real_clock_the_fastest_measured_one_wins(tmp_path: Path) -> None:
    tuned = run(Cache(tmp_path), RealClock(device=CPU, launch="eager"), bounds=BOUNDS)
    assert [t.bound for t in tuned] == list(BOUNDS)
    for t in tuned:
        times = {trial.candidate: trial.us for trial in t.trials}
        assert len(times) == 2 and all(us is not None and us > 0 for us in times.values())
        assert times[str(t.chosen)] == min(times.values())
        assert 1 <= t.reach <= SPEC.E
        assert all(trial.why.startswith("hopeless") or trial.error < 1e-6 for trial in t.trials)


def test_a_wrong_result_never_wins_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="moe_compile"):
        (tuned,) = run(Cache(tmp_path), Clock(wrong=0.1), *named("wrong", "other"))
    assert str(tuned.chosen) == "other"
    (trial,) = [t for t in tuned.trials if t.candidate == "wrong"]
    assert trial.us == 1e5 and trial.why.startswith("wrong: rms ") and trial.candidate not in tuned.times()
    assert "wrong is left out for 8 tokens" in caplog.text


def test_the_users_modes_do_not_spoil_the_comparison(tmp_path: Path) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (tuned,) = run(Cache(tmp_path), Clock())
    assert [t.why for t in tuned.trials] == ["", ""] and all(t.error < 1e-6 for t in tuned.trials)


def test_a_candidate_that_fails_is_noted(tmp_path: Path) -> None:
    (tuned,) = run(Cache(tmp_path), Clock(), *named("broken", "other"))
    assert str(tuned.chosen) == "other"
    assert tuned.trials[0].why == "failed: RuntimeError: no such instruction" and tuned.trials[0].us is None


def test_a_candidate_far_behind_in_a_single_call_is_not_timed(tmp_path: Path) -> None:
    clock = Clock(other=0.5)
    clock.single = {"other": 3.0, "aten(path=blocks)": 2.0}
    (tuned,) = run(Cache(tmp_path), clock, HIT, BLOCKS, *named("other"))
    assert tuned.chosen == HIT and clock.asked == [([str(HIT), str(BLOCKS)], tune.FEW)]
    assert tuned.trials[2].why == "hopeless: 3.0 times the best, in a single call" and tuned.trials[2].us == 3e6


def test_the_host_time_of_launches_drops_nobody(tmp_path: Path) -> None:
    """In a single call a kernel of 20 us is behind its launches; in a CUDA graph it may be the fastest."""
    clock = Clock(other=0.5)
    clock.single = {str(HIT): 3e-5, str(BLOCKS): 4e-5, "other": 1.2e-4}
    (tuned,) = run(Cache(tmp_path), clock, HIT, BLOCKS, *named("other"))
    assert str(tuned.chosen) == "other" and all(t.why == "" for t in tuned.trials)


def test_what_is_far_behind_a_wrong_candidate_gets_its_chance(tmp_path: Path) -> None:
    clock = Clock(wrong=0.1, other=0.9)
    clock.single = {"wrong": 0.01}
    (tuned,) = run(Cache(tmp_path), clock, *named("wrong", "aten", "other"))
    assert str(tuned.chosen) == "other" and tuned.complete
    assert set(tuned.times()) == {"aten", "other"}


def test_where_nothing_works_there_is_no_result(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert run(cache, Clock(), *named("broken")) == []
    assert cache.entries() == {}


def test_where_everything_is_wrong_it_is_an_error(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(RuntimeError, match="no candidate for 8 tokens of experts"):
        run(cache, Clock(), *named("broken", "wrong"))
    assert cache.entries() == {}


def test_a_model_that_overflows_can_be_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = pool()
    full.pools[0].hidden_TH.fill_(float("inf"))
    monkeypatch.setitem(globals(), "pool", lambda: full)
    (tuned,) = run(Cache(tmp_path), Clock(aten_blocks=0.5))
    assert tuned.chosen == BLOCKS and set(tuned.times()) == {str(BLOCKS)}


@pytest.mark.parametrize(
    ("seconds", "done"),
    [
        (0.0, []),
        (0.3, [(1, False)]),  # the two providers are timed, the final is not
        (0.5, [(1, True)]),
        (0.7, [(1, True), (8, False)]),  # one provider is timed
        (9.9, [(1, True), (8, True), (64, True)]),
    ],
)
def test_the_budget_keeps_what_was_measured(
    seconds: float, done: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket takes three timings of 0.2 s: each of two providers, and the final."""
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])

    class Slow(Clock):
        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Timing]:
            now[0] += 0.2
            return super().__call__(*args, **kwargs)

    cache = Cache(tmp_path)
    tuned = run(cache, Slow(other=0.5), *named("aten", "other"), bounds=BOUNDS, seconds=seconds)
    assert [(t.bound, t.complete) for t in tuned] == done
    assert {k.tokens: e.complete for k, e in cache.entries().items()} == {str(b): whole for b, whole in done}


def test_ctrl_c_keeps_the_buckets_that_are_done(tmp_path: Path) -> None:
    class Interrupted(Clock):
        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Timing]:
            if len(self.asked) == 2:
                raise KeyboardInterrupt
            return super().__call__(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        run(Cache(tmp_path), Interrupted(), bounds=BOUNDS)
    assert {k.tokens: e.chosen for k, e in Cache(tmp_path).entries().items()} == {"1": str(HIT), "8": str(HIT)}


def test_a_cached_result_is_the_measured_one(tmp_path: Path) -> None:
    (tuned,) = run(Cache(tmp_path), Clock(aten_blocks=0.5))
    entry = tune.remembered(Cache(tmp_path), [key(8)])
    assert entry is not None
    found = tune.tuned_of(entry, 8)
    assert found.cached and (found.chosen, found.trials, found.complete) == (tuned.chosen, tuned.trials, True)


def test_compiling_runs_nothing() -> None:
    """Inside, a launch only warms its kernel up; after it, it runs, and no trace of the first is left."""
    pytest.importorskip("triton")
    from moe_compile.kernels.launch import Bound, compiling

    done: list[str] = []

    class Kernel:
        def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
            done.append(f"compiled {args[1:]} for {grid}")

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: done.append(f"run {args[1:]}")

    bound = Bound(Kernel(), (16,), CPU)
    with ThreadPoolExecutor(2) as pool:
        with compiling(pool):
            bound((1, 2), (torch.zeros(1), 7), (3,))
        with pytest.raises(ZeroDivisionError), compiling(pool):
            raise ZeroDivisionError
    bound((1, 2), (torch.zeros(1), 7), (3,))
    assert done == ["compiled (7, 3, 16, False) for (1, 2)", "run (7, 3, 16, False)"]


# other processes


def _tune(folder: str, seconds: float) -> None:
    class Sleepy(Clock):
        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Timing]:
            time.sleep(seconds)
            return super().__call__(*args, **kwargs)

    run(Cache(folder), Sleepy(aten_blocks=0.5), bounds=(1, 2, 4, 8, 16, 32))


def test_a_tuner_that_is_killed_leaves_its_buckets_to_the_next(tmp_path: Path) -> None:
    victim = FORKS.Process(target=_tune, args=(str(tmp_path), 0.5))
    victim.start()
    deadline = time.monotonic() + 60
    while len(Cache(tmp_path).entries()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(timeout=30)
    cache = Cache(tmp_path)
    left = [b for b in (1, 2, 4, 8, 16, 32) if cache.get(key(b)) is None]
    assert 0 < len(left) <= 4 and cache.problems == []
    assert len(run(cache, Clock(), bounds=left)) == len(left)
    assert all(e.complete for e in Cache(tmp_path).entries().values()) and len(Cache(tmp_path).entries()) == 6


def test_eight_processes_tune_at_once(tmp_path: Path) -> None:
    tuners = [FORKS.Process(target=_tune, args=(str(tmp_path), 0.0)) for _ in range(8)]
    for t in tuners:
        t.start()
    for t in tuners:
        t.join(timeout=90)
    assert [t.exitcode for t in tuners] == [0] * 8
    cache = Cache(tmp_path)
    assert {k.tokens: e.chosen for k, e in cache.entries().items()} == {str(1 << i): str(BLOCKS) for i in range(6)}
    assert cache.problems == []


# through the backend


def compiled(x: torch.Tensor, dynamic: bool | None = None, **options: Any) -> tuple[torch.Tensor, list[Any]]:
    torch._dynamo.reset()
    settings = {"moe.inner": "eager", "moe.strict": True, **{f"moe.{k}": v for k, v in options.items()}}
    block = torch.compile(
        GroupedBlock(), backend=functools.partial(backend.moe_backend, options=settings), dynamic=dynamic
    )
    with torch.no_grad(), journal.capture() as events:
        out = block(x)
        torch.testing.assert_close(out, GroupedBlock()(x))
    return out, events


def plan_of(events: list[Any]) -> str:
    (planned,) = [e for e in events if isinstance(e, journal.Planned)]
    return planned.plan


def tuned_in(events: list[Any]) -> list[journal.Tuned]:
    return [e for e in events if isinstance(e, journal.Tuned)]


@pytest.fixture
def two_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """aten offers both of its paths, so that there is something to choose."""

    def both(self: Aten, spec: Any, device: Any, T: int) -> Any:
        return [(c.tactic, self.work(c.tactic, spec, device)) for c in (HIT, BLOCKS)]

    monkeypatch.setattr(Aten, "tactics", both)


def clocked(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> Clock:
    clock = Clock(**seconds)
    monkeypatch.setattr(choose, "Clock", lambda **_: clock)
    return clock


def test_a_graph_is_measured_once_and_then_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_paths: None
) -> None:
    x, settings = torch.randn(10, H), {"tune": "measure", "cache": str(tmp_path)}
    clock = clocked(monkeypatch, aten_blocks=0.5, nodes=9.0)
    _, events = compiled(x, **settings)
    (tuned,) = tuned_in(events)  # ten tokens fall into one bucket
    assert (tuned.tokens, tuned.at, tuned.source, tuned.chosen) == ("16", 16, "measured", str(BLOCKS))
    assert tuned.workload == "hidden=drawn:1" and "no token ids" in tuned.why
    assert f"16:{BLOCKS}" in plan_of(events) or plan_of(events) == f"*:{BLOCKS}"
    (beside,) = [e for e in events if isinstance(e, journal.Beside)]
    assert (beside.kept, beside.tokens) == ("operator", 10)
    (planned,) = [e for e in events if isinstance(e, journal.Planned)]
    measured = {b.bound: {o.candidate: o.measured for o in b.offers} for b in planned.buckets}
    assert measured[16] == {str(HIT): 1.0, str(BLOCKS): 0.5} and set(measured[1].values()) == {None}

    choose._caches.clear()  # as another process would start
    clock.asked.clear()
    monkeypatch.setattr(choose, "collect", lambda *a, **k: pytest.fail("collected again"))
    _, again = compiled(x, **settings)
    assert clock.asked == [] and plan_of(again) == plan_of(events)
    (tuned,) = tuned_in(again)
    assert (tuned.source, tuned.chosen, len(tuned.trials)) == ("cache", str(BLOCKS), 2)
    text = str(Report.from_events(again))
    assert "measured    1 buckets, 1 of them by an earlier run, on hidden=drawn:1" in text
    (line,) = [words for words in map(str.split, text.splitlines()) if words[:2] == ["16", "500000.0"]]
    assert line[3:] == [f"{tuned.reach:.1f}", "2.00", str(BLOCKS)]


def test_what_the_budget_cut_is_measured_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_paths: None
) -> None:
    x, settings = torch.randn(10, H), {"tune": "measure", "cache": str(tmp_path)}
    clocked(monkeypatch, aten_blocks=0.5, nodes=9.0)
    compiled(x, **settings)
    cache = Cache(tmp_path)
    (entry,) = [e for e in cache.entries().values() if e.key.tokens == "16" and not e.key.workload.startswith("beside")]
    cache.path.write_text(dataclasses.replace(entry, chosen=str(HIT), complete=False).line() + "\n")
    choose._caches.clear()
    _, events = compiled(x, **settings)
    assert [(e.source, e.chosen) for e in tuned_in(events)] == [("cache", str(HIT)), ("measured", str(BLOCKS))]
    assert str(BLOCKS) in plan_of(events) and Cache(tmp_path).get(entry.key).complete


def test_a_dynamic_graph_measures_every_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_paths: None
) -> None:
    clock = clocked(monkeypatch, aten_blocks=0.5, nodes=9.0)
    monkeypatch.setattr(choose, "OPEN_BUCKET", 64)
    monkeypatch.setattr(choose, "TOKEN_BUCKETS", (1, 4, 16, None))
    monkeypatch.setattr("moe_compile.plan.TOKEN_BUCKETS", (1, 4, 16, None))
    _, events = compiled(torch.randn(10, H), dynamic=True, tune="measure", cache=str(tmp_path))
    assert [e.tokens for e in tuned_in(events)] == ["1", "4", "16", "*"]
    assert plan_of(events) == f"*:{BLOCKS}" and len(clock.asked) == 5


def test_where_the_nodes_are_faster_they_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"tune": "measure", "cache": str(tmp_path)}
    clock = clocked(monkeypatch, nodes=0.5, operator=1.0)
    for measured in (True, False):
        clock.asked.clear()
        choose._caches.clear()
        _, events = compiled(torch.randn(10, H), **settings)
        (skipped,) = [e for e in events if isinstance(e, journal.RegionSkipped)]
        assert "own nodes were faster" in skipped.why
        assert not any(isinstance(e, journal.Lowered) for e in events)
        assert bool(clock.asked) == measured


def test_a_difference_of_noise_keeps_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, nodes=0.99, operator=1.0)
    _, events = compiled(torch.randn(10, H), tune="measure", cache=str(tmp_path))
    assert any(isinstance(e, journal.Lowered) for e in events)


def test_off_and_cost_measure_nothing_and_cost_reads_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_paths: None
) -> None:
    x = torch.randn(10, H)
    clock = clocked(monkeypatch, aten_blocks=0.5, nodes=9.0)
    _, predicted = compiled(x, tune="cost", cache=str(tmp_path))
    assert clock.asked == [] and tuned_in(predicted) == [] and not any(tmp_path.iterdir())
    (first, *_) = plan_experts(ExpertsSpec.parse(_spec(predicted)), facts(CPU), mode="eager").lists[16]
    assert str(first.candidate) in plan_of(predicted)
    compiled(x, tune="measure", cache=str(tmp_path))
    _, cost = compiled(x, tune="cost", cache=str(tmp_path))
    assert [(e.source, e.chosen) for e in tuned_in(cost)] == [("cache", str(BLOCKS))]
    _, off = compiled(x, tune="off", cache=str(tmp_path))
    assert tuned_in(off) == [] and plan_of(off) == plan_of(predicted)


def _spec(events: list[Any]) -> str:
    (found,) = [e for e in events if isinstance(e, journal.RegionFound)]
    return found.spec.partition(") router")[0].rstrip(")") + ")"


def test_a_wish_wins_over_what_was_measured_and_over_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_paths: None
) -> None:
    x, settings = torch.randn(10, H), {"tune": "measure", "cache": str(tmp_path)}
    clocked(monkeypatch, aten_blocks=0.5, nodes=9.0)
    compiled(x, **settings)
    clocked(monkeypatch, aten_blocks=0.5, nodes=0.1)
    for _ in range(2):
        _, events = compiled(x, provider=str(HIT), **settings)
        assert plan_of(events) == f"*:{HIT}"
        assert any(isinstance(e, journal.Lowered) for e in events)


def test_a_cache_that_can_not_be_used_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, nodes=9.0)
    (tmp_path / "file").write_text("")
    x = torch.randn(10, H)
    with pytest.warns(UserWarning, match="tuning cache.*this process only") as caught:
        _, events = compiled(x, tune="measure", cache=str(tmp_path / "file"))
        _, again = compiled(x, tune="measure", cache=str(tmp_path / "file"))
    assert len([w for w in caught if "tuning cache" in str(w.message)]) == 1
    assert [e.source for e in (*tuned_in(events), *tuned_in(again))] == ["measured", "cache"]


def test_without_a_cache_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, nodes=9.0)
    monkeypatch.chdir(tmp_path)
    _, events = compiled(torch.randn(10, H), tune="measure", cache="off")
    assert len(tuned_in(events)) == 1 and not any(tmp_path.iterdir())


def test_an_error_in_tuning_leaves_the_graph_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "collect", lambda *a, **k: 1 / 0)
    with pytest.warns(UserWarning, match="tune: ZeroDivisionError"):
        _, events = compiled(torch.randn(10, H), tune="measure", cache=str(tmp_path), strict=False)
    assert [e.stage for e in events if isinstance(e, journal.StageFailed)] == ["tune"]


def _compile_as_rank(rank: int, world: int, folder: str, out: Any) -> None:
    """Rank 0 finds hit faster, the others blocks by more; rank 1's cache is warm already."""
    import torch.distributed as dist

    seconds = {"aten_hit": 1.0, "aten_blocks": 1.1} if rank == 0 else {"aten_hit": 2.0, "aten_blocks": 1.5}
    with pytest.MonkeyPatch.context() as patch:
        two_paths.__wrapped__(patch)  # type: ignore[attr-defined]
        clocked(patch, **seconds, nodes=9.0)
        settings = {"tune": "measure", "cache": f"{folder}/{rank}"}
        if rank == 1:
            compiled(torch.randn(10, H), **settings)
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous")
        alone = plan_of(compiled(torch.randn(10, H), agree="off", **settings)[1])
        together = plan_of(compiled(torch.randn(10, H), **settings)[1])
        if rank == 0:
            patch.setattr(choose, "_planned", lambda *a: 1 / 0)
        with pytest.warns(UserWarning, match="compiled without MoE kernels"):
            events = compiled(torch.randn(10, H), **{**settings, "strict": False})[1]
        (failed,) = [e.error for e in events if isinstance(e, journal.StageFailed)]
        out.put((rank, alone, together, failed))
        dist.barrier()
        dist.destroy_process_group()


def test_ranks_compile_the_same_plan_cold_or_warm_and_fail_together(tmp_path: Path) -> None:
    out = FORKS.Queue()
    processes = [FORKS.Process(target=_compile_as_rank, args=(r, 2, str(tmp_path), out)) for r in range(2)]
    for p in processes:
        p.start()
    found = sorted(out.get(timeout=120) for _ in processes)
    for p in processes:
        p.join(timeout=30)
    (_, alone0, together0, failed0), (_, alone1, together1, failed1) = found
    assert alone0 != alone1, "each for itself they differ"
    assert together0 == together1 and f"{BLOCKS}" in together0, "the slowest rank decides"
    assert "ZeroDivisionError" in failed0 and "Disagreement" in failed1
    assert "rank 0: ZeroDivisionError: division by zero" in failed1


# the progress bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    now = iter([0.0, 0.1, 2.0, 3.0])
    monkeypatch.setattr("moe_compile.progress.time.monotonic", lambda: next(now))
    progress = Progress("tuning", 4)
    progress.step("1 tokens")
    assert terminal.getvalue() == "", "too early to bother anybody"
    progress.step("2 tokens")
    assert "tuning [############............] 2/4 2 tokens, 2 s left" in terminal.getvalue()
    progress.end("done")
    assert terminal.getvalue().endswith("\r")


def test_elsewhere_it_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="moe_compile"):
        progress = Progress("tuning", 2)
        progress.begun -= 10
        progress.step("1 tokens")
        progress.end("1 of 2 buckets")
    assert capsys.readouterr().err == ""
    assert [r.getMessage() for r in caplog.records] == ["tuning: 1 of 2 buckets in 10.0 s"]


assert E == SPEC.E
