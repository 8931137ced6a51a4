"""What warps of hopper.py's kernels do where the weights are a product's rows and a tile's rows are its columns.

In, out, invariants: as of hopper_parts.multiply_partition. A product of the tensor cores has 64 rows, but any multiple
of 8 columns: so a tile has as many of an expert's rows as there are, in units of UNIT. A tensor's sides are powers of
2, hence a tile is one or two products side by side: 32 or 64 columns where a tile has at most 64 rows, up to 128 + 32
where it has at most 160. Which, each tile's height says, and every pair has a loop of its own. A partition has 64
columns of gate and the same 64 of up, or 128 columns that have no gate.
Its weights pass through registers, which both products read: from shared memory it would read them for each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import sizes
from .hopper_parts import claimed_ahead, part_of, split_columns

UNIT, SIDE = gl.constexpr(sizes.UNIT), gl.constexpr(64)  # rows of a buffer of x; weights' columns of a product

_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # by triton 3.9
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 128 bytes of each row together


@gluon.constexpr_function
def _pieces(parts):
    """The columns of the two products, by a tile's height, of tiles that have so many parts at most."""
    return {2: (32, 0, 64, 0), 5: (64, 0, 64, 32, 128, 0, 128, 32)}[parts]


@gluon.constexpr_function
def _height(pieces, i):
    return pieces[2 * i] + pieces[2 * i + 1] if i >= 0 else 0


