"""The experts' two linears over routes in expert order: two kernels.

In: x_TH, the expert tensors in their native layout (strides are read, nothing is copied), a Schedule (sort.py).
  fc1       act_RI[p] = cast(act(gate, up), x)  with gate, up = first-linear rows of x[routes[p] // K] (+ bias)
  fc2       y_RH[routes[p]] = cast(act_RI[p] @ down[e]^T + bias, x)
The 2I-wide intermediate and a permuted copy of x never exist. act_RI is in sorted order (contiguous for fc2), y_RH in
route order (contiguous for finalize.py). y is rounded where the original rounds its second linear, and the routing
weight is applied after that in fp32: no rounding that the original lacks.
Invariants: rows past a tile's end are computed on zeros or neighbours and never stored; every element is written by one
program, sums run in a fixed order: results are bitwise repeatable. A route outside [0, E) has no row in any tile and
its y is never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Bound, ceil_div
from .listed import Experts, alignment, base, tensor_of
from .product import descriptor, product, routes_at, rows_of, spans, strides_aligned, tile_at
from .sort import Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class Tile:
    """Block sizes and schedule of one grouped linear; the provider's knobs in the kernels' terms.

    SWAP computes the tile transposed: the weights become the tall operand of the tensor cores, which want 64 rows and
    more of it, and the tokens the narrow one, which may be 16. TMA fetches weights (and fc2's rows) by tensor
    descriptors instead of per-thread addresses.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    SWAP: int = 0
    TMA: int = 0
    warps: int = 4
    stages: int = 3


@triton.jit(do_not_specialize=["bound"])
def _fc1_kernel(
    x_ptr, w, v, bias_ptr, bias2_ptr, route_weight_ptr, act_ptr, plan_ptr, stride_xt, bound,
    stride_xh: tl.constexpr, stride_we: tl.constexpr, stride_wn: tl.constexpr, stride_wk: tl.constexpr,
    stride_be: tl.constexpr, V_ROW: tl.constexpr, CHOICES: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    GATED: tl.constexpr, PAIRED: tl.constexpr, INTERLEAVED: tl.constexpr, GATE_FIRST: tl.constexpr,
    K_MAJOR: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, TMA: tl.constexpr,
    SWAP: tl.constexpr, M_: tl.constexpr, N_: tl.constexpr, K_: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m, column = tile_at(plan_ptr, tl.cdiv(I, N_), PDL)
    if m < 0:
        return
    e, first, end, p = rows_of(plan_ptr, m, M_)
    route = routes_at(plan_ptr, bound, p, end)
    x_rows = x_ptr + (route // CHOICES).to(tl.int64) * stride_xt
    one, two = product(
        x_ptr, x_rows, p < end, first, w, v, e, column * N_, stride_xh, stride_we, stride_wn, stride_wk, V_ROW,
        I, H, GATED and not PAIRED, PAIRED, INTERLEAVED, K_MAJOR, False, TMA, SWAP, M_, N_, K_,
        LISTED,
    )  # fmt: skip
    if PAIRED:
        one, two = tl.split(tl.reshape(one, (M_, N_, 2)))
    if SCALE:
        scale = tl.load(route_weight_ptr + route, mask=p < end, other=0.0).to(tl.float32)[:, None]
        one, two = one * scale, two * scale
    n = column * N_ + tl.arange(0, N_)
    if BIAS:
        bias_ptr = tensor_of(bias_ptr, e, x_ptr.dtype.element_ty, LISTED)
        bias2_ptr = tensor_of(bias2_ptr, e, x_ptr.dtype.element_ty, LISTED)
        row = 2 * n if INTERLEAVED else n
        at = e.to(tl.int64) * stride_be + row
        one += tl.load(bias_ptr + at, mask=n < I, other=0.0).to(tl.float32)[None, :]
        if GATED:
            at += 1 if INTERLEAVED else V_ROW
            two += tl.load(bias2_ptr + at, mask=n < I, other=0.0).to(tl.float32)[None, :]
    if not GATED:
        value = ACT(one, one)
    elif GATE_FIRST:
        value = ACT(one, two)
    else:
        value = ACT(two, one)
    out_ptrs = act_ptr + p.to(tl.int64)[:, None] * I + n[None, :]
    tl.store(out_ptrs, value.to(act_ptr.dtype.element_ty), mask=(p < end)[:, None] & (n < I)[None, :])


@triton.jit(do_not_specialize=["bound"])
def _fc2_kernel(
    act_ptr, act, w, bias_ptr, y_ptr, plan_ptr, bound, stride_we: tl.constexpr,
    stride_wn: tl.constexpr, stride_wk: tl.constexpr, stride_be: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    K_MAJOR: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr, M_: tl.constexpr,
    N_: tl.constexpr, K_: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m, column = tile_at(plan_ptr, tl.cdiv(H, N_), PDL)
    if m < 0:
        return
    e, first, end, p = rows_of(plan_ptr, m, M_)
    a_rows = act_ptr + p.to(tl.int64) * I
    y, _ = product(
        act, a_rows, p < end, first, w, w, e, column * N_, 1, stride_we, stride_wn, stride_wk, 0,
        H, I, False, False, False, K_MAJOR, TMA, TMA, SWAP, M_, N_, K_, LISTED,
    )  # fmt: skip
    n = column * N_ + tl.arange(0, N_)
    if BIAS:
        bias_ptr = tensor_of(bias_ptr, e, act_ptr.dtype.element_ty, LISTED)
        y += tl.load(bias_ptr + e.to(tl.int64) * stride_be + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
    route = routes_at(plan_ptr, bound, p, end)
    out_ptrs = y_ptr + route.to(tl.int64)[:, None] * H + n[None, :]
    tl.store(out_ptrs, y.to(y_ptr.dtype.element_ty), mask=(p < end)[:, None] & (n < H)[None, :])


# What follows binds a kernel once for all calls that differ in addresses and in T only; see launch.Bound.


@lru_cache(1024)
def _fc1_bound(
    tile: Tile, act: Any, choices: int, sizes: tuple[int, int], gated: bool, halves: str, k_major: bool, dtype: Any,
    device: torch.device, x_strides: tuple[int, ...], w_strides: tuple[int, ...], v_strides: tuple[int, ...],
    bias_stride: int | None, weights_dtype: Any, aligned: bool, listed: int,
) -> tuple[Bound, int]:  # fmt: skip
    """The kernel, and the weight rows that its descriptors fetch at once (0: it reads by addresses)."""
    H, I = sizes
    interleaved = halves.endswith("interleaved")
    tma = aligned and strides_aligned(w_strides, dtype.itemsize) and strides_aligned(v_strides, dtype.itemsize)
    # one wide tile wherever its rows can alternate without breaking contiguity
    paired = gated and (interleaved or (halves != "separate" and k_major and not tma))
    n_axis, k_axis = (1, 2) if k_major else (2, 1)
    constants = (
        x_strides[1], w_strides[0], w_strides[n_axis], w_strides[k_axis], bias_stride or 0,
        0 if halves in ("separate", "up") else 1 if interleaved else I, choices, H, I,
        gated, paired, interleaved, not halves.startswith("up_gate"), k_major, bias_stride is not None,
        weights_dtype is not None, act, tma, bool(tile.SWAP), tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K, listed,
    )  # fmt: skip
    bound = Bound(_fc1_kernel, constants, device, warps=tile.warps, stages=tile.stages, overlap=True)
    return bound, tile.BLOCK_N * (2 if paired else 1) if tma else 0


@lru_cache(1024)
def _fc2_bound(
    tile: Tile, I: int, H: int, k_major: bool, dtype: Any, device: torch.device, w_strides: tuple[int, ...],
    bias_stride: int | None, aligned: bool, listed: int,
) -> tuple[Bound, bool]:  # fmt: skip
    """The kernel, and whether it reads by descriptors."""
    tma = aligned and strides_aligned(w_strides, dtype.itemsize) and I * dtype.itemsize % 16 == 0
    n_axis, k_axis = (1, 2) if k_major else (2, 1)
    constants = (
        w_strides[0], w_strides[n_axis], w_strides[k_axis], bias_stride or 0, H, I, k_major, bias_stride is not None,
        tma, bool(tile.SWAP), tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K, listed,
    )  # fmt: skip
    # Not overlapped: its programs would fill the processors that fc1 leaves first, unevenly (mixtral T=1: 187 us, with
    # it 196; gpt_oss_20b T=4: 166, 168; elsewhere it gained 1 us; H200, 2026-11-30).
    return Bound(_fc2_kernel, constants, device, warps=tile.warps, stages=tile.stages), tma


def fc1(
    x_TH: torch.Tensor, gate_up: tuple[Experts, ...], bias: tuple[Experts, ...],
    weights_TK: torch.Tensor | None, schedule: Schedule, act: Any, *, choices: int, sizes: tuple[int, int],
    gated: bool, halves: str, k_major: bool, tile: Tile,
) -> torch.Tensor:  # fmt: skip
    """act_RI [R, I] in x's dtype, rows in sorted order; rows of dropped routes stay unwritten.

    gate_up: one tensor or table, or (first, second), bias likewise or (); weights_TK scales x (spec.weight == "input")
    or None. `halves` as in spec.HALVES, k_major for [E, G, H], sizes = (H, I), `act` of epilogue(). TMA falls back to
    addresses where a tensor is not aligned for it, and for tables.
    """
    w, v = gate_up[0], gate_up[-1]
    w_at, v_at, listed = base(w), base(v), alignment(w, v, *bias)
    strides = x_TH.stride()
    bound, width = _fc1_bound(
        tile, act, choices, sizes, gated, halves, k_major, x_TH.dtype, x_TH.device, strides, w.stride(), v.stride(),
        bias[0].stride(0) if bias else None, None if weights_TK is None else weights_TK.dtype,
        bool(tile.TMA) and not listed and (w_at.data_ptr() | v_at.data_ptr()) % 16 == 0, listed,
    )  # fmt: skip
    out = torch.empty((schedule.R, sizes[1]), dtype=x_TH.dtype, device=x_TH.device)
    arguments = (
        x_TH,
        descriptor(w_at, width, tile.BLOCK_K, k_major) if width else w_at,
        descriptor(v_at, width, tile.BLOCK_K, k_major) if width else v_at,
        base(bias[0]) if bias else x_TH, base(bias[-1]) if bias else x_TH,
        x_TH if weights_TK is None else weights_TK.contiguous(), out, schedule.plan, strides[0],
    )  # fmt: skip
    bound((schedule.bound * ceil_div(sizes[1], tile.BLOCK_N), 1), arguments, (schedule.bound,))
    return out


def fc2(
    act_RI: torch.Tensor, down: Experts, bias: Experts | None, schedule: Schedule, *, k_major: bool, tile: Tile,
) -> torch.Tensor:  # fmt: skip
    """y_RH [R, H] in act's dtype, rows in route order; rows of dropped routes stay unwritten.

    k_major: down is [E, H, I], else [E, I, H].
    """
    I, H = act_RI.shape[1], down.shape[1 if k_major else 2]
    down_at, listed = base(down), alignment(down) if bias is None else alignment(down, bias)
    bound, tma = _fc2_bound(
        tile, I, H, k_major, act_RI.dtype, act_RI.device, down.stride(), None if bias is None else bias.stride(0),
        bool(tile.TMA) and not listed and down_at.data_ptr() % 16 == 0, listed,
    )  # fmt: skip
    y = torch.empty((schedule.R, H), dtype=act_RI.dtype, device=act_RI.device)
    arguments = (
        act_RI,
        TensorDescriptor.from_tensor(act_RI, [tile.BLOCK_M, tile.BLOCK_K]) if tma else act_RI,
        descriptor(down_at, tile.BLOCK_N, tile.BLOCK_K, k_major) if tma else down_at,
        act_RI if bias is None else base(bias), y, schedule.plan,
    )  # fmt: skip
    bound((schedule.bound * ceil_div(H, tile.BLOCK_N), 1), arguments, (schedule.bound,))
    return y


def gate_and_up(tensors: tuple[torch.Tensor, ...], halves: str, axis: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Views of the gate (None without one) and up parts of first-linear weights or biases, whose rows are on `axis`."""
    if halves == "separate":
        return tensors[0], tensors[1]
    (w,) = tensors
    if halves == "up":
        return None, w
    if halves.endswith("interleaved"):
        index = (slice(None),) * axis
        first, second = w[index + (slice(0, None, 2),)], w[index + (slice(1, None, 2),)]
    else:
        first, second = w.chunk(2, dim=axis)
    return (second, first) if halves.startswith("up_gate") else (first, second)


def fc1_reference(
    x_TH: torch.Tensor, gate_up: tuple[torch.Tensor, ...], bias: tuple[torch.Tensor, ...],
    weights_TK: torch.Tensor | None, schedule: Schedule, act: Callable[..., torch.Tensor], *, choices: int, halves: str,
    k_major: bool,
) -> torch.Tensor:  # fmt: skip
    """The torch twin of `fc1`: act is a function of fp32 (gate or None, up); rows past the last tile are zero."""
    gate, up = gate_and_up(gate_up, halves, 1 if k_major else 2)
    gate_bias, up_bias = gate_and_up(bias, halves, 1) if bias else (None, None)
    routes = schedule.routes().long()
    out = x_TH.new_zeros((schedule.R, up.shape[1 if k_major else 2]))

    def linear(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, e: int) -> torch.Tensor | None:
        if w is None:
            return None
        y = x @ (w[e].float().T if k_major else w[e].float())
        return y if b is None else y + b[e].float()

    for e, start, stop in spans(schedule):
        x = x_TH[routes[start:stop] // choices].float()
        if weights_TK is not None:
            x = x * weights_TK.reshape(-1)[routes[start:stop], None].float()
        out[start:stop] = act(linear(x, gate, gate_bias, e), linear(x, up, up_bias, e)).to(out.dtype)
    return out


def fc2_reference(
    act_RI: torch.Tensor, down: torch.Tensor, bias: torch.Tensor | None, schedule: Schedule, *, k_major: bool
) -> torch.Tensor:
    """The torch twin of `fc2`; rows of dropped routes are zero."""
    routes = schedule.routes().long()
    y_RH = act_RI.new_zeros((schedule.R, down.shape[1 if k_major else 2]))
    for e, start, stop in spans(schedule):
        y = act_RI[start:stop].float() @ (down[e].float().T if k_major else down[e].float())
        y_RH[routes[start:stop]] = (y if bias is None else y + bias[e].float()).to(y_RH.dtype)
    return y_RH
