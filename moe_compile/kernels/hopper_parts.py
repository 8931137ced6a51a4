"""What the warps of hopper.py's kernels do: fetch operands, or multiply 64 rows of a tile and finish them.

In: a schedule, tensor descriptors, shared buffers and their barriers. Out: rows of the first or second linear.
Fetching warps claim this program's next tile, in the schedule's order, tell the others, and fill buffers as they come
free, as far ahead as there are any. Every multiplying partition has 64 rows of the tile and accumulates its products
from the same buffers; where its rows are past the tile's end it only hands the buffers back. Then it finishes its rows,
while others may still multiply.
Invariants: buffers and tile numbers change hands through two barriers each, full and empty; what is computed does not
depend on who claims a tile; plan[1], in which tiles are counted, is zero again when the last one is claimed.
"""

from __future__ import annotations

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# triton 3.9 renamed both
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def tile_of(claim, tiles, plan_ptr, bound, COLUMNS: gl.constexpr):
    """The number of the tile that is claimed as the `claim`th: column by column of a group of row tiles, which read the
    same weights. From tiles * COLUMNS on, `claim`."""
    m = claim // COLUMNS
    group = gl.load(plan_ptr + 7 + 4 * m, mask=m < bound, other=0)  # undefined from `tiles` on; doesn't wait for them
    start, height = m - (group & 0xFFFF), group >> 16
    local = claim - start * COLUMNS
    return gl.where(m < tiles, (start + local % height) * COLUMNS + local // height, claim)


@gluon.jit
def tile_at(pid, plan_ptr, COLUMNS: gl.constexpr, N: gl.constexpr):
    """(expert, its first row, the expert's end, first column) of a tile's number."""
    tile_ptr = plan_ptr + 4 + 4 * (pid // COLUMNS)
    return gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2), pid % COLUMNS * N


@gluon.jit
def _tell(number, pid, told, told_full, told_empty):
    """Fetching warps: the `number`th tile of this program is pid."""
    slot = number % 2
    LANES: gl.constexpr = told.type.shape[1]
    mbarrier.wait(told_empty.index(slot), ((number // 2) & 1) ^ 1)
    told.index(slot).store(gl.full((LANES,), pid, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    mbarrier.arrive(told_full.index(slot), count=1)


@gluon.jit
def barriers(N: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """(full, empty) of N buffers: of each, FULL threads or copies arrive that fill it, EMPTY that are done with it."""
    full = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=EMPTY)
    return full, empty


@gluon.jit
def telling(FETCHERS: gl.constexpr, READERS: gl.constexpr):
    """(told, told_full, told_empty): where so many fetching warps tell so many partitions this program's tiles. Each of
    their lanes writes a word of its own: the tool that looks for races takes two writers of one word for one."""
    told = gl.allocate_shared_memory(gl.int32, [2, 32 * FETCHERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told_full, told_empty = barriers(2, 1, READERS)
    return told, told_full, told_empty


@gluon.jit
def claimed(number, told, told_full, told_empty):
    """Other warps: the `number`th tile of this program."""
    slot = number % 2
    mbarrier.wait(told_full.index(slot), (number // 2) & 1)
    pid = gl.max(told.index(slot).slice(0, 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
    mbarrier.arrive(told_empty.index(slot), count=1)
    return pid


@gluon.jit
def claimed_ahead(
    number, total, plan_ptr, told, told_full, told_empty, COLUMNS: gl.constexpr, N: gl.constexpr
):  # fmt: skip
    """(the `number`th tile of this program, its place as of tile_at); from `total` on that is the last tile's."""
    pid = claimed(number, told, told_full, told_empty)
    return pid, tile_at(gl.maximum(gl.minimum(pid, total - 1), 0), plan_ptr, COLUMNS, N)


@gluon.jit
def _tokens(plan_ptr, bound, first, end, M: gl.constexpr, CHOICES: gl.constexpr, LAYOUT: gl.constexpr):
    """The tokens of M sorted rows from `first` on; -1 from `end` on."""
    p = first + gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    route = gl.load(plan_ptr + 4 + 4 * bound + p, mask=p < end, other=0)
    return gl.where(p < end, route // CHOICES, -1)


@gluon.jit
def _copy_rows(buffer, x_ptr, tokens, k0, stride_xt, BK: gl.constexpr, LAYOUT: gl.constexpr):
    k = k0 + gl.arange(0, BK, gl.SliceLayout(0, LAYOUT))
    ptrs = gl.expand_dims(x_ptr + tokens.to(gl.int64) * stride_xt, 1) + gl.expand_dims(k, 0)
    _gather(buffer, ptrs, mask=gl.expand_dims(tokens >= 0, 1))


@gluon.jit
def fetch_weights(w, v, e, n0, k0, full, buffer, HALVES: gl.constexpr, K_MAJOR: gl.constexpr, pred=True):
    """Columns n0.. of expert e's weights (HALVES: of gate and of up) at k0, on their way to `buffer`."""
    if HALVES == 2:
        fetch(w, [e, 0, n0, k0], full, buffer, pred=pred)
    elif HALVES == 3:
        fetch(w, [e, n0, k0], full, buffer.slice(0, 1), pred=pred)
        fetch(v, [e, n0, k0], full, buffer.slice(1, 1), pred=pred)
    elif K_MAJOR:
        fetch(w, [e, 2 * n0 if HALVES == 1 else n0, k0], full, buffer, pred=pred)
    else:
        fetch(w, [e, k0, 2 * n0 if HALVES == 1 else n0], full, buffer, pred=pred)


@gluon.jit
def part_of(s, i: gl.constexpr, S: gl.constexpr, M: gl.constexpr, PARTS: gl.constexpr):
    """The number of the buffer of stage s's `i`th part of M rows: those of the first 128 rows come first."""
    FIRST: gl.constexpr = min(PARTS, 128 // M)
    return s * FIRST + i if i < FIRST else S * FIRST + s


@gluon.jit
def _expect(full, parts, PARTS: gl.constexpr, A_BYTES: gl.constexpr, B_BYTES: gl.constexpr, pred):
    """So many parts of rows and the weights are to come."""
    for i in gl.static_range(PARTS):
        mbarrier.expect(full, B_BYTES + (i + 1) * A_BYTES, pred=(parts == i + 1) & pred)


@gluon.jit
def fetch_partition(
    x_ptr, a, w, v, plan_ptr, bound, stride_xt, tiles, pid, a_bufs, b_bufs, full, empty, told, told_full, told_empty,
    CHOICES: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, N: gl.constexpr,
    BK: gl.constexpr, GATHER: gl.constexpr, HALVES: gl.constexpr, K_MAJOR: gl.constexpr, A_BYTES: gl.constexpr,
    B_BYTES: gl.constexpr, AHEAD: gl.constexpr = False, PAIRED: gl.constexpr = 0,
):  # fmt: skip
    """Fills the buffers, tile after tile, from tile `pid` on. GATHER: these warps, four of them, copy rows by their
    routes. AHEAD: the kernel waits here for the one before it, with the first buffers' weights on their way. PAIRED: of
    a tile with so many rows at most, two buffers that follow each other along K are filled at once, if weights are
    contiguous so."""
    S: gl.constexpr = full.type.shape[0]
    M: gl.constexpr = a_bufs.type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    count, number, total = 0, 0, tiles * COLUMNS
    _tell(number, pid, told, told_full, told_empty)
    EARLY: gl.constexpr = min(S, (K + BK - 1) // BK) if AHEAD else 0
    if AHEAD:
        if pid < total:
            e, first, end, n0 = tile_at(pid, plan_ptr, COLUMNS, N)
            parts = gl.minimum((end - first + M - 1) // M, PARTS)
            for s in gl.static_range(EARLY):
                _expect(full.index(s), parts, PARTS, A_BYTES, B_BYTES, True)
                fetch_weights(w, v, e, n0, s * BK, full.index(s), b_bufs.index(s), HALVES, K_MAJOR)
        gdc_wait()
        gdc_launch_dependents()
    while pid < total:
        claim = gl.atomic_add(plan_ptr + 1, 1)
        if claim == total - 1:  # nobody claims after this
            gl.store(plan_ptr + 1, 0)
        number += 1
        e, first, end, n0 = tile_at(pid, plan_ptr, COLUMNS, N)
        following = tile_of(claim + gl.num_programs(0), tiles, plan_ptr, bound, COLUMNS)
        _tell(number, following, told, told_full, told_empty)
        parts = gl.minimum((end - first + M - 1) // M, PARTS)  # that have rows
        tokens = ()
        if GATHER:
            for i in gl.static_range(PARTS):
                mine = _tokens(plan_ptr, bound, first + i * M, end, M, CHOICES, layout)
                tokens = tokens + (mine,)  # type: ignore[assignment]
        for k0 in range(0, K, BK):
            s = count % S
            mbarrier.wait(empty.index(s), ((count // S) & 1) ^ 1)
            if PAIRED and K_MAJOR:
                two = (end - first <= PAIRED) & ((k0 // BK) % 2 == 0)
                mbarrier.wait(empty.index((count + 1) % S), (((count + 1) // S) & 1) ^ 1, pred=two)
            lacking = count >= EARLY
            if GATHER:
                mbarrier.expect(full.index(s), B_BYTES)
            else:
                _expect(full.index(s), parts, PARTS, A_BYTES, B_BYTES, lacking)
            fetch_weights(w, v, e, n0, k0, full.index(s), b_bufs.index(s), HALVES, K_MAJOR, lacking)
            if GATHER:
                for i in gl.static_range(PARTS):
                    if i < parts:
                        rows = a_bufs.index(part_of(s, i, S, M, PARTS))
                        _copy_rows(rows, x_ptr, tokens[i], k0, stride_xt, BK, layout)
                async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            else:
                for i in gl.static_range(PARTS):
                    rows = a_bufs.index(part_of(s, i, S, M, PARTS))
                    fetch(a, [first + i * M, k0], full.index(s), rows, pred=i < parts)
            count += 1
        pid = following


@gluon.jit
def rest(count, STEPS: gl.constexpr, full, empty):
    """Hands back the buffers of a tile in which a partition has no rows, as they come. `count`: used before."""
    S: gl.constexpr = full.type.shape[0]
    for used in range(count, count + STEPS):
        mbarrier.wait(full.index(used % S), (used // S) & 1)
        mbarrier.arrive(empty.index(used % S), count=1)


@gluon.jit
def multiply(
    acc, count, a_bufs, b_bufs, full, empty, PART: gl.constexpr, PARTS: gl.constexpr, BK: gl.constexpr,
    K: gl.constexpr, GATHER: gl.constexpr, K_MAJOR: gl.constexpr,
):  # fmt: skip
    """(acc and the products of a tile, buffers used so far): rows of part PART of PARTS, whose buffers lie in turn."""
    S: gl.constexpr = full.type.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    for k0 in range(0, K, BK):
        s = count % S
        mbarrier.wait(full.index(s), (count // S) & 1)
        if GATHER:
            fence_async_shared()  # gathered rows came by ordinary stores
        if K_MAJOR:
            b = b_bufs.index(s).reshape([WIDTH, BK]).permute((1, 0))
        else:
            b = b_bufs.index(s).reshape([BK, WIDTH])
        acc = warpgroup_mma(a_bufs.index(part_of(s, PART, S, a_bufs.type.shape[1], PARTS)), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((count + S - 1) % S), count=1, pred=k0 > 0)  # the product before is done
        count += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((count + S - 1) % S), count=1)
    return acc, count


@gluon.constexpr_function
def _stored(N):
    """How N columns lie in the registers of four warps that store 16 bytes a thread: in the warps and quads of threads
    that have them as accumulators, so that they change hands by shuffles."""
    columns = [[0, 2**i] for i in range(3)] + [[8, 0]] + [[0, 2**i] for i in range(5, N.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(columns, lanes, [[16, 0], [32, 0]], [], [64, N])


@gluon.jit
def split_columns(x, N: gl.constexpr):
    """The left and the right half of x's N columns."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, N // 2)), (0, 2, 1)))


@gluon.jit
def _store(value, out_ptr, rows, here, n0, N: gl.constexpr, STRIDE: gl.constexpr, OUT: gl.constexpr,
           WHOLE: gl.constexpr):  # fmt: skip
    """Columns n0.. of out's `rows`, STRIDE elements from each to the next and OUT columns wide."""
    stored: gl.constexpr = _stored(N)
    value = gl.convert_layout(value.to(out_ptr.dtype.element_ty), stored)
    n = n0 + gl.arange(0, N, gl.SliceLayout(0, stored))
    rows, here = gl.convert_layout(rows, gl.SliceLayout(1, stored)), gl.convert_layout(here, gl.SliceLayout(1, stored))
    ptrs = gl.expand_dims(out_ptr + rows.to(gl.int64) * STRIDE, 1) + gl.expand_dims(n, 0)
    if WHOLE:
        gl.store(ptrs, value, mask=gl.expand_dims(here, 1))
    else:
        gl.store(ptrs, value, mask=gl.expand_dims(here, 1) & gl.expand_dims(n < OUT, 0))


@gluon.jit
def _finish(
    one, two, e, n0, rows, here, scale, bias_ptr, bias2_ptr, out_ptr, kept_ptr, N: gl.constexpr, OUT: gl.constexpr,
    FIRST: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, stride_be: gl.constexpr, V_ROW: gl.constexpr,
    BIAS: gl.constexpr, SCALE: gl.constexpr, KEEP: gl.constexpr, ACT: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Scale, bias and activation of N columns of accumulators, from n0 on, and their way to out's `rows`. HALVES == 1:
    `one` has their gate and up columns in turn. KEEP: what the activation is of is stored
    too, all of it (1) or its last OUT columns (2)."""
    layout: gl.constexpr = one.type.layout
    if SCALE:
        by = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, layout)), 1)
        one = one * by
        two = two * by
    if BIAS:
        EACH: gl.constexpr = 2 if HALVES == 1 else 1
        n = EACH * n0 + gl.arange(0, EACH * N, gl.SliceLayout(0, layout))
        at = e.to(gl.int64) * stride_be + n
        one += gl.expand_dims(gl.load(bias_ptr + at, mask=n < EACH * OUT, other=0.0).to(gl.float32), 0)
        if HALVES > 1:
            two += gl.expand_dims(gl.load(bias2_ptr + V_ROW + at, mask=n < OUT, other=0.0).to(gl.float32), 0)
    if HALVES == 1:
        if KEEP:
            _store(one, kept_ptr, rows, here, 2 * n0, 2 * N, 2 * OUT, 2 * OUT, WHOLE)
        one, two = gl.split(gl.reshape(one, (one.shape[0], N, 2)))
    elif KEEP == 1:
        _store(one, kept_ptr, rows, here, n0, N, 2 * OUT if HALVES > 0 else OUT, OUT, WHOLE)
        if HALVES > 0:
            _store(two, kept_ptr + OUT, rows, here, n0, N, 2 * OUT, OUT, WHOLE)
    elif KEEP == 2:
        _store(two, kept_ptr, rows, here, n0, N, OUT, OUT, WHOLE)
    if not FIRST:
        value = one
    elif HALVES == 0:
        value = ACT(one, one)
    elif GATE_FIRST:
        value = ACT(one, two)
    else:
        value = ACT(two, one)
    _store(value, out_ptr, rows, here, n0, N, OUT, OUT, WHOLE)


@gluon.jit
def _multiply_tile(
    count, e, first, end, n0, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound, a_bufs,
    b_bufs, full, empty, PART: gl.constexpr, PARTS: gl.constexpr, N: gl.constexpr, BK: gl.constexpr, K: gl.constexpr,
    OUT: gl.constexpr, GATHER: gl.constexpr, FIRST: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr,
    K_MAJOR: gl.constexpr, stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr,
    KEEP: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """A partition's rows of a tile, `first` and on. `count`: buffers used before."""
    M: gl.constexpr = a_bufs.type.shape[1]
    WIDTH: gl.constexpr = N if HALVES == 0 else 2 * N
    # where threads start with 128 registers, ptxas takes no product 256 wide
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH if PARTS == 2 else min(WIDTH, 128), 16])
    # columns that are finished at once: fewer registers, and less shared memory to turn them in
    PIECE: gl.constexpr = N // 2 if BIAS or N == 256 else N
    rows = first + gl.arange(0, M, gl.SliceLayout(1, _stored(PIECE)))
    here = rows < end
    scale = 1.0
    if SCALE or not FIRST:  # read before the products, which hide it
        route = gl.load(plan_ptr + 4 + 4 * bound + rows, mask=here, other=0)
        if SCALE:
            scale = gl.load(route_weight_ptr + route).to(gl.float32)
        if not FIRST:
            rows = route
    acc, _ = multiply(
        gl.zeros((M, WIDTH), gl.float32, mma), count, a_bufs, b_bufs, full, empty, PART, PARTS, BK, K, GATHER, K_MAJOR
    )

    if HALVES > 1:
        one, two = split_columns(acc, 2 * N)
    else:
        one, two = acc, acc
    WHOLE: gl.constexpr = OUT % N == 0
    if PIECE == N:
        _finish(one, two, e, n0, rows, here, scale, bias_ptr, bias2_ptr, out_ptr, kept_ptr, N, OUT, FIRST, HALVES,
                GATE_FIRST, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT, WHOLE)  # fmt: skip
    else:
        left, right = split_columns(one, 2 * N if HALVES == 1 else N)
        left2, right2 = split_columns(two, 2 * N if HALVES == 1 else N)
        _finish(left, left2, e, n0, rows, here, scale, bias_ptr, bias2_ptr, out_ptr, kept_ptr, PIECE, OUT, FIRST,
                HALVES, GATE_FIRST, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT, WHOLE)  # fmt: skip
        _finish(right, right2, e, n0 + PIECE, rows, here, scale, bias_ptr, bias2_ptr, out_ptr, kept_ptr, PIECE, OUT,
                FIRST, HALVES, GATE_FIRST, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT, WHOLE)  # fmt: skip


@gluon.jit
def multiply_partition(
    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs, full, empty, told,
    told_full, told_empty, PART: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
    N: gl.constexpr, BK: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, GATHER: gl.constexpr,
    FIRST: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, K_MAJOR: gl.constexpr,
    stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, KEEP: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """Rows 64 * PART and on of each tile. Of a tile without such rows it hands the buffers back as they come."""
    M: gl.constexpr = a_bufs.type.shape[1]
    STEPS: gl.constexpr = (K + BK - 1) // BK
    count, number, total = 0, 0, tiles * COLUMNS
    pid, place = claimed_ahead(number, total, plan_ptr, told, told_full, told_empty, COLUMNS, N)
    while pid < total:
        # the next tile's place is on its way while this tile's products are made
        number += 1
        e, first, end, n0 = place
        pid, place = claimed_ahead(number, total, plan_ptr, told, told_full, told_empty, COLUMNS, N)
        first += PART * M
        if first < end:
            _multiply_tile(
                count, e, first, end, n0, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound,
                a_bufs, b_bufs, full, empty, PART, PARTS, N, BK, K, OUT, GATHER, FIRST, HALVES, GATE_FIRST, K_MAJOR,
                stride_be, V_ROW, BIAS, SCALE, KEEP, ACT,
            )  # fmt: skip
        else:
            rest(count, STEPS, full, empty)
        count += STEPS
