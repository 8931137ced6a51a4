"""The timing protocol, on a clock that the tests wind: interleaving, medians, ratios within a round."""

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_compile import bench
from moe_compile.bench import Timing, compare


class Clock:
    """Every call of a contender advances the time by what the contender costs at that moment."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.calls = []
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self.now)

    def contender(self, name, seconds):
        def call():
            self.calls.append(name)
            self.now += seconds() if callable(seconds) else seconds

        return call


def test_medians_and_ratio(monkeypatch):
    clock = Clock(monkeypatch)
    times = compare({"a": clock.contender("a", 0.001), "b": clock.contender("b", 0.004)}, rounds=5)
    assert times["a"].median == pytest.approx(0.001)
    assert times["b"].over(times["a"]) == pytest.approx(4)
    assert len(times["a"].samples) == 5
    assert times["a"].spread == pytest.approx(0, abs=1e-9)


def test_every_round_times_each_once_and_none_always_follows_the_same(monkeypatch):
    clock = Clock(monkeypatch)
    compare({n: clock.contender(n, 1.0) for n in "abc"}, rounds=12, sample_seconds=0.5)
    calls = clock.calls[9:]  # three warming calls each come first
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 12 and all(sorted(r) == list("abc") for r in rounds)
    for name in "abc":
        assert len({before for before, after in itertools.pairwise(calls) if after == name} - {name}) == 2


def test_a_machine_that_slows_down_does_not_bend_the_ratio(monkeypatch):
    clock = Clock(monkeypatch)
    slow = lambda base: lambda: base * (1 + clock.now)
    contenders = {"a": clock.contender("a", slow(0.001)), "b": clock.contender("b", slow(0.002))}
    times = compare(contenders, rounds=30, sample_seconds=0.001)
    assert max(times["a"].samples) > 1.05 * min(times["a"].samples)
    assert times["b"].over(times["a"]) == pytest.approx(2, rel=0.01)


def test_short_calls_are_repeated(monkeypatch):
    clock = Clock(monkeypatch)
    times = compare({"a": clock.contender("a", 1e-5)}, rounds=2, sample_seconds=0.02)
    assert len(clock.calls) == 3 + 2 * 2000
    assert times["a"].median == pytest.approx(1e-5)


def test_the_first_call_is_not_counted(monkeypatch):
    clock = Clock(monkeypatch)
    costs = iter([100.0])
    times = compare({"a": clock.contender("a", lambda: next(costs, 0.1))}, rounds=2)
    assert max(times["a"].samples) == pytest.approx(0.1)


def test_the_device_is_waited_for_around_each_sample(monkeypatch):
    clock = Clock(monkeypatch)
    compare(
        {"a": clock.contender("a", 0.01)},
        rounds=2,
        sample_seconds=0.02,
        synchronize=lambda: clock.calls.append("|"),
    )
    assert "".join(clock.calls) == "|a||a||a|" + "|aa|" * 2


class Replayed:
    """A graph of two calls on a Clock."""

    calls = 2

    def __init__(self, clock, name, seconds):
        self.call = clock.contender(name, 2 * seconds)
        self.alone = seconds

    def seconds(self, replays):
        for _ in range(replays):
            self.call()
        return self.alone


def test_graphs_settle_in_turn_before_the_rounds(monkeypatch):
    clock = Clock(monkeypatch)
    graphs = {n: Replayed(clock, n, s) for n, s in (("a", 0.0005), ("b", 0.001))}
    times = bench.compare_captured(graphs, rounds=4)  # type: ignore[arg-type]
    settled = round(bench.SETTLE_SECONDS / 0.003)
    assert "".join(clock.calls[:4]) == "aabb"
    assert "".join(clock.calls[4 : 4 + 2 * settled]) == "ab" * settled
    rest = clock.calls[4 + 2 * settled :]
    assert sorted(rest) == ["a"] * 8 + ["b"] * 4
    assert {n: t.median for n, t in times.items()} == {"a": 0.0005, "b": 0.001}


def test_one_disturbed_round_does_not_decide_while_clocks_fall():
    times = {"a": Timing(samples=(1.0, 1.155, 1.2)), "b": Timing(samples=(1.02, 1.122, 1.224)),
             "c": Timing(samples=(1.03, 1.133, 1.236))}  # fmt: skip
    assert min(times, key=lambda n: times[n].median) == "b"  # a's second sample was disturbed, and is in the middle
    level = bench.level(times)
    assert min(level, key=lambda n: level[n].median) == "a"


SAMPLES = st.floats(0.5, 2.0)


@given(st.integers(2, 7).flatmap(lambda n: st.tuples(
    st.lists(st.lists(SAMPLES, min_size=n, max_size=n), min_size=1, max_size=5),
    st.lists(SAMPLES, min_size=n, max_size=n))))  # fmt: skip
def test_level_takes_rounds_as_equally_fast(drawn):
    rows, factors = drawn
    was = {str(i): Timing(samples=tuple(row)) for i, row in enumerate(rows)}
    now = {n: Timing(samples=tuple(s * f for s, f in zip(t.samples, factors))) for n, t in was.items()}
    a, b = bench.level(was), bench.level(now)
    rounds = [statistics.median(samples) for samples in zip(*(t.samples for t in a.values()))]
    assert rounds == pytest.approx([rounds[0]] * len(rounds))
    scale = b["0"].samples[0] / a["0"].samples[0]
    for name, timing in a.items():
        assert b[name].samples == pytest.approx([scale * s for s in timing.samples])


def test_spread_is_half_the_quartile_distance():
    assert Timing(samples=(1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(1 / 3)


def test_one_round_has_no_spread():
    with pytest.raises(ValueError, match="rounds=1 must be at least 2"):
        compare({"a": lambda: None}, rounds=1)
