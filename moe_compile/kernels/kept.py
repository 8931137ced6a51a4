"""Training's first linear: grouped.fc1 that also keeps what it made; and the halves that training's kernels share.

In: as grouped.fc1. Out, for position p of the sorted routes: gate_up_RG[p] = the first linear's rows (+ bias), and
act_RI[p] = act(gate, up). gate_up_RG holds the rows in the native order of the weights' rows (two tensors: gate first),
so that what multiplies it by weights or tokens need not know about halves.
Invariants: as of grouped.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .grouped import Tile, gate_and_up
from .launch import ceil_div, launch
from .product import descriptor, product, routes_at, rows_of, spans, tile_at, tma_aligned
from .sort import Schedule


def placed(halves: str, I: int) -> tuple[bool, bool, bool, int]:
    """(gated, interleaved, gate first, the second half's first row counted from the first's) of spec.HALVES."""
    interleaved = halves.endswith("interleaved")
    second = 0 if halves in ("separate", "up") else 1 if interleaved else I
    return halves != "up", interleaved, not halves.startswith("up_gate"), second


@triton.jit
def store_pair(at, one, two, n, I: tl.constexpr, rows, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
                N_: tl.constexpr):  # fmt: skip
    """Writes [M_, N_] halves at columns n of rows `at` [M_, 1]: alternating, or the second I columns further."""
    kind = at.dtype.element_ty
    if INTERLEAVED:
        c = 2 * tl.min(n, axis=0) + tl.arange(0, 2 * N_)
        tl.store(at + c[None, :], tl.interleave(one, two).to(kind), mask=rows & (c < 2 * I)[None, :])
    else:
        inside = rows & (n < I)[None, :]
        tl.store(at + n[None, :], one.to(kind), mask=inside)
        if GATED:
            tl.store(at + I + n[None, :], two.to(kind), mask=inside)


@triton.jit
def split_columns(x, M_: tl.constexpr, N_: tl.constexpr):
    """The left and the right half of x [M_, N_]."""
    return tl.split(tl.permute(tl.reshape(x, (M_, 2, N_ // 2)), (0, 2, 1)))


@triton.jit(do_not_specialize=["bound"])
def _fc1_kept_kernel(
    x_ptr, w, v, bias_ptr, bias2_ptr, route_weight_ptr, kept_ptr, act_ptr, plan_ptr, stride_xt, bound,
    stride_we: tl.constexpr, stride_wn: tl.constexpr, stride_wk: tl.constexpr,
    stride_be: tl.constexpr, V_ROW: tl.constexpr, CHOICES: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    GATED: tl.constexpr, PAIRED: tl.constexpr, INTERLEAVED: tl.constexpr, GATE_FIRST: tl.constexpr,
    K_MAJOR: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, TMA: tl.constexpr,
    SWAP: tl.constexpr, M_: tl.constexpr, N_: tl.constexpr, K_: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m, column = tile_at(plan_ptr, tl.cdiv(I, N_), PDL)
    if m < 0:
        return
    e, first, end, p = rows_of(plan_ptr, m, M_)
    route = routes_at(plan_ptr, bound, p, end)
    x_rows = x_ptr + (route // CHOICES).to(tl.int64) * stride_xt
    one, two = product(
        x_ptr, x_rows, p < end, first, w, v, e, column * N_, 1, stride_we, stride_wn, stride_wk, V_ROW,
        I, H, GATED and not PAIRED, PAIRED, INTERLEAVED, K_MAJOR, False, TMA, SWAP, M_, N_, K_,
    )  # fmt: skip
    if PAIRED:
        one, two = tl.split(tl.reshape(one, (M_, N_, 2)))
    if SCALE:
        scale = tl.load(route_weight_ptr + route, mask=p < end, other=0.0).to(tl.float32)[:, None]
        one, two = one * scale, two * scale
    n = column * N_ + tl.arange(0, N_)
    if BIAS:
        row = 2 * n if INTERLEAVED else n
        at = e.to(tl.int64) * stride_be + row
        one += tl.load(bias_ptr + at, mask=n < I, other=0.0).to(tl.float32)[None, :]
        if GATED:
            at += 1 if INTERLEAVED else V_ROW
            two += tl.load(bias2_ptr + at, mask=n < I, other=0.0).to(tl.float32)[None, :]
    rows = (p < end)[:, None]
    _kept_piece(
        one, two, column * N_, p.to(tl.int64)[:, None], rows, kept_ptr, act_ptr, I, GATED, INTERLEAVED, GATE_FIRST,
        ACT, M_, N_,
    )  # fmt: skip


@triton.jit
def _kept_piece(
    one, two, n0, at, rows, kept_ptr, act_ptr, I: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATE_FIRST: tl.constexpr, ACT: tl.constexpr, M_: tl.constexpr, N_: tl.constexpr,
):  # fmt: skip
    """Stores the halves [M_, N_] of columns n0.. and their activation."""
    if N_ > 64:  # in pieces, as _act_piece
        one, one2 = split_columns(one, M_, N_)
        two, two2 = split_columns(two, M_, N_)
        HALF: tl.constexpr = N_ // 2
        _kept_piece(one, two, n0, at, rows, kept_ptr, act_ptr, I, GATED, INTERLEAVED, GATE_FIRST, ACT, M_, HALF)
        _kept_piece(
            one2, two2, n0 + HALF, at, rows, kept_ptr, act_ptr, I, GATED, INTERLEAVED, GATE_FIRST, ACT, M_, HALF
        )
    else:
        n = n0 + tl.arange(0, N_)
        store_pair(kept_ptr + at * (2 * I if GATED else I), one, two, n, I, rows, GATED, INTERLEAVED, N_)
        if not GATED:
            value = ACT(one, one)
        elif GATE_FIRST:
            value = ACT(one, two)
        else:
            value = ACT(two, one)
        tl.store(act_ptr + at * I + n[None, :], value.to(act_ptr.dtype.element_ty), mask=rows & (n < I)[None, :])


def fc1_kept(
    x_TH: torch.Tensor, gate_up: tuple[torch.Tensor, ...], bias: tuple[torch.Tensor, ...],
    weights_TK: torch.Tensor | None, schedule: Schedule, act: Any, *, choices: int, sizes: tuple[int, int],
    halves: str, k_major: bool, tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(gate_up_RG, act_RI) in x's dtype, rows in sorted order; rows of dropped routes stay unwritten. As grouped.fc1.

    x's innermost stride is 1.
    """
    H, I = sizes
    w, v = gate_up[0], gate_up[-1]
    gated, interleaved, gate_first, second = placed(halves, I)
    tma = bool(tile.TMA) and tma_aligned(w) and tma_aligned(v)
    paired = gated and (interleaved or (halves != "separate" and k_major and not tma))
    width = tile.BLOCK_N * (2 if paired else 1)
    n_axis, k_axis = (1, 2) if k_major else (2, 1)
    kept = torch.empty((schedule.R, 2 * I if gated else I), dtype=x_TH.dtype, device=x_TH.device)
    out = torch.empty((schedule.R, I), dtype=x_TH.dtype, device=x_TH.device)
    bias1, bias2 = (bias[0], bias[-1]) if bias else (x_TH, x_TH)
    assert x_TH.stride(1) == 1
    arguments = (
        x_TH,
        descriptor(w, width, tile.BLOCK_K, k_major) if tma else w,
        descriptor(v, width, tile.BLOCK_K, k_major) if tma else v,
        bias1, bias2, x_TH if weights_TK is None else weights_TK.contiguous(), kept, out, schedule.plan,
        x_TH.stride(0),
    )  # fmt: skip
    constants = (
        w.stride(0), w.stride(n_axis), w.stride(k_axis), bias1.stride(0) if bias else 0, second, choices, H, I,
        gated, paired, interleaved, gate_first, k_major, bool(bias), weights_TK is not None, act, tma,
        bool(tile.SWAP), tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K,
    )  # fmt: skip
    grid = (schedule.bound * ceil_div(I, tile.BLOCK_N), 1)
    free = (schedule.bound,)
    launch(_fc1_kept_kernel, grid, arguments, free, constants, warps=tile.warps, stages=tile.stages, overlap=True)
    return kept, out


