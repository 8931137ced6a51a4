"""Views and copies: they move, merge and split dims, and leave the term alone but for renamed axes."""

from __future__ import annotations

from typing import Any

import torch

from ..algebra.layout import Dim, Val, reshape, sliced
from ..algebra.terms import Axis, Size
from ..canonical import Call
from ..verdict import Reject
from .registry import Context, Result, dim_of, number, rule, static_int, val


@rule("reshape", "flatten", "unflatten")
def _reshape(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    if any(isinstance(s, torch.dtype) for s in call.get("shape", ())):
        return Reject("a view as another dtype")
    return reshape(c.terms, v, c.sizes)


@rule("squeeze", "unsqueeze", "t", "transpose", "permute")
def _permute(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    rank = len(v.dims)
    dims: tuple[Dim, ...]
    if call.op == "squeeze":
        asked = call.get("dim", ())
        which = {dim_of(int(d), rank) for d in (asked if isinstance(asked, tuple) else (asked,))}
        dims = tuple(d for i, d in enumerate(v.dims) if d or (which and i not in which))
    elif call.op == "unsqueeze":
        at = dim_of(call.args["dim"], rank + 1)
        dims = (*v.dims[:at], (), *v.dims[at:])
    else:
        order = list(range(rank))
        if call.op == "permute":
            order = [dim_of(int(d), rank) for d in call.args["dims"]]
        elif rank >= 2:
            i, j = (0, 1) if call.op == "t" else (dim_of(call.args["dim0"], rank), dim_of(call.args["dim1"], rank))
            order[i], order[j] = order[j], order[i]
        dims = tuple(v.dims[i] for i in order)
    return Val(dims, v.term, v.dtype)


@rule("getattr")
def _getattr(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    if call.get("name") not in ("T", "mT"):
        return Reject("an unknown attribute", str(call.get("name")))
    return Val((*v.dims[:-2], v.dims[-1], v.dims[-2]), v.term, v.dtype)


@rule("expand", "expand_as")
def _expand(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    sizes: tuple[Size, ...] = c.sizes
    dims = ((),) * (len(sizes) - len(v.dims)) + v.dims
    return Val(tuple(d if d or n == 1 else (Axis(n),) for d, n in zip(dims, sizes)), v.term, v.dtype)


@rule("repeat")
def _repeat(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    times = [number(c, n) for n in call.args["sizes"]]
    dims = ((),) * (len(times) - len(v.dims)) + v.dims
    return Val(tuple(d if n == 1 else (Axis(n), *d) for d, n in zip(dims, times)), v.term, v.dtype)


@rule("repeat_interleave")
def _repeat_interleave(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    n, d = number(c, call.get("repeats")), static_int(c, call.get("dim"))
    if isinstance(n, Reject) or d is None:
        return Reject("repeats that depend on data, or a flattened input")
    d = dim_of(d, len(v.dims))
    dim = v.dims[d] if n == 1 else (*v.dims[d], Axis(n))
    return Val((*v.dims[:d], dim, *v.dims[d + 1 :]), v.term, v.dtype)


@rule("identity")
def _identity(c: Context, call: Call) -> Result:
    return c.value(call.get("input"))


@rule("chunk", "split", "unbind")
def _split(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if isinstance(v, Reject):
        return v
    d = dim_of(static_int(c, call.get("dim"), 0) or 0, len(v.dims))
    total = v.sizes[d]
    if type(total) is not int:
        return Reject("a split of a symbolic dim")
    pieces = _pieces(c, call, total)
    if pieces is None:
        return Reject("a split into unknown sizes")
    out: list[Any] = []
    start = 0
    for n in pieces:
        piece = sliced(c.terms, v, d, start, n)
        if isinstance(piece, Reject):
            return piece
        if call.op == "unbind":
            piece = Val((*piece.dims[:d], *piece.dims[d + 1 :]), piece.term, piece.dtype)
        out.append(piece)
        start += n
    return tuple(out)


def _pieces(c: Context, call: Call, total: int) -> list[int] | None:
    if call.op == "unbind":
        return [1] * total
    if call.op == "chunk":
        n = static_int(c, call.get("chunks"))
        size = None if not n else -(-total // n)
    else:
        sizes = call.get("split_size")
        if isinstance(sizes, (tuple, list)):
            given = [static_int(c, s) for s in sizes]
            return None if None in given else given  # type: ignore[return-value]
        size = static_int(c, sizes)
    if not size:
        return None
    return [min(size, total - start) for start in range(0, total, size)]
