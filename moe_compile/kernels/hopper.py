"""The two grouped linears of many rows an expert, for Hopper: warps that fetch beside warps that multiply (Gluon).

In, out, arguments and invariants: as grouped.fc1 and fc2, whose torch twins are these kernels' too. What differs is the
schedule. A program stays on its processor and takes tiles in turn. One partition of its warps fetches, as far ahead as
its buffers reach: weights and sorted rows by tensor descriptors, or x's rows gathered by their routes; so the next
tile's first operands arrive while the other partition still stores the last one's results. The other multiplies, two
warpgroups of 64 rows each. Buffers change hands through two barriers each: full (the bytes are there) and empty.

`permute` copies x's rows into expert order first. Gathering costs fc1 up to a tenth of its time; the copy moves 4 H
bytes a route whatever I, so that with a larger I it is the cheaper of the two (whole calls, T=4096: mixtral 5265 us
gathered, 4895 copied; qwen3_30b 762, 779; H200, 2026-11-30). docs/kernels.md has what else was tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import Bound, ceil_div, power_of_2
from .sort import Schedule

# triton 3.9 renamed both
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

ROWS, WARPS, DEPTH = 128, 8, 64  # of a tile; that multiply it; columns of x that a buffer holds
# Where the gate and up rows of a tile are in memory: there is no gate; alternating; in two blocks of a tensor; in two
# tensors.
ALONE, ALTERNATING, BLOCKS, TENSORS = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Persistent:
    """N columns of a tile (for fc1: of gate and of up each), S buffers, GROUP row tiles side by side before the next
    column tile; GATHER: fc1 reads x's rows by their routes, not sorted ones; H is then a multiple of 64."""

    N: int
    S: int = 4
    GROUP: int = 8
    GATHER: int = 0


