"""Rows of tokens copied into sorted order, each read once: what training's sums over routes take.

In: rows by token, ids_TK, and the Schedule of the routes. Out: rows by position of the sorted routes; rows past the
last route's are not written. hopper.permute reads a row for each of its routes: where the tokens' rows exceed L2, most
of them again from memory (qwen3_30b, T=16384, 537 MB of result: 239 us; H200, 2026-12-01).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import Bound, ceil_div, power_of_2
from .sort import Schedule

_BLOCK = 1024  # positions that a program inverts


@triton.jit(do_not_specialize=["bound"])
def _positions_kernel(plan_ptr, positions_ptr, bound, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """positions[route] = position."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tiles = tl.load(plan_ptr)
    here = p < tl.load(plan_ptr + 4 * tiles + 2, mask=tiles > 0, other=0)  # the last tile's end
    tl.store(positions_ptr + tl.load(plan_ptr + 4 + 4 * bound + p, mask=here, other=0), p, mask=here)


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
def _bounds(E: int, K: int, H: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> tuple[Bound, Bound, int]:
    block = min(2048, power_of_2(H))
    spread = Bound(_spread_kernel, (E, K, H, block), device, warps=8 if block > 1024 else 4, overlap=True)
    return Bound(_positions_kernel, (_BLOCK,), device, overlap=True), spread, ceil_div(H, block)


def positions(schedule: Schedule) -> torch.Tensor:
    """int32 [R]: the position of each route; undefined for dropped ones."""
    plan = schedule.plan
    out = torch.empty(schedule.R, dtype=torch.int32, device=plan.device)
    bound, _, _ = _bounds(0, 1, 1, (), plan.device)
    bound((ceil_div(schedule.R, _BLOCK), 1), (plan, out), (schedule.bound,))
    return out


def spread(x_TH: torch.Tensor, ids_TK: torch.Tensor, positions_R: torch.Tensor, E: int) -> torch.Tensor:
    """x_RH [R, H]: the rows of x in sorted order. x's rows are contiguous."""
    (T, K), H = ids_TK.shape, x_TH.shape[1]
    out = torch.empty((T * K, H), dtype=x_TH.dtype, device=x_TH.device)
    _, bound, blocks = _bounds(E, K, H, (x_TH.dtype, ids_TK.dtype), x_TH.device)
    bound((T, blocks), (x_TH, ids_TK.contiguous(), positions_R, out, x_TH.stride(0)))
    return out


def spread_reference(x_TH: torch.Tensor, schedule: Schedule, choices: int) -> torch.Tensor:
    """The torch twin of `spread`; rows past the last route's are zero."""
    end = max((end for _, _, end in schedule.tiles().tolist()), default=0)
    out = x_TH.new_zeros((schedule.R, x_TH.shape[1]))
    out[:end] = x_TH[schedule.routes()[:end].long() // choices]
    return out
