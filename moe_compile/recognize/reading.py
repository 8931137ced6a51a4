"""Pieces that readers of terms share: casts to look through, factors of a product, the streams of a first linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..activation import Activation, Expr, apply
from ..algebra.affine import Size, as_size
from ..algebra.terms import Term
from ..nodes import fake
from ..verdict import Unproved


def sizes_of(leaf: Term) -> list[Size]:
    """The sizes of the tensor that a leaf reads."""
    return [as_size(n) for n in fake(leaf.attr.node).shape]


def strip(t: Term) -> Term:
    """Without casts between floating dtypes: roundings that a kernel may skip. To eight bits or less is no rounding:
    what a model does so (quantization, simulated or real) is meant."""
    while t.op == "cast" and t.dtype.is_floating_point and t.dtype.itemsize > 1 and _floating(t.args[0]):
        t = t.args[0]
    return t


def integral(t: Term) -> bool:
    return t.dtype in (torch.int32, torch.int64)


def _floating(t: Term) -> bool:
    return t.op == "scalar" or (isinstance(t.dtype, torch.dtype) and t.dtype.is_floating_point)


@dataclass(frozen=True)
class Stream:
    """One output of the first linear: rows coefficient * i + offset of a weight tensor, and maybe of a bias."""

    weight: Term
    storage: str
    coefficient: Size
    offset: Size
    bias: Term | None

    @property
    def row(self) -> tuple[Size, Size]:
        return self.coefficient, self.offset


def halves_of(streams: Sequence[Stream], H: int, I: int) -> tuple[str, list[int]]:
    """Where the streams' rows sit in their tensor(s); and the order of the streams by position there."""
    first = streams[0]
    weights = {s.weight.attr for s in streams}
    G = I * len(streams) if len(weights) == 1 else I
    for s in streams:
        shape = [G, H] if s.storage == "EGH" else [H, G]
        if sizes_of(s.weight)[-2:] != shape:
            raise Unproved("the first linear's weights are only partly used", f"{sizes_of(s.weight)}, not {shape}")
        if s.storage != first.storage or (s.bias is None) != (first.bias is None):
            raise Unproved("gate and up are stored differently")
        if s.bias is not None and sizes_of(s.bias)[-1] != G:
            raise Unproved("the first linear's bias is only partly used", str(sizes_of(s.bias)))
    if len(weights) == 1 and first.bias is not None and len({s.bias.attr for s in streams if s.bias}) != 1:
        raise Unproved("gate and up are stored differently")
    rows = [s.row for s in streams]
    if len(streams) == 1 or len(weights) == 2:
        if any(r != (1, 0) for r in rows):
            raise Unproved("the first linear's rows are permuted", str(rows))
        return ("up" if len(streams) == 1 else "separate"), list(range(len(streams)))
    order = sorted(range(2), key=lambda n: rows[n][1])
    placed = [rows[n] for n in order]
    if placed == [(1, 0), (1, I)]:
        return "gate_up", order
    if placed == [(2, 0), (2, 1)]:
        return "gate_up_interleaved", order
    raise Unproved("gate and up rows are neither halves nor interleaved", str(rows))


SWAPPED = {"gate_up": "up_gate", "gate_up_interleaved": "up_gate_interleaved"}


def named(expr: Expr, streams: int) -> tuple[Activation, bool]:
    """The activation, and whether its streams change names: the gate is the one that gives it a known name."""
    if streams == 1:
        return Activation(_rename(expr)), False
    as_is, swapped = Activation(expr), Activation(swap(expr))
    if as_is.name != "expression" or swapped.name == "expression":
        return as_is, False
    return swapped, True


def factors_of(t: Term) -> list[Term]:
    """The factors of a product, through casts."""
    t = strip(t)
    return [f for a in t.args for f in factors_of(a)] if t.op == "pw" and t.attr == "mul" else [t]


def swap(e: Expr) -> Expr:
    if e.op in ("gate", "up"):
        return Expr("up" if e.op == "gate" else "gate")
    return apply(e.op, *map(swap, e.args)) if e.args else e


def _rename(e: Expr) -> Expr:
    """The lone stream of a non-gated expert is called up."""
    if e.op == "gate":
        return Expr("up")
    return apply(e.op, *map(_rename, e.args)) if e.args else e


def scalar_value(t: Term) -> float:
    """A Python float that dynamic=True made an input: its value, which the compiled graph is then guarded on."""
    node: Any = t.attr
    return float(fake(node))
