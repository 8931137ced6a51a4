"""Our kernels one by one on a GPU: what the cost model's constants are fitted to, and helpers that benchmarks share.

In: geometries and token counts on the command line. Out: tables on stdout, kernels.json under $OUT (or .): sort, fc1,
fc2 and finalize alone, for each variant of STAGE_VARIANTS. Whole calls and other libraries: `moe-compile bench`.
Time is the median over interleaved replays of CUDA graphs that run layers with distinct weights (L2 never holds them);
weights and routing are suite.py's. Kernels are compiled in parallel beforehand.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent.parent))
from moe_compile import bench, suite
from moe_compile.kernels import finalize, grouped, launch, sort
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.sort import sort_routes
from moe_compile.operands import ExpertWeights
from moe_compile.peers import PEERS
from moe_compile.providers import triton_grouped
from moe_compile.spec import ExpertsSpec, torch_dtype

GEOMETRIES = {name: spec for name, spec in suite.GEOMETRIES.items() if name != "tiny"}
_seeds = itertools.count()

# (SWAP, TMA, N, K, warps, stages) of one linear, by rows of a tile
STAGE_VARIANTS: dict[str, list[tuple[int, ...]]] = {
    "fc1<=32": [(1, 0, 32, 128, 4, 4), (1, 0, 32, 128, 4, 5), (1, 0, 32, 128, 4, 3), (1, 0, 32, 256, 4, 3),
                (1, 0, 64, 128, 4, 3), (1, 0, 64, 128, 8, 3), (1, 0, 64, 64, 4, 4), (1, 1, 64, 128, 4, 3)],
    "fc1=64": [(0, 0, 64, 64, 4, 4), (1, 0, 64, 64, 4, 4), (0, 0, 64, 64, 4, 3), (0, 0, 64, 128, 4, 3),
               (1, 0, 32, 128, 4, 3), (0, 0, 128, 64, 8, 3)],
    "fc1=128": [(1, 1, 128, 64, 8, 4), (0, 1, 128, 64, 8, 4)],
    "fc2<=32": [(1, 0, 64, 128, 4, 4), (1, 0, 64, 256, 4, 3), (1, 0, 128, 128, 4, 3), (1, 0, 128, 64, 4, 4),
                (1, 0, 64, 128, 4, 5), (1, 0, 64, 128, 4, 3), (1, 0, 128, 128, 8, 3), (1, 1, 128, 128, 4, 3)],
    "fc2=64": [(0, 0, 128, 64, 4, 4), (0, 0, 128, 64, 4, 3), (0, 0, 128, 128, 4, 3), (1, 0, 64, 128, 4, 3),
               (1, 0, 128, 64, 4, 4), (0, 1, 256, 64, 4, 4)],
    "fc2=128": [(0, 1, 256, 64, 8, 4), (0, 1, 128, 64, 4, 4), (0, 1, 128, 64, 4, 3)],
}  # fmt: skip


def spec_of(name: str, **changes: Any) -> ExpertsSpec:
    return dataclasses.replace(GEOMETRIES[name], **changes)


def weights_of(spec: ExpertsSpec, device: str, draw: bool = True) -> ExpertWeights:
    """Other random weights with each call; draw: else whatever is in memory, to compile for."""
    if draw:
        return suite.weights_of(spec, torch.device(device), next(_seeds))
    lists = [[torch.empty(s, dtype=torch_dtype(spec.x), device=device) for s in some] for some in spec.operand_shapes()]
    return ExpertWeights.of(spec, *lists)


def tokens_of(spec: ExpertsSpec, T: int) -> tuple[torch.Tensor, ...]:
    """Other random tokens with each call."""
    return suite.tokens_of(spec, T, torch.device("cuda"), next(_seeds))


def torch_path(spec: ExpertsSpec, x: Any, ids: Any, weights: Any, p: ExpertWeights) -> torch.Tensor:
    """argsort, two torch._grouped_mm, activation in x's dtype, weighted sum."""
    run: Any = PEERS["torch._grouped_mm"](spec, x.device)
    out: torch.Tensor = run(x, ids, weights, p)
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
    """bench.py's protocol; what can't run is reported and left out."""

    def medians(self, variants: dict[str, list[Any]], rounds: int = 20) -> dict[str, tuple[float, float]]:
        """{name: (median us a call, spread)}: half the distance between the quartiles, over the median."""
        pool, graphs = torch.cuda.graph_pool_handle(), {}
        for name, calls in variants.items():
            try:
                graphs[name] = bench.capture(calls, pool)
            except (triton.TritonError, RuntimeError, ValueError) as e:
                print("  FAILED", name, type(e).__name__, str(e)[:200], flush=True)
        times = bench.compare_captured(graphs, rounds=rounds)
        return {name: (1e6 * t.median, t.spread) for name, t in times.items()}


def stage(kind: str, spec: ExpertsSpec, M: int, variant: tuple[int, ...], x: torch.Tensor, schedule, p) -> Any:
    swap, tma, n, k, warps, stages = variant
    tile = grouped.Tile(BLOCK_M=M, BLOCK_N=n, BLOCK_K=k, SWAP=swap, TMA=tma, warps=warps, stages=stages)
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


def sort_with(alone: bool, *args: Any) -> Any:
    kept, sort.counts_alone = sort.counts_alone, lambda R, E: alone
    try:
        return sort.sort_routes(*args)
    finally:
        sort.counts_alone = kept


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
            calls[f"sort M={M} alone"] = [lambda i=i, M=M: sort_with(True, i[1], spec.E, M) for i in inputs]
            calls[f"sort M={M} together"] = [lambda i=i, M=M: sort_with(False, i[1], spec.E, M) for i in inputs]
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
