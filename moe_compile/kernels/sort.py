"""From ids_TK to the schedule of the grouped linears: the routes in expert order, and who computes which rows.

In: ids_TK (int32 or int64), E, and BLOCK_M, the rows of a tile. Out: `Schedule`, on the device, in one launch, without
a host synchronization. Route r = t * K + k; a program places a chunk of them, for which it needs the counts of all.
For few routes it counts them itself. Else each program counts its chunk, waits until all are counted, and adds up.
Invariants: routes of an expert are contiguous and ascend (the sort is stable, hence deterministic); a route whose id is
not in [0, E) is in no tile; a tile never spans experts. No program depends on another that may not run: one that has
waited long counts what is missing, to the same numbers. So any number of programs may be resident, down to one at a
time, as in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import Bound, ceil_div, power_of_2
from .sizes import ALONE_COUNTS, ALONE_ROUTES
from .zeroed import zeroed

_SUB = 128  # routes ranked at once, by comparing all pairs; a multiple of it is a chunk. Threads of a program
_SCAN = 1024  # ids counted at once
_CHUNKS = 128  # most: each has a bit of four words
_CELLS = 1 << 14  # pairs of counts added up at once
_NARROW = 1 << 16  # R from which the pairs are of 32 bits each
_PATIENCE = 64  # looks, of about half a microsecond, before a program counts other chunks than its own
_GROUP = tl.constexpr(16)  # most tiles of a group


@dataclass(frozen=True)
class Schedule:
    """`plan`: int32: (tiles, claimed, -, -), (expert, first, end, group) of each of `bound` tiles, then routes [R];
    with sort_routes' `inverse` also positions [R] and ends [E, 2], each from a multiple of 16 bytes on.

    Tile m serves positions [first, min(first + BLOCK_M, end)) of the sorted routes, for its expert, whose last position
    (with sort_routes' `part`: the tile's) is end - 1. An expert's tiles are in groups, about as large as each other: a
    tile is the (group & 0xffff)th of its group's (group >> 16), and hopper.py computes a group column by column, so
    that its programs read the same weights at a time. `claimed` is 0 between kernels: hopper.py counts in it, and sets
    it back. Only rows m < tiles are written; `bound` >= tiles is known to the host: R // BLOCK_M + min(E, R).
    """

    plan: torch.Tensor
    bound: int
    R: int

    def tiles(self) -> torch.Tensor:
        """int32 [tiles, 4]: expert, first, end, group. Reads the device: for tests."""
        return self.plan[4 : 4 + 4 * int(self.plan[0])].view(-1, 4)

    def routes(self) -> torch.Tensor:
        """int32 [R]: the sorted routes; what lies past the last tile's end is undefined."""
        return self._from(4 + 4 * self.bound, self.R)

    def positions(self) -> torch.Tensor:
        """int32 [R]: where in `routes` each route is; undefined for dropped ones."""
        return self._from(4 + 4 * self.bound + _aligned(self.R), self.R)

    def ends(self, E: int) -> torch.Tensor:
        """int32 [E, 2]: first position and end of each expert, (0, 0) for one without routes."""
        return self._from(4 + 4 * self.bound + 2 * _aligned(self.R), 2 * E).view(E, 2)

    def _from(self, start: int, length: int) -> torch.Tensor:
        return self.plan[start : start + length]


def _aligned(n: int) -> int:
    """The multiple of 4 numbers, 16 bytes, from n on."""
    return (n + 3) // 4 * 4


