"""The gradient at the activation for Hopper: backward.act_backward over sorted rows, whose operands are all fetched by
warps of their own (Gluon).

In, out: as backward.act_backward, whose torch twin is this kernel's too, but dout_RH holds dout's rows in sorted order,
no zeros follow the last rows, and the activation is not rounded before it is scaled.
The schedule is hopper_outer.py's, with a third partition that fetches gate and up, PIECE columns at a time and as far
ahead as its buffers reach: the first of a tile's are there when its products are done. Results leave by the copy
engine, by tensor descriptors that end at the expert's last row (hopper_outer.ragged).
Invariant: one program makes an element: bitwise repeatable.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper import ALONE, ALTERNATING, BLOCKS, ROWS, _swizzled, processors
from .hopper_outer import WARPS, at, ragged, send
from .hopper_parts import _fetch, _place
from .kept import placed
from .launch import Bound, ceil_div
from .sort import Schedule

COLUMNS, PIECE = 256, 32  # of a tile; that the arithmetic takes at once
DEPTH, S, P, GROUP = 32, 6, 3, 8  # of a step; buffers of steps, of pieces of gate and up; row tiles side by side


@gluon.jit
def _fetch_partition(
    a, w, plan_ptr, tiles, a_bufs, b_bufs, full, empty, WIDE: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, H: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BK: gl.constexpr, K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Fetches what is multiplied."""
    S: gl.constexpr = a_bufs.type.shape[0]
    BYTES: gl.constexpr = BK * (M + N) * 2
    count = 0
    for pid in range(gl.program_id(0), tiles * WIDE, PROGRAMS):
        m, column = _place(pid, tiles, WIDE, GROUP)
        tile_ptr = plan_ptr + 4 + 4 * m
        e, first = gl.load(tile_ptr), gl.load(tile_ptr + 1)
        for k in range(0, H, BK):
            s = count % S
            mbarrier.wait(empty.index(s), ((count // S) & 1) ^ 1)
            mbarrier.expect(full.index(s), BYTES)
            _fetch(a, [first, k], full.index(s), a_bufs.index(s))
            if K_MAJOR:
                _fetch(w, [e, column * N, k], full.index(s), b_bufs.index(s))
            else:
                _fetch(w, [e, k, column * N], full.index(s), b_bufs.index(s))
            count += 1


@gluon.jit
def _kept_partition(
    one, two, plan_ptr, tiles, one_bufs, two_bufs, full, empty, WIDE: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, PIECE: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Fetches gate and up, piece after piece."""
    P: gl.constexpr = one_bufs.type.shape[0]
    BYTES: gl.constexpr = M * PIECE * (4 if HALVES > 0 else 2)
    WIDTH: gl.constexpr = 2 if HALVES == 1 else 1
    count = 0
    for pid in range(gl.program_id(0), tiles * WIDE, PROGRAMS):
        m, column = _place(pid, tiles, WIDE, GROUP)
        first = gl.load(plan_ptr + 5 + 4 * m)
        for c in range(column * N, column * N + N, PIECE):
            q = count % P
            mbarrier.wait(empty.index(q), ((count // P) & 1) ^ 1)
            mbarrier.expect(full.index(q), BYTES)
            _fetch(one, [first, WIDTH * c], full.index(q), one_bufs.index(q))
            if HALVES > 1:
                _fetch(two, [first, c], full.index(q), two_bufs.index(q))
            count += 1


@gluon.jit
def _piece(
    dv, count, first, end, c, scale, one_bufs, two_bufs, full, empty, done_buf, dtwo_buf, act_buf, done, dtwo, act,
    HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, ACT: gl.constexpr, BY_GATE: gl.constexpr, BY_UP: gl.constexpr,
    M: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Stores what follows from dv [M, PIECE] of columns c.., piece number `count`, and returns dv . act of each row."""
    P: gl.constexpr = one_bufs.type.shape[0]
    kind: gl.constexpr = act_buf.dtype
    layout: gl.constexpr = dv.type.layout
    q = count % P
    mbarrier.wait(full.index(q), (count // P) & 1)
    if HALVES == 1:
        pairs: gl.constexpr = gl.reshape(gl.join(dv, dv), (M, 2 * PIECE)).type.layout
        one, two = gl.split(gl.reshape(one_bufs.index(q).load(pairs), (M, PIECE, 2)))
    else:
        one = one_bufs.index(q).load(layout)
        two = one
        if HALVES > 1:
            two = two_bufs.index(q).load(layout)
    mbarrier.arrive(empty.index(q), count=1)
    if GATE_FIRST:
        gate, up = one.to(gl.float32), two.to(gl.float32)
    else:
        gate, up = two.to(gl.float32), one.to(gl.float32)
    value = ACT(gate, up)
    part = gl.sum(dv * value, axis=1)
    rows = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, layout)), 1)
    dv = dv * rows
    dup = dv * BY_UP(gate, up)
    dgate = dup
    if HALVES > 0:
        dgate = dv * BY_GATE(gate, up)
    if GATE_FIRST:
        first_half, second_half = dgate.to(kind), dup.to(kind)
    else:
        first_half, second_half = dup.to(kind), dgate.to(kind)
    value = (value * rows).to(kind)
    tma.store_wait(0)  # the piece before has left the buffers
    act_buf.reshape([M, PIECE]).store(value)
    if HALVES == 1:
        done_buf.reshape([M, 2 * PIECE]).store(gl.reshape(gl.join(first_half, second_half), (M, 2 * PIECE)))
    else:
        done_buf.reshape([M, PIECE]).store(first_half)
        if HALVES > 1:
            dtwo_buf.reshape([M, PIECE]).store(second_half)
    fence_async_shared()
    send(act, at(first, end, c), act_buf)
    send(done, at(first, end, 2 * c if HALVES == 1 else c), done_buf)
    if HALVES > 1:
        send(dtwo, at(first, end, c), dtwo_buf)
    return gl.convert_layout(part, scale.type.layout)


@gluon.jit
def _pieces(
    dv, count, first, end, c, scale, one_bufs, two_bufs, full, empty, done_buf, dtwo_buf, act_buf, done, dtwo, act,
    HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, ACT: gl.constexpr, BY_GATE: gl.constexpr, BY_UP: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """The same of all columns of dv [M, N]."""
    if N == PIECE:
        part = _piece(
            dv, count, first, end, c, scale, one_bufs, two_bufs, full, empty, done_buf, dtwo_buf, act_buf, done, dtwo,
            act, HALVES, GATE_FIRST, ACT, BY_GATE, BY_UP, M, PIECE,
        )  # fmt: skip
    else:
        left, right = gl.split(gl.permute(gl.reshape(dv, (M, 2, N // 2)), (0, 2, 1)))
        HALF: gl.constexpr = N // 2
        part = _pieces(
            left, count, first, end, c, scale, one_bufs, two_bufs, full, empty, done_buf, dtwo_buf, act_buf, done,
            dtwo, act, HALVES, GATE_FIRST, ACT, BY_GATE, BY_UP, M, HALF, PIECE,
        )  # fmt: skip
        part += _pieces(
            right, count + HALF // PIECE, first, end, c + HALF, scale, one_bufs, two_bufs, full, empty, done_buf,
            dtwo_buf, act_buf, done, dtwo, act, HALVES, GATE_FIRST, ACT, BY_GATE, BY_UP, M, HALF, PIECE,
        )  # fmt: skip
    return part


@gluon.jit
def _multiply_partition(
    done, dtwo, act, route_weight_ptr, parts_ptr, plan_ptr, bound, R, tiles, a_bufs, b_bufs, one_bufs, two_bufs,
    done_buf, dtwo_buf, act_buf, full, empty, kept_full, kept_empty, WIDE: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, H: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BK: gl.constexpr, PIECE: gl.constexpr,
    K_MAJOR: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, SCALE: gl.constexpr, PARTS: gl.constexpr,
    ACT: gl.constexpr, BY_GATE: gl.constexpr, BY_UP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = a_bufs.type.shape[0]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    count = 0
    pieces = 0
    for pid in range(gl.program_id(0), tiles * WIDE, PROGRAMS):
        m, column = _place(pid, tiles, WIDE, GROUP)
        tile_ptr = plan_ptr + 4 + 4 * m
        first, end = gl.load(tile_ptr + 1), gl.load(tile_ptr + 2)
        p = first + gl.arange(0, M, gl.SliceLayout(1, mma))
        route = gl.load(plan_ptr + 4 + 4 * bound + p, mask=p < end, other=0)
        scale = gl.full((M,), 1.0, gl.float32, gl.SliceLayout(1, mma))
        if SCALE:
            scale = gl.load(route_weight_ptr + route).to(gl.float32)
        acc = gl.zeros((M, N), gl.float32, mma)
        for k in range(0, H, BK):
            s = count % S
            mbarrier.wait(full.index(s), (count // S) & 1)
            if K_MAJOR:
                b = b_bufs.index(s).reshape([N, BK]).permute((1, 0))
            else:
                b = b_bufs.index(s).reshape([BK, N])
            acc = warpgroup_mma(a_bufs.index(s), b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((count + S - 1) % S), count=1, pred=k > 0)  # the product before is done
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + S - 1) % S), count=1)
        part = _pieces(
            acc, pieces, first, end, column * N, scale, one_bufs, two_bufs, kept_full, kept_empty, done_buf, dtwo_buf,
            act_buf, done, dtwo, act, HALVES, GATE_FIRST, ACT, BY_GATE, BY_UP, M, N, PIECE,
        )  # fmt: skip
        pieces += N // PIECE
        if PARTS:
            gl.store(parts_ptr + column.to(gl.int64) * R + route, part, mask=p < end)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["bound", "R"])
def _act_backward_kernel(
    a, w, one, two, done, dtwo, act, route_weight_ptr, parts_ptr, plan_ptr, bound, R, H: gl.constexpr,
    I: gl.constexpr, K_MAJOR: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, SCALE: gl.constexpr,
    PARTS: gl.constexpr, ACT: gl.constexpr, BY_GATE: gl.constexpr, BY_UP: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, BK: gl.constexpr, PIECE: gl.constexpr, S: gl.constexpr, P: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, A_LAYOUT: gl.constexpr, B_LAYOUT: gl.constexpr, KEPT_SHAPE: gl.constexpr,
    KEPT_LAYOUT: gl.constexpr, DKEPT_LAYOUT: gl.constexpr, ACT_LAYOUT: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kind: gl.constexpr = a.dtype
    WIDE: gl.constexpr = (I + N - 1) // N
    a_bufs = gl.allocate_shared_memory(kind, [S, M, BK], A_LAYOUT)
    b_bufs = gl.allocate_shared_memory(kind, [S, 1, N, BK] if K_MAJOR else [S, 1, BK, N], B_LAYOUT)
    one_bufs = gl.allocate_shared_memory(kind, [P, M, KEPT_SHAPE], KEPT_LAYOUT)
    done_buf = gl.allocate_shared_memory(kind, [1, 1, M, KEPT_SHAPE], DKEPT_LAYOUT)
    act_buf = gl.allocate_shared_memory(kind, [1, 1, M, PIECE], ACT_LAYOUT)
    two_bufs, dtwo_buf = one_bufs, done_buf
    if HALVES > 1:
        two_bufs = gl.allocate_shared_memory(kind, [P, M, KEPT_SHAPE], KEPT_LAYOUT)
        dtwo_buf = gl.allocate_shared_memory(kind, [1, 1, M, KEPT_SHAPE], DKEPT_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    kept_full = gl.allocate_shared_memory(gl.int64, [P, 1], mbarrier.MBarrierLayout())
    kept_empty = gl.allocate_shared_memory(gl.int64, [P, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(P):
        mbarrier.init(kept_full.index(i), count=1)
        mbarrier.init(kept_empty.index(i), count=1)
    tiles = gl.load(plan_ptr)
    gl.warp_specialize(
        [
            (_multiply_partition, (
                done, dtwo, act, route_weight_ptr, parts_ptr, plan_ptr, bound, R, tiles, a_bufs, b_bufs, one_bufs,
                two_bufs, done_buf, dtwo_buf, act_buf, full, empty, kept_full, kept_empty, WIDE, GROUP, PROGRAMS, H, M,
                N, BK, PIECE, K_MAJOR, HALVES, GATE_FIRST, SCALE, PARTS, ACT, BY_GATE, BY_UP, WARPS,
            )),
            (_fetch_partition, (
                a, w, plan_ptr, tiles, a_bufs, b_bufs, full, empty, WIDE, GROUP, PROGRAMS, H, M, N, BK, K_MAJOR,
            )),
            (_kept_partition, (
                one, two, plan_ptr, tiles, one_bufs, two_bufs, kept_full, kept_empty, WIDE, GROUP, PROGRAMS, M, N,
                PIECE, HALVES,
            )),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


@lru_cache(1024)
def _bound(
    sizes: tuple[int, int], k_major: bool, halves: str, weights: Any, parts: bool, acts: tuple[Any, Any, Any],
    dtype: torch.dtype, device: torch.device,
) -> tuple[Bound, int, dict[str, tuple[list[int], Any]]]:  # fmt: skip
    """The kernel, how many programs run, and the boxes and layouts of its descriptors."""
    gated, interleaved, gate_first, _ = placed(halves, 0)
    kind, width = (ALTERNATING, 2 * PIECE) if interleaved else (BLOCKS if gated else ALONE, PIECE)
    boxes = {
        "dout": [ROWS, DEPTH], "down": [1, COLUMNS, DEPTH] if k_major else [1, DEPTH, COLUMNS],
        "kept": [ROWS, width], "dkept": [1, 1, ROWS, width], "act": [1, 1, ROWS, PIECE],
    }  # fmt: skip
    layouts = {name: _swizzled(box, dtype) for name, box in boxes.items()}
    programs = processors(device)
    constants = (
        *sizes, k_major, kind, gate_first, weights is not None, parts, *acts, ROWS, COLUMNS, DEPTH, PIECE, S, P, GROUP,
        programs, layouts["dout"], layouts["down"], width, layouts["kept"], layouts["dkept"], layouts["act"], WARPS,
    )  # fmt: skip
    bound = Bound(_act_backward_kernel, constants, device, warps=WARPS, overlap=True, registers=168)
    return bound, programs, {name: (box, layouts[name]) for name, box in boxes.items()}


def act_backward(
    dout_RH: torch.Tensor, down: torch.Tensor, kept: tuple[torch.Tensor, ...], weights_TK: torch.Tensor | None,
    schedule: Schedule, acts: tuple[Any, Any, Any], *, halves: str, k_major: bool, parts: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(dgate_up_RG, s_act_RI, parts fp32 [columns, R] by route or None) as of backward.act_backward.

    kept: gate_up_RG, or its halves in their order where they are two blocks. schedule has tiles of ROWS rows; down is
    aligned for tensor descriptors.
    """
    (R, H), I, dtype = dout_RH.shape, down.shape[2 if k_major else 1], dout_RH.dtype
    bound, programs, boxes = _bound(
        (H, I), not k_major, halves, None if weights_TK is None else weights_TK.dtype, parts, acts, dtype, down.device
    )
    columns, width = ceil_div(I, COLUMNS), boxes["kept"][0][1]
    dkept = torch.empty((R, sum(part.shape[1] for part in kept)), dtype=dtype, device=down.device)
    out = torch.empty((R, I), dtype=dtype, device=down.device)
    partial = torch.empty((columns, R), dtype=torch.float32, device=down.device) if parts else None
    dparts = dkept.split(kept[0].shape[1], 1)  # type: ignore[no-untyped-call]
    arguments = (
        TensorDescriptor.from_tensor(dout_RH, *boxes["dout"]), TensorDescriptor.from_tensor(down, *boxes["down"]),
        *(TensorDescriptor.from_tensor(part, *boxes["kept"]) for part in (kept[0], kept[-1])),
        *(ragged(part, (ROWS, width), dtype) for part in (dparts[0], dparts[-1])), ragged(out, (ROWS, PIECE), dtype),
        dout_RH if weights_TK is None else weights_TK.contiguous(), out if partial is None else partial, schedule.plan,
    )  # fmt: skip
    bound((min(programs, schedule.bound * columns), 1), arguments, (schedule.bound, R))
    return dkept, out, partial
