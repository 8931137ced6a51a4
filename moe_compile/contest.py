"""The experts' benchmark: in, a geometry and token counts; out, a cell for each, with every contender's time and limit.

A cell's contenders run the same routed tokens on the same weights: `moe` (what the plan picks by price), `moe_tuned`
(the fastest of the short list that tuning measures), `moe_decode`, `moe_grouped` and so on (the cheapest tactic of each
provider of ours), other libraries' providers under their own names (the fastest of the tactics they offer, their own
tuner run first on these tokens) and peers (peers.py). Times are bench.py's: CUDA graphs that rotate through layers with
distinct weights, more than L2 holds; sorting and the weighted sum included, as any call needs them; laying weights out
and compiling excluded.
Invariant: a contender is timed only if its result agrees with fp64 on sampled rows; one that can't run, or is wrong,
is named with why.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from . import bench
from .bench import Timing
from .hardware import facts
from .operands import ExpertWeights
from .peers import PEERS
from .plan import SHORT_LIST, plan_experts, shortlist
from .providers import Unserved, copied_bytes, launcher, providers
from .spec import ExpertsSpec, torch_dtype
from .suite import GEOMETRIES, exact, limit, tokens_of, weights_of
from .tune import faults
from .verdict import Reject

OURS = ("moe", "triton_")  # how our columns start, and under `tactics`
HOPELESS = 4.0  # times the best of ours, predicted: a column that is not tried
ENDS = [0, -1]  # rows that are checked
Makers = Mapping[str, Callable[[], Any]]  # builders of a peers.Run, by the names of their tactics
PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "vllm", "sonic-moe", "quack-kernels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """Seconds a call, by contender; limit in seconds; RMS errors on the checked rows, relative; which tactic a
    contender of several chose; why others have no time."""

    geometry: str
    spec: ExpertsSpec
    T: int
    limit: float
    times: dict[str, Timing]
    errors: dict[str, float]
    chosen: dict[str, str]
    failed: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        us = {name: round(1e6 * t.median, 2) for name, t in self.times.items()}
        return {
            "geometry": self.geometry, **{k: getattr(self.spec, k) for k in "EKHI"}, "T": self.T,
            "limit_us": round(1e6 * self.limit, 2), "us": us,
            "ratio": {name: round(1e-6 * t / self.limit, 3) for name, t in us.items()},
            "spread": round(max((t.spread for t in self.times.values()), default=0.0), 4),
            "error": {name: float(f"{e:.2e}") for name, e in self.errors.items()}, "chosen": self.chosen,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [f"{n} {1e6 * t.median:.1f} ({t.median / self.limit:.2f})" for n, t in self.times.items()]
        return f"{self.geometry} T={self.T} limit {1e6 * self.limit:.1f} us: " + ", ".join(parts)


def contenders(
    spec: ExpertsSpec, T: int, device: torch.device, *, tactics: int, peers: bool
) -> dict[str, Makers | Reject]:
    """Columns and how to build each, in one or several ways; a Reject where one can't run the spec. tactics: so many of
    each provider, each a column under its own name, cheapest by the cost model first."""
    found: dict[str, Makers | Reject] = {}
    here = facts(device)

    def ways(names: tuple[str, ...], most: int | None) -> dict[str, Callable[[], Any]]:
        # built here, not by `launcher`, which lets aten serve what the provider can't
        return {
            str(c): partial(providers()[c.provider].build, c.tactic, spec, device)
            for c in (priced.candidate for priced in shortlist(spec, here, T, names)[:most])
        }

    def far(name: str) -> float:
        """Its best predicted time over the best of ours."""
        mine, best = (shortlist(spec, here, T, names)[:1] for names in ((name,), ours))
        return mine[0].seconds / best[0].seconds if mine and best else 0.0

    able = {name: p.available() and p.supports(spec, here) for name, p in providers().items()}
    ours = tuple(n for n, verdict in able.items() if n.startswith("triton_") and verdict)
    if not tactics:
        pick = plan_experts(spec, here).plan.at(T)
        found["moe"] = {str(pick): partial(launcher, pick, spec, device)}
        if ours:
            found["moe_tuned"] = ways(ours, SHORT_LIST)
    for name, verdict in able.items():
        if name == "aten" and device.type == "cuda":
            continue  # its calls are those of a peer, torch._grouped_mm
        column = name.replace("triton_", "moe_") if name != "aten" else "moe_aten"
        if isinstance(verdict, Reject):
            found[column] = verdict
        elif name in ours and far(name) > HOPELESS:
            found[column] = Reject("not tried", "predicted to take several times as long as the best of ours")
        elif tactics:
            found |= {label: {label: make} for label, make in ways((name,), tactics).items()}
        elif makers := ways((name,), 1 if providers()[name].priced else None):
            found[column] = makers
    if peers:
        found |= {name: {name: partial(peer, spec, device)} for name, peer in PEERS.items()}
    return found


class Contest:
    """The cells of one geometry. layers: calls in a graph, on tokens of their own, with weights of their own but where
    those, and what is copied of them, fill the memory. only: columns whose names start with one of these; without: none
    of those."""

    def __init__(
        self, geometry: str, device: torch.device, *, tactics: int = 0, peers: bool = True, only: Sequence[str] = (),
        rounds: int = 15, layers: int = 3,
    ) -> None:  # fmt: skip
        self.geometry, self.spec, self.device = geometry, GEOMETRIES[geometry], device
        self.only, self.rounds, self.layers = tuple(only), rounds, layers
        self._which = {"tactics": tactics, "peers": peers}
        self._stack: list[ExpertWeights] = []
        self._pool: Any = None  # of the graphs' memory

    def compile(self, T: int, without: Collection[str] = ()) -> dict[str, float]:
        """Compile what the contenders for T tokens need, ours on several threads, others by a call of each; seconds.
        What fails here fails again, and is named, in `cell`."""
        seconds, begun = {}, time.monotonic()
        weights, inputs = self._weights(1)[0], tokens_of(self.spec, T, self.device, 1000)
        makers = self._contenders(T)
        ours = [make for name, made in makers.items() if name.startswith(OURS) for make in made.values()]
        if self.device.type == "cuda" and ours:
            from .kernels.launch import compiling

            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, compiling(pool):
                for make in ours:
                    _attempt(lambda make=make: make()(*inputs, weights))  # type: ignore[misc]
            for make in ours:  # Triton builds a launcher at the first launch
                _attempt(lambda make=make: make()(*inputs, weights))  # type: ignore[misc]
            seconds["moe"] = time.monotonic() - begun
        for name, made in makers.items():
            if not name.startswith((*OURS, *without)):
                begun = time.monotonic()
                for make in made.values():
                    _attempt(lambda make=make: make()(*inputs, weights))  # type: ignore[misc]
                seconds[name] = time.monotonic() - begun
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes compile beside this one
        return seconds

    def cell(self, T: int) -> Cell:
        """Every contender for T tokens, checked and timed."""
        stack = self._weights(self._fitting())
        inputs = [tokens_of(self.spec, T, self.device, 1000 + i) for i in range(self.layers)]
        truth = exact(self.spec, ENDS, inputs[0], stack[0])
        failed: dict[str, str] = {}
        fastest: dict[str, _Ready] = {}
        self._pool = _new_pool(self.device)
        for name, made in self._contenders(T, failed).items():
            found = {label: self._ready(label, make, inputs, stack, truth) for label, make in made.items()}
            ready = {label: r for label, r in found.items() if isinstance(r, _Ready)}
            times = bench.level(self._time(ready, 5)) if len(ready) > 1 else {}
            if ready:
                fastest[name] = min(ready.values(), key=lambda r: times[r.label].median if times else 0.0)
            else:
                failed[name] = str(next(iter(found.values())))
        low = sum(limit(self.spec, ids) for _, ids, _ in inputs) / len(inputs)
        return Cell(
            geometry=self.geometry, spec=self.spec, T=T, limit=low, failed=failed,
            times=self._time(fastest, self.rounds) if fastest else {},
            errors={name: r.error for name, r in fastest.items()},
            chosen={name: r.label for name, r in fastest.items() if r.label != name},
        )  # fmt: skip

    def forget(self) -> None:
        """Let go of the weights; the next cell draws them again."""
        self._stack.clear()

    def _contenders(self, T: int, failed: dict[str, str] | None = None) -> dict[str, Makers]:
        found: dict[str, Makers] = {}
        for name, made in contenders(self.spec, T, self.device, **self._which).items():  # type: ignore[arg-type]
            if self.only and not name.startswith(self.only):
                continue
            if not isinstance(made, Reject):
                found[name] = made
            elif failed is not None:
                failed[name] = str(made)
        return found

    def _weights(self, layers: int) -> list[ExpertWeights]:
        while len(self._stack) < layers:
            self._stack.append(weights_of(self.spec, self.device, len(self._stack)))
        return self._stack[:layers]

    def _fitting(self) -> int:
        if self.device.type != "cuda":
            return self.layers
        s, here = self.spec, facts(self.device)
        able = [n for n, p in providers().items() if p.copies(s) and p.available() and p.supports(s, here)]
        one = s.E * s.H * (s.G + s.I) * torch_dtype(s.x).itemsize + copied_bytes(able, s)
        more = int(0.6 * torch.cuda.mem_get_info(self.device)[0] / one)  # the rest is the calls'
        return max(1, min(self.layers, len(self._stack) + more))

    def _ready(
        self, label: str, make: Callable[[], Any], inputs: Sequence[Any], stack: Sequence[ExpertWeights],
        truth: torch.Tensor,
    ) -> _Ready | Reject:  # fmt: skip
        """The contender ready to be timed, if its result agrees with fp64 to four roundings of the dtype."""
        run = _attempt(make)
        got = run if isinstance(run, Reject) else _attempt(lambda: run(*inputs[0], stack[0])[ENDS].double())
        if isinstance(got, Reject):
            return got
        error = float((got - truth).norm() / truth.norm())
        bound = 4 * torch.finfo(torch_dtype(self.spec.x)).eps
        if not error <= bound:
            return Reject("its result is wrong", f"relative error {error:.1e}, allowed is {bound:.1e}")
        calls = [partial(run, *i, stack[k % len(stack)]) for k, i in enumerate(inputs)]
        graph = None
        if self._pool is not None and isinstance(graph := _attempt(lambda: bench.capture(calls, self._pool)), Reject):
            self._pool = _new_pool(self.device)
            return graph
        return _Ready(label=label, error=error, calls=calls, graph=graph)

    def _time(self, ready: Mapping[str, _Ready], rounds: int) -> dict[str, Timing]:
        if self.device.type == "cuda":
            return bench.compare_captured({name: r.graph for name, r in ready.items()}, rounds=rounds)
        times = bench.compare({name: partial(_all, r.calls) for name, r in ready.items()}, rounds=rounds)
        return {n: Timing(samples=tuple(s / self.layers for s in t.samples)) for n, t in times.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ready:
    label: str
    error: float
    calls: Sequence[Callable[[], Any]]
    graph: Any  # a bench.Captured; None without CUDA


def _new_pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _attempt(make: Callable[[], Any]) -> Any:
    """What `make` returns, or a Reject that says how it failed. Others' code fails in ways of its own."""
    cutlass = sys.modules.get("cutlass.base_dsl.common")  # its errors are none of Python's
    try:
        return make()
    except (*faults(), Unserved, ImportError, getattr(cutlass, "DSLBaseError", Unserved)) as failure:
        return Reject(type(failure).__name__, " ".join(str(failure).split())[:200])


