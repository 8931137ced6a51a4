"""The two grouped linears of many rows an expert, for Hopper: warps that fetch beside warps that multiply (Gluon).

In, out, arguments and invariants: as grouped.fc1 and fc2, whose torch twins are these kernels' too. What differs is the
schedule. A program stays on its processor and claims tile after tile. One partition of its warps fetches, as far ahead
as its buffers reach: weights and sorted rows by tensor descriptors, or x's rows gathered by their routes; so the next
tile's first operands arrive while this one's results are stored. Two or three others multiply 64 rows of the tile each
(hopper_parts.py), and rest where it has fewer; two warps that are left do other work for training (beside.py). What
limits a large load is what L2 delivers: a tile of 192 rows reads an expert's weights once where tiles of 128 read them
twice; but its products are 128 wide, not 256, and its buffers three, not four. A tile of at most 64 or 160 has its
rows, in units of 32, as the products' columns; two multiplying partitions share out the weights' columns
(hopper_swapped.py).

`permute` copies x's rows into expert order first. Gathering costs fc1 up to a tenth of its time; the copy moves 4 H
bytes a route whatever I, so that with a larger I it is the cheaper of the two (whole calls, T=4096: qwen3_30b 707 us
gathered, 726 copied; gpt_oss_20b 1611, 1581; H200, 2026-12-01). docs/kernels.md has what else was tried.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import sizes
from .beside import NOTHING, Beside, Kind, beside_partition, nothing
from .hopper_parts import barriers, fetch_partition, multiply_partition, telling, tile_of
from .hopper_swapped import SIDE, swapped_partition
from .launch import Bound, ceil_div, power_of_2
from .sizes import HEIGHTS, PART
from .sort import Schedule

DEPTH = 64  # columns of x that a buffer holds
ROWS = 2 * PART  # of the default tile
PAIRED = gl.constexpr(sizes.PAIRED)
# Where the gate and up rows of a tile are in memory: there is no gate; alternating; in two blocks of a tensor; in two
# tensors.
ALONE, ALTERNATING, BLOCKS, TENSORS = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Persistent:
    """ROWS of a tile at most, N columns (for fc1: of gate and of up each), S buffers; GATHER: fc1 reads x's rows by
    their routes, not sorted ones; H is then a multiple of 64. 64 and 160 rows are the products' columns
    (hopper_swapped.py); N is then 256, with a gate 128. AHEAD: the kernel before it in the stream began when the
    schedule was complete; so its first weights are fetched while that ends."""

    N: int
    S: int = 0  # as many as fit
    GATHER: int = 0
    ROWS: int = 128
    AHEAD: bool = False


@gluon.jit(do_not_specialize=["bound", "tokens"])
def _kernel(
    x_ptr, a, w, v, bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, stride_xt, source_ptr, ids_ptr,
    other_ptr, result_ptr, stride, bound, tokens,
    CHOICES: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BK: gl.constexpr,
    PARTS: gl.constexpr, SWAP: gl.constexpr, S: gl.constexpr, GATHER: gl.constexpr,
    FIRST: gl.constexpr, HALVES: gl.constexpr, GATE_FIRST: gl.constexpr, K_MAJOR: gl.constexpr,
    stride_be: gl.constexpr, V_ROW: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, KEEP: gl.constexpr,
    ACT: gl.constexpr, A_LAYOUT: gl.constexpr, B_SHAPE: gl.constexpr, B_LAYOUT: gl.constexpr,
    TURNED_LAYOUT: gl.constexpr, REGISTERS: gl.constexpr, FETCH_REGISTERS: gl.constexpr, BESIDE: gl.constexpr,
    E: gl.constexpr, TOPK: gl.constexpr, H: gl.constexpr, BLOCK: gl.constexpr, WEIGHTED: gl.constexpr,
    AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """FIRST: fc1, else fc2. The weights' buffers are B_SHAPE, rows and columns of x's PARTS * M x BK. BESIDE, or None,
    and what comes with it: beside.py."""
    if PDL and not AHEAD:  # else the fetching warp waits
        gdc_wait()
        gdc_launch_dependents()
    kind: gl.constexpr = out_ptr.dtype.element_ty
    WIDTH: gl.constexpr = N if HALVES == 0 else 2 * N
    A_BYTES: gl.constexpr = M * BK * kind.primitive_bitwidth // 8
    B_BYTES: gl.constexpr = WIDTH * BK * kind.primitive_bitwidth // 8
    COLUMNS: gl.constexpr = (OUT + N - 1) // N
    FETCHERS: gl.constexpr = 4 if GATHER else 1
    MULTIPLIERS: gl.constexpr = 2 if SWAP else PARTS
    a_bufs = gl.allocate_shared_memory(kind, [S * PARTS, M, BK], A_LAYOUT)
    b_bufs = gl.allocate_shared_memory(kind, B_SHAPE, B_LAYOUT)
    full, empty = barriers(S, 1 + (32 * FETCHERS if GATHER else 0), MULTIPLIERS)  # every copying thread arrives too
    told, told_full, told_empty = telling(FETCHERS, MULTIPLIERS)
    tiles = gl.load(plan_ptr)
    pid = tile_of(gl.program_id(0), tiles, plan_ptr, bound, COLUMNS)
    if SWAP:
        turned = gl.allocate_shared_memory(kind, [2, SIDE, SIDE], TURNED_LAYOUT)
        gl.warp_specialize(
            [
                (swapped_partition, (
                    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs, full, empty,
                    told, told_full, told_empty, turned, 0, PARTS, COLUMNS, N, BK, K, OUT, GATHER, FIRST,
                    HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, ACT,
                )),
                (swapped_partition, (
                    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs, full, empty,
                    told, told_full, told_empty, turned, 1, PARTS, COLUMNS, N, BK, K, OUT, GATHER, FIRST,
                    HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, ACT,
                )),
                (fetch_partition, (
                    x_ptr, a, w, v, plan_ptr, bound, stride_xt, tiles, pid, a_bufs, b_bufs, full, empty, told,
                    told_full, told_empty, CHOICES, COLUMNS, K, PARTS, N, BK, GATHER, HALVES, K_MAJOR, A_BYTES, B_BYTES,
                    AHEAD, PAIRED,
                )),
            ],
            [4, FETCHERS],
            [REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip
    elif BESIDE is not None:
        gl.warp_specialize(
            [
                (multiply_partition, (
                    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs,
                    full, empty, told, told_full, told_empty, 0, PARTS, COLUMNS, N, BK, K, OUT, GATHER, FIRST,
                    HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT,
                )),
                (multiply_partition, (
                    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs,
                    full, empty, told, told_full, told_empty, 1, PARTS, COLUMNS, N, BK, K, OUT, GATHER, FIRST,
                    HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT,
                )),
                (beside_partition, (
                    source_ptr, ids_ptr, other_ptr, result_ptr, tokens, stride, BESIDE, E, TOPK, H, BLOCK, WEIGHTED,
                )),
                (fetch_partition, (
                    x_ptr, a, w, v, plan_ptr, bound, stride_xt, tiles, pid, a_bufs, b_bufs, full, empty, told,
                    told_full, told_empty, CHOICES, COLUMNS, K, PARTS, N, BK, GATHER, HALVES, K_MAJOR, A_BYTES, B_BYTES,
                    AHEAD, PAIRED,
                )),
            ],
            [4, 2, 1],
            [208, 88, 88],
        )  # fmt: skip
    elif PARTS == 2:
        gl.warp_specialize(
            [
                (multiply_partition, (
                    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs,
                    full, empty, told, told_full, told_empty, 0, PARTS, COLUMNS, N, BK, K, OUT, GATHER, FIRST,
                    HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT,
                )),
                (multiply_partition, (
                    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs,
                    full, empty, told, told_full, told_empty, 1, PARTS, COLUMNS, N, BK, K, OUT, GATHER, FIRST,
                    HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT,
                )),
                (fetch_partition, (
                    x_ptr, a, w, v, plan_ptr, bound, stride_xt, tiles, pid, a_bufs, b_bufs, full, empty, told,
                    told_full, told_empty, CHOICES, COLUMNS, K, PARTS, N, BK, GATHER, HALVES, K_MAJOR, A_BYTES, B_BYTES,
                    AHEAD, PAIRED,
                )),
            ],
            [4, FETCHERS],
            [REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_partition, (
                    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs,
                    full, empty, told, told_full, told_empty, 0, PARTS, COLUMNS, N, BK, K, OUT, GATHER, FIRST,
                    HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT,
                )),
                (multiply_partition, (
                    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs,
                    full, empty, told, told_full, told_empty, 1, PARTS, COLUMNS, N, BK, K, OUT, GATHER, FIRST,
                    HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT,
                )),
                (multiply_partition, (
                    bias_ptr, bias2_ptr, route_weight_ptr, out_ptr, kept_ptr, plan_ptr, bound, tiles, a_bufs, b_bufs,
                    full, empty, told, told_full, told_empty, 2, PARTS, COLUMNS, N, BK, K, OUT, GATHER, FIRST,
                    HALVES, GATE_FIRST, K_MAJOR, stride_be, V_ROW, BIAS, SCALE, KEEP, ACT,
                )),
                (fetch_partition, (
                    x_ptr, a, w, v, plan_ptr, bound, stride_xt, tiles, pid, a_bufs, b_bufs, full, empty, told,
                    told_full, told_empty, CHOICES, COLUMNS, K, PARTS, N, BK, GATHER, HALVES, K_MAJOR, A_BYTES, B_BYTES,
                    AHEAD, PAIRED,
                )),
            ],
            [4, 4, FETCHERS],
            [REGISTERS, REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip


@triton.jit(do_not_specialize=["bound"])
def _permute_kernel(
    x_ptr, out_ptr, plan_ptr, stride_xt, bound, CHOICES: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[p] = x[routes[p] // CHOICES]; rows past the last tile's end are not written."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tiles = tl.load(plan_ptr)
    if tiles == 0:
        return
    here = p < tl.load(plan_ptr + 4 * tiles + 2)  # the last tile's end
    t = (tl.load(plan_ptr + 4 + 4 * bound + p, mask=here, other=0) // CHOICES).to(tl.int64)
    mask = here[:, None] & (h < H)
    rows = tl.load(x_ptr + t[:, None] * stride_xt + h, mask=mask)
    tl.store(out_ptr + p.to(tl.int64)[:, None] * H + h, rows, mask=mask)


def permute(x_TH: torch.Tensor, schedule: Schedule, choices: int) -> torch.Tensor:
    """x_RH [R, H]: the rows of x in sorted order. x's rows are contiguous."""
    H = x_TH.shape[1]
    out = torch.empty((schedule.R, H), dtype=x_TH.dtype, device=x_TH.device)
    bound, rows, block = _permute_bound(choices, H, x_TH.dtype, x_TH.device)
    grid = (ceil_div(schedule.R, rows), ceil_div(H, block))
    bound(grid, (x_TH, out, schedule.plan, x_TH.stride(0)), (schedule.bound,))
    return out