def plan_size(R: int, E: int) -> int:
    """Numbers that the plan of any BLOCK_M >= 16 can take, with `inverse`. R may be symbolic."""
    return 4 + 4 * (R // 16 + E) + 2 * _aligned(R) + 2 * E


def tile_bound(R: int, E: int, BLOCK_M: int) -> int:
    """Most tiles that R routes over E experts can need: sum_e ceil(n_e / M) <= R // M + min(E, R)."""
    return R // BLOCK_M + min(E, R)


def counts_alone(R: int, E: int) -> bool:
    """Whether every program counts all ids: it waits for no other, but counts R of them in E bins. (us so and together:
    E128 K8 T=256 3.9, 4.4; T=512 5.8, 4.6; E512 K10 T=64 5.5, 5.2; E8 K2 T=4096 7.3, 4.3; H200, 2026-12-01)"""
    return R <= ALONE_ROUTES and R * _bins_of(E) <= ALONE_COUNTS


def _bins_of(E: int) -> int:
    return max(32, power_of_2(E))


@triton.jit
def _bins(ids_ptr, r, end, E: tl.constexpr):
    """The experts of routes r (int32 of r's shape) from ids_ptr on; E for r >= end and for ids outside [0, E)."""
    ids = tl.load(ids_ptr + r, mask=r < end, other=E)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit
def _counts(experts, E: tl.constexpr, BINS: tl.constexpr):
    """How many of `experts` are each of BINS >= E; those that are E are not counted."""
    return tl.histogram(experts, BINS, mask=experts < E)


@triton.jit
def _counted_alone(ids_ptr, origin, R, E: tl.constexpr, BINS: tl.constexpr, SCAN: tl.constexpr):
    """How many routes each expert has, and how many of them are before `origin`."""
    total, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, R, SCAN):
        r = start + tl.arange(0, SCAN)
        count = _counts(_bins(ids_ptr, r, R, E), E, BINS)
        total += count
        if start + SCAN <= origin:
            before += count
        elif start < origin:
            before += _counts(_bins(ids_ptr, r, origin, E), E, BINS)
    return total, before