def record(done: Sequence[Cell], device: torch.device) -> dict[str, Any]:
    """The cells as one JSON object, with date, device and versions; absent: columns without a time, why, and for which
    token counts of which geometry."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    absent: dict[str, dict[str, dict[str, list[int]]]] = {}
    for cell in done:
        for name, why in cell.failed.items():
            absent.setdefault(name, {}).setdefault(why, {}).setdefault(cell.geometry, []).append(cell.T)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(facts(device)),
        "versions": {p: v for p in PACKAGES if (v := installed(p))},
        "absent": absent,
        "cells": [cell.as_dict() for cell in done],
    }


def as_json(found: Mapping[str, Any]) -> str:
    """A record as text, a line for each cell and each reason."""
    rows = ",\n".join(f"  {json.dumps(cell)}" for cell in found["cells"])
    gaps = ",\n".join(f"  {json.dumps(name)}: {json.dumps(why)}" for name, why in found["absent"].items())
    head = [f' "{k}": {json.dumps(v)}' for k, v in found.items() if k not in ("cells", "absent")]
    lists = [f' "absent": {{\n{gaps}\n }}' if gaps else ' "absent": {}', f' "cells": [\n{rows}\n ]']
    return "{\n" + ",\n".join([*head, *lists]) + "\n}"
