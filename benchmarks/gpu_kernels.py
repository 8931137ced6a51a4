"""Correctness and speed of our Triton kernels on a GPU, alone (routing given): the numbers behind the tactics' order.

In: geometries and token counts on the command line. Out: tables on stdout, kernels.json under $OUT (or .).
  check   bf16 against fp64 on sampled rows, beside the error of the torch bf16 path; fp16, fp32; repeatability; graphs
  stages  sort, fc1, fc2 and finalize alone, for each variant of STAGE_VARIANTS
  total   every tactic of both providers' lists, beside torch._grouped_mm (sorting included on both sides)
Time is the median over interleaved replays of CUDA graphs that run layers with distinct weights (L2 never holds them);
routing is the softmax of a random linear router over random hidden rows. Kernels are compiled in parallel beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))
from moe_compile.activation import Activation, evaluate
from moe_compile.hardware import facts
from moe_compile.kernels import finalize, grouped, sort
from moe_compile.kernels import launch as kernel_launch
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.sort import sort_routes
from moe_compile.operands import ExpertWeights
from moe_compile.providers import triton_decode, triton_grouped
from moe_compile.providers.base import Tactic
from moe_compile.spec import ExpertsSpec, Layout, torch_dtype

OAI = "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))"
OSS = {"gate_up": Layout(storage="EHG", halves="gate_up_interleaved"), "down": "EIH", "bias": "both"}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3_30b": {"E": 128, "K": 8, "H": 2048, "I": 768},
    "mixtral": {"E": 8, "K": 2, "H": 4096, "I": 14336},
    "olmoe": {"E": 64, "K": 8, "H": 2048, "I": 1024},
    "qwen3next": {"E": 512, "K": 10, "H": 2048, "I": 512},
    "gpt_oss_20b": {"E": 32, "K": 4, "H": 2880, "I": 2880, "act": OAI, **OSS},
    "dsv3": {"E": 256, "K": 8, "H": 7168, "I": 2048},
}
BANDWIDTH, PEAK = 4.8e12, 989e12  # datasheet bytes/s and dense bf16 FLOP/s of an H200

# (SWAP, TMA, N, K, warps, stages, GROUP_M = 8) of one linear, by rows of a tile
STAGE_VARIANTS: dict[str, list[tuple[int, ...]]] = {
    "fc1<=32": [(1, 0, 32, 128, 4, 4), (1, 0, 32, 128, 4, 5), (1, 0, 32, 128, 4, 3), (1, 0, 32, 256, 4, 3),
                (1, 0, 64, 128, 4, 3), (1, 0, 64, 128, 8, 3), (1, 0, 64, 64, 4, 4), (1, 1, 64, 128, 4, 3)],
    "fc1=64": [(0, 0, 64, 64, 4, 4), (1, 0, 64, 64, 4, 4), (0, 0, 64, 64, 4, 3), (0, 0, 64, 128, 4, 3),
               (1, 0, 32, 128, 4, 3), (0, 0, 128, 64, 8, 3)],
    "fc1=128": [(1, 1, 128, 64, 8, 4), (1, 1, 128, 64, 8, 4, 8), (1, 1, 128, 64, 8, 4, 128), (0, 1, 128, 64, 8, 4),
                (0, 1, 128, 64, 8, 4, 8), (0, 1, 128, 64, 8, 4, 128)],
    "fc2<=32": [(1, 0, 64, 128, 4, 4), (1, 0, 64, 256, 4, 3), (1, 0, 128, 128, 4, 3), (1, 0, 128, 64, 4, 4),
                (1, 0, 64, 128, 4, 5), (1, 0, 64, 128, 4, 3), (1, 0, 128, 128, 8, 3), (1, 1, 128, 128, 4, 3)],
    "fc2=64": [(0, 0, 128, 64, 4, 4), (0, 0, 128, 64, 4, 3), (0, 0, 128, 128, 4, 3), (1, 0, 64, 128, 4, 3),
               (1, 0, 128, 64, 4, 4), (0, 1, 256, 64, 4, 4)],
    "fc2=128": [(0, 1, 256, 64, 8, 4), (0, 1, 256, 64, 8, 4, 8), (0, 1, 256, 64, 8, 4, 128), (0, 1, 128, 64, 4, 4),
                (0, 1, 128, 64, 4, 4, 8), (0, 1, 128, 64, 4, 3)],
}  # fmt: skip


def spec_of(name: str, **changes: Any) -> ExpertsSpec:
    fields = {"act": "swiglu", "x": "bf16", "w": "f32", "out": "bf16", **GEOMETRIES[name], **changes}
    fields["act"] = Activation.parse(fields["act"])
    return ExpertsSpec(**fields)


def weights_of(spec: ExpertsSpec, device: str, draw: bool = True) -> ExpertWeights:
    def tensor(*shape: int) -> torch.Tensor:
        w = torch.empty(shape, dtype=torch_dtype(spec.x), device=device)
        return w.normal_(0, 0.02) if draw else w

    *first, down = (tensor(*s) for s in spec.weight_shapes())
    bias = tuple(tensor(spec.E, spec.G) for _ in first) if spec.has_gate_up_bias else ()
    down_bias = tensor(spec.E, spec.H) if spec.has_down_bias else None
    return ExpertWeights(gate_up=tuple(first), down=down, gate_up_bias=bias, down_bias=down_bias)


def tokens_of(spec: ExpertsSpec, T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(T, spec.H, device="cuda", dtype=torch.float32).to(torch_dtype(spec.x))
    router = torch.randn(spec.E, spec.H, device="cuda") * 0.02
    weights, ids = torch.softmax(x.float() @ router.T, -1).topk(spec.K, -1)
    return x, ids, (weights / weights.sum(-1, keepdim=True)).to(torch_dtype(spec.w))


def torch_path(spec: ExpertsSpec, x, ids, weights, p: ExpertWeights) -> torch.Tensor:
    """argsort, two torch._grouped_mm, activation in x's dtype, weighted sum."""
    order = ids.view(-1).argsort(stable=True)
    experts = ids.view(-1)[order]
    ends = torch.searchsorted(experts, torch.arange(1, spec.E + 1, device=x.device)).int()
    first = p.gate_up[0].transpose(1, 2) if spec.gate_up.storage == "EGH" else p.gate_up[0]
    down = p.down.transpose(1, 2) if spec.down == "EHI" else p.down
    h = torch._grouped_mm(x[order // spec.K], first, offs=ends)
    if p.gate_up_bias:
        h = h + p.gate_up_bias[0][experts]
    gate, up = (h[:, ::2], h[:, 1::2]) if spec.gate_up.halves.endswith("interleaved") else h.chunk(2, -1)
    y = torch._grouped_mm(evaluate(spec.act.expr, gate, up), down, offs=ends)
    if p.down_bias is not None:
        y = y + p.down_bias[experts]
    y = y * weights.view(-1, 1)[order]
    out = torch.empty_like(y)
    out[order] = y
    return out.view(x.shape[0], spec.K, spec.H).sum(1).to(x.dtype)


def exact_rows(spec: ExpertsSpec, rows: list[int], x, ids, weights, p: ExpertWeights) -> torch.Tensor:
    """The spec's meaning in fp64 for some tokens."""
    k_major = spec.gate_up.storage == "EGH"
    gate, up = grouped.gate_and_up(p.gate_up, spec.gate_up.halves, 1 if k_major else 2)
    gate_bias, up_bias = grouped.gate_and_up(p.gate_up_bias, spec.gate_up.halves, 1) if p.gate_up_bias else (None, None)

    def linear(a, w, b, e, rows_first):
        y = (w[e].double() if rows_first else w[e].double().T) @ a
        return y if b is None else y + b[e].double()

    out = torch.zeros(len(rows), spec.H, dtype=torch.float64, device=x.device)
    for i, t in enumerate(rows):
        for k, e in enumerate(ids[t].tolist()):
            a = x[t].double()
            h = evaluate(spec.act.expr, linear(a, gate, gate_bias, e, k_major), linear(a, up, up_bias, e, k_major))
            out[i] += weights[t, k].double() * linear(h, p.down, p.down_bias, e, spec.down == "EHI")
    return out


def error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(RMS, max), each relative to the reference's."""
    d = got.double() - want
    return (d.norm() / want.norm()).item(), (d.abs().max() / want.abs().max()).item()


def tactics_of(spec: ExpertsSpec, T: int, device: torch.device) -> list[tuple[Any, Tactic]]:
    found = [(GROUPED, t) for t, _ in GROUPED.tactics(spec, facts(device), T)]
    if T <= 8:
        found += [(DECODE, t) for t, _ in DECODE.tactics(spec, facts(device), T)]
    return found


GROUPED, DECODE = triton_grouped.TritonGrouped(), triton_decode.TritonDecode()
EXTRA_DECODE = [
    f"N1={n1},K1={k1},W1={w1},N2={n2},K2={k2},W2={w2}"
    for n1, k1, w1, n2, k2, w2 in [
        (2, 1024, 4, 2, 256, 4), (2, 1024, 4, 8, 256, 8), (2, 1024, 4, 8, 128, 4), (2, 1024, 4, 4, 512, 8),
        (4, 1024, 4, 4, 256, 4), (1, 1024, 4, 4, 256, 4), (2, 512, 2, 4, 256, 4), (4, 512, 4, 4, 256, 4),
    ]
]  # fmt: skip
EXTRA_DECODE_TRANSPOSED = [
    f"N1={n1},K1={k1},W1={w1},N2={n2},K2={k2},W2={w2}"
    for n1, k1, w1, n2, k2, w2 in [
        (16, 256, 4, 32, 128, 4), (32, 128, 8, 64, 64, 8), (32, 128, 4, 64, 64, 4), (32, 256, 8, 64, 128, 8),
    ]
]  # fmt: skip


EXTRA_GROUPED = [  # beside the provider's own lists, at few tokens
    f"M=16,N1={n1},K1={k1},W1=4,S1={s1},SWAP1=1,TMA1=0,N2={n2},K2={k2},W2=4,S2={s2},SWAP2=1,TMA2=0"
    for n1, k1, s1, n2, k2, s2 in [(64, 64, 4, 128, 64, 4), (32, 128, 4, 64, 128, 4), (32, 128, 4, 64, 64, 4)]
]


def extras_of(spec: ExpertsSpec) -> list[tuple[Any, Tactic]]:
    decode = EXTRA_DECODE if spec.down == "EHI" else EXTRA_DECODE_TRANSPOSED
    return [(DECODE, Tactic.parse(t)) for t in decode] + [(GROUPED, Tactic.parse(t)) for t in EXTRA_GROUPED]


# --- compile in parallel: forked workers without CUDA run the launchers with every launch replaced by a warm-up ---


class NoDevice:
    """Enough of a Triton driver to compile for the GPU that the parent process will use."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_job(job: tuple[str, str, int, str, str]) -> str:
    kind, name, M, text, extra = job
    from triton.runtime.driver import driver

    driver.set_active(NoDevice(90))
    kernel_launch.overlaps = lambda device: True
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.run = lambda *a, warmup=False, **k: run(*a, warmup=True, **k)
    try:
        changes = json.loads(extra)
        spec = spec_of(name, **changes)
        p = weights_of(spec, "cpu", draw=False)
        T = 64
        x = torch.empty(T, spec.H, dtype=torch_dtype(spec.x))
        ids = torch.zeros(T, spec.K, dtype=torch.int64)
        weights = torch.empty(T, spec.K, dtype=torch_dtype(spec.w))
        if kind in ("fc1", "fc2"):
            stage(kind, spec, M, tuple(map(int, text.split())), x, sort_routes(ids, spec.E, M), p)()
        else:
            provider = GROUPED if kind == GROUPED.name else DECODE
            triton_grouped.hopper = lambda device: True
            provider.build(Tactic.parse(text), spec, torch.device("cpu"))(x, ids, weights, p)
        return ""
    except Exception as e:  # noqa: BLE001  (reported; the timing below skips the variant)
        return f"{job}: {type(e).__name__} {str(e)[-400:]}"
    finally:
        triton.runtime.jit.JITFunction.run = run


def compile_all(jobs: list[tuple[str, str, int, str, str]]) -> set[tuple[str, str, int, str, str]]:
    """Jobs that failed."""
    jobs, began = list(dict.fromkeys(jobs)), time.time()
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=get_context("fork")) as pool:
        said = list(pool.map(compile_job, jobs, chunksize=2))
    for line in filter(None, said):
        print("NOT COMPILED", line, flush=True)
    print(f"compiled {len(jobs)} jobs in {time.time() - began:.0f} s", flush=True)
    return {job for job, line in zip(jobs, said) if line}


# --- timing ---


class Timer:
    """Medians of interleaved graph replays, in us for each layer."""

    def capture(self, calls: list[Any]) -> Any:
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            for call in calls:
                call()
        return graph

    def medians(self, variants: dict[str, list[Any]], rounds: int = 20) -> dict[str, tuple[float, float]]:
        """{name: (median us a call, relative spread of the middle half)}; what fails is reported and left out."""
        self.pool = torch.cuda.graph_pool_handle()  # a pool ends with the last of its graphs
        graphs: dict[str, tuple[Any, int]] = {}
        for name, calls in variants.items():
            try:
                graphs[name] = self.capture(calls), len(calls)
            except (triton.TritonError, RuntimeError, ValueError, triton.runtime.errors.OutOfResources) as e:
                print("  FAILED", name, type(e).__name__, str(e)[:200], flush=True)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for r in range(rounds + 2):
            torch.cuda._sleep(1_000_000)  # so that the queue never runs dry
            marks = []
            for name, (graph, n) in graphs.items():
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                graph.replay()
                b.record()
                marks.append((name, a, b, n))
            torch.cuda.synchronize()
            if r >= 2:
                for name, a, b, n in marks:
                    times[name].append(1000 * a.elapsed_time(b) / n)
        out = {}
        for name, t in times.items():
            t.sort()
            out[name] = statistics.median(t), (t[3 * len(t) // 4] - t[len(t) // 4]) / statistics.median(t)
        return out


def stage(kind: str, spec: ExpertsSpec, M: int, variant: tuple[int, ...], x: torch.Tensor, schedule, p) -> Any:
    swap, tma, n, k, warps, stages = variant[:6]
    group = variant[6] if len(variant) > 6 else 8
    tile = grouped.Tile(BLOCK_M=M, BLOCK_N=n, BLOCK_K=k, SWAP=swap, TMA=tma, warps=warps, stages=stages, GROUP_M=group)
    if kind == "fc1":
        act, k_major = epilogue(spec.act.expr), spec.gate_up.storage == "EGH"
        return lambda: grouped.fc1(
            x, p.gate_up, p.gate_up_bias, None, schedule, act, choices=spec.K, sizes=(spec.H, spec.I),
            gated=spec.gated, halves=spec.gate_up.halves, k_major=k_major, tile=tile,
        )  # fmt: skip
    a = torch.empty(schedule.R, spec.I, dtype=x.dtype, device=x.device)
    if a.is_cuda:
        a.normal_()
    return lambda: grouped.fc2(a, p.down, p.down_bias, schedule, k_major=spec.down == "EHI", tile=tile)


def sort_with(fused_routes: int, *args: Any) -> Any:
    kept = sort.FUSED_ROUTES, sort._FUSED_COUNTS
    sort.FUSED_ROUTES, sort._FUSED_COUNTS = fused_routes, 1 << 62
    try:
        return sort.sort_routes(*args)
    finally:
        sort.FUSED_ROUTES, sort._FUSED_COUNTS = kept


def blocks_for(spec: ExpertsSpec, T: int) -> list[int]:
    rows = T * spec.K / triton_grouped.active_experts(spec, T)
    return [m for m in (16, 32, 64, 128) if m <= max(16, 4 * rows) and m >= min(64, rows / 2)]


def variants_for(kind: str, M: int) -> list[tuple[int, ...]]:
    return STAGE_VARIANTS[f"{kind}<=32" if M <= 32 else f"{kind}={M}"]


def time_stages(name: str, Ts: list[int], timer: Timer, layers: list[ExpertWeights], skip: set[Any]) -> list[Any]:
    spec, rows = spec_of(name), []
    for T in Ts:
        calls: dict[str, list[Any]] = {}
        inputs = [tokens_of(spec, T) for _ in layers]
        for M in blocks_for(spec, T):
            plans = [sort_routes(ids, spec.E, M) for _, ids, _ in inputs]
            calls[f"sort M={M}"] = [lambda i=i, M=M: sort_routes(i[1], spec.E, M) for i in inputs]
            calls[f"sort M={M} fused"] = [lambda i=i, M=M: sort_with(1 << 20, i[1], spec.E, M) for i in inputs]
            calls[f"sort M={M} three launches"] = [lambda i=i, M=M: sort_with(0, i[1], spec.E, M) for i in inputs]
            for kind in ("fc1", "fc2"):
                for v in variants_for(kind, M):
                    if (kind, name, M, " ".join(map(str, v)), "{}") not in skip:
                        calls[f"{kind} M={M} {v}"] = [
                            stage(kind, spec, M, v, i[0], s, p) for i, s, p in zip(inputs, plans, layers)
                        ]
        ys = [torch.randn(T * spec.K, spec.H, device="cuda", dtype=torch.bfloat16) for _ in layers]
        calls["finalize"] = [
            lambda y=y, i=i: finalize.finalize(y, i[1], i[2], spec.E, torch.bfloat16) for y, i in zip(ys, inputs)
        ]
        us = timer.medians(calls, rounds=12)
        for kind in ("sort", "fc1", "fc2", "fina"):
            best = sorted((v[0], k) for k, v in us.items() if k.startswith(kind))
            print(f"{name} T={T} {kind}: " + "; ".join(f"{u:.1f} {k[4:]}" for u, k in best[:7]), flush=True)
        rows.append({"geometry": name, "T": T, "stages": {k: round(v[0], 2) for k, v in us.items()}})
        del calls
    return rows


def limit_us(spec: ExpertsSpec, ids: torch.Tensor) -> float:
    size = spec.H * (spec.G + spec.I)
    return 1e6 * max(len(ids.unique()) * size * 2 / BANDWIDTH, 2 * ids.numel() * size / PEAK)


def time_totals(name: str, Ts: list[int], timer: Timer, layers: list[ExpertWeights], extras: bool) -> list[Any]:
    spec, device, rows = spec_of(name), torch.device("cuda"), []
    for T in Ts:
        inputs = [tokens_of(spec, T) for _ in layers]
        repeat = 2 if T <= 16 else 1
        chosen = tactics_of(spec, T, device)
        if extras and T <= 8:
            chosen += extras_of(spec)
        calls: dict[str, list[Any]] = {}
        for provider, tactic in dict.fromkeys(chosen):
            run = provider.build(tactic, spec, device)
            calls[f"{provider.name}({tactic})"] = [
                lambda run=run, i=i, p=p: run(*i, p) for i, p in zip(inputs, layers)
            ] * repeat
        calls["torch._grouped_mm"] = [lambda i=i, p=p: torch_path(spec, *i, p) for i, p in zip(inputs, layers)] * repeat
        us = timer.medians(calls)
        limit = statistics.mean(limit_us(spec, i[1]) for i in inputs)
        ranked = sorted((v[0], k) for k, v in us.items())
        base, default, (best, which) = us["torch._grouped_mm"][0], us[next(iter(calls))][0], ranked[0]
        print(f"{name} T={T} limit {limit:.1f}: grouped_mm {base:.1f}; best {best:.1f} ({best / limit:.2f}x) {which}; "
              f"default {default:.1f}", flush=True)  # fmt: skip
        for u, k in ranked[1:6]:
            print(f"    {u:.1f} {k}", flush=True)
        rows.append({
            "geometry": name, "E": spec.E, "K": spec.K, "H": spec.H, "I": spec.I, "T": T, "limit_us": round(limit, 1),
            "us": {k: round(v[0], 2) for k, v in us.items()}, "spread": round(max(v[1] for v in us.values()), 3),
        })  # fmt: skip
        del calls
    return rows


def check(names: list[str]) -> list[Any]:
    """Prints and returns a row for each case; raises AssertionError where a result is worse than it may be."""
    device, rows = torch.device("cuda"), []
    for name in names:
        for x, Ts in (("bf16", (1, 5, 70, 700)), ("f16", (3, 130)), ("f32", (33,))):
            if x != "bf16" and name not in ("qwen3_30b", "gpt_oss_20b"):
                continue
            spec = spec_of(name, x=x, out=x)
            p = weights_of(spec, "cuda")
            for T in Ts:
                i = tokens_of(spec, T)
                picked = sorted({0, T - 1, *torch.randint(0, T, (6,)).tolist()})
                want = exact_rows(spec, picked, *i, p)
                base = error(torch_path(spec, *i, p)[picked], want) if x == "bf16" else None
                for provider, tactic in tactics_of(spec, T, device):
                    run = provider.build(tactic, spec, device)
                    got = run(*i, p)
                    rms, top = error(got[picked], want)
                    again = torch.equal(got, run(*i, p))
                    finite = bool(got.isfinite().all())
                    bound = 1.1 * base[0] if base else {"f16": 1e-3, "f32": 3e-6}[x]
                    good = rms <= bound and again and finite
                    rows.append({"geometry": name, "x": x, "T": T, "tactic": f"{provider.name}({tactic})", "rms": rms,
                                 "max": top, "torch_rms": base and base[0], "bitwise": again, "ok": good})  # fmt: skip
                    if not good:
                        print("BAD", rows[-1], flush=True)
                worst = max(r["rms"] for r in rows if (r["geometry"], r["x"], r["T"]) == (name, x, T))
                print(f"check {name} {x} T={T}: worst rms {worst:.2e}, torch {base and base[0]}", flush=True)
            # sentinels: dropped routes read nothing, a token without routes is exactly zero; graph replay = eager
            T = 40
            hidden, ids, weights = tokens_of(spec, T)
            dropped = ids % 3 == 0
            ids = torch.where(dropped, spec.E, ids)
            ids[7] = -1
            for t in (*p.gate_up, p.down, *p.gate_up_bias, *(() if p.down_bias is None else (p.down_bias,))):
                t[0::3] = float("nan")
            for provider, tactic in tactics_of(spec, T, device)[:2] + tactics_of(spec, 1, device)[-1:]:
                run = provider.build(tactic, spec, device)
                eager = run(hidden, ids, weights, p)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    replayed = run(hidden, ids, weights, p)
                graph.replay()
                good = bool(eager.isfinite().all()) and not eager[7].any() and torch.equal(eager, replayed)
                case = f"sentinels {provider.name}({tactic})"
                rows.append({"geometry": name, "x": x, "T": T, "tactic": case, "rms": 0.0, "ok": good})
                if not good:
                    print("BAD", rows[-1], flush=True)
    big = spec_of("qwen3_30b")
    for T, K in ((70000, 8), (3, 8), (1024, 8), (1025, 8)):  # sort at sizes beyond a chunk
        from moe_compile.kernels.sort import sort_routes_reference

        ids = torch.randint(-1, big.E + 1, (T, K), device="cuda")
        got, want = sort_routes(ids, big.E, 64), sort_routes_reference(ids, big.E, 64)
        n = int(((ids >= 0) & (ids < big.E)).sum())
        good = torch.equal(got.tiles(), want.tiles()) and torch.equal(got.routes()[:n], want.routes()[:n])
        rows.append({"sort": T * K, "ok": good})
        print("sort", T * K, good, flush=True)
    print("all ok" if all(r["ok"] for r in rows) else "NOT ALL OK", flush=True)
    return rows


def host_us(name: str) -> dict[str, float]:
    """Host time of one eager call, us."""
    spec, device, out = spec_of(name), torch.device("cuda"), {}
    p, i = weights_of(spec, "cuda"), tokens_of(spec, 4)
    for provider in (GROUPED, DECODE):
        run = provider.build(provider.tactics(spec, facts(device), 4)[0][0], spec, device)
        for n in (20, 200):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(n):
                run(*i, p)
            out[provider.name] = 1e6 * (time.perf_counter() - began) / n
        torch.cuda.synchronize()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["check", "stages", "total", "extras", "host"])
    parser.add_argument("--geometries", default="qwen3_30b,mixtral,olmoe,qwen3next,gpt_oss_20b")
    parser.add_argument("--tokens", default="1,2,4,8,16,64,256,1024,4096")
    parser.add_argument("--seconds", type=float, default=280, help="stop starting new geometries after this")
    args = parser.parse_args()
    began, names, Ts = time.time(), args.geometries.split(","), [int(t) for t in args.tokens.split(",")]
    jobs: list[tuple[str, str, int, str, str]] = []
    triton_grouped.hopper = lambda device: True
    for name in names:
        spec = spec_of(name)
        if "stages" in args.what:
            jobs += [(kind, name, M, " ".join(map(str, v)), "{}") for T in Ts if T > 8 for M in blocks_for(spec, T)
                     for kind in ("fc1", "fc2") for v in variants_for(kind, M)]  # fmt: skip
        if "total" in args.what:
            jobs += [(p.name, name, 0, str(t), "{}") for T in Ts for p, t in tactics_of(spec, T, torch.device("cuda"))]
        if "extras" in args.what:
            jobs += [(p.name, name, 0, str(t), "{}") for p, t in extras_of(spec)]
        if "check" in args.what:
            for x, checked in (("bf16", (1, 5, 70, 700)), ("f16", (3, 130)), ("f32", (33,))):
                if x == "bf16" or name in ("qwen3_30b", "gpt_oss_20b"):
                    changed = spec_of(name, x=x, out=x)
                    jobs += [(p.name, name, 0, str(t), json.dumps({"x": x, "out": x})) for T in checked
                             for p, t in tactics_of(changed, T, torch.device("cuda"))]  # fmt: skip
    skip = compile_all(jobs)
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(),
                              "versions": {"torch": torch.__version__, "triton": triton.__version__}}  # fmt: skip
    out = Path(os.environ.get("OUT", "."))

    def save() -> None:
        (out / "kernels.json").write_text(json.dumps(result, indent=1))

    torch.manual_seed(0)
    if "check" in args.what:
        result["check"] = check(names)
        save()
    if "host" in args.what:
        result["host_us"] = host_us("qwen3_30b")
        print("host us a call", result["host_us"], flush=True)
    timer = Timer()
    for name in names:
        if time.time() - began > args.seconds:
            print("out of time before", name, flush=True)
            break
        spec = spec_of(name)
        torch.cuda.empty_cache()
        layers = [weights_of(spec, "cuda") for _ in range(2 if name == "dsv3" else 3)]
        if "stages" in args.what:
            result.setdefault("stages", []).extend(time_stages(name, [T for T in Ts if T > 8], timer, layers, skip))
            save()
        if "total" in args.what:
            result.setdefault("cells", []).extend(time_totals(name, Ts, timer, layers, "extras" in args.what))
            save()
        print(f"-- {name} done at {time.time() - began:.0f} s", flush=True)
        del layers
    save()


if __name__ == "__main__":
    main()
