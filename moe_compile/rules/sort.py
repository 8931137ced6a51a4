"""Sorting and counting: a sort makes an order, argsort of a permutation its inverse, histc and cumsum its offsets."""

from __future__ import annotations

import operator

import torch
import torch.fx

from ..algebra.affine import Affine, Axis, axis_index
from ..algebra.layout import Ord, Order, Val, new_axes, number_of, position
from ..algebra.terms import Term
from ..canonical import Call
from ..verdict import Unproved
from .gather import bijection
from .registry import Context, Result, dim, integer, number, ordinary, rule, static_int, val


def _key(c: Context, v: Val) -> Term:
    """The multiset of a vector's values, as a term without free axes over its rows."""
    t = v.term
    while t.op == "cast" and t.dtype in _WIDE and t.args[0].dtype in _INTEGERS:
        t = t.args[0]  # .float() of ids, before histc: exact below 2**24
    return c.terms.bind("key", tuple(v.every()), (t,))


_INTEGERS = (torch.int32, torch.int64, "int")
_WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)  # they hold every id and every count


@rule("sort", "argsort")
def _sort(c: Context, call: Call) -> Result:
    """(values, indices) of a vector of integers. Rows are routes in an order of their own, even for equal keys."""
    v = val(c, call.get("input"))
    if len(v.dims) != 1 or v.dtype not in (torch.int32, torch.int64):
        return None
    if call.get("descending"):
        raise Unproved("a descending sort of expert ids")
    known = integer(c.terms, v.term)
    if known is not None:
        order_axes = bijection(known, v.every(), v.sizes[0])
        if order_axes is None:
            raise Unproved("a sort of positions that are not a permutation")
        rows = v.dims[0]
        if len(rows) == 1 and isinstance(rows[0], Ord):
            term = position(c.terms, rows[0])
        elif not v.plain:
            raise Unproved("an inverse of rows that are only partly sorted")
        else:
            term = c.terms.integer(number_of(v.axes()))
        inverse = Val((tuple(order_axes),), term, torch.int64)
        if call.op == "argsort":
            return inverse
        return None, inverse
    if not v.plain:
        raise Unproved("a sort of rows that are sorted already")
    digits = tuple(a for a in v.axes())
    order = Order(c.node.name, _key(c, v), tuple(a.size for a in digits))
    dims = (((Ord(order, digits),) if digits else ()),)
    permutation = Val(dims, c.terms.integer(number_of(digits)), torch.int64)
    return permutation if call.op == "argsort" else (Val(dims, v.term, v.dtype), permutation)


def item(node: torch.fx.Node, i: int) -> torch.fx.Node | None:
    """The getitem node that takes output i of a tuple."""
    return next((u for u in node.users if u.target is operator.getitem and u.args[1] == i), None)


@rule("topk")
def _topk(c: Context, call: Call) -> Result:
    """(values, ids): the ids are a leaf; the values are the input read at the ids."""
    v = val(c, call.get("input"))
    ids = item(c.node, 1)
    d = dim(c, call.get("dim"), len(v.dims), -1)
    if not c.cut and not call.get("largest", True):
        raise Unproved("a top-k of the smallest")
    if ids is not None and type(v.sizes[d]) is int:
        key = c.leaf(ids).term.attr
        c.ranges[key], c.distinct[key] = v.sizes[d], d
    if c.cut:
        return None, None
    if d != len(v.dims) - 1:
        raise Unproved("a top-k along a dim that is not the last")
    if ids is None:
        # only the values are read (the two best scores of a group): they are the choices of this very node
        k = static_int(c, call.get("k"))
        axis = Axis(k)
        chosen = c.terms.make("choice", index=(axis_index(axis), *(_rest(v, d))), attr=c.node, dtype="int")
        return _at(c, v, d, Val((*v.dims[:d], (axis,) if k != 1 else ()), chosen, torch.int64)), None
    c.selections[ids] = v
    chosen_val = c.leaf(ids)
    # the ids' own dims are renamed to the input's
    axes = {b: a for da, db in zip(v.dims[:d], chosen_val.dims[:d]) for a, b in zip(da, db)}
    if any(len(da) != len(db) for da, db in zip(v.dims[:d], chosen_val.dims[:d])):
        raise Unproved("a top-k over dims that do not match")
    mapping = {b: axis_index(a) for b, a in axes.items()}  # type: ignore[arg-type]
    term = c.terms.substitute(chosen_val.term, mapping)  # type: ignore[arg-type]
    at = Val((*v.dims[:d], chosen_val.dims[d]), term, torch.int64)
    return _at(c, v, d, at), at


def _rest(v: Val, d: int) -> tuple[Affine, ...]:
    return tuple(axis_index(a) for dim in v.dims[:d] for a in dim if isinstance(a, Axis))


def _at(c: Context, v: Val, d: int, at: Val) -> Result:
    chosen = v.dims[d]
    if len(chosen) != 1 or not isinstance(chosen[0], Axis):
        return None
    return Val(at.dims, c.terms.substitute(v.term, {chosen[0]: c.terms.value(at.term)}), v.dtype)


@rule("histc")
def _histc(c: Context, call: Call) -> Result:
    """Counts of integers in [0, bins): histc(ids.float(), bins=E, min=0, max=E - 1 or E)."""
    v = val(c, call.get("input"))
    if len(v.dims) != 1:
        return None
    bins, low, high = (number(c, call.get(n, d)) for n, d in (("bins", 100), ("min", 0), ("max", 0)))
    if type(bins) is not int or low != 0 or high not in (bins - 1, bins):
        raise Unproved("a histogram whose bins are not one per expert", f"bins={bins}, min={low}, max={high}")
    source = v.term.args[0] if v.term.op == "cast" else v.term
    if v.dtype not in _WIDE or source.dtype not in _INTEGERS:
        return None
    dims, index = new_axes((bins,))
    return Val(dims, c.terms.make("count", index=index, attr=_key(c, v), dtype="int"), v.dtype)


@rule("bincount")
def _bincount(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    size = c.sizes[0]
    if call.get("weights") is not None or type(size) is not int:
        raise Unproved("a bincount of unknown length or with weights")
    dims, index = new_axes((size,))
    return Val(dims, c.terms.make("count", index=index, attr=_key(c, v), dtype="int"), c.dtype)


@rule("cumsum")
def _cumsum(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    count = v.term.args[0] if v.term.op == "cast" else v.term
    if count.op != "count":
        if ordinary(v):
            return None
        raise Unproved("a running sum over routes")
    if v.dtype not in _WIDE or c.dtype not in _WIDE:
        raise Unproved("offsets in a dtype that doesn't hold them", f"counts {v.dtype}, offsets {c.dtype}")
    if len(v.dims) != 1 or count.index != tuple(map(axis_index, v.axes())):
        raise Unproved("a running sum over a part of the counts, or along another dim", repr(count.index))
    return Val(v.dims, c.terms.make("offsets", index=count.index, attr=count.attr, dtype="int"), c.dtype)
