"""What the kernels of grouped.py, kept.py and backward.py share: a program's tile of the schedule, and its product.

In: a Schedule's plan (sort.py), rows of A at addresses or by descriptor, the experts' weights in their native layout.
Out: fp32 tiles of A @ W[e]^T, first and second halves apart. Invariants: as of grouped.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from .listed import tensor_of
from .sort import Schedule

# Row tiles side by side before the next column tile, so that they find an expert's weights in L2 (fc1 of qwen3next at
# T=4096: 573 us with 8, 589 with 32, 622 with 128; H200, 2026-11-30). Not the schedule's groups, of one expert's tiles:
# qwen3_30b and qwen3next up to 1.7 % slower at T=16 to 128, gpt_oss_20b up to 3 % faster, others alike (2026-12-01).
_GROUP = tl.constexpr(8)


@triton.jit
def tile_at(plan_ptr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """(row tile, column tile) of this program, row tiles fastest in groups of _GROUP; row tile -1: none is left.

    With PDL it waits until the kernel before has written, and lets the one after begin.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid, tiles = tl.program_id(0), tl.load(plan_ptr)
    group = pid // (_GROUP * COLUMNS)
    height = tl.maximum(tl.minimum(tiles - group * _GROUP, _GROUP), 1)
    local = pid - group * _GROUP * COLUMNS
    return tl.where(pid < tiles * COLUMNS, group * _GROUP + local % height, -1), local // height


@triton.jit
def rows_of(plan_ptr, m, M_: tl.constexpr):
    """(expert, first position, end, the positions [M_]) of row tile m; positions from `end` on are not its."""
    tile_ptr = plan_ptr + 4 + 4 * m
    e, first, end = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    return e, first, end, first + tl.arange(0, M_)


@triton.jit
def routes_at(plan_ptr, bound, p, end):
    """The routes at positions p, 0 from `end` on."""
    return tl.load(plan_ptr + 4 + 4 * bound + p, mask=p < end, other=0)


@triton.jit
def product(
    a, a_rows, a_mask, first, w, v, e, n0, stride_ak,
    stride_we, stride_wn, stride_wk, V_ROW: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, TWO: tl.constexpr, PAIRED: tl.constexpr, INTERLEAVED: tl.constexpr,
    K_MAJOR: tl.constexpr, A_TMA: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr,
    M_: tl.constexpr, N_: tl.constexpr, K_: tl.constexpr, LISTED: tl.constexpr = 0,
):  # fmt: skip
    """fp32 tiles [M_, N_] of A @ W[e]^T: of weight rows n0.. (first) and, with TWO, of rows V_ROW + n0.. of v (second).

    PAIRED loads both as one tile with first and second rows alternating and returns it as [M_, 2 N_] (and as itself
    again). A's rows are at pointers a_rows, or at positions `first`.. of descriptor a.
    """
    WIDTH: tl.constexpr = 2 * N_ if PAIRED else N_
    row0 = 2 * n0 if INTERLEAVED else n0
    k = tl.arange(0, K_)
    a_ptrs = a_rows[:, None] + k[None, :] * stride_ak
    if not TMA:
        n = tl.arange(0, WIDTH)
        if INTERLEAVED:
            row, inside = row0 + n, row0 + n < 2 * N
        elif PAIRED:
            row, inside = n0 + n // 2 + (n % 2) * V_ROW, n0 + n // 2 < N
        else:
            row, inside = n0 + n, n0 + n < N
        offset = e.to(tl.int64) * stride_we + row.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
        w_ptrs = tensor_of(w, e, a.dtype.element_ty, LISTED) + offset
        if TWO:
            v_ptrs = tensor_of(v, e, a.dtype.element_ty, LISTED) + offset + V_ROW * stride_wn
    if SWAP:
        acc = tl.zeros((WIDTH, M_), tl.float32)
        acc2 = tl.zeros((WIDTH, M_), tl.float32)
    else:
        acc = tl.zeros((M_, WIDTH), tl.float32)
        acc2 = tl.zeros((M_, WIDTH), tl.float32)
    for k0 in range(0, K, K_):
        if A_TMA:
            x = a.load([first, k0])
        elif K % K_ == 0:
            x = tl.load(a_ptrs + k0 * stride_ak, mask=a_mask[:, None], other=0.0)
        else:
            x = tl.load(a_ptrs + k0 * stride_ak, mask=a_mask[:, None] & (k0 + k < K)[None, :], other=0.0)
        if TMA and K_MAJOR:
            b = tl.trans(tl.reshape(w.load([e, row0, k0]), (WIDTH, K_)))
        elif TMA:
            b = tl.reshape(w.load([e, k0, row0]), (K_, WIDTH))
        elif N % N_ == 0 and K % K_ == 0:
            b = tl.load(w_ptrs)
        else:
            b = tl.load(w_ptrs, mask=inside[None, :] & (k0 + k < K)[:, None], other=0.0)
        if SWAP:
            acc = tl.dot(tl.trans(b), tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, b, acc, input_precision="ieee")
        if TWO:
            if TMA and K_MAJOR:
                b = tl.trans(tl.reshape(v.load([e, V_ROW + n0, k0]), (N_, K_)))
            elif TMA:
                b = tl.reshape(v.load([e, k0, V_ROW + n0]), (K_, N_))
            elif N % N_ == 0 and K % K_ == 0:
                b = tl.load(v_ptrs)
            else:
                b = tl.load(v_ptrs, mask=inside[None, :] & (k0 + k < K)[:, None], other=0.0)
            if SWAP:
                acc2 = tl.dot(tl.trans(b), tl.trans(x), acc2, input_precision="ieee")
            else:
                acc2 = tl.dot(x, b, acc2, input_precision="ieee")
        if not TMA:
            w_ptrs += K_ * stride_wk
            if TWO:
                v_ptrs += K_ * stride_wk
    if SWAP:
        acc = tl.trans(acc)
        acc2 = tl.trans(acc2)
    return acc, acc2


def descriptor(w: torch.Tensor, rows: int, depth: int, k_major: bool) -> Any:
    """The descriptor of weights [E, N, K] (k_major) or [E, K, N], boxes of `rows` x `depth`; zeros past the edges."""
    return TensorDescriptor.from_tensor(w, [1, rows, depth] if k_major else [1, depth, rows])


def tma_aligned(w: torch.Tensor) -> bool:
    """Whether a tensor descriptor can address w: 16-byte base and strides, innermost contiguous."""
    return w.data_ptr() % 16 == 0 and strides_aligned(w.stride(), w.element_size())


def strides_aligned(strides: tuple[int, ...], size: int) -> bool:
    return strides[-1] == 1 and all(s * size % 16 == 0 for s in strides[:-1])


def spans(schedule: Schedule) -> list[tuple[int, int, int]]:
    """(expert, first position, end) of each expert that has routes."""
    starts: dict[int, tuple[int, int, int]] = {}
    for e, first, end, _ in schedule.tiles().tolist():
        starts.setdefault(e, (e, first, end))
    return list(starts.values())
