"""Products: linear, matmul, einsum and grouped matmul are one contraction, followed where a route touches them."""

from __future__ import annotations

from ..algebra.affine import Axis, axis_index
from ..algebra.layout import Dim, Ord, Val, broadcast, decode, match_dims, number_of, refresh
from ..algebra.terms import Term
from ..canonical import Call
from ..verdict import Unproved
from .registry import Context, Result, ordinary, rule, val


def _dot(c: Context, left: Val, right: Val, batch: int, left_in: int, right_in: int) -> Val:
    """Contract dim `left_in` of left with `right_in` of right; the first `batch` dims of both go together.

    Result dims: batch, then left's others, then right's others.
    """
    right = refresh(c.terms, right)
    pick = (*range(batch), right_in)
    probe = Val(tuple(right.dims[i] for i in pick), right.term, right.dtype)
    rest_right = tuple(d for i, d in enumerate(right.dims) if i not in pick)
    got = match_dims(c.terms, probe, [left.dims[i] for i in (*range(batch), left_in)])
    dims, right_term, map_left = got
    left_term = c.terms.substitute(left.term, map_left)
    rest_left = tuple(d for i, d in enumerate(left.dims) if i >= batch and i != left_in)
    contracted = Val((dims[-1],), left_term, left.dtype)
    if not contracted.plain:
        raise Unproved("a product over routes")
    term = contract(c, tuple(contracted.axes()), left_term, right_term)
    return Val((*dims[:-1], *rest_left, *rest_right), term, c.dtype)


def contract(c: Context, axes: tuple[Axis, ...], a: Term, b: Term) -> Term:
    """sum over `axes` of a * b, operands in a fixed order. Over the choices, or the experts that weights were scattered
    over, it is a combination, as if spelled by a product and a sum."""
    if axes:
        combines = (a.chosen | b.chosen).issuperset(axes)
    else:  # over a single choice: an expert's output times what no expert id indexes
        combines = (a.dots or b.dots) and not (a.routed and b.routed)
    if combines:
        return c.terms.bind("sum", axes, (c.terms.make("pw", (a, b), attr="mul", dtype=c.dtype),), dtype=c.dtype)
    first, second = sorted((a, b), key=lambda t: t.id)
    return c.terms.bind("dot", axes, (first, second), dtype=c.dtype)


@rule("linear", cuts=True)
def _linear(c: Context, call: Call) -> Result:
    x, w = val(c, call.get("input")), val(c, call.get("weight"))
    if not c.follow and ordinary(x) and ordinary(w):
        return None
    if len(w.dims) != 2:
        raise Unproved("a linear whose weight is not a matrix")
    out = _dot(c, x, w, 0, len(x.dims) - 1, 1)
    bias = c.value(call.get("bias"))
    return out if bias is None else _plus(c, out, bias)


def _plus(c: Context, out: Val, bias: Val) -> Val:
    got = broadcast(c.terms, [out, bias])
    dims, (a, b) = got
    return Val(dims, c.terms.make("pw", (a, b), attr="add", dtype=c.dtype), c.dtype)


@rule("matmul", cuts=True)
def _matmul(c: Context, call: Call) -> Result:
    a, b = val(c, call.get("input")), val(c, call.get("other"))
    if not c.follow and ordinary(a) and ordinary(b):
        return None
    if len(a.dims) < 2 or len(b.dims) < 2:
        raise Unproved("a product with a vector")
    batch = min(len(a.dims), len(b.dims)) - 2
    if len(a.dims) > len(b.dims) and batch == 0:
        return _dot(c, a, b, 0, len(a.dims) - 1, 0)  # the leading dims of a are all rows
    if len(a.dims) != len(b.dims):
        raise Unproved("a product of different ranks")
    return _dot(c, a, b, batch, len(a.dims) - 1, batch)


@rule("addmm", "baddbmm", cuts=True)
def _added(c: Context, call: Call) -> Result:
    """input + a @ b."""
    a, b = (val(c, call.get(f"{'mat' if call.op == 'addmm' else 'batch'}{n}")) for n in (1, 2))
    if not c.follow and ordinary(a) and ordinary(b):
        return None
    if call.get("beta", 1) != 1 or call.get("alpha", 1) != 1:
        raise Unproved("a product and a sum that are scaled")
    batch = len(a.dims) - 2
    return _plus(c, _dot(c, a, b, batch, batch + 1, batch), val(c, call.get("input")))