@gluon.jit
def _place(pid, tiles, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """(row tile, column tile) of a number, row tiles fastest in groups of GROUP."""
    group = pid // (GROUP * COLUMNS)
    height = gl.maximum(gl.minimum(tiles - group * GROUP, GROUP), 1)
    local = pid - group * GROUP * COLUMNS
    return group * GROUP + local % height, local // height


@gluon.jit
def _fetch_partition(
    x_ptr, a, w, v, plan_ptr, bound, stride_xt, tiles, a_bufs, b_bufs, full, empty,
    CHOICES: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, K: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, BK: gl.constexpr, GATHER: gl.constexpr, HALVES: gl.constexpr,
    K_MAJOR: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Fills the buffers, tile after tile. GATHER: these warps, four of them, copy rows by their routes."""
    S: gl.constexpr = a_bufs.type.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    count = 0
    for pid in range(gl.program_id(0), tiles * COLUMNS, PROGRAMS):
        m, column = _place(pid, tiles, COLUMNS, GROUP)
        tile_ptr = plan_ptr + 4 + 4 * m
        e, first, end = gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2)
        n0 = column * N
        if GATHER:
            p = first + gl.arange(0, M, gl.SliceLayout(1, layout))
            k = gl.arange(0, BK, gl.SliceLayout(0, layout))
            route = gl.load(plan_ptr + 4 + 4 * bound + p, mask=p < end, other=0)
            rows = x_ptr + (route // CHOICES).to(gl.int64) * stride_xt
            ptrs = gl.expand_dims(rows, 1) + gl.expand_dims(k, 0)
            here = gl.expand_dims(p < end, 1)
        for k0 in range(0, K, BK):
            s = count % S
            mbarrier.wait(empty.index(s), ((count // S) & 1) ^ 1)
            mbarrier.expect(full.index(s), BYTES)
            if HALVES == 2:
                _fetch(w, [e, 0, n0, k0], full.index(s), b_bufs.index(s))
            elif HALVES == 3:
                _fetch(w, [e, n0, k0], full.index(s), b_bufs.index(s).slice(0, 1))
                _fetch(v, [e, n0, k0], full.index(s), b_bufs.index(s).slice(1, 1))
            elif K_MAJOR:
                _fetch(w, [e, 2 * n0 if HALVES == 1 else n0, k0], full.index(s), b_bufs.index(s))
            else:
                _fetch(w, [e, k0, 2 * n0 if HALVES == 1 else n0], full.index(s), b_bufs.index(s))
            if GATHER:
                _gather(a_bufs.index(s), ptrs + k0, mask=here)
                async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            else:
                _fetch(a, [first, k0], full.index(s), a_bufs.index(s))
            count += 1


@gluon.jit
def _store(value, out_ptr, plan_ptr, bound, first, end, n0, N: gl.constexpr, OUT: gl.constexpr, WHOLE: gl.constexpr,
           FIRST: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Rows first.. of `value`, columns n0..: at their positions (FIRST), or routes. WHOLE: all are below OUT."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    value = gl.convert_layout(value.to(out_ptr.dtype.element_ty), layout)
    p = first + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    n = n0 + gl.arange(0, N, gl.SliceLayout(0, layout))
    row = p
    if not FIRST:
        row = gl.load(plan_ptr + 4 + 4 * bound + p, mask=p < end, other=0)
    ptrs = gl.expand_dims(out_ptr + row.to(gl.int64) * OUT, 1) + gl.expand_dims(n, 0)
    if WHOLE:
        gl.store(ptrs, value, mask=gl.expand_dims(p < end, 1))
    else:
        gl.store(ptrs, value, mask=gl.expand_dims(p < end, 1) & gl.expand_dims(n < OUT, 0))


@gluon.jit
def _multiply_tile(
    count, e, first, end, n0, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, a_bufs, b_bufs, full,
    empty, M: gl.constexpr, N: gl.constexpr, BK: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr,
    GATHER: gl.constexpr, FIRST: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, K_MAJOR: gl.constexpr,
    stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """One tile; returns the buffers used so far."""
    S: gl.constexpr = a_bufs.type.shape[0]
    WIDTH: gl.constexpr = N if HALVES == 0 else 2 * N
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    acc = gl.zeros((M, WIDTH), gl.float32, mma)
    for k0 in range(0, K, BK):
        s = count % S
        mbarrier.wait(full.index(s), (count // S) & 1)
        if GATHER:
            fence_async_shared()  # gathered rows came by ordinary stores
        if K_MAJOR:
            b = b_bufs.index(s).reshape([WIDTH, BK]).permute((1, 0))
        else:
            b = b_bufs.index(s).reshape([BK, WIDTH])
        acc = warpgroup_mma(a_bufs.index(s), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((count + S - 1) % S), count=1, pred=k0 > 0)  # the product before is done
        count += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((count + S - 1) % S), count=1)

    if HALVES == 1:
        one, two = gl.split(gl.reshape(acc, (M, N, 2)))
    elif HALVES > 1:
        one, two = gl.split(gl.permute(gl.reshape(acc, (M, 2, N)), (0, 2, 1)))
    else:
        one = acc
    layout: gl.constexpr = one.type.layout
    if SCALE:
        p = first + gl.arange(0, M, gl.SliceLayout(1, layout))
        route = gl.load(plan_ptr + 4 + 4 * bound + p, mask=p < end, other=0)
        scale = gl.expand_dims(gl.load(route_weight_ptr + route).to(gl.float32), 1)
        one = one * scale
        if HALVES > 0:
            two = two * scale
    if BIAS:
        n = n0 + gl.arange(0, N, gl.SliceLayout(0, layout))
        at = e.to(gl.int64) * stride_be + (2 * n if HALVES == 1 else n)
        one += gl.expand_dims(gl.load(bias_ptr + at, mask=n < OUT, other=0.0).to(gl.float32), 0)
        if HALVES > 0:
            at2 = bias2_ptr + at + (1 if HALVES == 1 else V_ROW)
            two += gl.expand_dims(gl.load(at2, mask=n < OUT, other=0.0).to(gl.float32), 0)
    if not FIRST:
        value = one
    elif HALVES == 0:
        value = ACT(one, one)
    elif GATE_FIRST:
        value = ACT(one, two)
    else:
        value = ACT(two, one)
    WHOLE: gl.constexpr = OUT % N == 0
    if N == 256:  # in two parts: less shared memory to pass them through
        left, right = gl.split(gl.permute(gl.reshape(value, (M, 2, N // 2)), (0, 2, 1)))
        _store(left, out_ptr, plan_ptr, bound, first, end, n0, N // 2, OUT, WHOLE, FIRST, WARPS)
        _store(right, out_ptr, plan_ptr, bound, first, end, n0 + N // 2, N // 2, OUT, WHOLE, FIRST, WARPS)
    else:
        _store(value, out_ptr, plan_ptr, bound, first, end, n0, N, OUT, WHOLE, FIRST, WARPS)
    return count


@gluon.jit
def _multiply_partition(
    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs, full, empty,
    COLUMNS: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, BK: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, GATHER: gl.constexpr,
    FIRST: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, K_MAJOR: gl.constexpr,
    stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    count = 0
    for pid in range(gl.program_id(0), tiles * COLUMNS, PROGRAMS):
        m, column = _place(pid, tiles, COLUMNS, GROUP)
        tile_ptr = plan_ptr + 4 + 4 * m
        e, first, end = gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2)
        count = _multiply_tile(
            count, e, first, end, column * N, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, a_bufs,
            b_bufs, full, empty, M, N, BK, K, OUT, GATHER, FIRST, HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS,
            SCALE, ACT, WARPS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["bound"])
def _kernel(
    x_ptr, a, w, v, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, stride_xt, bound,
    CHOICES: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BK: gl.constexpr,
    S: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, GATHER: gl.constexpr,
    FIRST: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, K_MAJOR: gl.constexpr,
    stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    A_LAYOUT: gl.constexpr, B_SHAPE: gl.constexpr, B_LAYOUT: gl.constexpr, WARPS: gl.constexpr,
    FETCHERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """FIRST: fc1, else fc2. The weights' buffers are B_SHAPE, rows and columns of x's M x BK."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kind: gl.constexpr = out_ptr.dtype.element_ty
    WIDTH: gl.constexpr = N if HALVES == 0 else 2 * N
    BYTES: gl.constexpr = (WIDTH * BK + (0 if GATHER else M * BK)) * kind.primitive_bitwidth // 8
    COLUMNS: gl.constexpr = (OUT + N - 1) // N
    a_bufs = gl.allocate_shared_memory(kind, [S, M, BK], A_LAYOUT)
    b_bufs = gl.allocate_shared_memory(kind, B_SHAPE, B_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1 + (32 * FETCHERS if GATHER else 0))  # every copying thread arrives too
        mbarrier.init(empty.index(i), count=1)
    tiles = gl.load(plan_ptr)
    gl.warp_specialize(
        [
            (_multiply_partition, (
                bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs, full, empty,
                COLUMNS, GROUP, PROGRAMS, M, N, BK, K, OUT, GATHER, FIRST, HALVES, GATE_FIRST, K_MAJOR,
                stride_be, V_ROW, BIAS, SCALE, ACT, WARPS,
            )),
            (_fetch_partition, (
                x_ptr, a, w, v, plan_ptr, bound, stride_xt, tiles, a_bufs, b_bufs, full, empty, CHOICES, COLUMNS,
                GROUP, PROGRAMS, K, M, N, BK, GATHER, HALVES, K_MAJOR, BYTES,
            )),
        ],
        [FETCHERS],
        [56 if GATHER else 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["bound"])
def _permute_kernel(
    x_ptr, out_ptr, plan_ptr, stride_xt, bound, CHOICES: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[p] = x[routes[p] // CHOICES]; rows past the last tile's end are not written."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p, h = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tiles = tl.load(plan_ptr)
    if tiles == 0:
        return
    if p >= tl.load(plan_ptr + 4 * tiles + 2):  # the last tile's end
        return
    t = (tl.load(plan_ptr + 4 + 4 * bound + p) // CHOICES).to(tl.int64)
    tl.store(out_ptr + p.to(tl.int64) * H + h, tl.load(x_ptr + t * stride_xt + h, mask=h < H), mask=h < H)


def permute(x_TH: torch.Tensor, schedule: Schedule, choices: int) -> torch.Tensor:
    """x_RH [R, H]: the rows of x in sorted order. x's rows are contiguous."""
    H = x_TH.shape[1]
    out = torch.empty((schedule.R, H), dtype=x_TH.dtype, device=x_TH.device)
    bound, blocks = _permute_bound(choices, H, x_TH.dtype, x_TH.device)
    bound((schedule.R, blocks), (x_TH, out, schedule.plan, x_TH.stride(0)), (schedule.bound,))
    return out


@lru_cache(1024)
def _permute_bound(choices: int, H: int, dtype: Any, device: torch.device) -> tuple[Bound, int]:
    block = min(2048, power_of_2(H))
    return Bound(_permute_kernel, (choices, H, block), device, overlap=True), ceil_div(H, block)


def _swizzled(shape: list[int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


@lru_cache(1024)
def _bound(
    tile: Persistent, first: bool, act: Any, choices: int, sizes: tuple[int, int], halves: str, k_major: bool,
    dtype: torch.dtype, device: torch.device, bias_stride: int | None, weights: Any,
) -> tuple[Bound, tuple[int, ...], tuple[int, ...], Any, Any, int]:  # fmt: skip
    """The kernel; the boxes of the weights' and the rows' descriptors and their layouts; how many programs run."""
    H, I = sizes
    depth, columns = (H, I) if first else (I, H)
    gather = first and bool(tile.GATHER)
    if not first or halves == "up":
        kind, box, shape = ALONE, [1, tile.N, DEPTH], [1, tile.N, DEPTH]
    elif halves.endswith("interleaved"):
        kind, box, shape = ALTERNATING, [1, 2 * tile.N, DEPTH], [1, 2 * tile.N, DEPTH]
    elif halves == "separate":
        kind, box, shape = TENSORS, [1, tile.N, DEPTH], [2, tile.N, DEPTH]
    else:
        kind, box, shape = BLOCKS, [1, 2, tile.N, DEPTH], [1, 2, tile.N, DEPTH]
    if not k_major:
        assert kind in (ALONE, ALTERNATING), halves
        box = shape = [1, DEPTH, box[1]]
    rows = [ROWS, DEPTH]
    w_layout, a_layout = _swizzled(box, dtype), _swizzled(rows, dtype)
    programs = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    constants = (
        choices, depth, columns, ROWS, tile.N, DEPTH, tile.S, tile.GROUP, programs, gather, first, kind,
        not halves.startswith("up_gate"), k_major, bias_stride or 0, 0 if kind == TENSORS else I,
        bias_stride is not None, weights is not None, act, a_layout, (tile.S, *shape), w_layout, WARPS,
        4 if gather else 1,
    )  # fmt: skip
    bound = Bound(_kernel, constants, device, warps=WARPS, overlap=first, registers=168)
    return bound, tuple(box), tuple(rows), w_layout, a_layout, programs


def fc1(
    x: torch.Tensor, gate_up: tuple[torch.Tensor, ...], bias: tuple[torch.Tensor, ...],
    weights_TK: torch.Tensor | None, schedule: Schedule, act: Any, *, choices: int, sizes: tuple[int, int],
    gated: bool, halves: str, k_major: bool, tile: Persistent,
) -> torch.Tensor:  # fmt: skip
    """act_RI as of grouped.fc1. x: x_TH where tile.GATHER, else its rows in sorted order (`permute`)."""
    bound, box, rows, w_layout, a_layout, programs = _bound(
        tile, True, act, choices, sizes, halves, k_major, x.dtype, x.device, bias[0].stride(0) if bias else None,
        None if weights_TK is None else weights_TK.dtype,
    )  # fmt: skip
    out = torch.empty((schedule.R, sizes[1]), dtype=x.dtype, device=x.device)
    views = [torch.unflatten(w, 1, (2, sizes[1])) if len(box) == 4 else w for w in gate_up]
    w, v = (TensorDescriptor.from_tensor(t, list(box), w_layout) for t in (views[0], views[-1]))
    arguments = (
        x, w if tile.GATHER else TensorDescriptor.from_tensor(x, list(rows), a_layout), w, v,
        bias[0] if bias else x, bias[-1] if bias else x, x if weights_TK is None else weights_TK.contiguous(), out,
        schedule.plan, x.stride(0),
    )  # fmt: skip
    bound((min(programs, schedule.bound * ceil_div(sizes[1], tile.N)), 1), arguments, (schedule.bound,))
    return out


def fc2(
    act_RI: torch.Tensor, down: torch.Tensor, bias: torch.Tensor | None, schedule: Schedule, *, k_major: bool,
    tile: Persistent,
) -> torch.Tensor:  # fmt: skip
    """y_RH as of grouped.fc2."""
    sizes = (down.shape[1 if k_major else 2], act_RI.shape[1])
    bound, box, rows, w_layout, a_layout, programs = _bound(
        tile, False, None, 1, sizes, "up", k_major, act_RI.dtype, act_RI.device,
        None if bias is None else bias.stride(0), None,
    )  # fmt: skip
    y = torch.empty((schedule.R, sizes[0]), dtype=act_RI.dtype, device=act_RI.device)
    w = TensorDescriptor.from_tensor(down, list(box), w_layout)
    a = TensorDescriptor.from_tensor(act_RI, list(rows), a_layout)
    biased = act_RI if bias is None else bias
    arguments = (act_RI, a, w, w, biased, biased, act_RI, y, schedule.plan, act_RI.stride(0))
    bound((min(programs, schedule.bound * ceil_div(sizes[0], tile.N)), 1), arguments, (schedule.bound,))
    return y
