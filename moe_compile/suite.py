"""The experts' benchmark: in, geometries and token counts; out, a cell for each, with every contender's time and limit.

A cell's contenders run the same routed tokens on the same weights: `moe` (what the plan picks), the cheapest tactic of
each provider (`moe_decode`, `moe_grouped`, others under their own names), and peers (peers.py). Times are bench.py's:
CUDA graphs that rotate through layers with distinct weights, more than L2 holds; sorting and the weighted sum included,
as any call needs them. Routing is the top-k of a random linear router over random rows.
limit = max(bytes of the active experts' weights / bandwidth, FLOP / peak), from the datasheet (hardware.py).
Invariant: a contender is timed only if its result agrees with fp64 on sampled rows; one that can't run, or is wrong,
is named with why.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from . import reference
from .activation import Activation
from .bench import Timing, compare, compare_graphs
from .hardware import facts
from .operands import ExpertWeights, Listed
from .peers import PEERS
from .plan import plan_experts, shortlist
from .providers import Unserved, launcher, providers
from .spec import ExpertsSpec, Layout, torch_dtype
from .verdict import Reject

OAI = "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))"
SWIGLU = Activation.parse("swiglu")
# bf16 experts of published models; `tiny` is for machines without a GPU
GEOMETRIES: dict[str, ExpertsSpec] = {
    "qwen3_30b": ExpertsSpec(E=128, K=8, H=2048, I=768, act=SWIGLU),
    "mixtral": ExpertsSpec(E=8, K=2, H=4096, I=14336, act=SWIGLU),
    "olmoe": ExpertsSpec(E=64, K=8, H=2048, I=1024, act=SWIGLU),
    "qwen3next": ExpertsSpec(E=512, K=10, H=2048, I=512, act=SWIGLU),
    "dsv3": ExpertsSpec(E=256, K=8, H=7168, I=2048, act=SWIGLU),
    "gpt_oss_20b": ExpertsSpec(
        E=32, K=4, H=2880, I=2880, act=Activation.parse(OAI), down="EIH", bias="both",
        gate_up=Layout(storage="EHG", halves="gate_up_interleaved"),
    ),
    "tiny": ExpertsSpec(E=16, K=4, H=128, I=64, act=SWIGLU, x="f32", out="f32"),
}  # fmt: skip
TOKENS = tuple(1 << i for i in range(14))
_FAILURES = (
    Unserved,
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    NotImplementedError,
    ImportError,
    AttributeError,
)
Call = Callable[[], Any]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """Seconds a call, by contender; limit in seconds; why others have no time."""

    geometry: str
    spec: ExpertsSpec
    T: int
    limit: float
    times: dict[str, Timing]
    failed: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        us = {name: round(1e6 * t.median, 2) for name, t in self.times.items()}
        return {
            "geometry": self.geometry, **{k: getattr(self.spec, k) for k in "EKHI"}, "T": self.T,
            "limit_us": round(1e6 * self.limit, 2), "us": us,
            "ratio": {name: round(1e-6 * t / self.limit, 3) for name, t in us.items()},
            "spread": round(max((t.spread for t in self.times.values()), default=0.0), 4),
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [f"{n} {1e6 * t.median:.1f} ({t.median / self.limit:.2f})" for n, t in self.times.items()]
        return f"{self.geometry} T={self.T} limit {1e6 * self.limit:.1f} us: " + ", ".join(parts)


def weights_of(spec: ExpertsSpec, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Random weights of the spec's layout, N(0, 1 / depth)."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        w = torch.empty(shape, dtype=torch_dtype(spec.x), device=device)
        return w.normal_(0, scale, generator=generator)

    scales = (spec.H**-0.5, spec.I**-0.5, 0.1, 0.1)
    lists = [[draw(s, scale) for s in shapes] for shapes, scale in zip(spec.operand_shapes(), scales)]
    return ExpertWeights.of(spec, lists[0], lists[1], lists[2], lists[3])


def tokens_of(spec: ExpertsSpec, T: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(hidden_TH, ids_TK, weights_TK): random rows, routed by the softmax of a random linear router over them."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(T, spec.H, device=device, generator=generator)
    router = torch.randn(spec.E, spec.H, device=device, generator=generator) * spec.H**-0.5
    weights, ids = torch.softmax(x @ router.T, -1).topk(spec.K, -1)
    return x.to(torch_dtype(spec.x)), ids, (weights / weights.sum(-1, keepdim=True)).to(torch_dtype(spec.w))


def limit(spec: ExpertsSpec, ids: torch.Tensor) -> float:
    """Seconds below which no kernel can be on the device of `ids`."""
    device, each = facts(ids.device), spec.H * (spec.G + spec.I)
    size = torch_dtype(spec.x).itemsize
    active = len(torch.unique(ids))
    return max(active * each * size / device.bandwidth, 2 * ids.numel() * each / device.flop_rate(spec.x))


def contenders(spec: ExpertsSpec, T: int, device: torch.device, *, tactics: int, peers: bool) -> dict[str, Any]:
    """Names to zero-argument builders of a Run; a Reject where one can't run the spec. tactics: so many of each
    provider, under their own names, cheapest by the cost model first."""
    found: dict[str, Any] = {}
    here = facts(device)
    if not tactics:
        found["moe"] = partial(launcher, plan_experts(spec, here).plan.at(T), spec, device)
    for name, p in providers().items():
        able = p.available() and p.supports(spec, here)
        column = name if tactics else name.replace("triton_", "moe_")
        if not able:
            found[column] = able
            continue
        for priced in shortlist(spec, here, T, (name,))[: tactics or 1]:
            candidate = priced.candidate
            # built here, not by `launcher`, which lets aten serve what the provider can't
            found[str(candidate) if tactics else column] = partial(p.build, candidate.tactic, spec, device)
    if peers:
        found |= {name: partial(peer, spec, device) for name, peer in PEERS.items()}
    return found


def cells(
    names: Iterable[str], tokens: Sequence[int], device: torch.device, *, tactics: int = 0, peers: bool = True,
    only: Sequence[str] = (), rounds: int = 15, layers: int = 3, until: float = math.inf,
) -> Iterator[Cell]:  # fmt: skip
    """A cell for each geometry and token count, until the clock (time.time) says `until`.

    only: columns whose names start with one of these. layers: with weights of their own, fewer where they fill memory.
    """
    for geometry in names:
        spec = GEOMETRIES[geometry]
        fits = layers
        if device.type == "cuda":
            one = spec.E * spec.H * (spec.G + spec.I) * torch_dtype(spec.x).itemsize
            fits = max(1, min(layers, int(0.5 * torch.cuda.mem_get_info(device)[0] / one)))
        stack = [weights_of(spec, device, i) for i in range(fits)]
        for T in tokens:
            if time.time() > until:
                return
            inputs = [tokens_of(spec, T, device, 1000 + i) for i in range(fits)]
            yield _cell(geometry, spec, inputs, stack, only, rounds, tactics=tactics, peers=peers)
        del stack


def _cell(
    geometry: str, spec: ExpertsSpec, inputs: Sequence[Any], stack: Sequence[ExpertWeights], only: Sequence[str],
    rounds: int, **which: Any,
) -> Cell:  # fmt: skip
    device, T = inputs[0][0].device, inputs[0][0].shape[0]
    calls: dict[str, list[Call]] = {}
    failed: dict[str, str] = {}
    times: dict[str, Timing] = {}
    exact = _exact(spec, inputs[0], stack[0])
    for name, make in contenders(spec, T, device, **which).items():
        if only and not name.startswith(tuple(only)):
            continue
        run: Any = make if isinstance(make, Reject) else _attempt(make)
        why = run if isinstance(run, Reject) else _differs(spec, run, inputs[0], stack[0], exact)
        if why:
            calls[name] = [partial(run, *i, w) for i, w in zip(inputs, stack)]
        else:
            failed[name] = str(why)
    if device.type == "cuda":
        for name in list(calls):  # what can't be captured costs no other its time
            alone = _attempt(partial(compare_graphs, {name: calls[name]}, rounds=2, sample_seconds=0.0))
            if isinstance(alone, Reject):
                failed[name] = str(alone)
                del calls[name]
        times = compare_graphs(calls, rounds=rounds)
    elif calls:
        times = compare({name: partial(_all, each) for name, each in calls.items()}, rounds=rounds)
        times = {n: Timing(samples=tuple(s / len(stack) for s in t.samples)) for n, t in times.items()}
    low = sum(limit(spec, ids) for _, ids, _ in inputs) / len(inputs)
    return Cell(geometry=geometry, spec=spec, T=T, limit=low, times=times, failed=failed)


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _attempt(make: Callable[[], Any]) -> Any:
    """What `make` returns, or a Reject that says how it failed. Others' code fails in ways of its own."""
    try:
        return make()
    except _FAILURES as failure:
        return Reject(type(failure).__name__, " ".join(str(failure).split())[:200])


