"""The gradient at the activation for Hopper: backward.act_backward over sorted rows, with warps of their own for what
follows from the products (Gluon).

In, out: as backward.act_backward, whose torch twin is this kernel's too, but dout_RH holds dout's rows in sorted order,
no zeros follow the last rows, and the activation is not rounded before it is scaled.
The schedule is hopper.py's. Each partition that multiplies hands its 64 rows of dv over through shared memory and goes
on with the next tile: the arithmetic, and the traffic of gate, up and what comes of them, run under its products. dv
changes hands as fp16, each row divided by the power of two of its largest element: 11 bits of whatever counts, where
bf16 has 8. Of two more partitions, one fetches gate and up, PIECE columns at a time, the other computes and stores.
Invariant: one program makes an element: bitwise repeatable.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper import ALONE, ALTERNATING, BLOCKS, processors, swizzled
from .hopper_parts import (
    barriers,
    claimed,
    claimed_ahead,
    fetch,
    fetch_partition,
    multiply,
    rest,
    split_columns,
    telling,
    tile_at,
    tile_of,
)
from .kept import placed
from .launch import Bound, ceil_div
from .sizes import PART
from .sort import Schedule

COLUMNS, PIECE = 256, 32  # of a tile; of gate_up_RG, of each half where these are two blocks, taken at once
DEPTH, S, P = 64, 3, 2  # of a step; buffers of steps, of pieces of gate and up
READERS = 4  # partitions that are told a tile's number


@gluon.jit
def _hand_over(dv, bufs, j, N: gl.constexpr):
    """Stores the N columns of dv to buffers j.. of PIECE columns."""
    PIECE: gl.constexpr = bufs.type.shape[2]
    if N > PIECE:
        left, right = split_columns(dv, N)
        HALF: gl.constexpr = N // 2
        _hand_over(left, bufs, j, HALF)
        _hand_over(right, bufs, j + HALF // PIECE, HALF)
    else:
        bufs.index(j).store(dv)


@gluon.jit
def _multiply_partition(
    plan_ptr, tiles, a_bufs, b_bufs, dv_bufs, power_bufs, full, empty, dv_full, dv_empty, told, told_full, told_empty,
    PART: gl.constexpr, COLUMNS: gl.constexpr, N: gl.constexpr, BK: gl.constexpr, H: gl.constexpr,
    K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Rows 64 * PART and on of each tile; of a tile without such rows, the buffers as they come."""
    M: gl.constexpr = a_bufs.type.shape[1]
    PIECES: gl.constexpr = N // dv_bufs.type.shape[2]
    STEPS: gl.constexpr = (H + BK - 1) // BK
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    count, number, total = 0, 0, tiles * COLUMNS
    pid, place = claimed_ahead(number, total, plan_ptr, told, told_full, told_empty, COLUMNS, N)
    while pid < total:
        number += 1
        _, first, end, _ = place
        pid, place = claimed_ahead(number, total, plan_ptr, told, told_full, told_empty, COLUMNS, N)
        if first + PART * M < end:
            acc, _ = multiply(
                gl.zeros((M, N), gl.float32, mma), count, a_bufs, b_bufs, full, empty, PART, 2, BK, H, False, K_MAJOR
            )
            power = gl.max(gl.abs(acc), axis=1).to(gl.int32, bitcast=True) & 0x7F800000
            power = gl.minimum(gl.maximum(power, 1 << 23), 253 << 23)  # it and its reciprocal are normal numbers
            acc = acc * gl.expand_dims(((254 << 23) - power).to(gl.float32, bitcast=True), 1)
            mbarrier.wait(dv_empty.index(PART), number & 1)
            power_bufs.index(PART).store(power.to(gl.float32, bitcast=True))
            _hand_over(acc.to(gl.float16), dv_bufs, PART * PIECES, N)
        else:
            rest(count, STEPS, full, empty)
            mbarrier.wait(dv_empty.index(PART), number & 1)
        mbarrier.arrive(dv_full.index(PART), count=1)
        count += STEPS


