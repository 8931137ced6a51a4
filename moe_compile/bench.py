"""The one timing protocol: in, named functions; out, a Timing each. Tuning and benchmarks both use it.

Machines drift (clocks, heat, neighbours), so contenders are never timed one after the other: every round times each of
them once, in an order of its own, so that none always follows the same one (which may have heated the chip, or left
much in a cache), and a contender's time is the median over rounds. One sample repeats the call until
it fills `sample_seconds`, so that clock resolution and call overhead don't show. Ratios are of the same round, then the
median: what drifts slower than a round cancels.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SETTLE_SECONDS = 0.03  # before rounds of graphs


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per call, one sample a round, in round order."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median: 0.05 is +-5 %."""
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def over(self, other: Timing) -> float:
        """The median over rounds of this time / the other's: below 1, this one is faster."""
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=True))


def compare(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 15,
    sample_seconds: float = 0.02,
    synchronize: Callable[[], Any] = lambda: None,
) -> dict[str, Timing]:
    """Time each contender, interleaved. The first call of each, uncounted, warms it up (it may compile).

    synchronize: waits for the device (torch.cuda.synchronize); called once before and once after the repeated calls of
    a sample, so that launches overlap within a sample as they do in use. At least two rounds.
    """
    if rounds < 2:
        raise ValueError(f"bench: rounds={rounds} must be at least 2")

    def sample(call: Callable[[], Any], repeats: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize()
        return (time.perf_counter() - start) / repeats

    repeats = {}
    for name, call in contenders.items():
        sample(call, 1)
        once = min(sample(call, 1), sample(call, 1))
        repeats[name] = max(1, round(sample_seconds / max(once, 1e-9)))
    return _interleaved(list(contenders), rounds, lambda name: sample(contenders[name], repeats[name]))


def level(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """One comparison's timings as if all its rounds had been as fast as the middle one: what to rank by.

    Where rounds grow slower, as a card's clocks fall, a contender's median is its sample of a middle round, and what
    disturbed that one decides. Of 5 or 6 tactics that are timed in 5 rounds after a pause, the one chosen by medians
    takes up to 4 % longer than the best, by these up to 1.3 %, and after SETTLE_SECONDS of replays it is the best
    (H200, 5 shapes, 8 times each, 2026-12-01).
    """
    rounds = [statistics.median(samples) for samples in zip(*(t.samples for t in timings.values()), strict=True)]
    middle = statistics.median(rounds)
    return {
        name: Timing(samples=tuple(s * middle / r for s, r in zip(t.samples, rounds, strict=True)))
        for name, t in timings.items()
    }


def _interleaved(names: Sequence[str], rounds: int, sample: Callable[[str], float]) -> dict[str, Timing]:
    """One sample of each name a round, in a drawn order; the same orders every time."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(names, len(names)):
            samples[name].append(sample(name))
    return {name: Timing(samples=tuple(s)) for name, s in samples.items()}


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A CUDA graph that makes `calls` calls in turn."""

    graph: torch.cuda.CUDAGraph
    calls: int

    def seconds(self, replays: int) -> float:
        """Seconds a call, by events on the device."""
        import torch

        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(replays):
            self.graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3 / replays / self.calls


def capture(calls: Sequence[Callable[[], Any]], pool: Any = None) -> Captured:
    """The calls in a CUDA graph, after each was made outside of it. pool: of memory, shared with other graphs whose
    results are dropped too. Raises what the calls and capturing raise; the pool is of no more use then."""
    import torch

    for call in calls:  # the first compiles what capture must not; each may lay out weights of its own
        call()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            for call in calls:
                call()
    finally:
        torch.cuda.set_stream(stream)  # torch leaves the capture's current where capturing fails
    return Captured(graph=graph, calls=len(calls))


def compare_captured(
    graphs: Mapping[str, Captured], *, rounds: int = 15, sample_seconds: float = 0.002
) -> dict[str, Timing]:
    """Time each graph, interleaved; seconds a call. At least two rounds.

    Before that all are replayed in turn for SETTLE_SECONDS, since a card that was idle starts at clocks that its power
    limit soon takes back.
    """
    if rounds < 2:
        raise ValueError(f"bench: rounds={rounds} must be at least 2")
    replays = {}
    for name, captured in graphs.items():
        captured.seconds(1)
        once = captured.seconds(1) * captured.calls
        replays[name] = max(1, round(sample_seconds / max(once, 1e-9)))
    until = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < until:
        for captured in graphs.values():
            captured.seconds(1)
    return _interleaved(list(graphs), rounds, lambda name: graphs[name].seconds(replays[name]))


def compare_graphs(
    contenders: Mapping[str, Sequence[Callable[[], Any]]], *, rounds: int = 15, sample_seconds: float = 0.002
) -> dict[str, Timing]:
    """Time each contender's calls inside a CUDA graph that makes them in turn, interleaved; seconds a call.

    Give calls that read different weights or rows, more of them than L2 holds: a replay then finds L2 as a model would
    leave it. Timed by events on the device, so host time does not count. Raises what capturing raises.
    """
    import torch

    pool = torch.cuda.graph_pool_handle()  # results are dropped, so that graphs may share their memory
    graphs = {name: capture(calls, pool) for name, calls in contenders.items()}
    return compare_captured(graphs, rounds=rounds, sample_seconds=sample_seconds)
