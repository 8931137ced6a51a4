"""The gradients at the activation and of the tokens: two kernels over routes in expert order (kept.py, outer.py have
the rest of training).

In: as grouped.py, and gate_up_RG (kept.py). Out, for position p of the sorted routes, of token t, expert e and routing
weight w:
  act_backward  with dv = down[e]^T dout[t], s = w where it scales the output, else 1:
                dgate_up_RG[p] = s dv (act_gate, act_up), s_act_RI[p] = s act, and in fp32 parts of dv . act by route
  dx_routes     dx_RH[route] = gate_up[e]^T dgate_up_RG[p]
After the last rows of dgate_up_RG and s_act_RI there are BLOCK_M of zeros, as outer.py wants it.
Invariants: as of grouped.py; the activation is computed again from gate_up_RG, rounded as the forward's was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .grouped import Tile
from .kept import halves_of, placed, split_columns, store_pair
from .launch import ceil_div, launch
from .product import descriptor, product, routes_at, rows_of, spans, tile_at, tma_aligned
from .sort import Schedule


@triton.jit
def _act_piece(
    dv, n0, at, rows, scale, kept_ptr, dkept_ptr, act_ptr, I: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, GATE_FIRST: tl.constexpr, ACT: tl.constexpr, BY_GATE: tl.constexpr,
    BY_UP: tl.constexpr, M_: tl.constexpr, N_: tl.constexpr,
):  # fmt: skip
    """Stores what follows from dv [M_, N_] of columns n0.., and returns dv . act of each row."""
    if N_ > 32:  # in pieces: all at once spills 2.7 KB a thread where N_ = 256
        left, right = split_columns(dv, M_, N_)
        HALF: tl.constexpr = N_ // 2
        part = _act_piece(
            left, n0, at, rows, scale, kept_ptr, dkept_ptr, act_ptr, I, GATED, INTERLEAVED, GATE_FIRST, ACT, BY_GATE,
            BY_UP, M_, HALF,
        )  # fmt: skip
        return part + _act_piece(
            right, n0 + HALF, at, rows, scale, kept_ptr, dkept_ptr, act_ptr, I, GATED, INTERLEAVED, GATE_FIRST, ACT,
            BY_GATE, BY_UP, M_, HALF,
        )  # fmt: skip
    n = n0 + tl.arange(0, N_)
    inside = rows & (n < I)[None, :]
    G: tl.constexpr = 2 * I if GATED else I
    kept_rows = kept_ptr + at * G
    if INTERLEAVED:
        c = 2 * n0 + tl.arange(0, 2 * N_)
        both = tl.load(kept_rows + c[None, :], mask=rows & (c < 2 * I)[None, :], other=0.0)
        one, two = tl.split(tl.reshape(both, (M_, N_, 2)))
    else:
        one = tl.load(kept_rows + n[None, :], mask=inside, other=0.0)
        two = one
        if GATED:
            two = tl.load(kept_rows + I + n[None, :], mask=inside, other=0.0)
    one, two = one.to(tl.float32), two.to(tl.float32)
    if GATE_FIRST:
        gate, up = one, two
    else:
        gate, up = two, one
    value = ACT(gate, up).to(act_ptr.dtype.element_ty).to(tl.float32)
    part = tl.sum(tl.where(inside, dv * value, 0.0), axis=1)
    tl.store(act_ptr + at * I + n[None, :], (value * scale).to(act_ptr.dtype.element_ty), mask=inside)
    dv *= scale
    dup = dv * BY_UP(gate, up)
    dgate = dup
    if GATED:
        dgate = dv * BY_GATE(gate, up)
    if GATED and GATE_FIRST:
        store_pair(dkept_ptr + at * G, dgate, dup, n, I, rows, GATED, INTERLEAVED, N_)
    else:
        store_pair(dkept_ptr + at * G, dup, dgate, n, I, rows, GATED, INTERLEAVED, N_)
    return part


@triton.jit(do_not_specialize=["bound", "R"])
def _act_backward_kernel(
    dout_ptr, w, kept_ptr, route_weight_ptr, dkept_ptr, act_ptr, parts_ptr, plan_ptr, stride_dt, bound, R,
    stride_we: tl.constexpr, stride_wn: tl.constexpr, stride_wk: tl.constexpr, CHOICES: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, GATE_FIRST: tl.constexpr,
    K_MAJOR: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, ACT: tl.constexpr, BY_GATE: tl.constexpr,
    BY_UP: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr, M_: tl.constexpr, N_: tl.constexpr,
    K_: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m, column = tile_at(plan_ptr, tl.cdiv(I, N_), PDL)
    if m < 0:
        return
    e, first, end, p = rows_of(plan_ptr, m, M_)
    route = routes_at(plan_ptr, bound, p, end)
    dout_rows = dout_ptr + (route // CHOICES).to(tl.int64) * stride_dt
    dv, _ = product(
        dout_ptr, dout_rows, p < end, first, w, w, e, column * N_, 1, stride_we, stride_wn, stride_wk, 0,
        I, H, False, False, False, K_MAJOR, False, TMA, SWAP, M_, N_, K_,
    )  # fmt: skip
    G: tl.constexpr = 2 * I if GATED else I
    rows = (p < end)[:, None]
    scale = tl.full((M_, 1), 1.0, tl.float32)
    if SCALE:
        scale = tl.load(route_weight_ptr + route, mask=p < end, other=0.0).to(tl.float32)[:, None]
    part = _act_piece(
        dv, column * N_, p.to(tl.int64)[:, None], rows, scale, kept_ptr, dkept_ptr, act_ptr, I, GATED, INTERLEAVED,
        GATE_FIRST, ACT, BY_GATE, BY_UP, M_, N_,
    )  # fmt: skip
    if m == tl.load(plan_ptr) - 1:  # after the last rows, zeros
        q = end + tl.arange(0, M_)
        after = (q < R)[:, None]
        n, q = column * N_ + tl.arange(0, N_), q.to(tl.int64)[:, None]
        zero = tl.zeros((M_, N_), act_ptr.dtype.element_ty)
        tl.store(act_ptr + q * I + n[None, :], zero, mask=after & (n < I)[None, :])
        store_pair(dkept_ptr + q * G, zero, zero, n, I, after, GATED, INTERLEAVED, N_)
    if PARTS:
        tl.store(parts_ptr + column.to(tl.int64) * R + route, part, mask=p < end)


@triton.jit(do_not_specialize=["bound"])
def _dx_kernel(
    d_ptr, d, d2, w, v, y_ptr, plan_ptr, bound, stride_we: tl.constexpr, stride_wn: tl.constexpr,
    stride_wk: tl.constexpr, G: tl.constexpr, DEPTH: tl.constexpr, H: tl.constexpr, K_MAJOR: tl.constexpr,
    TMA: tl.constexpr, SWAP: tl.constexpr, M_: tl.constexpr, N_: tl.constexpr, K_: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m, column = tile_at(plan_ptr, tl.cdiv(H, N_), PDL)
    if m < 0:
        return
    e, first, end, p = rows_of(plan_ptr, m, M_)
    rows = d_ptr + p.to(tl.int64) * G
    y, _ = product(
        d, rows, p < end, first, w, w, e, column * N_, 1, stride_we, stride_wn, stride_wk, 0,
        H, DEPTH, False, False, False, K_MAJOR, TMA, TMA, SWAP, M_, N_, K_,
    )  # fmt: skip
    if DEPTH < G:  # two tensors
        y2, _ = product(
            d2, rows + DEPTH, p < end, first, v, v, e, column * N_, 1, stride_we, stride_wn, stride_wk, 0,
            H, DEPTH, False, False, False, K_MAJOR, TMA, TMA, SWAP, M_, N_, K_,
        )  # fmt: skip
        y += y2
    n = column * N_ + tl.arange(0, N_)
    route = routes_at(plan_ptr, bound, p, end)
    out_ptrs = y_ptr + route.to(tl.int64)[:, None] * H + n[None, :]
    tl.store(out_ptrs, y.to(y_ptr.dtype.element_ty), mask=(p < end)[:, None] & (n < H)[None, :])


def act_backward(
    dout_TH: torch.Tensor, down: torch.Tensor, gate_up_RG: torch.Tensor, weights_TK: torch.Tensor | None,
    schedule: Schedule, acts: tuple[Any, Any, Any], *, choices: int, halves: str, k_major: bool, parts: bool,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(dgate_up_RG, s_act_RI, parts fp32 [columns, R] by route or None): see the module. weights_TK None means s = 1.

    acts: epilogues of the activation and of its derivatives by gate (any, without one) and up. k_major: down is
    [E, H, I]. dout is in down's dtype, its innermost stride 1. Parts of dropped routes stay unwritten.
    """
    # rows of the product are I, its depth H: down [E, H, I] has its rows innermost
    n_axis, k_axis = (2, 1) if k_major else (1, 2)
    H, I, R = down.shape[k_axis], down.shape[n_axis], schedule.R
    gated, interleaved, gate_first, _ = placed(halves, I)
    columns = ceil_div(I, tile.BLOCK_N)
    tma = bool(tile.TMA) and tma_aligned(down)
    dkept = torch.empty_like(gate_up_RG)
    out = torch.empty((R, I), dtype=gate_up_RG.dtype, device=gate_up_RG.device)
    partial = torch.empty((columns, R), dtype=torch.float32, device=out.device) if parts else None
    assert dout_TH.stride(1) == 1
    arguments = (
        dout_TH, descriptor(down, tile.BLOCK_N, tile.BLOCK_K, not k_major) if tma else down, gate_up_RG,
        dout_TH if weights_TK is None else weights_TK.contiguous(), dkept, out, out if partial is None else partial,
        schedule.plan, dout_TH.stride(0),
    )  # fmt: skip
    constants = (
        down.stride(0), down.stride(n_axis), down.stride(k_axis), choices, H, I, gated, interleaved,
        gate_first, not k_major, weights_TK is not None, parts, *acts, tma, bool(tile.SWAP), tile.BLOCK_M,
        tile.BLOCK_N, tile.BLOCK_K,
    )  # fmt: skip
    grid, free = (schedule.bound * columns, 1), (schedule.bound, R)
    launch(_act_backward_kernel, grid, arguments, free, constants, warps=tile.warps, stages=tile.stages)
    return dkept, out, partial


