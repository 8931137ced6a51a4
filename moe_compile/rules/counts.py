"""Counting ids: how many routes each expert has, and where its rows end in expert order, however it is spelled.

`count[axes](ids)@e` is how many of the bound axes' ids are e, `offsets` how many are at most e.
"""

from __future__ import annotations

import torch

from ..algebra.affine import Affine, Axis, axis_index
from ..algebra.layout import Ord, Val, new_axes
from ..algebra.terms import Term
from ..canonical import Call
from ..verdict import Unproved
from .masks import indicator
from .registry import Context, Result, integer, is_zero, number, ordinary, rule, static_int, val


def key_of(c: Context, v: Val) -> Term:
    """The multiset of a vector's values, as a term without free axes over its rows."""
    t = v.term
    while t.op == "cast" and t.dtype in WIDE and t.args[0].dtype in _INTEGERS:
        t = t.args[0]  # .float() of ids, before histc: exact below 2**24
    return c.terms.bind("key", tuple(v.every()), (t,))


_INTEGERS = (torch.int32, torch.int64, "int")
WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)  # they hold every id and every count


@rule("histc")
def _histc(c: Context, call: Call) -> Result:
    """Counts of integers in [0, bins): histc(ids.float(), bins=E, min=0, max=E - 1). With max=E the last bin holds E
    too, so that none may be an id."""
    v = val(c, call.get("input"))
    if len(v.dims) != 1:
        return None
    bins, low, high = (number(c, call.get(n, d)) for n, d in (("bins", 100), ("min", 0), ("max", 0)))
    if type(bins) is not int or low != 0 or high not in (bins - 1, bins):
        raise Unproved("a histogram whose bins are not one per expert", f"bins={bins}, min={low}, max={high}")
    source = v.term.args[0] if v.term.op == "cast" else v.term
    if v.dtype not in WIDE or source.dtype not in _INTEGERS:
        return None
    bound = c.ranges.get(source.attr) if source.op == "leaf" else None
    if high == bins and (bound is None or bound > bins):
        known = "an unknown bound" if bound is None else bound
        raise Unproved("a histogram whose last bin may hold ids beyond the experts", f"max={high}, ids below {known}")
    dims, index = new_axes((bins,))
    return Val(dims, c.terms.make("count", index=index, attr=key_of(c, v), dtype="int"), v.dtype)


@rule("bincount")
def _bincount(c: Context, call: Call) -> Result:
    """Its length is minlength, or more where an id is larger; a reader that can't do with another length (a grouped
    product) makes the graph say a number. It is minlength for certain where the ids are a top-k's over at most so many.
    """
    v = val(c, call.get("input"))
    (size,), least = c.sizes, static_int(c, call.get("minlength"), 0)
    bound = c.ranges.get(v.term.attr) if v.term.op == "leaf" else None
    if call.get("weights") is not None or type(size) is not int:
        raise Unproved("a bincount of unknown length or with weights")
    if bound is None or bound > least or size != least:
        known = "an unknown bound" if bound is None else bound
        raise Unproved("a bincount whose length depends on the ids", f"minlength={least}, ids below {known}")
    dims, index = new_axes((size,))
    return Val(dims, c.terms.make("count", index=index, attr=key_of(c, v), dtype="int"), c.dtype)


@rule("cumsum")
def _cumsum(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    count = v.term.args[0] if v.term.op == "cast" else v.term
    if count.op != "count":
        if ordinary(v):
            return None
        raise Unproved("a running sum over routes")
    if v.dtype not in WIDE or c.dtype not in WIDE:
        raise Unproved("offsets in a dtype that doesn't hold them", f"counts {v.dtype}, offsets {c.dtype}")
    if len(v.dims) != 1 or count.index != tuple(map(axis_index, v.axes())):
        raise Unproved("a running sum over a part of the counts, or along another dim", repr(count.index))
    return Val(v.dims, c.terms.make("offsets", index=count.index, attr=count.attr, dtype="int"), c.dtype)


def counts_of(c: Context, t: Term, axes: tuple[Axis, ...]) -> Term | None:
    """The sum over `axes` of ids == e (one-hot ids, a comparison with arange), where these are all routes."""
    test = indicator(t) if t.guarded else None
    if test is None or test.op != "pw":
        return None
    ids, at = test.args
    e = at.index[0].single
    if not isinstance(e, Axis) or e in ids.free or ids.free != frozenset(axes):
        return None
    return c.terms.make("count", index=(axis_index(e),), attr=c.terms.bind("key", axes, (ids,)), dtype="int")


def counted(c: Context, base: Val, at: Val, source: Val) -> Val | None:
    """Ones added into zeros at the ids."""
    one = source.term.op == "const" and source.term.attr[1] == 1
    if len(base.dims) != 1 or len(at.dims) != 1 or not is_zero(base.term) or not one or at.sizes != source.sizes:
        return None
    if type(base.sizes[0]) is not int or integer(c.terms, at.term) is not None:
        return None
    dims, index = new_axes(base.sizes)
    return Val(dims, c.terms.make("count", index=index, attr=key_of(c, at), dtype="int"), base.dtype)


@rule("searchsorted")
def _searchsorted(c: Context, call: Call) -> Result:
    """In sorted ids, how many are at most e (right=True), or below e."""
    rows, at = val(c, call.get("sorted_sequence")), c.value(call.get("input"))
    if not isinstance(at, Val) or len(rows.dims) != 1 or len(rows.dims[0]) != 1:
        return None
    (order,) = rows.dims[0]
    if not isinstance(order, Ord) or order.order.key is not key_of(c, rows):
        raise Unproved("a search in rows that are not in expert order")
    if call.get("sorter") is not None or call.get("side") not in (None, "right" if call.get("right") else "left"):
        raise Unproved("a search of another kind")
    asked = integer(c.terms, at.term)
    if asked is None or len(at.dims) != 1:
        return None
    e = asked if call.get("right") else asked + Affine.of(-1)
    return Val(at.dims, c.terms.make("offsets", index=(e,), attr=order.order.key, dtype="int"), c.dtype)