@triton.jit
def _meet(
    ids_ptr, counters_ptr, words_ptr, R, length, E: tl.constexpr, BINS: tl.constexpr, SUB: tl.constexpr,
    PATIENCE: tl.constexpr,
):  # fmt: skip
    """Counts the program's chunk, counters[chunk, e] routes that go to e, and comes back when all chunks are counted.

    Chunk c is bit c % 32 of word c // 32, which thread c // 32 sets and looks at. Thread i < 4 of the last program to
    come back gets chunks - 1, and so knows that no one sets or looks at words i and 4 + i any more: every program's
    thread i is done with word i before it adds 1 to word 4 + i.
    """
    mine, chunks, i = tl.program_id(0), tl.num_programs(0), tl.arange(0, SUB)
    bits = tl.minimum(tl.maximum(chunks - 32 * i, 0), 32)
    all_bits = tl.where(bits == 32, -1, (1 << (bits % 32)) - 1)
    chunk, looks, counts, missing = mine, 0, True, True
    seen = 0 * i
    while missing:
        if counts:
            count, origin = tl.zeros((BINS,), tl.int32), chunk * length
            n = tl.minimum(length, R - origin)
            for start in range(0, n, SUB):
                count += _counts(_bins(ids_ptr + origin, start + i, n, E), E, BINS)
            tl.store(counters_ptr + chunk * BINS + tl.arange(0, BINS), count.to(counters_ptr.dtype.element_ty))
            tl.debug_barrier()  # every thread has stored its part
            bit = tl.where(i == chunk // 32, 1 << (chunk % 32), 0)
            seen = tl.atomic_or(words_ptr + i, bit, mask=i < 4, sem="acq_rel") | bit
        else:
            seen = tl.atomic_or(words_ptr + i, 0 * i, mask=i < 4, sem="acquire")
        lacks = tl.where(i < 4, all_bits & ~seen, 0)
        missing = tl.max((lacks != 0).to(tl.int32), axis=0) > 0
        looks += 1
        chunk = (mine + looks) % chunks
        counts = False
        if looks > PATIENCE:
            counts = tl.max(tl.where(i == chunk // 32, lacks >> (chunk % 32) & 1, 0), axis=0) > 0
    return tl.atomic_add(words_ptr + 4 + i, 1 + 0 * i, mask=i < 4, sem="relaxed")


@triton.jit
def _added_up(counters_ptr, BINS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """(total, before) as _counted_alone, of all programs' counts. Pairs of them are added as one number: neither sum
    reaches 2^16, or 2^32 where WIDE."""
    mine, chunks, pair = tl.program_id(0), tl.num_programs(0), tl.arange(0, BINS // 2)
    kind: tl.constexpr = tl.int64 if WIDE else tl.int32
    BITS: tl.constexpr = 32 if WIDE else 16
    pairs_ptr = counters_ptr.to(tl.pointer_type(kind))
    total, before = tl.zeros((BINS // 2,), kind), tl.zeros((BINS // 2,), kind)
    for first in range(0, chunks, ROWS):
        c = first + tl.arange(0, ROWS)[:, None]
        counts = tl.load(pairs_ptr + c * (BINS // 2) + pair[None, :], mask=c < chunks, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(c < mine, counts, 0), axis=0)
    LOW: tl.constexpr = (1 << BITS) - 1
    total = tl.interleave((total & LOW).to(tl.int32), (total >> BITS & LOW).to(tl.int32))
    return total, tl.interleave((before & LOW).to(tl.int32), (before >> BITS & LOW).to(tl.int32))


@triton.jit(do_not_specialize=["R", "length", "bound"])
def _sort_kernel(
    ids_ptr, counters_ptr, words_ptr, plan_ptr, R, length, bound,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, PART: tl.constexpr, INVERSE: tl.constexpr,
    ALONE: tl.constexpr, SCAN: tl.constexpr, SUB: tl.constexpr, PATIENCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Places the chunk's routes, and writes its share of the tiles; INVERSE: positions and ends, too. SCAN: ids counted
    at once where ALONE, else chunks whose counts are added up at once."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, BINS)
    origin = chunk * length
    if ALONE:
        total, before = _counted_alone(ids_ptr, origin, R, E, BINS, SCAN)
    else:
        left = _meet(ids_ptr, counters_ptr, words_ptr, R, length, E, BINS, SUB, PATIENCE)
        total, before = _added_up(counters_ptr, BINS, counters_ptr.dtype.element_ty == tl.int32, SCAN)
    first = tl.cumsum(total, axis=0) - total
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    at = tl.cumsum(tiles, axis=0) - tiles
    if chunk == 0:
        tl.store(plan_ptr, tl.sum(tiles, axis=0))
        tl.store(plan_ptr + 1, 0)
    parts, among = (total + PART - 1) // PART, tl.maximum(tiles, 1)
    groups = (among + _GROUP - 1) // _GROUP
    height = (among + groups - 1) // groups
    for j in range(chunk, tl.max(tiles, axis=0), chunks):
        tile_ptr = plan_ptr + 4 + 4 * (at + j)
        tl.store(tile_ptr, e, mask=j < tiles)
        if PART == BLOCK_M:
            tl.store(tile_ptr + 1, first + j * BLOCK_M, mask=j < tiles)
            tl.store(tile_ptr + 2, first + total, mask=j < tiles)
        else:
            below = tl.minimum((j + 1) * parts // among * PART, total)
            tl.store(tile_ptr + 1, first + j * parts // among * PART, mask=j < tiles)
            tl.store(tile_ptr + 2, first + below, mask=j < tiles)
        start = j // height * height
        tl.store(tile_ptr + 3, tl.minimum(tiles - start, height) << 16 | j - start, mask=j < tiles)

    i = tl.arange(0, SUB)
    if not ALONE:
        last = (i < 4) & (left == chunks - 1)
        tl.store(words_ptr + i, 0, mask=last)
        tl.store(words_ptr + 4 + i, 0, mask=last)
    routes_ptr = plan_ptr + 4 + 4 * bound
    positions_ptr = routes_ptr + (R + 3) // 4 * 4
    if INVERSE and chunk == 0:
        ends_ptr = positions_ptr + (R + 3) // 4 * 4 + 2 * e
        tl.store(ends_ptr, tl.where(total > 0, first, 0), mask=e < E)
        tl.store(ends_ptr + 1, tl.where(total > 0, first + total, 0), mask=e < E)
    free = first + before  # each expert's next position
    n = tl.minimum(length, R - origin)
    for start in range(0, n, SUB):
        mine = _bins(ids_ptr + origin, start + i, n, E)
        earlier = (mine[:, None] == mine[None, :]) & (i[:, None] < i[None, :])  # summed down columns: no shuffles
        position = tl.gather(free, tl.minimum(mine, BINS - 1), axis=0) + tl.sum(earlier.to(tl.int32), axis=0)
        tl.store(routes_ptr + position, origin + start + i, mask=mine < E)
        if INVERSE:
            tl.store(positions_ptr + origin + start + i, position, mask=mine < E)
        if start + SUB < n:
            free += _counts(mine, E, BINS)


@lru_cache(1024)
def _bound(
    E: int, rows: tuple[int, int], inverse: bool, alone: bool, scan: int, patience: int, ids: torch.dtype,
    counters: torch.dtype, device: torch.device,
) -> Bound:  # fmt: skip
    """The kernel for all calls that differ in addresses and in R only. rows: of a tile and of its parts."""
    constants = (E, _bins_of(E), *rows, inverse, alone, scan, _SUB, patience)
    return Bound(_sort_kernel, constants, device, warps=_SUB // 32, overlap=True)


def sort_routes(ids_TK: torch.Tensor, E: int, BLOCK_M: int, part: int = 0, *, inverse: bool = False) -> Schedule:
    """The schedule of ids_TK for tiles of BLOCK_M rows. R = T * K must be in [1, 2^31).

    part, less than BLOCK_M: as many tiles, of about as many parts of so many rows each, and a tile's end is its own,
    not its expert's.
    inverse: with positions and ends, and a plan of plan_size.
    """
    R = ids_TK.numel()
    assert 1 <= R < 2**31 and part < BLOCK_M, (R, part)
    ids = ids_TK.contiguous()
    bound, rows, bins = tile_bound(R, E, BLOCK_M), (BLOCK_M, part or BLOCK_M), _bins_of(E)
    plan = torch.empty(plan_size(R, E) if inverse else 4 + 4 * bound + R, dtype=torch.int32, device=ids.device)
    if alone := counts_alone(R, E):
        length, scan = _SUB, min(_SCAN, max(_SUB, power_of_2(R)))
        counters = words = plan
    else:
        length = _SUB * ceil_div(R, _SUB * _CHUNKS)
        scan = min(power_of_2(ceil_div(R, length)), 2 * _CELLS // bins)
        kind = torch.int16 if R < _NARROW else torch.int32
        counters = torch.empty(ceil_div(R, length) * bins, dtype=kind, device=ids.device)
        words = zeroed(ids.device)()
    kernel = _bound(E, rows, inverse, alone, scan, _PATIENCE, ids.dtype, counters.dtype, ids.device)
    kernel((ceil_div(R, length), 1), (ids, counters, words, plan), (R, length, bound))
    return Schedule(plan, bound, R)


def sort_routes_reference(ids_TK: torch.Tensor, E: int, BLOCK_M: int, part: int = 0) -> Schedule:
    """The torch twin: the same Schedule with `inverse`, by a stable argsort (synchronizes)."""
    ids = ids_TK.reshape(-1).long()
    R = ids.numel()
    bound = tile_bound(R, E, BLOCK_M)
    bins = torch.where((ids >= 0) & (ids < E), ids, E)
    rows, ends, first = [], [], 0
    for e, n in enumerate(torch.bincount(bins, minlength=E + 1)[:E].tolist()):
        tiles = ceil_div(n, BLOCK_M)
        if part:
            starts = [j * ceil_div(n, part) // tiles * part for j in range(tiles)]
            spans = list(zip(starts, [*starts[1:], n]))
        else:
            spans = [(j * BLOCK_M, n) for j in range(tiles)]
        height = ceil_div(tiles, max(ceil_div(tiles, _GROUP.value), 1)) or 1
        heights = [min(height, tiles - start) for start in range(0, tiles, height)]
        groups = [n << 16 | i for n in heights for i in range(n)]
        rows += [(e, first + a, first + b, group) for (a, b), group in zip(spans, groups)]
        ends.append((first, first + n) if n else (0, 0))
        first += n
    plan = torch.zeros(plan_size(R, E), dtype=torch.int32, device=ids.device)
    plan[0] = len(rows)
    plan[4 : 4 + 4 * len(rows)] = torch.tensor(rows, dtype=torch.int32, device=ids.device).reshape(-1)
    schedule = Schedule(plan, bound, R)
    schedule.routes()[:] = torch.argsort(bins, stable=True).int()
    schedule.positions()[schedule.routes().long()] = torch.arange(R, dtype=torch.int32, device=ids.device)
    schedule.ends(E)[:] = torch.tensor(ends, dtype=torch.int32, device=ids.device)
    return schedule