@lru_cache(1024)
def _permute_bound(choices: int, H: int, dtype: Any, device: torch.device) -> tuple[Bound, int, int]:
    """The kernel, and a program's rows and columns: 64 bytes in flight for each of its threads."""
    block = min(1024, power_of_2(H))
    rows = 4096 // block
    return Bound(_permute_kernel, (choices, H, rows, block), device, overlap=True), rows, block


def swizzled(shape: list[int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def weights_box(halves: str, n: int, k_major: bool) -> tuple[int, list[int], list[int]]:
    """For n columns of a tile: where gate and up rows are, the box of the weights' descriptor, a buffer's shape."""
    if halves == "up":
        kind, box, shape = ALONE, [1, n, DEPTH], [1, n, DEPTH]
    elif halves.endswith("interleaved"):
        kind, box, shape = ALTERNATING, [1, 2 * n, DEPTH], [1, 2 * n, DEPTH]
    elif halves == "separate":
        kind, box, shape = TENSORS, [1, n, DEPTH], [2, n, DEPTH]
    else:
        kind, box, shape = BLOCKS, [1, 2, n, DEPTH], [1, 2, n, DEPTH]
    if not k_major:
        assert kind in (ALONE, ALTERNATING), halves
        box = shape = [1, DEPTH, box[1]]
    return kind, box, shape


def processors(device: torch.device) -> int:
    """How many programs stay on `device`, one a processor; where there is none to ask, an H200's."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@lru_cache(1024)
def _bound(
    tile: Persistent, first: bool, act: Any, choices: int, sizes: tuple[int, int], halves: str, k_major: bool,
    dtype: torch.dtype, device: torch.device, bias_stride: int | None, weights: Any, keep: int = 0,
    beside: Kind = NOTHING,
) -> tuple[Bound, tuple[int, ...], tuple[int, ...], Any, Any, int]:  # fmt: skip
    """The kernel; the boxes of the weights' and the rows' descriptors and their layouts; how many programs run."""
    H, I = sizes
    depth, columns = (H, I) if first else (I, H)
    gather = first and bool(tile.GATHER)
    kind, box, shape = weights_box(halves if first else "up", tile.N, k_major)
    height = HEIGHTS[tile.ROWS]
    part, swap = height.part, height.as_columns
    rows = [part, DEPTH]
    w_layout, a_layout = swizzled(box, dtype), swizzled(rows, dtype)
    programs, buffers = processors(device), tile.S or height.buffers
    assert not (swap and (keep or beside is not NOTHING)), (tile, keep)
    registers = height.gathering if gather else (height.registers, 24)
    constants = (
        choices, depth, columns, part, tile.N, DEPTH, tile.ROWS // part, swap, buffers, gather, first,
        kind, not halves.startswith("up_gate"), k_major, bias_stride or 0, 0 if kind == TENSORS else I,
        bias_stride is not None, weights is not None, keep, act, a_layout, (buffers, *shape), w_layout,
        swizzled([SIDE.value, SIDE.value], dtype), *registers, *beside.constants, tile.AHEAD,
    )  # fmt: skip
    overlap = first or tile.AHEAD
    bound = Bound(_kernel, constants, device, warps=4, overlap=overlap, registers=128 if tile.ROWS == 192 else 168)
    return bound, tuple(box), tuple(rows), w_layout, a_layout, programs


def fc1(
    x: torch.Tensor, gate_up: tuple[torch.Tensor, ...], bias: tuple[torch.Tensor, ...],
    weights_TK: torch.Tensor | None, schedule: Schedule, act: Any, *, choices: int, sizes: tuple[int, int],
    gated: bool, halves: str, k_major: bool, tile: Persistent, kept: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """act_RI as of grouped.fc1. x: x_TH where tile.GATHER, else its rows in sorted order (`permute`).

    kept: where gate_up_RG goes as well, in the order of the weights' rows; with I columns, the last of them (then the
    halves are two blocks).
    """
    keep = 0 if kept is None else 2 if gated and kept.shape[1] == sizes[1] else 1
    bound, box, rows, w_layout, a_layout, programs = _bound(
        tile, True, act, choices, sizes, halves, k_major, x.dtype, x.device, bias[0].stride(0) if bias else None,
        None if weights_TK is None else weights_TK.dtype, keep,
    )  # fmt: skip
    out = torch.empty((schedule.R, sizes[1]), dtype=x.dtype, device=x.device)
    views = [torch.unflatten(w, 1, (2, sizes[1])) if len(box) == 4 else w for w in gate_up]
    w, v = (TensorDescriptor.from_tensor(t, list(box), w_layout) for t in (views[0], views[-1]))
    arguments = (
        x, w if tile.GATHER else TensorDescriptor.from_tensor(x, list(rows), a_layout), w, v,
        bias[0] if bias else x, bias[-1] if bias else x, x if weights_TK is None else weights_TK.contiguous(), out,
        out if kept is None else kept, schedule.plan, x.stride(0), *nothing(out).arguments,
    )  # fmt: skip
    bound((min(programs, schedule.bound * ceil_div(sizes[1], tile.N)), 1), arguments, (schedule.bound, 0))
    return out


def fc2(
    act_RI: torch.Tensor, down: torch.Tensor, bias: torch.Tensor | None, schedule: Schedule, *, k_major: bool,
    tile: Persistent, beside: Beside | None = None,
) -> torch.Tensor:  # fmt: skip
    """y_RH as of grouped.fc2. beside: what else the launch does, with tiles of 128 rows."""
    sizes, also = (down.shape[1 if k_major else 2], act_RI.shape[1]), beside or nothing(act_RI)
    bound, box, rows, w_layout, a_layout, programs = _bound(
        tile, False, None, 1, sizes, "up", k_major, act_RI.dtype, act_RI.device,
        None if bias is None else bias.stride(0), None, 0, also.kind,
    )  # fmt: skip
    y = torch.empty((schedule.R, sizes[0]), dtype=act_RI.dtype, device=act_RI.device)
    w = TensorDescriptor.from_tensor(down, list(box), w_layout)
    a = TensorDescriptor.from_tensor(act_RI, list(rows), a_layout)
    biased = act_RI if bias is None else bias
    arguments = (act_RI, a, w, w, biased, biased, act_RI, y, y, schedule.plan, act_RI.stride(0), *also.arguments)
    bound((min(programs, schedule.bound * ceil_div(sizes[0], tile.N)), 1), arguments, (schedule.bound, also.tokens))
    return y