@gluon.jit
def _kept_partition(
    one, two, plan_ptr, tiles, one_bufs, two_bufs, full, empty, told, told_full, told_empty, COLUMNS: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, PIECE: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Fetches gate and up, piece after piece of M rows."""
    P: gl.constexpr = one_bufs.type.shape[0]
    BYTES: gl.constexpr = M * PIECE * (4 if HALVES > 0 else 2)
    WIDTH: gl.constexpr = 2 if HALVES == 1 else 1
    count, number, total = 0, 0, tiles * COLUMNS
    pid = claimed(number, told, told_full, told_empty)
    while pid < total:
        _, first, end, n0 = tile_at(pid, plan_ptr, COLUMNS, N)
        number += 1
        pid = claimed(number, told, told_full, told_empty)
        for p in range(first, gl.minimum(end, first + 2 * M), M):
            for c in range(n0, n0 + N, PIECE):
                q = count % P
                mbarrier.wait(empty.index(q), ((count // P) & 1) ^ 1)
                mbarrier.expect(full.index(q), BYTES)
                fetch(one, [p, WIDTH * c], full.index(q), one_bufs.index(q))
                if HALVES > 1:
                    fetch(two, [p, c], full.index(q), two_bufs.index(q))
                count += 1


@gluon.jit
def _follows(dv, one, two, dv_by, act_by, kind: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr,
             ACT: gl.constexpr, BY_GATE: gl.constexpr, BY_UP: gl.constexpr):  # fmt: skip
    """(dv times the activation; the activation times act_by; of `one` and `two`, the gradients, dv times dv_by)."""
    if GATE_FIRST:
        gate, up = one.to(gl.float32), two.to(gl.float32)
    else:
        gate, up = two.to(gl.float32), one.to(gl.float32)
    value = ACT(gate, up)
    product = dv * value
    dv = dv * dv_by
    dup = (dv * BY_UP(gate, up)).to(kind)
    dgate = dup
    if HALVES > 0:
        dgate = (dv * BY_GATE(gate, up)).to(kind)
    first, second = dup, dgate
    if GATE_FIRST:
        first, second = dgate, dup
    return product, (value * act_by).to(kind), first, second


@gluon.jit
def _arithmetic_partition(
    dkept_ptr, act_ptr, route_weight_ptr, parts_ptr, plan_ptr, bound, R, tiles, dv_bufs, power_bufs, one_bufs, two_bufs,
    dv_full, dv_empty, full, empty, told, told_full, told_empty, COLUMNS: gl.constexpr, N: gl.constexpr,
    I: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, SCALE: gl.constexpr, PARTS: gl.constexpr,
    ACT: gl.constexpr, BY_GATE: gl.constexpr, BY_UP: gl.constexpr,
):  # fmt: skip
    """Makes and stores what follows from dv, M rows after M rows, in pieces as they are fetched."""
    P: gl.constexpr = one_bufs.type.shape[0]
    M: gl.constexpr = dv_bufs.type.shape[1]
    PIECE: gl.constexpr = dv_bufs.type.shape[2]
    PIECES: gl.constexpr = N // PIECE
    kind: gl.constexpr = one_bufs.dtype
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PIECE, PIECE // 8], [gl.num_warps(), 1], [1, 0])
    pairs: gl.constexpr = gl.BlockedLayout([1, 16], [256 // PIECE, PIECE // 8], [gl.num_warps(), 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    G: gl.constexpr = 2 * I if HALVES > 0 else I
    count, number, total = 0, 0, tiles * COLUMNS
    pid = claimed(number, told, told_full, told_empty)
    while pid < total:
        _, first, end, n0 = tile_at(pid, plan_ptr, COLUMNS, N)
        parts = parts_ptr + (n0 // N).to(gl.int64) * R
        number += 1
        pid = claimed(number, told, told_full, told_empty)
        for i in range(2):
            p = first + i * M + gl.arange(0, M, rows)
            route = gl.load(plan_ptr + 4 + 4 * bound + p, mask=p < end, other=0)
            scale = gl.full((M,), 1.0, gl.float32, rows)
            if SCALE:
                scale = gl.load(route_weight_ptr + route).to(gl.float32)
            mbarrier.wait(dv_full.index(i), (number & 1) ^ 1)
            if first + i * M < end:
                power = power_bufs.index(i).load(rows)
                act_by, dv_by = gl.expand_dims(scale, 1), gl.expand_dims(power * scale, 1)
                here = gl.expand_dims(p < end, 1)
                act_rows = gl.expand_dims(act_ptr + p.to(gl.int64) * I, 1)
                dkept_rows = gl.expand_dims(dkept_ptr + p.to(gl.int64) * G, 1)
                part = gl.zeros((M,), gl.float32, rows)
                for j in range(PIECES):
                    q = count % P
                    mbarrier.wait(full.index(q), (count // P) & 1)
                    if HALVES == 1:
                        one, two = gl.split(gl.reshape(one_bufs.index(q).load(pairs), (M, PIECE, 2)))
                        one, two = gl.convert_layout(one, layout), gl.convert_layout(two, layout)  # the same
                    else:
                        one = one_bufs.index(q).load(layout)
                        two = one
                        if HALVES > 1:
                            two = two_bufs.index(q).load(layout)
                    mbarrier.arrive(empty.index(q), count=1)
                    count += 1
                    dv = dv_bufs.index(i * PIECES + j).load(layout).to(gl.float32)
                    product, value, done, dtwo = _follows(
                        dv, one, two, dv_by, act_by, kind, HALVES, GATE_FIRST, ACT, BY_GATE, BY_UP
                    )
                    n = gl.expand_dims(n0 + j * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, layout)), 0)
                    inside = here
                    if I % N > 0:
                        inside = here & (n < I)
                        product = gl.where(inside, product, 0.0)
                    part += gl.sum(product, axis=1)
                    gl.store(act_rows + n, value, mask=inside)
                    if HALVES == 1:
                        both = gl.convert_layout(gl.reshape(gl.join(done, dtwo), (M, 2 * PIECE)), pairs)
                        c = 2 * (n0 + j * PIECE) + gl.arange(0, 2 * PIECE, gl.SliceLayout(0, pairs))
                        c = gl.expand_dims(c, 0)
                        inside = gl.convert_layout(here, pairs) & (c < G)
                        gl.store(gl.convert_layout(dkept_rows, pairs) + c, both, mask=inside)
                    else:
                        gl.store(dkept_rows + n, done, mask=inside)
                        if HALVES > 1:
                            gl.store(dkept_rows + I + n, dtwo, mask=inside)
                if PARTS:
                    gl.store(parts + route, part * power, mask=p < end)
            mbarrier.arrive(dv_empty.index(i), count=1)


@gluon.jit(do_not_specialize=["bound", "R"])
def _act_backward_kernel(
    a, w, one, two, dkept_ptr, act_ptr, route_weight_ptr, parts_ptr, plan_ptr, bound, R, H: gl.constexpr,
    I: gl.constexpr, K_MAJOR: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, SCALE: gl.constexpr,
    PARTS: gl.constexpr, ACT: gl.constexpr, BY_GATE: gl.constexpr, BY_UP: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, BK: gl.constexpr, PIECE: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    READERS: gl.constexpr, A_LAYOUT: gl.constexpr, B_LAYOUT: gl.constexpr, DV_LAYOUT: gl.constexpr, WIDTH: gl.constexpr,
    KEPT_LAYOUT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """M: rows of a multiplying partition, of two. WIDTH: columns of gate_up_RG that a piece of `one` has."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kind: gl.constexpr = a.dtype
    COLUMNS: gl.constexpr = (I + N - 1) // N
    a_bufs = gl.allocate_shared_memory(kind, [2 * S, M, BK], A_LAYOUT)
    b_bufs = gl.allocate_shared_memory(kind, [S, 1, N, BK] if K_MAJOR else [S, 1, BK, N], B_LAYOUT)
    dv_bufs = gl.allocate_shared_memory(gl.float16, [2 * N // PIECE, M, PIECE], DV_LAYOUT)
    one_bufs = gl.allocate_shared_memory(kind, [P, M, WIDTH], KEPT_LAYOUT)
    two_bufs = one_bufs
    if HALVES > 1:
        two_bufs = gl.allocate_shared_memory(kind, [P, M, WIDTH], KEPT_LAYOUT)
    power_bufs = gl.allocate_shared_memory(gl.float32, [2, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(S, 1, 2)
    kept_full, kept_empty = barriers(P, 1, 1)
    dv_full, dv_empty = barriers(2, 1, 1)
    told, told_full, told_empty = telling(1, READERS)
    tiles = gl.load(plan_ptr)
    pid = tile_of(gl.program_id(0), tiles, plan_ptr, bound, COLUMNS)
    gl.warp_specialize(
        [
            (_multiply_partition, (
                plan_ptr, tiles, a_bufs, b_bufs, dv_bufs, power_bufs, full, empty, dv_full, dv_empty, told, told_full,
                told_empty, 0, COLUMNS, N, BK, H, K_MAJOR,
            )),
            (_multiply_partition, (
                plan_ptr, tiles, a_bufs, b_bufs, dv_bufs, power_bufs, full, empty, dv_full, dv_empty, told, told_full,
                told_empty, 1, COLUMNS, N, BK, H, K_MAJOR,
            )),
            (_arithmetic_partition, (
                dkept_ptr, act_ptr, route_weight_ptr, parts_ptr, plan_ptr, bound, R, tiles, dv_bufs, power_bufs,
                one_bufs, two_bufs, dv_full, dv_empty, kept_full, kept_empty, told, told_full, told_empty, COLUMNS,
                N, I, HALVES, GATE_FIRST, SCALE, PARTS, ACT, BY_GATE, BY_UP,
            )),
            (fetch_partition, (
                plan_ptr, a, w, w, plan_ptr, bound, 0, tiles, pid, a_bufs, b_bufs, full, empty, told, told_full,
                told_empty, 1, COLUMNS, H, 2, N, BK, False, 0, K_MAJOR, M * BK * 2, N * BK * 2,
            )),
            (_kept_partition, (
                one, two, plan_ptr, tiles, one_bufs, two_bufs, kept_full, kept_empty, told, told_full, told_empty,
                COLUMNS, M, N, PIECE, HALVES,
            )),
        ],
        [4, 2, 1, 1],
        [168, 168, 168, 168],
    )  # fmt: skip


@lru_cache(1024)
def _bound(
    sizes: tuple[int, int], k_major: bool, halves: str, weights: Any, parts: bool, acts: tuple[Any, Any, Any],
    dtype: torch.dtype, device: torch.device,
) -> tuple[Bound, int, dict[str, tuple[list[int], Any]]]:  # fmt: skip
    """The kernel, how many programs run, and the boxes and layouts of its descriptors."""
    gated, interleaved, gate_first, _ = placed(halves, 0)
    kind, piece = (ALTERNATING, PIECE // 2) if interleaved else (BLOCKS if gated else ALONE, PIECE)
    boxes = {
        "dout": [PART, DEPTH], "down": [1, COLUMNS, DEPTH] if k_major else [1, DEPTH, COLUMNS],
        "kept": [PART, PIECE],
    }  # fmt: skip
    layouts = {name: swizzled(box, dtype) for name, box in boxes.items()}
    programs = processors(device)
    constants = (
        *sizes, k_major, kind, gate_first, weights is not None, parts, *acts, PART, COLUMNS, DEPTH, piece, S, P,
        READERS, layouts["dout"], layouts["down"], swizzled([PART, piece], torch.float16), PIECE, layouts["kept"],
    )  # fmt: skip
    bound = Bound(_act_backward_kernel, constants, device, warps=4, overlap=True, registers=168)
    return bound, programs, {name: (box, layouts[name]) for name, box in boxes.items()}


def act_backward(
    dout_RH: torch.Tensor, down: torch.Tensor, kept: tuple[torch.Tensor, ...], weights_TK: torch.Tensor | None,
    schedule: Schedule, acts: tuple[Any, Any, Any], *, halves: str, k_major: bool, parts: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(dgate_up_RG, s_act_RI, parts fp32 [columns, R] by route or None) as of backward.act_backward.

    kept: gate_up_RG, or its halves in their order where they are two blocks. schedule has tiles of 128 rows; down is
    aligned for tensor descriptors.
    """
    (R, H), I, dtype = dout_RH.shape, down.shape[2 if k_major else 1], dout_RH.dtype
    bound, programs, boxes = _bound(
        (H, I), not k_major, halves, None if weights_TK is None else weights_TK.dtype, parts, acts, dtype, down.device
    )
    columns = ceil_div(I, COLUMNS)
    dkept = torch.empty((R, sum(part.shape[1] for part in kept)), dtype=dtype, device=down.device)
    out = torch.empty((R, I), dtype=dtype, device=down.device)
    partial = torch.empty((columns, R), dtype=torch.float32, device=down.device) if parts else None
    arguments = (
        TensorDescriptor.from_tensor(dout_RH, *boxes["dout"]), TensorDescriptor.from_tensor(down, *boxes["down"]),
        *(TensorDescriptor.from_tensor(part, *boxes["kept"]) for part in (kept[0], kept[-1])), dkept, out,
        dout_RH if weights_TK is None else weights_TK.contiguous(), out if partial is None else partial, schedule.plan,
    )  # fmt: skip
    bound((min(programs, schedule.bound * columns), 1), arguments, (schedule.bound, R))
    return dkept, out, partial