def dx_routes(
    dgate_up_RG: torch.Tensor, gate_up: tuple[torch.Tensor, ...], schedule: Schedule, *, k_major: bool, tile: Tile
) -> torch.Tensor:
    """dx_RH [R, H] in the weights' dtype, rows in route order; rows of dropped routes stay unwritten.

    k_major: the tensors are [E, G, H], as in grouped.fc1.
    """
    w, v = gate_up[0], gate_up[-1]
    # rows of the product are H, its depth G
    n_axis, k_axis = (2, 1) if k_major else (1, 2)
    (R, G), H, depth = dgate_up_RG.shape, w.shape[n_axis], w.shape[k_axis]
    second = dgate_up_RG[:, G - depth :]
    tma = bool(tile.TMA) and all(map(tma_aligned, (w, v, dgate_up_RG, second)))
    y = torch.empty((R, H), dtype=dgate_up_RG.dtype, device=w.device)
    box = [tile.BLOCK_M, tile.BLOCK_K]
    arguments = (
        dgate_up_RG,
        TensorDescriptor.from_tensor(dgate_up_RG[:, :depth], box) if tma else dgate_up_RG,
        TensorDescriptor.from_tensor(second, box) if tma else dgate_up_RG,
        descriptor(w, tile.BLOCK_N, tile.BLOCK_K, not k_major) if tma else w,
        descriptor(v, tile.BLOCK_N, tile.BLOCK_K, not k_major) if tma else v,
        y, schedule.plan,
    )  # fmt: skip
    constants = (
        w.stride(0), w.stride(n_axis), w.stride(k_axis), G, depth, H, not k_major, tma, bool(tile.SWAP), tile.BLOCK_M,
        tile.BLOCK_N, tile.BLOCK_K,
    )  # fmt: skip
    grid = (schedule.bound * ceil_div(H, tile.BLOCK_N), 1)
    launch(_dx_kernel, grid, arguments, (schedule.bound,), constants, warps=tile.warps, stages=tile.stages)
    return y