def _differs(spec: ExpertsSpec, run: Run, inputs: Any, weights: ExpertWeights, exact: torch.Tensor) -> Any:
    """Ok where `run` agrees with fp64 on the first and last token, to four roundings of the dtype."""
    x, ids, w = inputs
    got = _attempt(lambda: run(x, ids, w, weights)[[0, -1]].double())
    if isinstance(got, Reject):
        return got
    error = float((got - exact).norm() / exact.norm())
    bound = 4 * torch.finfo(torch_dtype(spec.x)).eps
    return error <= bound or Reject("its result is wrong", f"relative error {error:.1e}, allowed is {bound:.1e}")


def _exact(spec: ExpertsSpec, inputs: Any, weights: ExpertWeights) -> torch.Tensor:
    """The first and last token in fp64."""
    x, ids, w = inputs
    rows = [0, x.shape[0] - 1]
    used, small = ids[rows].unique(return_inverse=True)
    some = dataclasses.replace(spec, E=len(used))
    few = ExpertWeights(
        gate_up=tuple(_pick(t, used) for t in weights.gate_up), down=_pick(weights.down, used),
        gate_up_bias=tuple(_pick(t, used) for t in weights.gate_up_bias),
        down_bias=None if weights.down_bias is None else _pick(weights.down_bias, used),
    )  # fmt: skip
    return reference.experts(reference.exact(some), x[rows].double(), small, w[rows].double(), few)


def _pick(w: Any, experts: torch.Tensor) -> torch.Tensor:
    tensors = w.tensors if isinstance(w, Listed) else w
    return torch.stack([tensors[e] for e in experts.tolist()]).double()


def record(done: Sequence[Cell], device: torch.device) -> dict[str, Any]:
    """The cells as one JSON object, with date, device and versions; absent: columns without a time, with the cells'
    token counts and why."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    absent: dict[str, dict[str, list[int]]] = {}
    for cell in done:
        for name, why in cell.failed.items():
            absent.setdefault(f"{cell.geometry} {name}", {}).setdefault(why, []).append(cell.T)
    packages = ("torch", "triton", "transformers", "flashinfer-python", "vllm", "sonic-moe")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(facts(device)),
        "versions": {p: v for p in packages if (v := installed(p))},
        "absent": absent,
        "cells": [cell.as_dict() for cell in done],
    }
