"""Experts in tensors of their own on a GPU: beside the same experts in one tensor, and as a whole model's block.

In: nothing. Out: tables on stdout, listed.json under $OUT (or .): device time of each short list's best three in a CUDA
graph, eight draws of tokens in turn; host time of the operator's call and of its parts; a ModuleList of 128 experts of
qwen3_30b's size under torch.compile, its compile time, its time beside its own eager code, and what it allocates.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from moe_compile import bench, journal, ops  # noqa: F401 (registers the operator)
from moe_compile.backend import moe_backend
from moe_compile.hardware import facts
from moe_compile.kernels import listed
from moe_compile.kernels.launch import compiling
from moe_compile.operands import ExpertWeights, Listed, checker
from moe_compile.plan import shortlist
from moe_compile.providers import Plan, launcher, providers
from moe_compile.providers.triton_grouped import one_stride_pattern
from moe_compile.spec import ExpertsSpec, Layout
from moe_compile.suite import GEOMETRIES, tokens_of, weights_of

GPU = torch.device("cuda", 0)
ONE = GEOMETRIES["qwen3_30b"]
SPECS = {"gate_up in one": ONE, "gate and up apart": dataclasses.replace(ONE, gate_up=Layout(halves="separate"))}
TOKENS, DRAWS = (1, 16, 256, 4096), 8
OURS = ("triton_decode", "triton_grouped", "triton_hopper")


def alone(spec: ExpertsSpec) -> ExpertsSpec:
    return dataclasses.replace(spec, tensors="listed")


def apart(p: ExpertWeights) -> ExpertWeights:
    """The same experts, each in tensors of its own."""

    def each(w: torch.Tensor) -> Listed:
        return Listed(tuple(t.clone() for t in w))

    return dataclasses.replace(p, gate_up=tuple(map(each, p.gate_up)), down=each(p.down))


def best(spec: ExpertsSpec, T: int, most: int = 3) -> list[Any]:
    here = facts(GPU)
    able = tuple(n for n in OURS if providers()[n].available() and providers()[n].supports(spec, here))
    return [p.candidate for p in shortlist(spec, here, T, able)[:most]]


def on_device(weights: dict[str, tuple[ExpertWeights, ExpertWeights]]) -> list[Any]:
    """us a call of each candidate, experts in one tensor and in tensors of their own."""
    cells: dict[tuple[str, int], dict[str, list[Callable[[], Any]]]] = {}
    for name, spec in SPECS.items():
        for T in TOKENS:
            draws = [tokens_of(spec, T, GPU, seed) for seed in range(DRAWS)]
            cells[name, T] = {
                f"{kind}: {c}": [functools.partial(launcher(c, s, GPU), *draw, w) for draw in draws]
                for kind, s, w in zip(("one tensor", "listed"), (spec, alone(spec)), weights[name], strict=True)
                for c in best(s, T)
            }
    with ThreadPoolExecutor(16) as threads, compiling(threads):
        for cell in cells.values():
            for calls in cell.values():
                calls[0]()
    rows = []
    for (name, T), cell in cells.items():
        graphs = {n: bench.capture(calls) for n, calls in cell.items()}
        us = {n: round(1e6 * t.median, 2) for n, t in bench.compare_captured(graphs, rounds=9).items()}
        rows.append({"weights": name, "T": T, "us": us})
        print(rows[-1], flush=True)
    return rows


def host(call: Callable[[], Any], repeats: int = 20, rounds: int = 15) -> float:
    """us of host time a call, the queue never full."""
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        samples.append((time.perf_counter() - start) / repeats * 1e6)
    return round(statistics.median(samples), 1)


def on_host(weights: dict[str, tuple[ExpertWeights, ExpertWeights]]) -> dict[str, Any]:
    """us of the operator's call, T = 1, and of its parts for listed experts: E = 128 in three lists."""
    name = "gate and up apart"
    spec, (one, own) = SPECS[name], weights[name]
    draw = tokens_of(spec, 1, GPU)
    *lists, scale = own.arguments()
    check, found = checker(alone(spec)), {}
    with torch.no_grad():
        for kind, s, w in (("one tensor", spec, one), ("listed", alone(spec), own)):
            plan = str(Plan.of([(None, best(s, 1)[0])]))
            call = functools.partial(torch.ops.moe_compile.experts.default, *draw, *w.arguments(), str(s), plan)
            found[kind] = host(call)
        found["listed: shapes and dtypes"] = host(lambda: check(*draw, *lists, scale))
        found["listed: strides"] = host(lambda: one_stride_pattern(own))
        found["listed: addresses and tables"] = host(lambda: listed.tables(own))
    print(found, flush=True)
    return found


class Expert(nn.Module):
    def __init__(self, H: int, I: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((H, I), (H, I), (I, H)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Loop(nn.Module):
    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__()
        self.router, self.K = nn.Linear(spec.H, spec.E, bias=False), spec.K
        self.experts = nn.ModuleList(Expert(spec.H, spec.I) for _ in range(spec.E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, ids = torch.topk(F.softmax(self.router(x), dim=-1, dtype=torch.float32), self.K, dim=-1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (w * (ids == e)).sum(-1, keepdim=True).to(x.dtype)
        return out


def whole() -> list[Any]:
    rows = []
    with torch.device(GPU), torch.no_grad():
        model = Loop(ONE).bfloat16()
        for mode, tokens in (("default", (1, 16)), ("reduce-overhead", (1,))):
            torch._dynamo.reset()
            backend = functools.partial(moe_backend, mode=mode, options={"moe.strict": True, "moe.tune": "off"})
            run = torch.compile(model, backend=backend, dynamic=False)
            for T in tokens:
                x = torch.randn(T, ONE.H, dtype=torch.bfloat16)
                start = time.time()
                with journal.capture() as events:
                    for _ in range(3):
                        run(x)
                torch.cuda.synchronize()
                took, before = time.time() - start, torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run(x)
                peak = torch.cuda.max_memory_allocated() - before
                calls = {"moe": functools.partial(run, x), "eager": functools.partial(model, x)}
                times = bench.compare(calls, rounds=5, synchronize=torch.cuda.synchronize)
                rows.append({
                    "mode": mode, "T": T, "compile_s": round(took, 1), "peak_MB": round(peak / 1e6, 1),
                    "plans": [e.plan for e in events if isinstance(e, journal.Planned)],
                    "us": {n: round(1e6 * t.median, 1) for n, t in times.items()},
                })  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }  # fmt: skip
    weights = {name: (p := weights_of(spec, GPU), apart(p)) for name, spec in SPECS.items()}
    for name, part in (
        ("times", functools.partial(on_device, weights)), ("host", functools.partial(on_host, weights)),
        ("module", whole),
    ):  # fmt: skip
        result[name] = part()
        Path(os.environ.get("OUT", "."), "listed.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
