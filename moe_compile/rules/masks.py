"""Masks of the routes of one expert: ids == e, one-hot ids, and the rows that such a mask picks.

A mask's term is `eq(ids[t, k], e)`. What it picks (`where(mask)`, `nonzero`, `x[mask]`) is rows in an order of their
own that holds only the routes hit: an `Ord` whose order says which. Nothing may sum over such rows as if they were all.
"""

from __future__ import annotations

from typing import Any

import torch

from ..algebra.affine import Axis, axis_index
from ..algebra.layout import Dim, Ord, Order, Val, match_dims, number_of, refresh
from ..algebra.terms import Term
from ..canonical import Call
from ..verdict import Unproved
from .registry import Context, Result, dims, rule, val


def indicator(t: Term) -> Term | None:
    """The `eq` (or `any` of eq) that a mask's term is, through casts and tests against 0 and 1; None for others.

    An `eq` with numbers that the graph reads from a tensor is another.
    """
    while t.op == "cast" or (t.op == "pw" and t.attr in _TESTS and constant(t.args[1]) == _TESTS[t.attr]):
        t = t.args[0]
    tests = t.op == "pw" and t.attr == "eq" and t.args[1].op == "int"
    return t if t.guarded and (t.op == "any" or tests) else None


_TESTS = {"ne": 0, "gt": 0, "ge": 1}


def constant(t: Term) -> Any:
    """The number that a term is; None where it is not one."""
    if t.op == "const":
        return t.attr[1]
    return t.index[0].const if t.op == "int" and not t.index[0].items else None


def expert_test(c: Context, name: str, operands: list[Term | None]) -> bool:
    """Whether a comparison asks which expert a route chose: a top-k's ids with a number or a position."""
    return name in ("eq", "ne") and any(
        t is not None and t.op == "leaf" and t.attr in c.ranges and not t.routed for t in operands
    )


def _rows(c: Context, mask: Val, axes: tuple[Axis, ...], size: Any) -> Ord:
    test = indicator(mask.term)
    if test is None:
        raise Unproved("rows picked by a mask that is not of an expert's routes", repr(mask.term)[:200])
    if not mask.plain or test.free.difference(axes):
        raise Unproved("a mask over rows in sorted order")
    hits = c.terms.bind("hits", axes, (test,))
    return Ord(Order(c.node.name, hits, tuple(a.size for a in axes), hits, size), axes)


def mask_rows(c: Context, mask: Val) -> Dim:
    """The dim of the rows that the mask picks."""
    return (_rows(c, mask, tuple(mask.axes()), c.sizes[0]),)


@rule("one_hot")
def _one_hot(c: Context, call: Call) -> Result:
    ids = val(c, call.get("input"))
    if c.cut and not expert_test(c, "eq", [ids.term]):
        return None
    axis = Axis(c.sizes[-1])
    test = c.terms.equal(ids.term, axis_index(axis), torch.bool)
    return Val((*ids.dims, (axis,)), c.terms.make("cast", (test,), dtype=torch.int64), torch.int64)


@rule("any")
def _any(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    test = indicator(v.term)
    if test is None or test.op == "any":
        return None
    asked, rank = call.get("dim"), len(v.dims)
    which = set(range(rank)) if asked is None else set(dims(c, asked, rank))
    axes = tuple(a for i, d in enumerate(v.dims) if i in which for a in d)
    if not all(isinstance(a, Axis) for a in axes):
        raise Unproved("a test of some of the routes")
    kept = tuple(() if i in which else d for i, d in enumerate(v.dims) if call.get("keepdim") or i not in which)
    return Val(kept, c.terms.bind("any", axes, (test,), dtype=torch.bool) if axes else test, torch.bool)  # type: ignore[arg-type]


@rule("nonzero")
def _nonzero(c: Context, call: Call) -> Result:
    mask = val(c, call.get("input"))
    if call.get("as_tuple"):
        return picked(c, mask)
    found = picked(c, mask) if len(mask.dims) == 1 else None
    if not isinstance(found, tuple):
        return None
    (rows,) = found
    assert isinstance(rows, Val)
    return Val((*rows.dims, ()), rows.term, rows.dtype)  # [rows, 1]: a column for each dim of the mask


def picked(c: Context, mask: Val) -> Result:
    """where(mask): for each dim of the mask, the indices of the places where it is true."""
    if indicator(mask.term) is None:
        return None
    rows = _rows(c, mask, tuple(mask.axes()), c.sizes[0])
    numbers = (number_of([a for a in d if isinstance(a, Axis)]) for d in mask.dims)
    return tuple(Val(((rows,),), c.terms.integer(n), torch.int64) for n in numbers)


def taken_where(c: Context, v: Val, mask: Val) -> Val:
    """v[mask]: the rows of v's leading dims where the mask is true."""
    mask, rank = refresh(c.terms, mask), len(mask.dims)
    picked_dims, term, renamed = match_dims(c.terms, mask, v.dims[:rank])
    lead = Val(picked_dims, term, mask.dtype)
    rows = _rows(c, lead, tuple(lead.axes()), c.sizes[0])
    return Val(((rows,), *v.dims[rank:]), c.terms.substitute(v.term, renamed), v.dtype)
