"""New tensors: constants and arange. Memory that nothing has written yet is a leaf."""

from __future__ import annotations

from ..algebra.affine import Affine
from ..algebra.layout import Val, new_axes
from ..canonical import Call
from .registry import Context, Result, number, rule, stored

_VALUES = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}


@rule(*_VALUES, "full", "full_like", "new_full")
def _full(c: Context, call: Call) -> Result:
    value = _VALUES.get(call.op)
    if value is None:
        value = number(c, call.get("fill_value"))
        if not isinstance(value, (int, float)):
            return None
    dims, _ = new_axes(c.sizes)
    held = stored(value, c.dtype)
    return None if held is None else Val(dims, c.terms.const(held), c.dtype)


@rule("empty", "empty_like", "new_empty")
def _empty(c: Context, call: Call) -> Result:
    return None


@rule("arange")
def _arange(c: Context, call: Call) -> Result:
    bounds = [number(c, b) for b in call.get("bounds", ())] or [number(c, call.get("end"))]
    start, step = (bounds[0], bounds[2] if len(bounds) > 2 else 1) if len(bounds) > 1 else (call.get("start", 0), 1)
    if type(start) is not int or step != 1 or c.dtype.is_floating_point:
        return None
    dims, index = new_axes(c.sizes)
    return Val(dims, c.terms.integer(index[0] + Affine.of(start)), c.dtype)
