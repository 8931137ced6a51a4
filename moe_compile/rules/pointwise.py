"""Pointwise functions and casts: align the arguments' dims, then one term. Integers that are known stay known."""

from __future__ import annotations

from typing import Any

import torch

from ..activation import apply, const, pointwise_table
from ..algebra.affine import Affine, as_size, divmod_affine
from ..algebra.layout import Val, broadcast, split_inside
from ..algebra.terms import Term, Terms
from ..canonical import Call
from ..nodes import fake
from ..verdict import Unproved
from .counts import WIDE
from .masks import expert_test, picked
from .registry import CASTS, Context, Result, cut_here, is_zero, rule, stored, val

# canonical op -> its tensor-or-number arguments; whatever else a call says must stand in _EXTRA
_TWO = "add sub mul div floordiv remainder minimum maximum eq ne lt le gt ge bitwise_and bitwise_or"
_ONE = "sigmoid tanh exp log log1p sqrt rsqrt abs erf square reciprocal silu relu neg invert gelu softplus"
_ARGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_TWO.split(), ("input", "other")),
    **dict.fromkeys(_ONE.split(), ("input",)),
    "pow": ("input", "exponent"),
    "clamp": ("input", "min", "max"),
    "clamp_min": ("input", "min"),
    "clamp_max": ("input", "max"),
    "masked_fill": ("input", "mask", "value"),
    "where": ("condition", "input", "other"),
}
_EXTRA: dict[str, Any] = {
    "alpha": (1,),
    "rounding_mode": (None, "floor"),
    "beta": (1, 1.0),
    "threshold": (20, 20.0),
    "approximate": ("none", "tanh"),
}
_MAX_TERM = 400  # a bound on what one value may drag along; real blocks stay under 60


@rule(*_ARGS, cuts=True)
def _pointwise(c: Context, call: Call) -> Result:
    if call.op == "where" and "input" not in call.args and "other" not in call.args:
        return picked(c, val(c, call.get("condition")))
    names = _ARGS[call.op]
    for key, x in call.args.items():
        if key not in names and x not in _EXTRA.get(key, ()):
            raise Unproved("an unknown argument", f"{call.op}({key}={x})")
    args = [_operand(c, call.get(n)) for n in names]
    tensors = [a for a in args if isinstance(a, Val) and a.dims]
    vals: list[Val] = [a for a in args if isinstance(a, Val)]
    if not vals:
        return None
    decided = _by_range(c, call.op, args)
    if decided is not None:
        return decided
    tested = _integers(c.terms, vals) or expert_test(c, call.op, [v.term for v in vals])
    if not tested and cut_here(c, *(v for v in vals if isinstance(v.dtype, torch.dtype))):
        return None
    if sum(a.term.size for a in vals) > _MAX_TERM:
        raise Unproved("an expression too large to follow")
    got = broadcast(c.terms, tensors or vals[:1])
    dims, aligned = got
    found = iter(aligned)
    operands = [next(found) if isinstance(a, Val) and a.dims else a.term if isinstance(a, Val) else None for a in args]
    name = "floordiv" if call.op == "div" and call.get("rounding_mode") == "floor" else call.op
    if name in ("floordiv", "remainder"):
        dims, operands = _digits(c.terms, dims, operands)
    known = _integer(c.terms, name, operands, c.dtype)
    if known is not None:
        return Val(dims, known, c.dtype)
    if name == "gelu" and call.get("approximate") == "tanh":
        name = "gelu_tanh"
    return Val(dims, pushed(c.terms, name, operands, c.dtype) or _make(c.terms, name, operands, c.dtype), c.dtype)


def pushed(terms: Terms, name: str, operands: list[Term | None], dtype: torch.dtype) -> Term | None:
    """Of a function of scattered values and numbers: the scatter of its values, into what the function makes of the
    constant that fills the other places."""
    scats = [o for o in operands if o is not None and o.op == "scat"]
    rest = [o for o in operands if o is None or o.op not in ("scat", "const")]
    if len(scats) != 1 or scats[0].args[1].op == "const" or rest or (name != "cast" and name not in pointwise_table()):
        return None
    (ids, value, base), (spread,) = scats[0].args, scats
    filled = base.attr[1]
    if name != "cast":
        numbers = (base if o is spread else o for o in operands)
        filled = apply(name, *(const(float(n.attr[1])) for n in numbers if n is not None)).value
    inner = [value if o is spread else o for o in operands]
    new = terms.make("cast", (value,), dtype=dtype) if name == "cast" else _make(terms, name, inner, dtype)
    filled = stored(filled, dtype)
    if filled is None:
        return None
    return terms.make("scat", (ids, new, terms.const(filled)), spread.index, spread.bound, dtype=dtype)


def _operand(c: Context, argument: Any) -> Val | None:
    v = c.value(argument)
    if v is None or isinstance(v, Val):
        return v
    if isinstance(v, (bool, int, float)):
        return Val((), c.terms.const(v), type(v))
    if isinstance(v, (torch.SymInt, torch.SymFloat)):
        integral = isinstance(v, torch.SymInt)
        term = c.terms.integer(Affine.of(as_size(v))) if integral else c.terms.make("scalar", attr=argument)
        return Val((), term, int if integral else float)
    raise Unproved("an operand that is neither a tensor nor a number", str(argument))


