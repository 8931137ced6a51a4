"""Indexing by position: slices, integers, None and Ellipsis; tensors in an index go to gather.py."""

from __future__ import annotations

import builtins
from typing import Any

import torch
import torch.fx

from ..algebra.layout import Dim, Val, sliced, taken, taken_at
from ..canonical import Call
from ..verdict import Unproved
from .gather import index_cuts
from .masks import taken_where
from .registry import Context, Result, dim, number, parameter, rule, val


@rule("getitem", moves=True)
def _getitem(c: Context, call: Call) -> Result:
    source = c.value(call.get("input"))
    if isinstance(source, tuple):
        i = call.args["index"]
        if not isinstance(i, int) or not -len(source) <= i < len(source):
            raise Unproved("an unknown item")
        return source[i]
    if source is None:  # an item of results that no rule described
        return None
    if not isinstance(source, Val):
        raise Unproved("not a tensor")
    index = call.args["index"]
    return index_tensor(c, source, index if isinstance(index, tuple) else (index,))


@rule("index")
def _index(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    return index_tensor(c, v, tuple(slice(None) if i is None else i for i in call.args["indices"]))


@rule("slice", "select", "narrow", moves=True)
def _slice(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    d = dim(c, call.get("dim"), len(v.dims), 0)
    if call.op == "select":
        item: Any = call.args["index"]
    elif call.op == "narrow":
        start, length = number(c, call.args["start"]), number(c, call.args["length"])
        if type(start) is not int or type(length) is not int:
            raise Unproved("a slice at unknown bounds")
        item = slice(start, start + length)
    else:
        item = slice(call.get("start"), call.get("end"), call.get("step"))
    return index_tensor(c, v, (*(builtins.slice(None),) * d, item))


def index_tensor(c: Context, v: Val, index: tuple[Any, ...]) -> Result:
    """v[index], with at most one tensor in the index."""
    consumed = sum(1 for i in index if i is not None and i is not Ellipsis)
    if consumed > len(v.dims):
        raise Unproved("too many indices")
    if Ellipsis not in [i for i in index if not isinstance(i, torch.fx.Node)]:
        index = (*index, Ellipsis)
    fill = len(v.dims) - consumed
    d, out = 0, v
    tensors: list[tuple[int, Val]] = []
    for item in index:
        if item is Ellipsis:
            d += fill
        elif item is None:
            dims: tuple[Dim, ...] = (*out.dims[:d], (), *out.dims[d:])
            out, d = Val(dims, out.term, out.dtype), d + 1
        elif isinstance(item, slice):
            got = _sliced(c, out, d, item)
            out, d = got, d + 1
        else:
            at = c.value(item)
            if isinstance(at, Val):
                if at.dtype in (torch.bool, torch.uint8):
                    if consumed != 1 or len(index) > 2:
                        raise Unproved("a boolean mask beside other indices")
                    if not at.term.guarded:
                        raise Unproved("a boolean mask that is not of an expert's routes")
                    return taken_where(c, v, at)
                tensors.append((d, at))
                d += 1
                continue
            n = number(c, item)
            if type(n) is not int or type(out.sizes[d]) is not int:
                raise Unproved("an index at an unknown position")
            got = sliced(c.terms, out, d, n + out.sizes[d] if n < 0 else n, 1)
            out = Val((*got.dims[:d], *got.dims[d + 1 :]), got.term, got.dtype)
    if not tensors:
        some_experts = c.cut and parameter(v) and len(v.dims) == len(out.dims) == 3 and v.sizes[0] != out.sizes[0]
        return None if some_experts else out
    if len(tensors) > 1:
        places = [d for d, _ in tensors]
        if places != list(range(places[0], places[0] + len(places))):
            raise Unproved("several tensors in one index, not side by side")
        if all(index_cuts(c, out, at) for _, at in tensors):
            return None
        return taken_at(c.terms, out, places[0], [at for _, at in tensors])
    where, at = tensors[0]
    if index_cuts(c, out, at):
        return None
    return taken(c.terms, out, where, at)


def _sliced(c: Context, v: Val, d: int, item: slice) -> Val:
    size = v.sizes[d]
    start, stop, step = (number(c, x) for x in (item.start, item.stop, item.step))
    if start in (None, 0) and step in (None, 1) and (stop is None or stop == size or _unbounded(stop)):
        return v
    if type(size) is not int or any(x is not None and type(x) is not int for x in (start, stop, step)):
        raise Unproved("a slice at unknown bounds")
    bounds = range(*slice(start, stop, step).indices(size))
    if not len(bounds) or bounds.step < 1:
        raise Unproved("an empty or reversed slice")
    return sliced(c.terms, v, d, bounds.start, len(bounds), bounds.step)


def _unbounded(stop: Any) -> bool:
    return type(stop) is int and stop >= 2**62
