"""Rows of tokens copied into sorted order, each read once: what training's sums over routes take.

In: rows by token, ids_TK, and the Schedule of the routes, with positions. Out: rows by position of the sorted routes;
rows past the last route's are not written. hopper.permute reads a row for each of its routes: where the tokens' rows
exceed L2, most of them again from memory (qwen3_30b, T=16384, 537 MB of result: 239 us; H200, 2026-12-01).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import Bound, ceil_div, power_of_2
from .sort import Schedule


@triton.jit
def _spread_kernel(
    x_ptr, ids_ptr, positions_ptr, out_ptr, stride_xt, E: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token's row, to each of its routes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * stride_xt + h, mask=h < H)
    for k in tl.static_range(K):
        e = tl.load(ids_ptr + t * K + k)
        here = (e >= 0) & (e < E)
        p = tl.load(positions_ptr + t * K + k, mask=here, other=0).to(tl.int64)
        tl.store(out_ptr + p * H + h, x, mask=h < tl.where(here, H, 0))


@lru_cache(1024)
def _bound(E: int, K: int, H: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> tuple[Bound, int]:
    block = min(2048, power_of_2(H))
    warps = 8 if block > 1024 else 4
    return Bound(_spread_kernel, (E, K, H, block), device, warps=warps, overlap=True), ceil_div(H, block)


def spread(x_TH: torch.Tensor, ids_TK: torch.Tensor, schedule: Schedule, E: int) -> torch.Tensor:
    """x_RH [R, H]: the rows of x in sorted order. x's rows are contiguous; schedule has positions."""
    (T, K), H = ids_TK.shape, x_TH.shape[1]
    out = torch.empty((T * K, H), dtype=x_TH.dtype, device=x_TH.device)
    bound, blocks = _bound(E, K, H, (x_TH.dtype, ids_TK.dtype), x_TH.device)
    bound((T, blocks), (x_TH, ids_TK.contiguous(), schedule.positions(), out, x_TH.stride(0)))
    return out


def spread_reference(x_TH: torch.Tensor, schedule: Schedule, choices: int) -> torch.Tensor:
    """The torch twin of `spread`; rows past the last route's are zero."""
    end = max((end for _, _, end, _ in schedule.tiles().tolist()), default=0)
    out = x_TH.new_zeros((schedule.R, x_TH.shape[1]))
    out[:end] = x_TH[schedule.routes()[:end].long() // choices]
    return out
