"""Experts in tensors of their own: a table of their addresses, from which a kernel takes its expert's.

In: Listed tensors, alike in shape and strides. Out: a Table, which the wrappers of our kernels take where they take one
tensor of all experts; `tensor_of` reads it. The weights stay where they are.
Invariants: a table is found by the very addresses that it holds, taken anew at each call (E = 128 in three lists: 34 us
of host time, EPYC, 2026-11-30), so weights that moved never meet the table of where they were. It lives as long as the
memory of its first expert: a CUDA graph that reads a table reads that expert too. None is made while a CUDA graph is
captured, since it comes from the host.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton
import triton.language as tl

from ..operands import ExpertWeights, Listed
from .lasting import lasting


@triton.jit
def tensor_of(w, e, kind: tl.constexpr, LISTED: tl.constexpr):
    """w itself where all experts lie in it; where it is a table, the tensors of experts e. The stride of e is then 0.

    LISTED: 0 where there is no table, else what its addresses are multiples of.
    """
    if LISTED:
        w = tl.multiple_of(tl.load(w + e).to(tl.pointer_type(kind)), LISTED)
    return w


@dataclass(frozen=True, eq=False)
class Table:
    """Addresses of the experts' tensors, int64 [E] on their device; shape and strides are as if they lay in one."""

    addresses: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # 0 for the experts' axis
    multiple: int  # of bytes, that every address is

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]


Experts = torch.Tensor | Table


def alignment(*several: Experts) -> int:
    """LISTED of a kernel that reads these, which are all tables or all tensors."""
    return min(w.multiple for w in several) if type(several[0]) is Table else 0  # type: ignore[union-attr]


def base(w: Any) -> torch.Tensor:
    """What the kernel gets for w."""
    return w.addresses if type(w) is Table else w


_LOCK = threading.Lock()
_TABLES: dict[tuple[int, ...], Table] = {}  # by addresses, then the shape and strides of one expert's tensor


def tables(weights: ExpertWeights) -> ExpertWeights:
    """`weights` with a Table for each list; NoTable where one can't be made."""
    return dataclasses.replace(
        weights,
        gate_up=tuple(map(_table, weights.gate_up)),
        down=_table(weights.down),
        gate_up_bias=tuple(map(_table, weights.gate_up_bias)),
        down_bias=None if weights.down_bias is None else _table(weights.down_bias),
    )


class NoTable(Exception):
    """Why a table can't be made."""


def _table(w: Listed) -> Table:
    first = w.tensors[0]
    addresses = tuple(map(torch.Tensor.data_ptr, w.tensors))
    key = (*addresses, *first.shape, *first.stride())
    found = _TABLES.get(key)
    if found is not None:
        return found
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NoTable("none can be made while a CUDA graph is captured: run the model once before")
    if any(t.device != first.device for t in w.tensors):
        raise NoTable(f"experts on {', '.join(sorted({str(t.device) for t in w.tensors}))}")
    with _LOCK:
        if key not in _TABLES:
            union = reduce(or_, addresses, 16)
            _TABLES[key] = Table(
                addresses=_to(addresses, first.device), shape=w.shape, strides=(0, *first.stride()),
                multiple=union & -union,
            )  # fmt: skip
            # the storage's Python object lives as long as the storage
            weakref.finalize(first.untyped_storage(), _TABLES.pop, key, None).atexit = False
        return _TABLES[key]


def _to(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """An int64 tensor there, complete when this returns."""
    return lasting(lambda: torch.tensor(numbers, dtype=torch.int64).to(device), device)