@rule("einsum", cuts=True)
def _einsum(c: Context, call: Call) -> Result:
    """Two operands, each letter at most once an operand; letters of both and not of the result are contracted."""
    operands = [val(c, o) for o in call.get("operands", ())]
    if not c.follow and all(map(ordinary, operands)):
        return None
    equation = str(call.args["equation"]).replace(" ", "")
    left, arrow, result = equation.partition("->")
    letters = left.split(",")
    if (
        not arrow
        or len(letters) != 2
        or len(operands) != 2
        or "." in equation
        or any(len(set(x)) < len(x) for x in letters)
    ):
        raise Unproved("an einsum that is not a product of two tensors", equation)
    a, b = operands[0], refresh(c.terms, operands[1])
    shared = [x for x in letters[0] if x in letters[1]]
    probe = Val(tuple(b.dims[letters[1].index(x)] for x in shared), b.term, b.dtype)
    got = match_dims(c.terms, probe, [a.dims[letters[0].index(x)] for x in shared])
    dims, b_term, map_a = got
    a_term = c.terms.substitute(a.term, map_a)
    where: dict[str, Dim] = {x: a.dims[i] for i, x in enumerate(letters[0])}
    where.update({x: b.dims[i] for i, x in enumerate(letters[1])})
    where.update(zip(shared, dims))
    gone = [x for x in dict.fromkeys(letters[0] + letters[1]) if x not in result]
    if any(x not in shared for x in gone):
        raise Unproved("an einsum that sums one operand alone", equation)
    contracted = Val(tuple(where[x] for x in gone), a_term, a.dtype)
    if not contracted.plain:
        raise Unproved("a product over routes")
    return Val(tuple(where[x] for x in result), contract(c, tuple(contracted.axes()), a_term, b_term), c.dtype)


@rule("grouped_mm")
def _grouped_mm(c: Context, call: Call) -> Result:
    """Rows in expert order times their expert's matrix: x[r, h] W[e, h, g] with r in [offs[e - 1], offs[e])."""
    x, w, offs = (val(c, call.get(n)) for n in ("input", "weight", "offs"))
    if call.get("bias") is not None:
        raise Unproved("a grouped product with a bias argument")
    if len(x.dims) != 2 or len(w.dims) != 3:
        raise Unproved("a grouped product that is not 2-D by 3-D")
    if offs.term.op != "offsets" or offs.term.index != tuple(map(axis_index, offs.axes())):
        raise Unproved("offsets that are not proved to be the running count of the expert ids")
    rows = x.dims[0]
    key: Term = offs.term.attr
    if len(rows) == 1 and isinstance(rows[0], Ord):
        if rows[0].order.key is not key:
            raise Unproved("rows are sorted by other ids than the offsets count")
        axes = rows[0].axes
    elif not rows and not key.bound:
        axes = ()  # one route: any order is sorted
    else:
        raise Unproved("rows that are not in expert order")
    if w.sizes[0] != offs.sizes[0] or len(w.dims[0]) > 1:
        raise Unproved("as many offsets as experts are needed", f"{offs.sizes[0]} for {w.sizes[0]}")
    digits = decode(c.terms, number_of(axes), key.bound)
    ids = c.terms.substitute(key.args[0], digits)
    w = refresh(c.terms, w)
    expert = {a: c.terms.value(ids) for a in w.dims[0] if isinstance(a, Axis)}
    chosen = Val(w.dims[1:], c.terms.substitute(w.term, expert), w.dtype)
    probe = Val((chosen.dims[0],), chosen.term, chosen.dtype)
    got = match_dims(c.terms, probe, [x.dims[1]])
    dims, w_term, map_x = got
    x_term = c.terms.substitute(x.term, map_x)
    contracted = Val(dims, x_term, x.dtype)
    return Val((rows, chosen.dims[1]), contract(c, tuple(contracted.axes()), x_term, w_term), c.dtype)
