"""Gathers and scatters by tensors: an index substitutes for a dim's axes; a permutation written back undoes a sort."""

from __future__ import annotations

from ..algebra.affine import Affine, Axis, Size, axis_index, times
from ..algebra.layout import Val, broadcast, decode, refresh, taken
from ..algebra.terms import Term
from ..canonical import Call
from ..verdict import Unproved
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
    used = {b for b, _ in where.items if isinstance(b, Axis)}
    kept = [a for a in row_axes if a in used]
    summed = tuple(a for a in row_axes if a not in used)
    order = bijection(where, kept, base.sizes[0])
    if order is None or (summed and not add):
        raise Unproved("rows written at positions that are not proved distinct and complete", repr(where))
    if add:
        if not is_zero(base.term):
            raise Unproved("rows added onto values that are not zero")
        term = c.terms.bind("sum", summed, (term,), dtype=source.dtype)
    return Val((tuple(order), *dims[1:]), term, base.dtype)


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
    if not isinstance(at, Val) or not isinstance(source, Val):
        raise Unproved("a write of or at something that is not a tensor")
    return _written(c, base, at, source, add=bool(call.get("accumulate")))


@rule("index_add")
def _index_add(c: Context, call: Call) -> Result:
    base, at, source = (val(c, call.get(n)) for n in ("input", "index", "source"))
    if dim(c, call.get("dim"), len(base.dims)) != 0 or call.get("alpha", 1) != 1:
        raise Unproved("rows added along another dim, or scaled")
    return _written(c, base, at, source, add=True)


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
    if isinstance(source, Val) and source.term.op == "const":
        value: Term = source.term
    elif isinstance(source, (int, float)):
        value = c.terms.const(source)
    else:
        raise Unproved("a scatter of values that differ")
    if c.cut:
        return None
    if base.term.op != "const":
        raise Unproved("a scatter into values that are not constant")
    others = tuple(() if i == d else x for i, x in enumerate(at.dims))
    choices = Val((at.dims[d],), at.term, at.dtype).axes()
    axis = Axis(base.sizes[d])
    term = c.terms.bind("scat", tuple(choices), (at.term, value, base.term), (axis_index(axis),), dtype=base.dtype)
    return Val(tuple((axis,) if i == d else x for i, x in enumerate(others)), term, base.dtype)


@rule("scatter_add")
def _scatter_add(c: Context, call: Call) -> Result:
    """Rows added at an index that is the same along every other dim (expanded), as index_add spells it."""
    base, at, source = (val(c, call.get(n)) for n in ("input", "index", "src"))
    if dim(c, call.get("dim"), len(base.dims)) != 0 or len(at.dims) != len(base.dims):
        raise Unproved("rows added along another dim")
    rows = Val((at.dims[0],), at.term, at.dtype)
    if not at.term.free <= set(rows.axes()) or at.sizes != source.sizes:
        raise Unproved("a scatter whose index differs along the row")
    return _written(c, base, rows, source, add=True)
