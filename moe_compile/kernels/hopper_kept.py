"""Training's first linear for Hopper: kept.fc1_kept with a partition that fetches, stored by the copy engine (Gluon).

In, out: as kept.fc1_kept, whose torch twin is this kernel's too; x as in hopper.fc1. Rows of a tile past its expert's
last are not written (hopper_outer.ragged). Each [rows, N] part of a tile passes through one buffer of shared memory.
Invariants: as of hopper.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper import DEPTH, ROWS, TENSORS, Persistent, _swizzled, processors, weights_box
from .hopper_outer import WARPS, at, ragged, send
from .hopper_parts import _fetch, _gather, _place, fetch_weights, multiply
from .kept import placed
from .launch import Bound, ceil_div
from .sort import Schedule

S = 4  # buffers


@gluon.jit
def _fetch_partition(
    x_ptr, a, w, v, plan_ptr, bound, stride_xt, tiles, a_bufs, b_bufs, full, empty, CHOICES: gl.constexpr,
    COLUMNS: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, K: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, BK: gl.constexpr, GATHER: gl.constexpr, HALVES: gl.constexpr, K_MAJOR: gl.constexpr,
    BYTES: gl.constexpr,
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
            fetch_weights(w, v, e, n0, k0, full.index(s), b_bufs.index(s), HALVES, K_MAJOR)
            if GATHER:
                _gather(a_bufs.index(s), ptrs + k0, mask=here)
                async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            else:
                _fetch(a, [first, k0], full.index(s), a_bufs.index(s))
            count += 1


@gluon.jit
def _part(value, out, buf, first, end, column):
    """Stores a part of a tile when the one before has left the buffer."""
    tma.store_wait(0)
    buf.reshape(value.type.shape).store(value.to(buf.dtype))
    fence_async_shared()
    send(out, at(first, end, column), buf)


@gluon.jit
def _multiply_partition(
    kept, kept2, act, bias_ptr, bias2_ptr, route_weight_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs, buf, full, empty,
    COLUMNS: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    BK: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, GATHER: gl.constexpr, HALVES: gl.constexpr,
    GATE_FIRST: gl.constexpr, K_MAJOR: gl.constexpr, stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr,
    SCALE: gl.constexpr, BOTH: gl.constexpr, ACT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = N if HALVES == 0 else 2 * N
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    count = 0
    for pid in range(gl.program_id(0), tiles * COLUMNS, PROGRAMS):
        m, column = _place(pid, tiles, COLUMNS, GROUP)
        tile_ptr = plan_ptr + 4 + 4 * m
        e, first, end = gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2)
        acc, count = multiply(
            gl.zeros((M, WIDTH), gl.float32, mma), count, a_bufs, b_bufs, full, empty, 0, 1, BK, K, GATHER, K_MAJOR
        )

        if HALVES == 1:
            one, two = gl.split(gl.reshape(acc, (M, N, 2)))
        elif HALVES > 1:
            one, two = gl.split(gl.permute(gl.reshape(acc, (M, 2, N)), (0, 2, 1)))
        else:
            one = acc
            two = acc
        layout: gl.constexpr = one.type.layout
        if SCALE:
            p = first + gl.arange(0, M, gl.SliceLayout(1, layout))
            route = gl.load(plan_ptr + 4 + 4 * bound + p, mask=p < end, other=0)
            scale = gl.expand_dims(gl.load(route_weight_ptr + route).to(gl.float32), 1)
            one, two = one * scale, two * scale
        if BIAS:
            n = column * N + gl.arange(0, N, gl.SliceLayout(0, layout))
            bias_at = e.to(gl.int64) * stride_be + (2 * n if HALVES == 1 else n)
            one += gl.expand_dims(gl.load(bias_ptr + bias_at, mask=n < OUT, other=0.0).to(gl.float32), 0)
            if HALVES > 0:
                at2 = bias2_ptr + bias_at + (1 if HALVES == 1 else V_ROW)
                two += gl.expand_dims(gl.load(at2, mask=n < OUT, other=0.0).to(gl.float32), 0)
        c = column * N
        if HALVES == 1:
            left, right = gl.split(gl.permute(gl.reshape(gl.join(one, two), (M, 2, N)), (0, 2, 1)))
            _part(left, kept, buf, first, end, 2 * c)
            _part(right, kept, buf, first, end, 2 * c + N)
        else:
            if BOTH or HALVES == 0:
                _part(one, kept, buf, first, end, c)
            if HALVES > 1:
                _part(two, kept2, buf, first, end, c)
        if HALVES == 0:
            value = ACT(one, one)
        elif GATE_FIRST:
            value = ACT(one, two)
        else:
            value = ACT(two, one)
        _part(value, act, buf, first, end, c)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["bound"])
def _kept_kernel(
    x_ptr, a, w, v, bias_ptr, bias2_ptr, route_weight_ptr, kept, kept2, act, plan_ptr, stride_xt, bound,
    CHOICES: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BK: gl.constexpr,
    S: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, GATHER: gl.constexpr, HALVES: gl.constexpr,
    GATE_FIRST: gl.constexpr, K_MAJOR: gl.constexpr, stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr,
    SCALE: gl.constexpr, BOTH: gl.constexpr, ACT: gl.constexpr, A_LAYOUT: gl.constexpr, B_SHAPE: gl.constexpr,
    B_LAYOUT: gl.constexpr, PART_LAYOUT: gl.constexpr, WARPS: gl.constexpr, FETCHERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers as of hopper._kernel."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kind: gl.constexpr = act.dtype
    WIDTH: gl.constexpr = N if HALVES == 0 else 2 * N
    BYTES: gl.constexpr = (WIDTH * BK + (0 if GATHER else M * BK)) * kind.primitive_bitwidth // 8
    COLUMNS: gl.constexpr = (OUT + N - 1) // N
    a_bufs = gl.allocate_shared_memory(kind, [S, M, BK], A_LAYOUT)
    b_bufs = gl.allocate_shared_memory(kind, B_SHAPE, B_LAYOUT)
    buf = gl.allocate_shared_memory(kind, [1, 1, M, N], PART_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1 + (32 * FETCHERS if GATHER else 0))
        mbarrier.init(empty.index(i), count=1)
    tiles = gl.load(plan_ptr)
    gl.warp_specialize(
        [
            (_multiply_partition, (
                kept, kept2, act, bias_ptr, bias2_ptr, route_weight_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs, buf,
                full, empty, COLUMNS, GROUP, PROGRAMS, M, N, BK, K, OUT, GATHER, HALVES, GATE_FIRST, K_MAJOR,
                stride_be, V_ROW, BIAS, SCALE, BOTH, ACT, WARPS,
            )),
            (_fetch_partition, (
                x_ptr, a, w, v, plan_ptr, bound, stride_xt, tiles, a_bufs, b_bufs, full, empty, CHOICES, COLUMNS,
                GROUP, PROGRAMS, K, M, N, BK, GATHER, HALVES, K_MAJOR, BYTES,
            )),
        ],
        [FETCHERS],
        [56 if GATHER else 24],
    )  # fmt: skip


@lru_cache(1024)
def _bound(
    tile: Persistent, act: Any, choices: int, sizes: tuple[int, int], halves: str, k_major: bool, dtype: torch.dtype,
    device: torch.device, bias_stride: int | None, weights: Any, both: bool,
) -> tuple[Bound, tuple[int, ...], Any, Any, int]:  # fmt: skip
    """The kernel, the weights' box and layout, the rows' layout, and how many programs run."""
    (H, I), gather = sizes, bool(tile.GATHER)
    kind, box, shape = weights_box(halves, tile.N, k_major)
    w_layout, a_layout = _swizzled(box, dtype), _swizzled([ROWS, DEPTH], dtype)
    programs = processors(device)
    constants = (
        choices, H, I, ROWS, tile.N, DEPTH, S, tile.GROUP, programs, gather, kind,
        not halves.startswith("up_gate"), k_major, bias_stride or 0, 0 if kind == TENSORS else I,
        bias_stride is not None, weights is not None, both, act, a_layout, (S, *shape), w_layout,
        _swizzled([1, 1, ROWS, tile.N], dtype), WARPS, 4 if gather else 1,
    )  # fmt: skip
    bound = Bound(_kept_kernel, constants, device, warps=WARPS, overlap=True, registers=168)
    return bound, tuple(box), w_layout, a_layout, programs


def fc1_kept(
    x: torch.Tensor, gate_up: tuple[torch.Tensor, ...], bias: tuple[torch.Tensor, ...],
    weights_TK: torch.Tensor | None, schedule: Schedule, act: Any, *, choices: int, sizes: tuple[int, int],
    halves: str, k_major: bool, tile: Persistent, both: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(gate_up_RG, act_RI) as of kept.fc1_kept; without `both`, of gate_up_RG only its last I columns.

    x: x_TH where tile.GATHER, else its rows in sorted order. Without `both` the halves are not interleaved.
    """
    (_, I), dtype, device = sizes, x.dtype, x.device
    bound, box, w_layout, a_layout, programs = _bound(
        tile, act, choices, sizes, halves, k_major, dtype, device, bias[0].stride(0) if bias else None,
        None if weights_TK is None else weights_TK.dtype, both,
    )  # fmt: skip
    gated, interleaved, _, _ = placed(halves, I)
    assert both or (gated and not interleaved)
    kept = torch.empty((schedule.R, 2 * I if gated and both else I), dtype=dtype, device=device)
    out = torch.empty((schedule.R, I), dtype=dtype, device=device)
    views = [torch.unflatten(w, 1, (2, I)) if len(box) == 4 else w for w in gate_up]
    w, v = (TensorDescriptor.from_tensor(t, list(box), w_layout) for t in (views[0], views[-1]))
    a = w if tile.GATHER else TensorDescriptor.from_tensor(x, [ROWS, DEPTH], a_layout)
    parts = (kept, kept) if interleaved else (kept[:, :I], kept[:, -I:])
    arguments = (
        x, a, w, v, bias[0] if bias else x, bias[-1] if bias else x,
        x if weights_TK is None else weights_TK.contiguous(),
        *(ragged(t, (ROWS, tile.N), dtype) for t in (*parts, out)), schedule.plan, x.stride(0),
    )  # fmt: skip
    bound((min(programs, schedule.bound * ceil_div(I, tile.N)), 1), arguments, (schedule.bound,))
    return kept, out
