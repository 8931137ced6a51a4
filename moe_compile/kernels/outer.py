"""Sums over the routes of each expert: outer products (gradients of weights), row sums (of biases); and of each route.

In: operands over the sorted routes of a Schedule (position p), or over tokens (read at the token of position p). Out,
for each expert e with positions [first, end):
  outer     out[e] = sum_p a[p]^T b[p], cast once
  row_sum   out[e] = sum_p w[p] a[p], cast once
  route_dots   for each route the sum of its parts, plus a row of one tensor times a row of another (of weights_TK)
Invariants: one program makes an element, over positions in order: bitwise repeatable. `outer` multiplies up to BLOCK_K
rows past `end` by zero: what is by position must be finite there, also past the last tile. (A row that isn't finite, of
the next expert, spoils this one's sum as well as its own: masking both operands cost a step in registers, of 4 steps
where an expert has 256 routes.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from .grouped import Tile
from .launch import ceil_div, launch, power_of_2
from .product import tma_aligned
from .sort import Schedule

_GROUP = tl.constexpr(8)  # row tiles side by side: they read the same columns of the other operand


@dataclass(frozen=True, kw_only=True)
class Rows:
    """An operand [., columns] of a sum over routes. `tokens`: a row for each token, else for each position.

    weights_TK: each row is scaled by its route's weight, and rounded to its dtype again.
    """

    of: torch.Tensor
    tokens: bool = False
    weights_TK: torch.Tensor | None = None


@triton.jit
def _rows_of(x_ptr, w_ptr, row, route, p, end, c, stride, COLUMNS: tl.constexpr, SCALE: tl.constexpr,
             WHOLE: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Columns c of x's rows at positions p, times the routes' weights; zero past `end`, which WHOLE says not to ask."""
    at = x_ptr + row.to(tl.int64)[:, None] * stride + c[None, :]
    if EVEN and WHOLE:
        x = tl.load(at)
    elif WHOLE:
        x = tl.load(at, mask=(c < COLUMNS)[None, :], other=0.0)
    elif EVEN:
        x = tl.load(at, mask=(p < end)[:, None], other=0.0)
    else:
        x = tl.load(at, mask=(p < end)[:, None] & (c < COLUMNS)[None, :], other=0.0)
    if SCALE:
        w = tl.load(w_ptr + route, mask=p < end, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * w[:, None]).to(x_ptr.dtype.element_ty)
    return x


