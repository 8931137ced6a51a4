"""Views and copies: they move, merge and split dims, and leave the term alone but for renamed axes."""

from __future__ import annotations

from typing import Any

from ..algebra.affine import Axis, Size
from ..algebra.layout import Dim, Val, reshape, sliced
from ..canonical import Call
from ..verdict import Unproved
from .registry import Context, Result, dim, dims, number, parameter, rule, static_int, val


@rule("reshape", "flatten", "unflatten", moves=True)
def _reshape(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if c.dtype != v.dtype:
        raise Unproved("a view as another dtype")
    out = reshape(c.terms, v, c.sizes)
    # rows of all experts as [E, rows, ..]: what is indexed by expert is the view
    return out if not c.cut or not parameter(v) or parameter(out) else None


@rule("squeeze", "unsqueeze", "t", "transpose", "permute", moves=True)
def _permute(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    rank = len(v.dims)
    moved: tuple[Dim, ...]
    if call.op == "squeeze":
        asked = call.get("dim", ())
        which = set(dims(c, asked, rank))
        moved = tuple(d for i, d in enumerate(v.dims) if d or (which and i not in which))
    elif call.op == "unsqueeze":
        at = dim(c, call.get("dim"), rank + 1)
        moved = (*v.dims[:at], (), *v.dims[at:])
    else:
        order = list(range(rank))
        if call.op == "permute":
            order = list(dims(c, call.get("dims"), rank))
        elif rank >= 2:
            i, j = (0, 1) if call.op == "t" else dims(c, (call.get("dim0"), call.get("dim1")), rank)
            order[i], order[j] = order[j], order[i]
        moved = tuple(v.dims[i] for i in order)
    return Val(moved, v.term, v.dtype)


@rule("getattr", moves=True)
def _getattr(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    if call.get("name") not in ("T", "mT") or (len(v.dims) != 2 and call.get("name") == "T"):
        raise Unproved("an unknown attribute", str(call.get("name")))
    return Val((*v.dims[:-2], v.dims[-1], v.dims[-2]), v.term, v.dtype)


@rule("expand", "expand_as", moves=True)
def _expand(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    sizes: tuple[Size, ...] = c.sizes
    old = ((),) * (len(sizes) - len(v.dims)) + v.dims
    return Val(tuple(d if d or n == 1 else (Axis(n),) for d, n in zip(old, sizes)), v.term, v.dtype)


@rule("repeat", moves=True)
def _repeat(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    times = [number(c, n) for n in call.args["sizes"]]
    old = ((),) * (len(times) - len(v.dims)) + v.dims
    return Val(tuple(d if n == 1 else (Axis(n), *d) for d, n in zip(old, times)), v.term, v.dtype)


@rule("repeat_interleave")
def _repeat_interleave(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    n, d = number(c, call.get("repeats")), dim(c, call.get("dim"), len(v.dims))
    repeated = v.dims[d] if n == 1 else (*v.dims[d], Axis(n))
    return Val((*v.dims[:d], repeated, *v.dims[d + 1 :]), v.term, v.dtype)


@rule("identity", moves=True)
def _identity(c: Context, call: Call) -> Result:
    return c.value(call.get("input"))


@rule("dropout")
def _dropout(c: Context, call: Call) -> Result:
    if call.get("training", True) and call.get("p", 0.5) != 0:
        raise Unproved("dropout inside of a block")
    return c.value(call.get("input"))


@rule("detach")
def _detach(c: Context, call: Call) -> Result:
    """Whatever a gradient would flow through stops here: a leaf of its own, and a term where routers are read."""
    v = val(c, call.get("input"))
    if not v.dtype.is_floating_point:
        return v
    return None if c.cut else Val(v.dims, c.terms.make("pw", (v.term,), attr="detach", dtype=v.dtype), v.dtype)


@rule("chunk", "split", "unbind", moves=True)
def _split(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    d = dim(c, call.get("dim"), len(v.dims), 0)
    total = v.sizes[d]
    if type(total) is not int:
        raise Unproved("a split of a symbolic dim")
    pieces = _pieces(c, call, total)
    out: list[Any] = []
    start = 0
    for n in pieces:
        piece = sliced(c.terms, v, d, start, n)
        if call.op == "unbind":
            piece = Val((*piece.dims[:d], *piece.dims[d + 1 :]), piece.term, piece.dtype)
        out.append(piece)
        start += n
    return tuple(out)


def _pieces(c: Context, call: Call, total: int) -> list[int]:
    if call.op == "unbind":
        return [1] * total
    if call.op == "split" and isinstance(call.args["split_size"], (tuple, list)):
        return [static_int(c, s) for s in call.args["split_size"]]
    parts = static_int(c, call.get("chunks" if call.op == "chunk" else "split_size"))
    size = -(-total // parts) if call.op == "chunk" else parts
    return [min(size, total - start) for start in range(0, total, size)]
