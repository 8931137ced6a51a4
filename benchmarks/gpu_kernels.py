"""Our kernels one by one on a GPU: what the cost model's constants are fitted to, and helpers that benchmarks share.

In: geometries and token counts on the command line. Out: tables on stdout, kernels.json under $OUT (or .): sort, fc1,
fc2 and finalize alone, for each variant of STAGE_VARIANTS. Whole calls and other libraries: `moe-compile bench`.
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
from moe_compile.kernels import finalize, grouped, launch, sort
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.sort import sort_routes
from moe_compile.operands import ExpertWeights
from moe_compile.providers import triton_grouped
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


# --- compile in parallel: forked workers without CUDA, where a launch only compiles ---


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


def compile_only(bound: Any, key: Any, grid: Any, arguments: tuple[Any, ...], free: tuple[int, ...]) -> None:
    """In place of launch.Bound._compile."""
    bound.kernel.warmup(*arguments, *free, *bound.constants, grid=grid, **bound.options)


def compile_job(job: tuple[str, str, int, tuple[int, ...]]) -> str:
    kind, name, M, variant = job
    from triton.runtime.driver import driver

    driver.set_active(NoDevice(90))
    launch.overlaps = lambda device: True
    launch.Bound._compile = compile_only
    try:
        spec = spec_of(name)
        p = weights_of(spec, "cpu", draw=False)
        x = torch.empty(64, spec.H, dtype=torch_dtype(spec.x))
        ids = torch.zeros(64, spec.K, dtype=torch.int64)
        stage(kind, spec, M, variant, x, sort_routes(ids, spec.E, M), p)()
        return ""
    except Exception as e:  # noqa: BLE001  (reported; the timing below skips the variant)
        return f"{job}: {type(e).__name__} {str(e)[-400:]}"


def compile_all(jobs: list[Any]) -> set[Any]:
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
                    if (kind, name, M, v) not in skip:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometries", default="qwen3_30b,mixtral,olmoe,qwen3next,gpt_oss_20b")
    parser.add_argument("--tokens", default="16,64,256,1024,4096")
    parser.add_argument("--seconds", type=float, default=280, help="stop starting new geometries after this")
    args = parser.parse_args()
    began, names, Ts = time.time(), args.geometries.split(","), [int(t) for t in args.tokens.split(",")]
    skip = compile_all([
        (kind, name, M, v) for name in names for T in Ts for M in blocks_for(spec_of(name), T)
        for kind in ("fc1", "fc2") for v in variants_for(kind, M)
    ])  # fmt: skip
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(),
                              "versions": {"torch": torch.__version__, "triton": triton.__version__}}  # fmt: skip
    torch.manual_seed(0)
    timer = Timer()
    for name in names:
        if time.time() - began > args.seconds:
            print("out of time before", name, flush=True)
            break
        layers = [weights_of(spec_of(name), "cuda") for _ in range(2 if name == "dsv3" else 3)]
        result.setdefault("stages", []).extend(time_stages(name, Ts, timer, layers, skip))
        (Path(os.environ.get("OUT", ".")) / "kernels.json").write_text(json.dumps(result, indent=1))
        del layers


if __name__ == "__main__":
    main()
