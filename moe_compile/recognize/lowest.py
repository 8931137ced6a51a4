"""The least value that integer tensors may hold: in W[ids] a negative id means another expert, in the operator none.

In: the nodes in program order. Out: a bound for each memory, at most 0. What the graph is given (its inputs, and what a
custom operator makes of no negative integers) is trusted not to be negative, as ids that come from outside are; what
the graph itself computes is not, nor by an operation of torch's that no table names. A memory keeps the least bound of
all that was written to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from ..canonical import Call, canonical
from ..nodes import fake, spelling, storage
from ..writes import is_torch_function

_VALUES = (
    "input", "other", "value", "values", "src", "source", "fill_value", "tensors", "bounds", "start", "end", "operands",
)  # fmt: skip
# operations of torch's without a canonical name: those that put numbers in, and those that make no negative integer of
# others
_FILLS = {"fill", "fill_", "zero_", "index_fill", "index_fill_"}
_HARMLESS = frozenset(
    [
        "argmin",
        "bucketize",
        "count_nonzero",
        "cpu",
        "cuda",
        "diag",
        "flip",
        "hstack",
        "masked_select",
        "max",
        "min",
        "movedim",
        "multinomial",
        "ravel",
        "reshape_as",
        "roll",
        "stack",
        "take",
        "take_along_dim",
        "unique",
        "unique_consecutive",
        "view_as",
        "vstack",
    ]
)


class Lowest:
    """Bounds by memory; a memory that is not mentioned holds no negative integer."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}

    def of(self, argument: Any) -> float:
        """The bound of an argument; float tensors have none, until they are cast."""
        if isinstance(argument, torch.fx.Node):
            value = fake(argument)
            return (
                self._of.get(storage(argument), 0) if isinstance(value, (torch.Tensor, tuple, list)) else self.of(value)
            )
        if isinstance(argument, (tuple, list)):
            return min(map(self.of, argument), default=0)
        if isinstance(argument, (int, float)):
            return math.floor(min(argument, 0))
        return -math.inf if isinstance(argument, (torch.SymInt, torch.SymFloat)) else 0

    def _unnamed(self, node: torch.fx.Node) -> float:
        """Of an operation without a canonical name."""
        name = spelling(node)
        if name in _FILLS:
            return min(self.of(node.args), self.of(tuple(node.kwargs.values())))
        trusted = _custom(node) or name in _HARMLESS
        return 0 if trusted and self.of(node.all_input_nodes) >= 0 else -math.inf

    def visit(self, node: torch.fx.Node, call: Call | None) -> None:
        """Bound the result of `node`, and with it the memory that the result lives in."""
        result = call.args.get(call.mutates) if call is not None and call.mutates else node
        if not isinstance(result, torch.fx.Node) or not _integral(fake(result)):
            return
        if call is None:
            low = self._unnamed(node)
        else:
            low = _TABLE.get(call.op, _moved)(self, call)
        if low < 0:
            memory = storage(result)
            self._of[memory] = min(low, self._of.get(memory, 0))


def _custom(node: torch.fx.Node) -> bool:
    """Whether `node` calls what is not torch's own: a custom operator, or a callable that only its author knows."""
    target: Any = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = target._schema.name if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
        return name.split("::")[0] not in ("aten", "prims")
    return node.op == "call_module" or (node.op == "call_function" and not is_torch_function(target))


def _integral(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_integral, value))
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def _floating(argument: Any) -> bool:
    return (
        isinstance(argument, torch.fx.Node) and isinstance(v := fake(argument), torch.Tensor) and v.is_floating_point()
    )


def _moved(lowest: Lowest, call: Call) -> float:
    """Of an operation whose result holds values of its operands."""
    return min(lowest.of(call.get(name)) for name in _VALUES)


def _made(lowest: Lowest, call: Call) -> float:
    """Of arithmetic that makes no negative number of others."""
    return -math.inf if _moved(lowest, call) < 0 else 0


def _added(lowest: Lowest, call: Call) -> float:
    return (
        _made(lowest, call)
        if call.get("alpha", 1) != 1
        else lowest.of(call.get("input")) + lowest.of(call.get("other"))
    )


def _subtracted(lowest: Lowest, call: Call) -> float:
    other = call.get("other")
    return (
        lowest.of(call.get("input")) - max(other, 0) if type(other) is int and call.get("alpha", 1) == 1 else -math.inf
    )


def _modulo(lowest: Lowest, call: Call) -> float:
    """remainder has the divisor's sign, fmod the dividend's."""
    other = call.get("other")
    if type(other) is not int or other <= 0:
        return -math.inf
    return 0 if call.op == "remainder" else max(lowest.of(call.get("input")), 1 - other)


def _clamped(lowest: Lowest, call: Call) -> float:
    low, high = call.get("min"), call.get("max")
    least = lowest.of(call.get("input"))
    least = max(least, min(low, 0)) if type(low) is int else least
    return least if high is None else min(least, lowest.of(high) if type(high) is int else -math.inf)


def _masked(lowest: Lowest, call: Call) -> float:
    """masked_fill(x, x == c, v) where c is x's least value: nothing is left of c."""
    x, mask, least = call.get("input"), call.get("mask"), lowest.of(call.get("input"))
    test = canonical(mask) if isinstance(mask, torch.fx.Node) else None
    if test is not None and test.op == "eq" and test.get("input") is x and test.get("other") == least:
        least += 1
    return min(least, lowest.of(call.get("value")))


def _cast(lowest: Lowest, call: Call) -> float:
    """Of an operation that turns its operands' values into integers, or adds them up."""
    if any(_floating(call.get(name)) for name in _VALUES):
        return -math.inf
    return (_made if call.get("accumulate") or call.get("reduce") else _moved)(lowest, call)


def _retyped(lowest: Lowest, call: Call) -> float:
    return -math.inf if _floating(call.get("input")) else lowest.of(call.get("input"))


_Bound = Callable[[Lowest, Call], float]


def _each(names: str, bound: _Bound) -> dict[str, _Bound]:
    return dict.fromkeys(names.split(), bound)


_TABLE: dict[str, _Bound] = {
    "add": _added, "sub": _subtracted, "masked_fill": _masked, "type_as": _retyped,
    **_each("remainder fmod", _modulo),
    **_each("clamp clamp_min clamp_max", _clamped),
    **_each("to type convert copy setitem index_put scatter", _cast),
    **_each("index_add scatter_add", _made),
    **_each("mul div floordiv pow sum cumsum bitwise_and bitwise_or matmul linear einsum baddbmm addmm", _made),
    **_each("neg invert", lambda lowest, call: -math.inf),
    **_each("abs square eq ne lt le gt ge isnan isfinite", lambda lowest, call: 0),
    **_each("argsort argmax topk histc bincount one_hot", lambda lowest, call: 0),
}  # fmt: skip
