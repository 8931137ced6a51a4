"""From ids_TK to the schedule of the grouped linears: the routes in expert order, and who computes which rows.

In: ids_TK (int32 or int64), E, and BLOCK_M, the rows of a tile. Out: `Schedule`, on the device, without a host
synchronization: one launch for few routes (FUSED_ROUTES), else three. Route r = t * K + k.
Invariants: routes of an expert are contiguous and ascend (the sort is stable, hence deterministic); a route whose id is
not in [0, E) is in no tile; a tile never spans experts; no program reads what another of its launch writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import Bound, ceil_div, power_of_2

FUSED_ROUTES, _FUSED_COUNTS = 2048, 1 << 19  # most R and most R * bins for which every program recounts all ids
_SUB = 128  # routes ranked at once, by comparing all pairs; a multiple of it is a chunk
_SCAN = 1024  # ids counted at once
_MAX_CHUNKS = 256
_WIDTH = 16  # experts that a program of the scan takes


@dataclass(frozen=True)
class Schedule:
    """`plan`: int32: (tiles, claimed, -, -), (expert, first, end, -) of each of `bound` tiles, then routes [R]; with
    sort_routes' `inverse` also positions [R] and ends [E, 2], each from a multiple of 16 bytes on.

    Tile m serves positions [first, min(first + BLOCK_M, end)) of the sorted routes, for its expert, whose last position
    (with sort_routes' `part`: the tile's) is end - 1. `claimed` is 0 between kernels: hopper.py counts in it, and sets
    it back. Only rows m < tiles are written; `bound` >= tiles is known to the host: R // BLOCK_M + min(E, R).
    """

    plan: torch.Tensor
    bound: int
    R: int

    def tiles(self) -> torch.Tensor:
        """int32 [tiles, 3]: expert, first, end. Reads the device: for tests."""
        return self.plan[4 : 4 + 4 * int(self.plan[0])].view(-1, 4)[:, :3]

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


def sort_launches(R: int, E: int) -> int:
    """Launches that sorting takes: 1, or 3 where recounting all ids in every program would cost more than two launches
    (qwen3_30b T=1024: 9 us in three, 14 in one; T=256: 8 either way; qwen3next T=256: 13, 21; H200, 2026-11-30)."""
    return 1 if R <= FUSED_ROUTES and R * _bins_of(E) <= _FUSED_COUNTS else 3


def _bins_of(E: int) -> int:
    return max(32, power_of_2(E))


@triton.jit
def _bins(ids_ptr, r, end, E: tl.constexpr):
    """The experts of routes r (int32 of r's shape); E for routes >= end and for ids outside [0, E)."""
    ids = tl.load(ids_ptr + r, mask=r < end, other=E)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit
def _counts(experts, E: tl.constexpr, BINS: tl.constexpr):
    """How many of `experts` are each of BINS >= E; those that are E are not counted."""
    return tl.histogram(experts, BINS, mask=experts < E)


@triton.jit(do_not_specialize=["R", "length"])
def _count_kernel(
    ids_ptr, counters_ptr, R, length, E: tl.constexpr, BINS: tl.constexpr, SCAN: tl.constexpr, PDL: tl.constexpr
):
    """counters[chunk, e] = how many of the chunk's `length` routes go to e."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    count = tl.zeros((BINS,), tl.int32)
    end = tl.minimum((chunk + 1) * length, R)
    for start in range(chunk * length, end, SCAN):
        count += _counts(_bins(ids_ptr, start + tl.arange(0, SCAN), end, E), E, BINS)
    tl.store(counters_ptr + chunk * BINS + tl.arange(0, BINS), count)


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    counters_ptr, chunks, BINS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """counters[c, e] <- sum of counters[c', e] over c' < c; the total goes to row `chunks`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    c = tl.arange(0, CHUNKS)[:, None]
    e = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    at = counters_ptr + c * BINS + e[None, :]
    count = tl.load(at, mask=c < chunks, other=0)
    tl.store(at, tl.cumsum(count, axis=0) - count, mask=c < chunks)
    tl.store(counters_ptr + chunks * BINS + e, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["R", "length", "bound"])
def _place_kernel(
    ids_ptr, counters_ptr, plan_ptr, R, length, bound,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, PART: tl.constexpr, INVERSE: tl.constexpr,
    FUSED: tl.constexpr, SCAN: tl.constexpr, SUB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Places the chunk's routes, and writes its share of the tiles. FUSED counts here, else `counters` has the scan.
    INVERSE writes positions and ends, too."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, BINS)
    origin = chunk * length
    if FUSED:
        total, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
        for start in range(0, R, SCAN):
            r = start + tl.arange(0, SCAN)
            count = _counts(_bins(ids_ptr, r, R, E), E, BINS)
            total += count
            if start + SCAN <= origin:
                before += count
            elif start < origin:
                before += _counts(_bins(ids_ptr, r, origin, E), E, BINS)
    else:
        total, before = tl.load(counters_ptr + chunks * BINS + e), tl.load(counters_ptr + chunk * BINS + e)
    first = tl.cumsum(total, axis=0) - total
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    at = tl.cumsum(tiles, axis=0) - tiles
    if chunk == 0:
        tl.store(plan_ptr, tl.sum(tiles, axis=0))
        tl.store(plan_ptr + 1, 0)
    parts, among = (total + PART - 1) // PART, tl.maximum(tiles, 1)
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

    routes_ptr = plan_ptr + 4 + 4 * bound
    positions_ptr = routes_ptr + (R + 3) // 4 * 4
    if INVERSE and chunk == 0:
        ends_ptr = positions_ptr + (R + 3) // 4 * 4 + 2 * e
        tl.store(ends_ptr, tl.where(total > 0, first, 0), mask=e < E)
        tl.store(ends_ptr + 1, tl.where(total > 0, first + total, 0), mask=e < E)
    free = first + before  # each expert's next position
    i = tl.arange(0, SUB)
    end = tl.minimum(origin + length, R)
    for start in range(origin, end, SUB):
        mine = _bins(ids_ptr, start + i, end, E)
        earlier = (mine[:, None] == mine[None, :]) & (i[None, :] < i[:, None])
        position = tl.gather(free, tl.minimum(mine, BINS - 1), axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(routes_ptr + position, start + i, mask=mine < E)
        if INVERSE:
            tl.store(positions_ptr + start + i, position, mask=mine < E)
        if start + SUB < end:
            free += _counts(mine, E, BINS)


@lru_cache(1024)
def _bound(step: str, E: int, rows: tuple[int, int, bool], size: int, ids: torch.dtype, device: torch.device) -> Bound:
    """A step's kernel for all calls that differ in addresses and in R only (launch.Bound). rows: of a tile and of its
    parts, and `inverse`. size: chunks of the scan, or the ids that the fused place counts at once, 0 where it is not
    fused."""
    bins = _bins_of(E)
    if step == "count":
        return Bound(_count_kernel, (E, bins, _SUB), device, overlap=True)
    if step == "scan":
        return Bound(_scan_kernel, (bins, size, _WIDTH), device, overlap=True)
    constants = (E, bins, *rows, bool(size), size or _SCAN, _SUB)
    return Bound(_place_kernel, constants, device, warps=8 if bins > 512 else 4, overlap=True)


def sort_routes(ids_TK: torch.Tensor, E: int, BLOCK_M: int, part: int = 0, *, inverse: bool = False) -> Schedule:
    """The schedule of ids_TK for tiles of BLOCK_M rows. R = T * K must be in [1, 2^31).

    part: as many tiles, of about as many parts of so many rows each, and a tile's end is its own, not its expert's.
    inverse: with positions and ends, and a plan of plan_size.
    """
    R = ids_TK.numel()
    assert 1 <= R < 2**31, R
    ids = ids_TK.contiguous()
    bound, rows = tile_bound(R, E, BLOCK_M), (BLOCK_M, part or BLOCK_M, inverse)
    plan = torch.empty(plan_size(R, E) if inverse else 4 + 4 * bound + R, dtype=torch.int32, device=ids.device)
    if sort_launches(R, E) == 1:
        fused = _bound("place", E, rows, min(_SCAN, max(_SUB, power_of_2(R))), ids.dtype, ids.device)
        fused((ceil_div(R, _SUB), 1), (ids, plan, plan), (R, _SUB, bound))
        return Schedule(plan, bound, R)
    length = _SUB * ceil_div(R, _SUB * _MAX_CHUNKS)
    chunks, bins = ceil_div(R, length), _bins_of(E)
    counters = torch.empty((chunks + 1) * bins, dtype=torch.int32, device=ids.device)
    count, scan, place = (
        _bound(step, E, rows, power_of_2(chunks) if step == "scan" else 0, ids.dtype, ids.device)
        for step in ("count", "scan", "place")
    )
    count((chunks, 1), (ids, counters), (R, length))
    scan((bins // _WIDTH, 1), (counters,), (chunks,))
    place((chunks, 1), (ids, counters, plan), (R, length, bound))
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
            rows += [(e, first + a, first + b, 0) for a, b in zip(starts, [*starts[1:], n])]
        else:
            rows += [(e, first + j * BLOCK_M, first + n, 0) for j in range(tiles)]
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