def _by_range(c: Context, op: str, args: list[Val | None]) -> Val | None:
    """What a top-k's range decides: a test of its indices against their bound, a clamp that never bites, a mask."""
    x = args[0]
    if op in ("where", "masked_fill"):
        mask, kept = (x, args[2]) if op == "where" else (args[1], x)
        never = mask is not None and mask.term.op == "const" and not mask.term.attr[1]
        return kept if never and kept is not None and kept.sizes == c.sizes and kept.dtype == c.dtype else None
    bound = c.ranges.get(x.term.attr) if x is not None and x.term.op == "leaf" else None
    if x is None or bound is None or len(args) < 2:
        return None
    limits = [None if a is None else _affine(a.term) for a in args[1:]]
    if any(a is not None and (a.items or type(a.const) is not int) for a in limits):
        return None
    numbers = [None if a is None else a.const for a in limits]
    if op in ("clamp", "clamp_min", "clamp_max"):
        low = numbers[0] if op != "clamp_max" else None
        high = numbers[-1] if op != "clamp_min" else None
        return x if (low is None or low <= 0) and (high is None or high >= bound - 1) else None
    (n,) = numbers
    if n is None:
        return None
    tests = {"ge": (n <= 0, n >= bound), "gt": (n < 0, n >= bound - 1), "lt": (n >= bound, n <= 0)}
    always, never = tests.get(op, (False, False))
    return Val(x.dims, c.terms.const(bool(always)), torch.bool) if always or never else None


def _integers(terms: Terms, vals: list[Val]) -> bool:
    return all(v.term.op in ("int", "const") for v in vals) and any(v.term.op == "int" for v in vals)


def _digits(terms: Terms, dims: Any, operands: list[Term | None]) -> tuple[Any, list[Term | None]]:
    """A position that is divided has its axis split where the digit ends: n // K for n of [T * K] is t of (t, k)."""
    a, b = map(_affine, operands)
    if a is None or b is None or b.items or operands[0] is None or (type(b.const) is int and b.const < 2):
        return dims, operands
    v = split_inside(terms, Val(dims, operands[0], None), a, b.const)
    return v.dims, [v.term, operands[1]]


def _integer(terms: Terms, name: str, operands: list[Term | None], dtype: torch.dtype) -> Term | None:
    """Exact integer arithmetic on known positions: +, -, * by a number, // and % by a number."""
    if len(operands) != 2:
        return None
    a, b = map(_affine, operands)
    if a is None or b is None or dtype not in _EXACT:
        return None
    if all(t is not None and t.op == "const" for t in operands):
        return None
    if name == "add":
        return terms.integer(a + b)
    if name == "sub":
        return terms.integer(a + b.scaled(-1))
    if name == "mul" and (not a.items or not b.items):
        return terms.integer(b.scaled(a.const) if not a.items else a.scaled(b.const))
    if name in ("floordiv", "remainder") and not b.items and b.const != 0:
        parts = divmod_affine(a, b.const)
        return None if parts is None else terms.integer(parts[0 if name == "floordiv" else 1])
    return None


def _affine(t: Term | None) -> Affine | None:
    if t is None:
        return None
    if t.op == "int":
        return t.index[0]
    return Affine.of(t.attr[1]) if t.op == "const" and t.attr[0] == "int" else None


def _make(terms: Terms, name: str, operands: list[Term | None], dtype: torch.dtype) -> Term:
    """One term per meaning: clamps are min and max, subtraction of numbers keeps its place, masks are `where`."""
    x = operands[0]
    assert x is not None
    if name in ("clamp", "clamp_min", "clamp_max"):
        low = operands[1] if name in ("clamp", "clamp_min") else None
        high = operands[2] if name == "clamp" else operands[1] if name == "clamp_max" else None
        if low is not None:
            x = terms.make("pw", (x, low), attr="maximum", dtype=dtype)
        return x if high is None else terms.make("pw", (x, high), attr="minimum", dtype=dtype)
    if name == "square":
        return terms.make("pw", (x, x), attr="mul", dtype=dtype)
    if name == "pow" and operands[1] is not None and operands[1].op == "const" and operands[1].attr[1] == 2:
        return terms.make("pw", (x, x), attr="mul", dtype=dtype)
    if name == "reciprocal":
        return terms.make("pw", (terms.const(1), x), attr="div", dtype=dtype)
    if name in ("eq", "ne") and x.op == "leaf" and len(operands) == 2 and operands[1] is not None:
        number = _affine(operands[1])
        if number is not None:
            test = terms.equal(x, number, dtype)
            return test if name == "eq" else terms.make("pw", (test,), attr="invert", dtype=dtype)
    if name == "add":
        kept = [o for o in operands if o is not None and not (is_zero(o))]
        if len(kept) == 1 and kept[0].dtype == dtype:
            return kept[0]
    if name == "masked_fill":
        return terms.make("pw", (operands[1], operands[2], x), attr="where", dtype=dtype)  # type: ignore[arg-type]
    return terms.make("pw", tuple(o for o in operands if o is not None), attr=name, dtype=dtype)


@rule(*CASTS)
def _cast(c: Context, call: Call) -> Result:
    v = val(c, call.get("input"))
    new = c.dtype
    if fake(call.get("input")).device != fake(c.node).device:
        return None  # the copy on another device is a tensor of its own
    if new == v.dtype:
        return v
    kept = WIDE if v.term.op in ("count", "offsets") else _EXACT
    if new in kept and v.dtype in kept:
        return Val(v.dims, v.term, new)
    if cut_here(c, v) and v.dtype not in _EXACT:
        return None
    return Val(v.dims, pushed(c.terms, "cast", [v.term], new) or c.terms.make("cast", (v.term,), dtype=new), new)


_EXACT = (torch.int32, torch.int64)  # ids and positions: a cast between these keeps the value
