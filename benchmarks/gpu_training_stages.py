"""Training's products on a GPU, each alone: what gpu_training.py times as `stages`.

In: geometries and token counts. Out: a row for each, us of each product by its tile, on random intermediates. Kernels
are compiled in parallel beforehand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import gpu_kernels
import torch
from gpu_kernels import Timer, spec_of, tokens_of, weights_of

from moe_compile.activation import derivative
from moe_compile.kernels import hopper, hopper_act, hopper_outer, launch, spread
from moe_compile.kernels.backward import act_backward, dx_routes
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.finalize import finalize
from moe_compile.kernels.grouped import Tile, fc2
from moe_compile.kernels.kept import fc1_kept
from moe_compile.kernels.outer import Rows, outer
from moe_compile.kernels.sort import sort_routes
from moe_compile.operands import ExpertWeights
from moe_compile.spec import ExpertsSpec, torch_dtype

# (M, N, K, warps, stages, SWAP, TMA)
VARIANTS: dict[str, list[tuple[int, ...]]] = {
    "fc1": [(128, 128, 64, 8, 4, 1, 1)],
    "fc2": [(128, 256, 64, 8, 4, 0, 1)],
    "act": [(128, 256, 64, 8, 4, 0, 1), (128, 128, 64, 4, 3, 1, 1), (128, 128, 64, 4, 3, 0, 1)],
    "dx": [(128, 256, 64, 8, 4, 0, 1)],
    "ddown": [(128, 256, 64, 8, 3, 0, 1), (128, 128, 64, 4, 2, 0, 1), (128, 128, 32, 4, 4, 0, 1)],
    "ddown whole": [(128, 256, 64, 8, 5, 0, 1), (128, 256, 64, 8, 7, 0, 1), (128, 128, 64, 4, 3, 0, 1)],
}  # fmt: skip
VARIANTS["dgate_up whole"] = VARIANTS["ddown whole"]
# of kernels for Hopper: (GATHER,), or none
HOPPER = {"fc1 hopper": [(1,), (0,)], "fc2 hopper": [()], "act hopper": [()], "dx hopper": [()], "ddown hopper": [()],
          "dgate_up hopper": [()], "spread": [()]}  # fmt: skip
VARIANTS |= HOPPER
VARIANTS["dgate_up"] = VARIANTS["ddown"]


def tile_of(product: str, v: tuple[int, ...]) -> Any:
    if product in HOPPER:
        return v
    m, n, k, warps, stages, swap, tma = v
    return Tile(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, warps=warps, stages=stages, SWAP=swap, TMA=tma)


def calls_of(spec: ExpertsSpec, T: int, p: ExpertWeights, device: str) -> dict[str, Any]:
    """{product: a function of a tile}, on random intermediates."""
    on_gpu = device == "cuda"
    x = (
        torch.randn(T, spec.H, device=device).to(torch_dtype(spec.x))
        if on_gpu
        else torch.empty(T, spec.H, dtype=torch_dtype(spec.x))
    )
    ids = tokens_of(spec, T)[1] if on_gpu else torch.zeros(T, spec.K, dtype=torch.int64)
    w = torch.rand(T, spec.K, device=device)
    schedule = sort_routes(ids, spec.E, 128, inverse=True)
    ends = schedule.ends(spec.E)
    expr = spec.act.expr
    act = epilogue(expr)
    acts = (act, epilogue(derivative(expr, "gate")), epilogue(derivative(expr, "up")))
    R = T * spec.K

    def rows(n: int) -> torch.Tensor:
        t = torch.empty(R, n, dtype=x.dtype, device=device)
        return t.normal_() if on_gpu else t

    kept, a, y = rows(spec.G), rows(spec.I), rows(spec.H)
    common = {"choices": spec.K, "halves": spec.gate_up.halves}
    k_major, down_k_major = spec.gate_up.storage == "EGH", spec.down == "EHI"

    def sums(left: Rows, right: Rows, as_is: bool, whole: bool) -> Any:
        pair = (left, right) if as_is else (right, left)
        return lambda tile: outer(*pair, schedule, ends, choices=spec.K, tile=tile, whole=whole)

    x_rows = Rows(of=x, tokens=True)
    sorted_x = hopper.permute(x, schedule, spec.K)
    fast = tuple(epilogue(e, fast=True) for e in (expr, derivative(expr, "gate"), derivative(expr, "up")))
    blocks = kept.split(spec.G if spec.gate_up.halves.endswith("interleaved") else spec.I, 1)

    def hopper_sums(other: torch.Tensor, tokens_first: bool) -> Any:
        pair = (sorted_x, other) if tokens_first else (other, sorted_x)
        return lambda tile: hopper_outer.outer(*pair, ends)

    return {
        "fc1 hopper": lambda tile: hopper.fc1(
            x if tile[0] else sorted_x, p.gate_up, p.gate_up_bias, None, schedule, fast[0], sizes=(spec.H, spec.I),
            gated=spec.gated, k_major=k_major, tile=hopper.Persistent(N=128, GATHER=tile[0]), kept=kept, **common,
        ),
        "fc2 hopper": lambda tile: hopper.fc2(
            a, p.down, p.down_bias, schedule, k_major=down_k_major, tile=hopper.Persistent(N=256)
        ),
        "act hopper": lambda tile: hopper_act.act_backward(
            sorted_x, p.down, blocks, w, schedule, fast, halves=spec.gate_up.halves, k_major=down_k_major, parts=True
        ),
        "dx hopper": lambda tile: hopper.fc2(
            kept, p.gate_up[0], None, schedule, k_major=not k_major, tile=hopper.Persistent(N=256)
        ),
        "ddown hopper": hopper_sums(a, down_k_major),
        "dgate_up hopper": hopper_sums(kept, not k_major),
        "spread": lambda tile: spread.spread(x, ids, schedule, spec.E),
        "fc1": lambda tile: fc1_kept(
            x, p.gate_up, p.gate_up_bias, None, schedule, act, sizes=(spec.H, spec.I), k_major=k_major, tile=tile,
            **common,
        ),
        "fc2": lambda tile: fc2(a, p.down, p.down_bias, schedule, k_major=down_k_major, tile=tile),
        "act": lambda tile: act_backward(
            x, p.down, kept, w, schedule, acts, k_major=down_k_major, parts=True, tile=tile, **common
        ),
        "dx": lambda tile: dx_routes(kept, p.gate_up, schedule, k_major=k_major, tile=tile),
        "ddown": sums(x_rows, Rows(of=a), down_k_major, False),
        "ddown whole": sums(x_rows, Rows(of=a), down_k_major, True),
        "dgate_up": sums(Rows(of=kept), x_rows, k_major, False),
        "dgate_up whole": sums(Rows(of=kept), x_rows, k_major, True),
        "finalize": lambda tile: finalize(y, ids, w, spec.E, x.dtype),
        "sort": lambda tile: sort_routes(ids, spec.E, 128, inverse=True),
    }  # fmt: skip


def compile_job(job: tuple[str, str, tuple[int, ...]]) -> str:
    name, product, v = job
    from triton.runtime.driver import driver

    driver.set_active(gpu_kernels.NoDevice(90))
    launch.overlaps = lambda device: True
    launch.Bound._compile = gpu_kernels.compile_only
    try:
        spec = spec_of(name)
        calls_of(spec, 64, weights_of(spec, "cpu", draw=False), "cpu")[product](tile_of(product, v))
        return ""
    except Exception as e:  # noqa: BLE001  (reported; the timing below skips the variant)
        return f"{job}: {type(e).__name__} {str(e)[-400:]}"


def compile_all(names: list[str]) -> None:
    began = time.time()
    jobs = [(n, product, v) for n in names for product, vs in VARIANTS.items() for v in vs]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=get_context("fork")) as pool:
        for line in filter(None, pool.map(compile_job, jobs)):
            print("NOT COMPILED", line, flush=True)
    print(f"compiled {len(jobs)} in {time.time() - began:.0f} s", flush=True)


def flop(spec: ExpertsSpec, T: int, product: str) -> float:
    wide = product.split()[0] in ("fc1", "dx", "dgate_up")
    return 2.0 * T * spec.K * spec.H * (spec.G if wide else spec.I)


def stages(name: str, Ts: list[int], timer: Timer) -> Iterator[dict[str, Any]]:
    spec = spec_of(name)
    p = weights_of(spec, "cuda")
    for T in Ts:
        products = calls_of(spec, T, p, "cuda")
        row: dict[str, Any] = {"geometry": name, "T": T, "us": {}}
        for product, call in products.items():
            variants = VARIANTS.get(product, [(128, 128, 64, 4, 3, 0, 0)])
            tiles = {str(v): tile_of(product, v) for v in variants}
            us = timer.medians({k: [lambda t=t, call=call: call(t)] for k, t in tiles.items()}, rounds=5)
            work = flop(spec, T, product)
            ranked = sorted((u[0], v) for v, u in us.items())
            row["us"][product] = {v: round(u, 1) for u, v in ranked}
            best = "; ".join(f"{u:.0f} ({work / u / 1e6:.0f}) {v[1:-1]}" for u, v in ranked[:5])
            print(f"{name} T={T} {product}: {best}", flush=True)
            torch.cuda.empty_cache()
        yield row