def fc1_kept_reference(
    x_TH: torch.Tensor, gate_up: tuple[torch.Tensor, ...], bias: tuple[torch.Tensor, ...],
    weights_TK: torch.Tensor | None, schedule: Schedule, act: Callable[..., torch.Tensor], *, choices: int, halves: str,
    k_major: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The torch twin of `fc1_kept`: act is a function of fp32 (gate or None, up); rows past the last tile are zero."""
    routes, rows = schedule.routes().long(), 1 if k_major else 2
    G = sum(w.shape[rows] for w in gate_up)
    kept = x_TH.new_zeros((schedule.R, G))
    out = x_TH.new_zeros((schedule.R, G // (1 if halves == "up" else 2)))
    for e, first, end in spans(schedule):
        x = x_TH[routes[first:end] // choices].float()
        x = x if weights_TK is None else x * weights_TK.reshape(-1)[routes[first:end], None].float()
        y = torch.cat([x @ (w[e].float().T if k_major else w[e].float()) for w in gate_up], 1)
        y = y + torch.cat([b[e].float() for b in bias]) if bias else y
        kept[first:end] = y.to(kept.dtype)
        out[first:end] = act(*halves_of(y, halves)).to(out.dtype)
    return kept, out


def halves_of(x_SG: torch.Tensor, halves: str) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Views (gate or None, up) of rows in the native order."""
    return gate_and_up((x_SG,), "gate_up" if halves == "separate" else halves, 1)
