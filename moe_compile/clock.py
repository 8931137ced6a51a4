"""The clock that tuning reads: `bench`'s protocol, under the launch mode that the graph will have.

In: contenders, each a list of calls over batches of its own. Out: seconds a call, on one device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import bench


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Times contenders, each a list of calls that are made in turn; seconds a call. `launch` is how the graph will
    launch them: "graph" or "eager"."""

    device: torch.device
    launch: str

    def __call__(self, contenders: Mapping[str, Sequence[Callable[[], Any]]], rounds: int) -> dict[str, bench.Timing]:
        if self.device.type == "cuda" and self.launch == "graph":
            with torch.cuda.device(self.device):
                return bench.compare_graphs(contenders, rounds=rounds)
        turns = {name: _in_turn(calls) for name, calls in contenders.items()}
        return bench.compare(turns, rounds=rounds, sample_seconds=0.002, synchronize=self._wait)

    def once(self, call: Callable[[], Any]) -> float:
        """Seconds of a single call, host time included: the better of two after a first one."""
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            self._wait()
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    turn = itertools.cycle(calls)
    return lambda: next(turn)()
