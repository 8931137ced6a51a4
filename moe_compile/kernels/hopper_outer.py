"""The gradients of the weights for Hopper: outer.outer over rows in sorted order, warps that fetch beside warps that
multiply (Gluon).

In: a [R, M] and b [R, N] by position of the sorted routes, and Schedule.ends. Out: out[e] = sum_p a[p]^T b[p] over e's
positions, cast once; zero for an expert without routes. The torch twin is outer.outer_reference.
A program stays on its processor and takes tiles in turn; one partition fetches as far ahead as its buffers reach, two
multiply, half of a tile's rows each, and what warps are left may do other work beside (beside.py). Both operands come
by tensor descriptors that end where the expert's rows do (`ragged`): a step past them adds zeros, whatever the next
rows hold. A tile is passed through shared memory, in pieces that leave room for more buffers, and stored by the copy
engine, while the next tile's products run.
Invariant: one program makes an element, over positions in order: bitwise repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass
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

from .beside import Beside, Kind, beside_partition, nothing
from .hopper import processors, swizzled
from .hopper_parts import barriers, fetch, split_columns
from .launch import Bound, ceil_div
from .sizes import PART

# triton 3.9 renamed it
send = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_MOST = gl.constexpr(1 << 30)  # rows of a ragged descriptor


def ragged(rows: torch.Tensor, box: tuple[int, int], dtype: torch.dtype) -> TensorDescriptor:
    """A descriptor of rows [R, N] that a kernel ends at any position, by `at`: rows from there on are read as zeros and
    not written. Coordinates (u, v, r, c) are u 2^34 + v (2^34 - s) + r s + c elements on, s from row to row: with u + v
    = 2^30 the first two count modulo 2^64 bytes as -v s, so that the last row, r = 2^30 - 1, lies where v says."""
    stride, most = rows.stride(0), 1 << 30
    shape = [1, 1, *box]
    return TensorDescriptor(
        rows, [most + 1, most + 1, most, rows.shape[1]], [1 << 34, (1 << 34) - stride, stride, 1], shape,
        swizzled(shape, dtype),
    )  # fmt: skip


@gluon.jit
def at(p, end, column):
    """The coordinates of (position p, column) in a `ragged` descriptor whose rows end at `end`."""
    return [end, _MOST - end, _MOST - end + p, column]


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The tile of `outer`: 2 * PART x N of an expert's matrix, K routes a step, S buffers, GROUP tiles side by side;
    PIECE columns of it are stored at once."""

    N: int = 256
    K: int = 32
    S: int = 8
    PIECE: int = 64
    GROUP: int = 8


_SUMS = Sums()


