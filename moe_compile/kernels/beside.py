"""Copies and sums of tokens' rows that go on beside products, by warps that a kernel for Hopper has left (Gluon).

In, out: as of spread.spread and finalize.finalize, whose torch twins are these functions' too, and whose results these
are to the bit. What moves rows waits for memory, what multiplies for the tensor cores: one after the other, each rests
while the other works (forward + backward, T=16384: qwen3_30b 3.4 % of the time, mixtral 1.9 %; H200, 2026-12-01).
Invariants: one program makes an element, sums in slot order and fp32; the result is there when the kernel has run that
was given a `Beside`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .launch import power_of_2
from .sort import Schedule


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for: a function of this file and its constants; and the dtypes of its tensors."""

    constants: tuple[Any, ...]
    dtypes: tuple[torch.dtype, ...] = ()


NOTHING = Kind((None, 0, 0, 0, 0, False))


@dataclass(frozen=True, kw_only=True, eq=False)
class Beside:
    """Of a kind; arguments: source, ids, other, result, and the stride of the source's rows."""

    kind: Kind
    arguments: tuple[Any, ...]
    tokens: int

    @property
    def result(self) -> torch.Tensor:
        result: torch.Tensor = self.arguments[3]
        return result


def nothing(anything: torch.Tensor) -> Beside:
    """Of a launch that does nothing else: its kernel reads none of this."""
    return Beside(kind=NOTHING, arguments=(*4 * (anything,), 1), tokens=0)


@gluon.jit
def _spread(x_ptr, ids_ptr, positions_ptr, out_ptr, tokens, stride_xt, E: gl.constexpr, K: gl.constexpr,
            H: gl.constexpr, BLOCK: gl.constexpr, WEIGHTED: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    t = gl.program_id(0).to(gl.int64)
    while t < tokens:
        for h0 in range(0, H, BLOCK):
            h = h0 + gl.arange(0, BLOCK, layout)
            x = gl.load(x_ptr + t * stride_xt + h, mask=h < H)
            for k in gl.static_range(K):
                e = gl.load(ids_ptr + t * K + k)
                here = (e >= 0) & (e < E)
                p = gl.load(positions_ptr + t * K + k, mask=here, other=0).to(gl.int64)
                gl.store(out_ptr + p * H + h, x, mask=h < gl.where(here, H, 0))
        t += gl.num_programs(0)


@gluon.jit
def _finalize(y_ptr, ids_ptr, weights_ptr, out_ptr, tokens, stride, E: gl.constexpr, K: gl.constexpr, H: gl.constexpr,
              BLOCK: gl.constexpr, WEIGHTED: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    t = gl.program_id(0).to(gl.int64)
    while t < tokens:
        for h0 in range(0, H, BLOCK):
            h = h0 + gl.arange(0, BLOCK, layout)
            total = gl.zeros((BLOCK,), gl.float32, layout)
            for k in gl.static_range(K):
                e = gl.load(ids_ptr + t * K + k)
                here = (e >= 0) & (e < E)
                y = gl.load(y_ptr + (t * K + k) * H + h, mask=h < gl.where(here, H, 0), other=0.0).to(gl.float32)
                if WEIGHTED:
                    y = y * gl.where(here, gl.load(weights_ptr + t * K + k).to(gl.float32), 0.0)
                total += y
            gl.store(out_ptr + t * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)
        t += gl.num_programs(0)


@gluon.jit
def beside_partition(
    source_ptr, ids_ptr, other_ptr, result_ptr, tokens, stride, BESIDE: gl.constexpr, E: gl.constexpr, K: gl.constexpr,
    H: gl.constexpr, BLOCK: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """BESIDE, one of the two above: every num_programs-th token is this program's."""
    BESIDE(source_ptr, ids_ptr, other_ptr, result_ptr, tokens, stride, E, K, H, BLOCK, WEIGHTED)


def spread(x_TH: torch.Tensor, ids_TK: torch.Tensor, schedule: Schedule, E: int) -> Beside:
    """Its result: x_RH of spread.spread."""
    (T, K), H = ids_TK.shape, x_TH.shape[1]
    out = torch.empty((T * K, H), dtype=x_TH.dtype, device=x_TH.device)
    tensors = (x_TH, ids_TK.contiguous(), schedule.positions(), out)
    return _of((_spread, E, K, H, min(2048, power_of_2(H)), False), tensors, T, x_TH.stride(0))


def finalize(
    y_RH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, E: int, dtype: torch.dtype
) -> Beside:
    """Its result: out_TH of finalize.finalize."""
    (T, K), H = ids_TK.shape, y_RH.shape[1]
    out = torch.empty((T, H), dtype=dtype, device=y_RH.device)
    tensors = (y_RH, ids_TK.contiguous(), y_RH if weights_TK is None else weights_TK.contiguous(), out)
    return _of((_finalize, E, K, H, min(512, power_of_2(H)), weights_TK is not None), tensors, T, H)


def _of(constants: tuple[Any, ...], tensors: tuple[torch.Tensor, ...], tokens: int, stride: int) -> Beside:
    kind = Kind(constants, tuple(t.dtype for t in tensors))
    return Beside(kind=kind, arguments=(*tensors, stride), tokens=tokens)
