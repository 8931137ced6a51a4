"""Gathers and scatters by tensors: an index substitutes for a dim's axes; a permutation written back undoes a sort."""

from __future__ import annotations

import torch

from ..algebra.affine import Affine, Axis, Size, axis_index, times
from ..algebra.layout import Dim, Ord, Val, broadcast, decode, number_of, picked_where, refresh, reshape, taken
from ..algebra.terms import Term
from ..canonical import Call
from ..verdict import Unproved
from .counts import counted
from .masks import mask_rows
from .registry import Context, Result, dim, integer, is_zero, ordinary, rule, val


def index_cuts(c: Context, source: Val, at: Val) -> bool:
    """Whether a lookup is best left as a leaf: of a vector, or of integers (a table of ids), which no linear reads."""
    return c.cut and ordinary(source) and ordinary(at) and (len(source.dims) < 2 or not source.dtype.is_floating_point)


@rule("index_select")
def _index_select(c: Context, call: Call) -> Result:
    v, at = val(c, call.get("input")), val(c, call.get("index"))
    return None if index_cuts(c, v, at) else taken(c.terms, v, dim(c, call.get("dim"), len(v.dims)), at)


@rule("gather")
def _gather(c: Context, call: Call) -> Result:
    """out[.., j, ..] = input[.., index[.., j, ..], ..]: the other dims are read at the index's own axes."""
    v, at = val(c, call.get("input")), val(c, call.get("index"))
    if c.cut and ordinary(v) and ordinary(at):
        return None
    d = dim(c, call.get("dim"), len(v.dims))
    v = refresh(c.terms, v)
    others = [i for i in range(len(v.dims)) if i != d]
    if any(v.sizes[i] != at.sizes[i] for i in others):
        raise Unproved("a gather that reads part of a dim")
    # align the other dims of both by broadcasting index values against a copy of the input without dim d
    probe = Val(tuple(() if i == d else x for i, x in enumerate(v.dims)), v.term, v.dtype)
    got = broadcast(c.terms, [at, probe])
    dims, (index_term, source_term) = got
    found = decode(c.terms, c.terms.value(index_term), v.dims[d])
    return Val(dims, c.terms.substitute(source_term, found), v.dtype)


def bijection(index: Affine, axes: list[Axis], size: Size) -> tuple[Axis, ...] | None:
    """`axes` from most to least significant where `index` numbers them row-major, exactly covering [0, size)."""
    if index.const != 0 or {b for b, _ in index.items} != set(axes):
        return None
    coefficient = dict(index.items)
    span: Size = 1
    left, order = set(axes), []
    while left:
        # a unit of the current span; with symbolic sizes there is exactly one
        step = next((a for a in left if coefficient[a] == span), None)
        if step is None:
            return None
        order.append(step)
        left.remove(step)
        span = times(span, step.size)
    return tuple(reversed(order)) if span == size else None


def _written(c: Context, base: Val, at: Val, source: Val, add: bool) -> Result:
    """base with source's row r added to (or put in place of) row at[r] of dim 0; `at` runs along source's dim 0."""
    rows = Val((at.dims[0],), at.term, at.dtype) if len(at.dims) == 1 else None
    if rows is None or not source.dims:
        raise Unproved("an index of more than one dim")
    index = Val((rows.dims[0], *((),) * (len(source.dims) - 1)), rows.term, rows.dtype)
    got = broadcast(c.terms, [index, source])
    dims, (index_term, term) = got
    where = integer(c.terms, index_term)
    if where is None:
        raise Unproved("rows written at positions that depend on data")
    row_axes = Val((dims[0],), term, None).axes()
    hit = picked_where(c.terms, dims[0][0]) if len(dims[0]) == 1 and isinstance(dims[0][0], Ord) else None
    used = {b for b, _ in where.items if isinstance(b, Axis)}
    kept = [a for a in row_axes if a in used]
    summed = tuple(a for a in row_axes if a not in used)
    order = bijection(where, kept, base.sizes[0])
    if order is not None and hit is not None:
        return _written_where(c, base, (tuple(order), *dims[1:]), term, hit, summed, add)
    if order is None or (summed and not add):
        raise Unproved("rows written at positions that are not proved distinct and complete", repr(where))
    if add:
        if not is_zero(base.term):
            raise Unproved("rows added onto values that are not zero")
        term = c.terms.bind("sum", summed, (term,), dtype=source.dtype)
    return Val((tuple(order), *dims[1:]), term, base.dtype)


def _written_where(
    c: Context, base: Val, dims: tuple[Dim, ...], term: Term, hit: Term, summed: tuple[Axis, ...], add: bool
) -> Val:
    """base with the routes that were hit added to, or put in place of, their rows."""
    make, zero = c.terms.make, c.terms.const(0.0)
    dims, (pair, old) = broadcast(c.terms, [Val(dims, make("pair", (hit, term)), base.dtype), base])
    hit, term = pair.args
    if not add:
        if summed and not _once(c, hit, summed):
            raise Unproved("rows written at positions that may coincide", repr(hit))
        if is_zero(old):
            add = True
        elif term.op == "pw" and term.attr == "add" and old in term.args:  # out[rows] += value
            term, add = term.args[1 - term.args.index(old)], True
        elif summed:
            raise Unproved("rows written at positions that are not proved distinct and complete", repr(hit))
    if not add:
        return Val(dims, make("pw", (hit, term, old), attr="where", dtype=base.dtype), base.dtype)
    added = make("pw", (hit, term, zero), attr="where", dtype=base.dtype)
    if summed:
        added = c.terms.bind("sum", summed, (added,), dtype=base.dtype)
    return Val(dims, added if is_zero(old) else make("pw", (old, added), attr="add", dtype=base.dtype), base.dtype)


