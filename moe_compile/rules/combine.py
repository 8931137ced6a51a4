"""Reductions: a sum binds its axes; over k it is the combination of a token's experts."""

from __future__ import annotations

from ..algebra.affine import axis_index
from ..algebra.layout import Val
from ..canonical import Call
from ..nodes import fake
from ..verdict import Unproved
from .counts import counts_of
from .registry import Context, Result, cut_here, dim, dims, rule, val
from .sort import best_of, item


@rule("sum", "mean", cuts=True)
def _sum(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if cut_here(c, v):
        return None
    asked = call.get("dim")
    rank = len(v.dims)
    which = set(range(rank)) if asked is None or asked == () else set(dims(c, asked, rank))
    summed = Val(tuple(d for i, d in enumerate(v.dims) if i in which), v.term, v.dtype)
    keep = bool(call.get("keepdim"))
    kept = tuple(() if i in which else d for i, d in enumerate(v.dims) if keep or i not in which)
    counted = counts_of(c, v.term, tuple(summed.every())) if call.op == "sum" else None
    if counted is not None:
        return Val(kept, counted, c.dtype)
    return Val(kept, c.terms.bind(call.op, tuple(summed.every()), (v.term,), dtype=c.dtype), c.dtype)


@rule("norm", cuts=True)
def _norm(c: Context, call: Call) -> Result:
    """The 1-norm of a dim: the sum of absolute values."""
    v = val(c, call.get("input"))
    if cut_here(c, v):
        return None
    if call.get("p") not in (1, 1.0) or not isinstance(call.get("dim"), int):
        raise Unproved("a norm that is not the sum of a dim's absolute values", f"p={call.get('p')}")
    d = dim(c, call.get("dim"), len(v.dims))
    size = c.terms.make("pw", (v.term,), attr="abs", dtype=c.dtype)
    total = c.terms.bind("sum", tuple(Val((v.dims[d],), size, c.dtype).axes()), (size,), dtype=c.dtype)
    kept = ((),) if call.get("keepdim") else ()
    return Val((*v.dims[:d], *kept, *v.dims[d + 1 :]), total, c.dtype)


@rule("softmax", cuts=True)
def _softmax(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if cut_here(c, v):
        return None
    d = dim(c, call.get("dim"), len(v.dims))
    body = Val((v.dims[d],), v.term, v.dtype)
    term = v.term if c.dtype == v.dtype else c.terms.make("cast", (v.term,), dtype=c.dtype)
    axes = tuple(body.every())
    out = c.terms.bind("softmax", axes, (term,), tuple(axis_index(a) for a in axes), dtype=c.dtype)
    return Val(v.dims, out, c.dtype)


@rule("amax")
def _amax(c: Context, call: Call) -> Result:
    """The best of a dim; `max` along a dim gives its index too, which is a top-1's where it is read."""
    v = val(c, call.get("input"))
    indexed = isinstance(fake(c.node), tuple)
    ids, found = item(c.node, 1) if indexed else None, None
    if ids is not None:
        found = best_of(c, v, dim(c, call.get("dim"), len(v.dims)), bool(call.get("keepdim")), ids)
    if cut_here(c, v) or found is not None:
        return found
    if c.cut:
        raise Unproved("a maximum where a sum is expected")
    if call.get("keepdim"):
        raise Unproved("a maximum that keeps its dim")
    d = dim(c, call.get("dim"), len(v.dims))
    body = Val((v.dims[d],), v.term, v.dtype)
    # the gradient of `max` goes to one element, that of `amax` to all that are equal
    best = c.terms.bind("max", tuple(body.every()), (v.term,), attr="one" if indexed else "all", dtype=v.dtype)
    out = Val((*v.dims[:d], *v.dims[d + 1 :]), best, v.dtype)
    return (out, None) if indexed else out
