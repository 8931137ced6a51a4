"""Reductions: a sum binds its axes; over k it is the combination of a token's experts."""

from __future__ import annotations

from ..algebra.layout import Val
from ..algebra.terms import axis_index
from ..canonical import Call
from ..verdict import Reject
from .registry import Context, Result, cut_here, dim_of, rule, static_int, val


@rule("sum")
def _sum(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    if cut_here(c, v):
        return None
    asked = call.get("dim")
    rank = len(v.dims)
    which = (
        set(range(rank)) if asked is None or asked == () else
        {dim_of(int(d), rank) for d in (asked if isinstance(asked, (tuple, list)) else (asked,))}
    )
    summed = Val(tuple(d for i, d in enumerate(v.dims) if i in which), v.term, v.dtype)
    keep = bool(call.get("keepdim"))
    dims = tuple(() if i in which else d for i, d in enumerate(v.dims) if keep or i not in which)
    return Val(dims, c.terms.bind("sum", tuple(summed.axes()), (v.term,), dtype=c.dtype), c.dtype)


@rule("softmax")
def _softmax(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    if cut_here(c, v):
        return None
    d = static_int(c, call.get("dim"))
    if d is None:
        return Reject("a softmax over an unknown dim")
    d = dim_of(d, len(v.dims))
    body = Val((v.dims[d],), v.term, v.dtype)
    term = v.term if c.dtype == v.dtype else c.terms.make("cast", (v.term,), dtype=c.dtype)
    axes = tuple(body.axes())
    out = c.terms.bind("softmax", axes, (term,), tuple(axis_index(a) for a in axes), dtype=c.dtype)
    return Val(v.dims, out, c.dtype)


@rule("mean")
def _mean(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    return None if cut_here(c, v) else Reject("a mean where a sum is expected")


@rule("amax")
def _amax(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    out = _maximum(c, v, call)
    return out if isinstance(out, Reject) or not isinstance(c.node.meta.get("example_value", c.node.meta.get("val")),
                                                            tuple) else (out, None)


def _maximum(c: Context, v: Val, call: Call) -> Val | Reject:
    d = static_int(c, call.get("dim"))
    if c.cut or d is None or call.get("keepdim"):
        return Reject("a maximum where a sum is expected")
    d = dim_of(d, len(v.dims))
    body = Val((v.dims[d],), v.term, v.dtype)
    return Val((*v.dims[:d], *v.dims[d + 1 :]), c.terms.bind("max", tuple(body.axes()), (v.term,), dtype=v.dtype), v.dtype)