def act_backward_reference(
    dout_TH: torch.Tensor, down: torch.Tensor, gate_up_RG: torch.Tensor, weights_TK: torch.Tensor | None,
    schedule: Schedule, acts: tuple[Callable[..., torch.Tensor], ...], *, choices: int, halves: str, k_major: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The torch twin of `act_backward`, its parts summed: fp32 [R] by route, 0 for dropped ones."""
    routes, I = schedule.routes().long(), down.shape[2 if k_major else 1]
    dkept, out = torch.zeros_like(gate_up_RG), gate_up_RG.new_zeros((schedule.R, I))
    dots = torch.zeros(schedule.R, dtype=torch.float32, device=out.device)
    for e, first, end in spans(schedule):
        r = routes[first:end]
        dv = dout_TH[r // choices].float() @ (down[e].float() if k_major else down[e].float().T)
        gate, up = halves_of(gate_up_RG[first:end].float(), halves)
        value, by_gate, by_up = (f(gate, up) for f in acts)
        value = value.to(out.dtype).float()
        dots[r] = (dv * value).sum(1)
        scale = 1.0 if weights_TK is None else weights_TK.reshape(-1)[r, None].float()
        out[first:end] = (scale * value).to(out.dtype)
        dgate, dup = halves_of(dkept[first:end], halves)
        dup.copy_(scale * dv * by_up)
        if dgate is not None:
            dgate.copy_(scale * dv * by_gate)
    return dkept, out, dots


def dx_routes_reference(
    dgate_up_RG: torch.Tensor, gate_up: tuple[torch.Tensor, ...], schedule: Schedule, *, k_major: bool
) -> torch.Tensor:
    """The torch twin of `dx_routes`; rows of dropped routes are zero."""
    routes, w = schedule.routes().long(), torch.cat(gate_up, 1 if k_major else 2)
    w = w if k_major else w.mT
    y = dgate_up_RG.new_zeros((schedule.R, w.shape[2]))
    for e, first, end in spans(schedule):
        y[routes[first:end]] = (dgate_up_RG[first:end].float() @ w[e].float()).to(y.dtype)
    return y