@gluon.jit
def _tile(pid, HIGH: gl.constexpr, WIDE: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """(expert, first row, first column) of a number."""
    e, local = pid // (HIGH * WIDE), pid % (HIGH * WIDE)
    group = local // (GROUP * WIDE)
    height = gl.minimum(HIGH - group * GROUP, GROUP)
    local -= group * GROUP * WIDE
    return e, (group * GROUP + local % height) * M, local // height * N


@gluon.jit
def _fetch_partition(
    a, b, spans_ptr, a_bufs, b_bufs, full, empty, TILES: gl.constexpr, HIGH: gl.constexpr, WIDE: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = b_bufs.type.shape[0]
    BYTES: gl.constexpr = K * (2 * M + N) * 2
    count = 0
    for pid in range(gl.program_id(0), TILES, PROGRAMS):
        e, m0, n0 = _tile(pid, HIGH, WIDE, GROUP, 2 * M, N)
        first, end = gl.load(spans_ptr + 2 * e), gl.load(spans_ptr + 2 * e + 1)
        for p in range(first, end, K):
            s = count % S
            mbarrier.wait(empty.index(s), ((count // S) & 1) ^ 1)
            mbarrier.expect(full.index(s), BYTES)
            fetch(a, at(p, end, m0), full.index(s), a_bufs.index(2 * s))
            fetch(a, at(p, end, m0 + M), full.index(s), a_bufs.index(2 * s + 1))
            fetch(b, at(p, end, n0), full.index(s), b_bufs.index(s))
            count += 1


@gluon.jit
def _pass_on(out, value, bufs, i: gl.constexpr, e, m0, n0, N: gl.constexpr):
    """Stores N columns of a tile's `value`, PIECE at a time, through buffers i and i + 1."""
    PIECE: gl.constexpr = bufs.type.shape[3]
    left, right = split_columns(value, N)
    HALF: gl.constexpr = N // 2
    if HALF > PIECE:
        _pass_on(out, left, bufs, i, e, m0, n0, HALF)
        _pass_on(out, right, bufs, i, e, m0, n0 + HALF, HALF)
    else:
        _send(out, left, bufs.index(i), e, m0, n0)
        _send(out, right, bufs.index(i + 1), e, m0, n0 + HALF)


@gluon.jit
def _send(out, value, buf, e, m0, n0):
    tma.store_wait(1)  # what was in the buffer has been read
    buf.reshape([value.shape[0], value.shape[1]]).store(value)
    fence_async_shared()
    send(out, [e, m0, n0], buf)


@gluon.jit
def _multiply_partition(
    out, spans_ptr, a_bufs, b_bufs, out_bufs, full, empty, PART: gl.constexpr, TILES: gl.constexpr,
    HIGH: gl.constexpr, WIDE: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Rows M * PART and on of each tile."""
    S: gl.constexpr = b_bufs.type.shape[0]
    kind: gl.constexpr = a_bufs.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    count = 0
    for pid in range(gl.program_id(0), TILES, PROGRAMS):
        e, m0, n0 = _tile(pid, HIGH, WIDE, GROUP, 2 * M, N)
        first, end = gl.load(spans_ptr + 2 * e), gl.load(spans_ptr + 2 * e + 1)
        acc = gl.zeros((M, N), gl.float32, mma)
        for p in range(first, end, K):
            s = count % S
            mbarrier.wait(full.index(s), (count // S) & 1)
            x = a_bufs.index(2 * s + PART).reshape([K, M]).permute((1, 0))
            acc = warpgroup_mma(x, b_bufs.index(s).reshape([K, N]), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((count + S - 1) % S), count=1, pred=p > first)  # the product before is done
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + S - 1) % S), count=1, pred=end > first)
        _pass_on(out, acc.to(kind), out_bufs, 2 * PART, e, m0 + M * PART, n0, N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])
def _outer_kernel(
    a, b, out, spans_ptr, source_ptr, ids_ptr, other_ptr, result_ptr, stride, tokens, TILES: gl.constexpr,
    HIGH: gl.constexpr, WIDE: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, PIECE: gl.constexpr,
    S: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, A_LAYOUT: gl.constexpr, B_LAYOUT: gl.constexpr,
    OUT_LAYOUT: gl.constexpr, BESIDE: gl.constexpr, E: gl.constexpr, TOPK: gl.constexpr, H: gl.constexpr,
    BLOCK: gl.constexpr, WEIGHTED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """M: rows of a partition, of two. BESIDE, or None, and what comes with it: beside.py."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kind: gl.constexpr = a.dtype
    a_bufs = gl.allocate_shared_memory(kind, [2 * S, 1, 1, K, M], A_LAYOUT)
    b_bufs = gl.allocate_shared_memory(kind, [S, 1, 1, K, N], B_LAYOUT)
    out_bufs = gl.allocate_shared_memory(kind, [4, 1, M, PIECE], OUT_LAYOUT)
    full, empty = barriers(S, 1, 2)
    if BESIDE is None:
        gl.warp_specialize(
            [
                (_multiply_partition, (
                    out, spans_ptr, a_bufs, b_bufs, out_bufs, full, empty, 0, TILES, HIGH, WIDE, GROUP, PROGRAMS, M, N,
                    K,
                )),
                (_multiply_partition, (
                    out, spans_ptr, a_bufs, b_bufs, out_bufs, full, empty, 1, TILES, HIGH, WIDE, GROUP, PROGRAMS, M, N,
                    K,
                )),
                (_fetch_partition, (
                    a, b, spans_ptr, a_bufs, b_bufs, full, empty, TILES, HIGH, WIDE, GROUP, PROGRAMS, M, N, K,
                )),
            ],
            [4, 1],
            [232, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply_partition, (
                    out, spans_ptr, a_bufs, b_bufs, out_bufs, full, empty, 0, TILES, HIGH, WIDE, GROUP, PROGRAMS, M, N,
                    K,
                )),
                (_multiply_partition, (
                    out, spans_ptr, a_bufs, b_bufs, out_bufs, full, empty, 1, TILES, HIGH, WIDE, GROUP, PROGRAMS, M, N,
                    K,
                )),
                (beside_partition, (
                    source_ptr, ids_ptr, other_ptr, result_ptr, tokens, stride, BESIDE, E, TOPK, H, BLOCK, WEIGHTED,
                )),
                (_fetch_partition, (
                    a, b, spans_ptr, a_bufs, b_bufs, full, empty, TILES, HIGH, WIDE, GROUP, PROGRAMS, M, N, K,
                )),
            ],
            [4, 2, 1],
            [208, 88, 88],
        )  # fmt: skip


@lru_cache(1024)
def _bound(
    tile: Sums, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, beside: Kind
) -> tuple[Bound, int, Any]:
    """The kernel, how many programs run, and the layout of a stored part of a tile."""
    E, M, N = sizes
    high, wide = ceil_div(M, 2 * PART), ceil_div(N, tile.N)
    programs = processors(device)
    layouts = [swizzled(s, dtype) for s in ([1, 1, tile.K, PART], [1, 1, tile.K, tile.N], [1, PART, tile.PIECE])]
    tiles = E * high * wide
    programs = min(programs, tiles)
    constants = (
        tiles, high, wide, PART, tile.N, tile.K, tile.PIECE, tile.S, tile.GROUP, programs, *layouts, *beside.constants,
    )  # fmt: skip
    return Bound(_outer_kernel, constants, device, warps=4, overlap=True, registers=168), programs, layouts[2]


def outer(
    a_RM: torch.Tensor, b_RN: torch.Tensor, spans_E2: torch.Tensor, tile: Sums = _SUMS, beside: Beside | None = None
) -> torch.Tensor:
    """out [E, M, N] in a's dtype, contiguous; see the module. Rows of a and b are aligned for tensor descriptors.

    beside: what else the launch does.
    """
    sizes, also = (spans_E2.shape[0], a_RM.shape[1], b_RN.shape[1]), beside or nothing(spans_E2)
    bound, programs, layout = _bound(tile, sizes, a_RM.dtype, a_RM.device, also.kind)
    out = torch.empty(sizes, dtype=a_RM.dtype, device=a_RM.device)
    arguments = (
        ragged(a_RM, (tile.K, PART), a_RM.dtype), ragged(b_RN, (tile.K, tile.N), a_RM.dtype),
        TensorDescriptor.from_tensor(out, [1, PART, tile.PIECE], layout), spans_E2,
        *also.arguments,
    )  # fmt: skip
    bound((programs, 1), arguments, (also.tokens,))
    return out
