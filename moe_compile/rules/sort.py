"""Sorting and counting: a sort makes an order, argsort of a permutation its inverse, histc and cumsum its offsets."""

from __future__ import annotations

import operator

import torch
import torch.fx

from ..algebra.affine import Affine, Axis, axis_index
from ..algebra.layout import Ord, Order, Val, number_of, position
from ..canonical import Call
from ..verdict import Unproved
from .counts import key_of
from .gather import bijection
from .registry import Context, Result, dim, integer, rule, static_int, val


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
    order = Order(c.node.name, key_of(c, v), tuple(a.size for a in digits))
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


@rule("argmax")
def _argmax(c: Context, call: Call) -> Result:
    """A top-1's ids; of equal scores, the first."""
    v = val(c, call.get("input"))
    if call.get("dim") is None:
        raise Unproved("an argmax over all dims")
    found = best_of(c, v, dim(c, call.get("dim"), len(v.dims)), bool(call.get("keepdim")), c.node)
    return None if found is None else found[1]


def best_of(c: Context, v: Val, d: int, keepdim: bool, ids: torch.fx.Node) -> tuple[Result, Val] | None:
    """(the best of dim `d`, its index, which `ids` holds), in a walk that opens routers; else the ids stay a leaf."""
    if type(v.sizes[d]) is int:
        key = c.leaf(ids).term.attr
        c.ranges[key] = v.sizes[d]
        if keepdim:
            c.distinct[key] = d
    if c.cut:
        return None
    if d != len(v.dims) - 1:
        raise Unproved("an argmax along a dim that is not the last")
    c.selections[ids] = v
    chosen = c.leaf(ids)
    held = chosen.dims[:-1] if keepdim else chosen.dims
    if any(len(da) != len(db) for da, db in zip(v.dims[:d], held)):
        raise Unproved("an argmax over dims that do not match")
    mapping = {b: axis_index(a) for da, db in zip(v.dims[:d], held) for a, b in zip(da, db)}  # type: ignore[arg-type]
    term = c.terms.substitute(chosen.term, mapping)  # type: ignore[arg-type]
    at = Val((*v.dims[:d], *([()] if keepdim else [])), term, torch.int64)
    return _at(c, v, d, at), at


def _rest(v: Val, d: int) -> tuple[Affine, ...]:
    return tuple(axis_index(a) for dim in v.dims[:d] for a in dim if isinstance(a, Axis))


def _at(c: Context, v: Val, d: int, at: Val) -> Result:
    chosen = v.dims[d]
    if len(chosen) != 1 or not isinstance(chosen[0], Axis):
        return None
    return Val(at.dims, c.terms.substitute(v.term, {chosen[0]: c.terms.value(at.term)}), v.dtype)