def _once(c: Context, hit: Term, summed: tuple[Axis, ...]) -> bool:
    """Whether at most one of a token's choices is hit: they are distinct, and the test is for one expert."""
    ids = hit.args[0]
    along = c.distinct.get(ids.attr) if hit.op == "pw" and ids.op == "leaf" else None
    return along is not None and ids.index[along] == number_of(summed)


def _masked(c: Context, base: Val, mask: Val, source: Val) -> Val:
    """base[mask] = source."""
    rows = Val((mask_rows(c, mask), *((),) * (len(source.dims) - 1)), c.terms.const(0), torch.int64)
    if len(source.dims) != 1 + len(base.dims) - len(mask.dims):
        raise Unproved("a write of rows of another rank")
    dims, (_, term) = broadcast(c.terms, [rows, source])
    (found,) = dims[0]
    assert isinstance(found, Ord)
    lead = reshape(c.terms, Val((found.axes,), rows.term, torch.int64), mask.sizes)
    if lead.axes() != list(found.axes):
        raise Unproved("a mask over dims that are split elsewhere")
    hit = picked_where(c.terms, found)
    assert hit is not None
    return _written_where(c, base, (*lead.dims, *dims[1:]), term, hit, (), add=False)


@rule("setitem", "index_put", "index_copy")
def _setitem(c: Context, call: Call) -> Result:
    base = val(c, call.get("input"))
    if call.op == "index_copy":
        if dim(c, call.get("dim"), len(base.dims)) != 0:
            raise Unproved("rows written along another dim")
        index, value = call.get("index"), call.get("source")
    else:
        index, value = call.get("index", call.get("indices")), call.get("value", call.get("values"))
        if isinstance(index, (tuple, list)):
            if len(index) != 1:
                raise Unproved("a write at an index of several parts")
            index = index[0]
    at, source = c.value(index), c.value(value)
    if isinstance(at, Val) and isinstance(source, Val) and at.dtype == torch.bool and at.term.guarded:
        return _masked(c, base, at, source)
    if not isinstance(at, Val) or not isinstance(source, Val):
        raise Unproved("a write of or at something that is not a tensor")
    return _written(c, base, at, source, add=bool(call.get("accumulate")))


@rule("index_add")
def _index_add(c: Context, call: Call) -> Result:
    base, at, source = (val(c, call.get(n)) for n in ("input", "index", "source"))
    if dim(c, call.get("dim"), len(base.dims)) != 0 or call.get("alpha", 1) != 1:
        raise Unproved("rows added along another dim, or scaled")
    return counted(c, base, at, source) or _written(c, base, at, source, add=True)


@rule("scatter")
def _scatter(c: Context, call: Call) -> Result:
    """A permutation written back (1-D), or a constant at chosen places of the last dim: scat."""
    base, at = val(c, call.get("input")), val(c, call.get("index"))
    if call.get("reduce") is not None:
        raise Unproved("a scatter that reduces")
    source = c.value(call.get("src", call.get("value")))
    d = dim(c, call.get("dim"), len(base.dims))
    if isinstance(source, Val) and len(base.dims) == 1:
        return _written(c, base, at, source, add=False)
    dims, ids = at.dims, at.term
    if isinstance(source, Val) and source.term.op == "const":
        value: Term = source.term
    elif isinstance(source, (int, float)):
        value = c.terms.const(source)
    elif isinstance(source, Val) and source.sizes == at.sizes:
        dims, (ids, value) = broadcast(c.terms, [at, source])
    else:
        raise Unproved("a scatter of part of a tensor")
    if c.cut and (value.op == "const" or ids.op != "leaf"):
        return None
    if base.term.op != "const":
        raise Unproved("a scatter into values that are not constant")
    choices = Val((dims[d],), ids, at.dtype).axes()
    if value.op != "const" and choices:
        along = c.distinct.get(ids.attr) if ids.op == "leaf" else None
        if along is None or ids.index[along] != number_of(choices):
            raise Unproved("values scattered at places that may coincide", repr(ids))
    axis = Axis(base.sizes[d])
    term = c.terms.bind("scat", tuple(choices), (ids, value, base.term), (axis_index(axis),), dtype=base.dtype)
    return Val(tuple((axis,) if i == d else x for i, x in enumerate(dims)), term, base.dtype)


@rule("scatter_add")
def _scatter_add(c: Context, call: Call) -> Result:
    """Rows added at an index that is the same along every other dim (expanded), as index_add spells it."""
    base, at, source = (val(c, call.get(n)) for n in ("input", "index", "src"))
    if dim(c, call.get("dim"), len(base.dims)) != 0 or len(at.dims) != len(base.dims):
        raise Unproved("rows added along another dim")
    counts = counted(c, base, at, source)
    if counts is not None:
        return counts
    rows = Val((at.dims[0],), at.term, at.dtype)
    if not at.term.free <= set(rows.axes()) or at.sizes != source.sizes:
        raise Unproved("a scatter whose index differs along the row")
    return _written(c, base, rows, source, add=True)