@triton.jit(do_not_specialize=["bound"])
def _outer_kernel(
    a_ptr, b_ptr, b, route_weight_ptr, out_ptr, spans_ptr, plan_ptr, stride_a, stride_b, bound,
    CHOICES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, stride_m: tl.constexpr, stride_n: tl.constexpr,
    SCALE: tl.constexpr, TMA: tl.constexpr, WHOLE: tl.constexpr, M_: tl.constexpr, N_: tl.constexpr,
    K_: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    HIGH: tl.constexpr = (M + M_ - 1) // M_
    WIDE: tl.constexpr = (N + N_ - 1) // N_
    e, local = tl.program_id(0) // (HIGH * WIDE), tl.program_id(0) % (HIGH * WIDE)
    group = local // (_GROUP * WIDE)
    height = tl.minimum(HIGH - group * _GROUP, _GROUP)
    local -= group * _GROUP * WIDE
    m0, n0 = (group * _GROUP + local % height) * M_, local // height * N_
    m, n, k = m0 + tl.arange(0, M_), n0 + tl.arange(0, N_), tl.arange(0, K_)
    first, end = tl.load(spans_ptr + 2 * e), tl.load(spans_ptr + 2 * e + 1)
    routes_ptr = plan_ptr + 4 + 4 * bound
    acc = tl.zeros((M_, N_), tl.float32)
    if WHOLE:
        for p0 in range(first, end - K_ + 1, K_):
            p = p0 + k
            route = tl.load(routes_ptr + p)
            x = _rows_of(
                a_ptr, route_weight_ptr, route // CHOICES, route, p, end, m, stride_a, M, SCALE, True, M % M_ == 0
            )
            if TMA:
                y = b.load([p0, n0])
            else:
                y = _rows_of(b_ptr, b_ptr, p, route, p, end, n, stride_b, N, False, True, N % N_ == 0)
            acc = tl.dot(tl.trans(x), y, acc, input_precision="ieee")
        first += (end - first) // K_ * K_
    # a step's routes are fetched in the step before: a load that waits for another within a step halves the buffers
    route = tl.load(routes_ptr + first + k, mask=first + k < end, other=0)
    for p0 in tl.range(first, end, K_, num_stages=1 if WHOLE else None):
        p = p0 + k
        x = _rows_of(
            a_ptr, route_weight_ptr, route // CHOICES, route, p, end, m, stride_a, M, SCALE, False, M % M_ == 0
        )
        if TMA:
            y = b.load([p0, n0])
        else:
            y = _rows_of(b_ptr, b_ptr, p, route, p, end, n, stride_b, N, False, False, N % N_ == 0)
        acc = tl.dot(tl.trans(x), y, acc, input_precision="ieee")
        route = tl.load(routes_ptr + K_ + p, mask=K_ + p < end, other=0)
    out_ptrs = out_ptr + e.to(tl.int64) * (M * N) + m[:, None] * stride_m + n[None, :] * stride_n
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["bound"])
def _row_sum_kernel(
    a_ptr, route_weight_ptr, out_ptr, spans_ptr, plan_ptr, stride_a, bound, CHOICES: tl.constexpr, N: tl.constexpr,
    TOKENS: tl.constexpr, SCALE: tl.constexpr, N_: tl.constexpr, K_: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.program_id(0)
    n, k = tl.program_id(1) * N_ + tl.arange(0, N_), tl.arange(0, K_)
    first, end = tl.load(spans_ptr + 2 * e), tl.load(spans_ptr + 2 * e + 1)
    routes_ptr = plan_ptr + 4 + 4 * bound
    acc = tl.zeros((K_, N_), tl.float32)
    for p0 in range(first, end, K_):
        route = tl.load(routes_ptr + p0 + k, mask=p0 + k < end, other=0)
        row = route // CHOICES if TOKENS else p0 + k
        x = _rows_of(a_ptr, a_ptr, row, route, p0 + k, end, n, stride_a, N, False, False, False).to(tl.float32)
        if SCALE:
            x *= tl.load(route_weight_ptr + route, mask=p0 + k < end, other=0.0).to(tl.float32)[:, None]
        acc += x
    total = tl.sum(acc, axis=0)
    tl.store(out_ptr + e.to(tl.int64) * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["R"])
def _route_dots_kernel(
    parts_ptr, ids_ptr, a_ptr, b_ptr, out_ptr, stride_a, stride_b, R, COLUMNS: tl.constexpr, E: tl.constexpr,
    CHOICES: tl.constexpr, H: tl.constexpr, A_EXPERTS: tl.constexpr, DOT: tl.constexpr, C_: tl.constexpr,
    R_: tl.constexpr, H_: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    r = tl.program_id(0) * R_ + tl.arange(0, R_)
    e = tl.load(ids_ptr + r, mask=r < R, other=E)
    here = (e >= 0) & (e < E)
    total = tl.zeros((R_,), tl.float32)
    if COLUMNS > 0:
        c = tl.arange(0, C_)
        parts_ptrs = parts_ptr + c[:, None].to(tl.int64) * R + r[None, :]
        total = tl.sum(tl.load(parts_ptrs, mask=(c < COLUMNS)[:, None] & here[None, :], other=0.0), axis=0)
    if DOT:
        a_rows = a_ptr + (e if A_EXPERTS else r).to(tl.int64)[:, None] * stride_a
        b_rows = b_ptr + (r // CHOICES).to(tl.int64)[:, None] * stride_b
        acc = tl.zeros((R_, H_), tl.float32)
        for h0 in range(0, H, H_):
            h = h0 + tl.arange(0, H_)
            mask = here[:, None] & (h < H)[None, :]
            a = tl.load(a_rows + h[None, :], mask=mask, other=0.0).to(tl.float32)
            acc += a * tl.load(b_rows + h[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(acc, axis=1)
    tl.store(out_ptr + r, total.to(out_ptr.dtype.element_ty), mask=r < R)


def outer(
    a: Rows, b: Rows, schedule: Schedule, spans_E2: torch.Tensor, *, choices: int, tile: Tile, whole: bool = False
) -> torch.Tensor:  # fmt: skip
    """out [E, M, N] in a's dtype, contiguous: sum over e's routes of a^T b, a [., M], b [., N], accumulated in fp32.

    One of them is by token. `tile`: BLOCK_M of that one's columns x BLOCK_N of the other's, BLOCK_K routes a step. TMA
    fetches the other. whole: steps of BLOCK_K routes ask for no end, the rest comes in a step of its own: for many
    routes an expert. Its loads wait for the routes' within a step: of two stages more than buffers.
    """
    out = torch.empty((spans_E2.shape[0], a.of.shape[1], b.of.shape[1]), dtype=a.of.dtype, device=a.of.device)
    E, _, columns = out.shape
    left, right, strides = (b, a, (1, columns)) if b.tokens else (a, b, (columns, 1))
    assert left.tokens
    assert not right.tokens
    assert right.weights_TK is None
    assert left.of.stride(1) == right.of.stride(1) == 1
    M, N = left.of.shape[1], right.of.shape[1]
    tma = bool(tile.TMA) and tma_aligned(right.of)
    box = TensorDescriptor.from_tensor(right.of, [tile.BLOCK_K, tile.BLOCK_N]) if tma else right.of
    weights = left.of if left.weights_TK is None else left.weights_TK.contiguous()
    arguments = (
        left.of, right.of, box, weights, out, spans_E2, schedule.plan, left.of.stride(0), right.of.stride(0)
    )  # fmt: skip
    constants = (
        choices, M, N, *strides, left.weights_TK is not None, tma, whole, tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K,
    )  # fmt: skip
    grid = (E * ceil_div(M, tile.BLOCK_M) * ceil_div(N, tile.BLOCK_N), 1)
    launch(_outer_kernel, grid, arguments, (schedule.bound,), constants, warps=tile.warps, stages=tile.stages)
    return out


def row_sum(a: Rows, schedule: Schedule, spans_E2: torch.Tensor, *, choices: int) -> torch.Tensor:
    """out [E, N] in a's dtype: sum over e's routes of a (times the route's weight), accumulated in fp32."""
    E, N = spans_E2.shape[0], a.of.shape[1]
    out = torch.empty((E, N), dtype=a.of.dtype, device=a.of.device)
    assert a.of.stride(1) == 1
    weights = a.of if a.weights_TK is None else a.weights_TK.contiguous()
    block = min(128, power_of_2(N))
    constants = (choices, N, a.tokens, a.weights_TK is not None, block, 16)
    arguments = (a.of, weights, out, spans_E2, schedule.plan, a.of.stride(0))
    launch(_row_sum_kernel, (E, ceil_div(N, block)), arguments, (schedule.bound,), constants)
    return out


def route_dots(
    parts: torch.Tensor | None, ids_TK: torch.Tensor, a: torch.Tensor | None, b_TH: torch.Tensor | None, E: int,
    dtype: torch.dtype, *, a_experts: bool,
) -> torch.Tensor:  # fmt: skip
    """[T, K] in `dtype`: sum of the route's parts, plus a . b[t]; 0 for dropped routes.

    parts: [columns, R] or None; a: [E, H] read at the route's expert where a_experts, else [R, H], or None.
    """
    ids = ids_TK.contiguous()
    out = torch.empty(ids_TK.shape, dtype=dtype, device=ids.device)
    columns, R = 0 if parts is None else parts.shape[0], ids.numel()
    x, y = (ids, ids) if a is None or b_TH is None else (a, b_TH)
    H = 0 if a is None else a.shape[1]
    rows, width = (16, min(256, power_of_2(H))) if H else (128, 1)
    arguments = (ids if parts is None else parts, ids, x, y, out, x.stride(0), y.stride(0))
    constants = (columns, E, ids.shape[1], H, a_experts, H > 0, power_of_2(max(columns, 1)), rows, width)
    launch(_route_dots_kernel, (ceil_div(R, rows), 1), arguments, (R,), constants, overlap=True)
    return out


def outer_reference(a: Rows, b: Rows, schedule: Schedule, spans_E2: torch.Tensor, *, choices: int) -> torch.Tensor:
    """The torch twin of `outer`."""
    out = torch.zeros(len(spans_E2), a.of.shape[1], b.of.shape[1], dtype=a.of.dtype, device=a.of.device)
    for e, (first, end) in enumerate(spans_E2.tolist()):
        x, y = (_rows_reference(r, schedule, first, end, choices, r.of.dtype) for r in (a, b))
        out[e] = (x.float().T @ y.float()).to(out.dtype)
    return out


def row_sum_reference(a: Rows, schedule: Schedule, spans_E2: torch.Tensor, *, choices: int) -> torch.Tensor:
    """The torch twin of `row_sum`."""
    ends = spans_E2.tolist()
    rows = (_rows_reference(a, schedule, first, end, choices, torch.float32) for first, end in ends)
    return torch.stack([r.float().sum(0).to(a.of.dtype) for r in rows])


def _rows_reference(
    a: Rows, schedule: Schedule, first: int, end: int, choices: int, dtype: torch.dtype
) -> torch.Tensor:
    routes = schedule.routes()[first:end].long()
    x = a.of[routes // choices] if a.tokens else a.of[first:end]
    return x if a.weights_TK is None else (x.float() * a.weights_TK.reshape(-1)[routes, None].float()).to(dtype)


def route_dots_reference(
    parts: torch.Tensor | None, ids_TK: torch.Tensor, a: torch.Tensor | None, b_TH: torch.Tensor | None, E: int,
    dtype: torch.dtype, *, a_experts: bool,
) -> torch.Tensor:  # fmt: skip
    """The torch twin of `route_dots`."""
    ids = ids_TK.reshape(-1).long()
    here = (ids >= 0) & (ids < E)
    total = torch.zeros(ids.numel()) if parts is None else parts.sum(0)
    if a is not None and b_TH is not None:
        rows = a[ids.clamp(0, E - 1)] if a_experts else a
        total = total + (rows.float() * b_TH.repeat_interleave(ids_TK.shape[1], 0).float()).sum(1)
    return torch.where(here, total, 0.0).to(dtype).view(ids_TK.shape)