@gluon.constexpr_function
def _accumulators(N):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.constexpr_function
def _paired(N):
    """Accumulators of gate and up columns in turn, such that a thread has both of a column, shared in a warp: apart,
    they are then as accumulators of half as many."""
    rows = [[0, 2**i] for i in range(3, N.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout([[1, 0], [0, 1], *rows], lanes, [[16, 0], [32, 0]], [], [64, N])


@gluon.jit
def _zeros(N: gl.constexpr):
    return gl.zeros((SIDE, N), gl.float32, _accumulators(N))


@gluon.jit
def _rows(x_bufs, s, FROM: gl.constexpr, N: gl.constexpr, PARTS: gl.constexpr):
    """N rows of x in stage s, from its FROM-th on, as columns."""
    STAGES: gl.constexpr = x_bufs.shape[0] // PARTS
    shape: gl.constexpr = [x_bufs.shape[0] * UNIT // N, N, x_bufs.shape[2]]
    if _RENAMED:
        rows = x_bufs.reinterpret(x_bufs.dtype, shape, x_bufs.layout)
    else:
        rows = x_bufs._reinterpret(x_bufs.dtype, shape, x_bufs.layout)
    return rows.index(part_of(s, FROM // UNIT, STAGES, UNIT, PARTS) * UNIT // N).permute((1, 0))


@gluon.jit
def _weights(buffer, m: gl.constexpr, BK: gl.constexpr, K_MAJOR: gl.constexpr):
    """Columns m to m + 63 of a buffer's 256, in registers."""
    if K_MAJOR:
        rows = buffer.reshape([4 * SIDE, BK]).slice(m, SIDE)
    else:
        rows = buffer.reshape([BK, 4 * SIDE]).slice(m, SIDE, dim=1).permute((1, 0))
    return rows.load(gl.DotOperandLayout(0, _accumulators(128), 2))


@gluon.jit
def _add(w, x, acc):
    """acc and w times x's columns, on its way."""
    layout: gl.constexpr = gl.DotOperandLayout(0, _accumulators(x.shape[1]), 2)
    return warpgroup_mma(gl.convert_layout(w, layout, assert_trivial=True), x, acc, is_async=True)


@gluon.jit
def _multiply(
    one, two, one_b, two_b, count, x_bufs, b_bufs, full, empty, A: gl.constexpr, B: gl.constexpr, ONE: gl.constexpr,
    TWO: gl.constexpr, PARTS: gl.constexpr, BK: gl.constexpr, K: gl.constexpr, GATHER: gl.constexpr,
    K_MAJOR: gl.constexpr,
):  # fmt: skip
    """All products of a tile: of weights' columns ONE.. and TWO.. with A rows and, if B, with B more.

    While those of one are made, the weights of the other are read, hence the wait names w1: its registers are in use
    until then. No product is in flight from step to step; the tensor cores have the other partition's meanwhile.
    """
    S: gl.constexpr = full.type.shape[0]
    STEPS: gl.constexpr = (K + BK - 1) // BK
    for _ in range(STEPS):
        s = count % S
        mbarrier.wait(full.index(s), (count // S) & 1)
        if GATHER:
            fence_async_shared()  # gathered rows came by ordinary stores
        xa = _rows(x_bufs, s, 0, A, PARTS)
        w1 = _weights(b_bufs.index(s), ONE, BK, K_MAJOR)
        one = _add(w1, xa, one)
        if B:
            xb = _rows(x_bufs, s, A, B, PARTS)
            one_b = _add(w1, xb, one_b)
        w2 = _weights(b_bufs.index(s), TWO, BK, K_MAJOR)
        two = _add(w2, xa, two)
        if B:
            two_b = _add(w2, xb, two_b)
            one, one_b, two, two_b, w1 = warpgroup_mma_wait(0, deps=(one, one_b, two, two_b, w1))
        else:
            one, two, w1 = warpgroup_mma_wait(0, deps=(one, two, w1))
        mbarrier.arrive(empty.index(s), count=1)
        count += 1
    return one, two, one_b, two_b


@gluon.jit
def _biased(value, at, bias_ptr, m, OUT: gl.constexpr, STEP: gl.constexpr):
    """value and the biases of its columns, m and on; STEP 2: of gate or up where they come in turn."""
    n = m + gl.arange(0, value.shape[0], gl.SliceLayout(1, value.type.layout))
    return value + gl.expand_dims(gl.load(bias_ptr + at + STEP * n, mask=n < OUT, other=0.0).to(gl.float32), 1)


@gluon.jit
def _store(value, m, rows, here, out_ptr, buf, N: gl.constexpr, OUT: gl.constexpr, WHOLE: gl.constexpr):
    """N rows, columns m and on, on their way to out's `rows`: `buf` turns them, half of 128 at a time."""
    if N == 128:
        left, right = split_columns(value, N)
        rows_left, rows_right = _halves(rows)
        here_left, here_right = _halves(here.to(gl.int32))
        _store(left, m, rows_left, here_left > 0, out_ptr, buf, N // 2, OUT, WHOLE)
        _store(right, m, rows_right, here_right > 0, out_ptr, buf, N // 2, OUT, WHOLE)
    else:
        turned = buf.slice(0, N)
        turned.permute((1, 0)).store(value.to(buf.dtype))
        columns = m + gl.arange(0, SIDE, gl.SliceLayout(0, _STORED))
        ptrs = gl.expand_dims(out_ptr + rows.to(gl.int64) * OUT, 1) + gl.expand_dims(columns, 0)
        if WHOLE:
            gl.store(ptrs, turned.load(_STORED), mask=gl.expand_dims(here, 1))
        else:
            gl.store(ptrs, turned.load(_STORED), mask=gl.expand_dims(here, 1) & gl.expand_dims(columns < OUT, 0))


@gluon.jit
def _halves(x):
    """The first and the second half of what belongs to rows, in the threads that store those."""
    one, two = gl.split(gl.permute(gl.reshape(x, (2, x.shape[0] // 2)), (1, 0)))
    layout: gl.constexpr = gl.SliceLayout(1, _STORED)
    return gl.convert_layout(one, layout, assert_trivial=True), gl.convert_layout(two, layout, assert_trivial=True)


@gluon.jit
def _destination(first, end, plan_ptr, bound, N: gl.constexpr, FIRST: gl.constexpr):
    """(where N sorted rows from `first` on go, which of them are before `end`)."""
    rows = first + gl.arange(0, N, gl.SliceLayout(1, _STORED))
    here = rows < end
    if not FIRST:
        rows = gl.load(plan_ptr + 4 + 4 * bound + rows, mask=here, other=0)
    return rows, here


@gluon.jit
def _finish(
    one, two, e, first, end, m, rows, here, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, buf,
    N: gl.constexpr, OUT: gl.constexpr, FIRST: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr,
    stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Scale, bias and activation of N rows' accumulators, and their way to out's `rows`."""
    if SCALE:
        p = first + gl.arange(0, N, gl.SliceLayout(0, one.type.layout))
        route = gl.load(plan_ptr + 4 + 4 * bound + p, mask=p < end, other=0)
        by = gl.expand_dims(gl.load(route_weight_ptr + route).to(gl.float32), 0)
        one = one * by
        two = two * by
    at = e.to(gl.int64) * stride_be
    if HALVES == 1:  # gate and up in turn, in `one` of columns m and on, in `two` of m + 32 and on
        one = _in_turn(one, at, bias_ptr, m, N, OUT, GATE_FIRST, BIAS, ACT)
        two = _in_turn(two, at, bias_ptr, m + SIDE // 2, N, OUT, GATE_FIRST, BIAS, ACT)
        value = gl.reshape(gl.permute(gl.join(one, two), (2, 0, 1)), (SIDE, N))
        _store(value, m, rows, here, out_ptr, buf, N, OUT, WHOLE)
    elif HALVES == 0:
        if BIAS:
            one = _biased(one, at, bias_ptr, m, OUT, 1)
            two = _biased(two, at, bias_ptr, m + SIDE, OUT, 1)
        if FIRST:
            one = ACT(one, one)
            two = ACT(two, two)
        _store(one, m, rows, here, out_ptr, buf, N, OUT, WHOLE)
        _store(two, m + SIDE, rows, here, out_ptr, buf, N, OUT, WHOLE)
    else:
        if BIAS:
            one = _biased(one, at, bias_ptr, m, OUT, 1)
            two = _biased(two, at, bias2_ptr + V_ROW, m, OUT, 1)
        _store(ACT(one, two) if GATE_FIRST else ACT(two, one), m, rows, here, out_ptr, buf, N, OUT, WHOLE)


@gluon.jit
def _in_turn(
    x, at, bias_ptr, m, N: gl.constexpr, OUT: gl.constexpr, GATE_FIRST: gl.constexpr, BIAS: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """The activation of 32 columns of gate and up."""
    x = gl.convert_layout(x, _paired(N))
    one, two = gl.split(gl.permute(gl.reshape(x, (SIDE // 2, 2, N)), (0, 2, 1)))
    if BIAS:
        one = _biased(one, at, bias_ptr, m, OUT, 2)
        two = _biased(two, at, bias_ptr + 1, m, OUT, 2)
    return ACT(one, two) if GATE_FIRST else ACT(two, one)


@gluon.jit
def _multiply_tile(
    count, e, first, end, n0, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, x_bufs, b_bufs, buf,
    full, empty, A: gl.constexpr, B: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr, N: gl.constexpr,
    BK: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, GATHER: gl.constexpr, FIRST: gl.constexpr,
    HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, K_MAJOR: gl.constexpr, stride_be: gl.constexpr,
    V_ROW: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """A + B rows of a tile, a partition's columns of it. `count`: buffers used before."""
    ONE: gl.constexpr = (1 if HALVES > 1 else 2) * SIDE * PART
    TWO: gl.constexpr = ONE + (2 if HALVES > 1 else 1) * SIDE
    WHOLE: gl.constexpr = OUT % N == 0
    m = n0 + (2 if HALVES == 0 else 1) * SIDE * PART
    rows, here = _destination(first, end, plan_ptr, bound, A, FIRST)  # before the products, which hide it
    one, two = _zeros(A), _zeros(A)
    one_b, two_b = one, two
    if B:
        rows_b, here_b = _destination(first + A, end, plan_ptr, bound, B, FIRST)
        one_b, two_b = _zeros(B), _zeros(B)
    one, two, one_b, two_b = _multiply(
        one, two, one_b, two_b, count, x_bufs, b_bufs, full, empty, A, B, ONE, TWO, PARTS, BK, K, GATHER, K_MAJOR
    )
    _finish(one, two, e, first, end, m, rows, here, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound,
            buf, A, OUT, FIRST, HALVES, GATE_FIRST, stride_be, V_ROW, BIAS, SCALE, ACT, WHOLE)  # fmt: skip
    if B:
        _finish(one_b, two_b, e, first + A, end, m, rows_b, here_b, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr,
                plan_ptr, bound, buf, B, OUT, FIRST, HALVES, GATE_FIRST, stride_be, V_ROW, BIAS, SCALE, ACT,
                WHOLE)  # fmt: skip


@gluon.jit
def swapped_partition(
    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, tiles, x_bufs, b_bufs, full, empty, told,
    told_full, told_empty, turned, PART: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
    N: gl.constexpr, BK: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, GATHER: gl.constexpr,
    FIRST: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, K_MAJOR: gl.constexpr,
    stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Half of each tile's columns: SIDE PART and on of gate and up, or 2 SIDE PART and on."""
    STEPS: gl.constexpr = (K + BK - 1) // BK
    PIECES: gl.constexpr = _pieces(PARTS)
    count, number, total = 0, 0, tiles * COLUMNS
    pid, place = claimed_ahead(number, total, plan_ptr, told, told_full, told_empty, COLUMNS, N)
    while pid < total:
        # the next tile's place is on its way while this tile's products are made
        number += 1
        e, first, end, n0 = place
        pid, place = claimed_ahead(number, total, plan_ptr, told, told_full, told_empty, COLUMNS, N)
        for i in gl.static_range(len(PIECES) // 2):
            if (end - first > _height(PIECES, i - 1)) & (end - first <= _height(PIECES, i)):
                _multiply_tile(
                    count, e, first, end, n0, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, x_bufs,
                    b_bufs, turned.index(PART), full, empty, PIECES[2 * i], PIECES[2 * i + 1], PART, PARTS, N, BK, K,
                    OUT, GATHER, FIRST, HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, ACT,
                )  # fmt: skip
        count += STEPS
