"""What made a leaf: the operation of its node, over the values that its arguments had when it ran.

The walk cuts where no route touches a value; a dense block, which computes every expert for every token, is touched
only when its outputs are weighted. Its leaves are opened then, one operation at a time, as far as a reader asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from ..algebra.affine import Affine, Axis, Size, as_size
from ..algebra.layout import Val, decode, new_axes
from ..algebra.terms import LeafKey, Term, Terms
from ..canonical import Call
from ..nodes import fake
from ..rules.registry import CUTS, RULES
from ..verdict import Unproved

if TYPE_CHECKING:
    from .walk import Walk


_CASTS = ("to", "type", "type_as", "convert")


class Definitions:
    """By leaf: the call, and its arguments' values with their versions. Values are immutable, so later writes don't
    change them."""

    def __init__(self) -> None:
        self._made: dict[LeafKey, tuple[Call, dict[torch.fx.Node, tuple[Any, int]]]] = {}
        self._opened: dict[LeafKey, Val | None] = {}

    def record(self, walk: Walk, node: torch.fx.Node, call: Call | None) -> None:
        """`node` became a leaf of itself although a rule could follow it."""
        if call is not None and (call.op in CUTS or call.op in _CASTS) and not call.mutates:
            values = {n: (walk.known(n), walk.versions.of(n)) for n in node.all_input_nodes}
            self._made[LeafKey(node, walk.versions.of(node))] = call, values

    def of(self, walk: Walk, leaf: Term) -> Term | None:
        """The leaf's element as the operation computes it; None where no rule can tell."""
        key = leaf.attr
        if key not in self._opened:
            made = self._made.get(key)
            self._opened[key] = None if made is None else _Frozen(walk, key.node, made[1]).apply(made[0])
        value = self._opened[key]
        if value is None or not value.plain:
            return None
        at: dict[Axis, Affine] = {}
        try:
            for index, dim in zip(leaf.index, value.dims, strict=True):
                at.update(decode(walk.terms, index, dim))
        except Unproved:
            return None
        return walk.terms.substitute(value.term, at)


class _Frozen:
    """What a rule sees of one node: its arguments as they were, and nothing to be cut."""

    cut, follow = False, True

    def __init__(self, walk: Walk, node: torch.fx.Node, values: dict[torch.fx.Node, tuple[Any, int]]) -> None:
        self.terms: Terms = walk.terms
        self.node, self.ranges, self.distinct, self._values = node, walk.ranges, walk.distinct, values
        self.selections: dict[torch.fx.Node, Val] = {}

    def apply(self, call: Call) -> Val | None:
        rule: Any = RULES[call.op]
        try:
            value = rule(self, call)
        except Unproved:
            return None
        return value if isinstance(value, Val) and value.sizes == self.sizes and value.dtype == self.dtype else None

    def value(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            known, version = self._values[argument]
            value = fake(argument)
            if known is not None or not isinstance(value, torch.Tensor):
                return value if known is None else known
            dims, index = new_axes([as_size(n) for n in value.shape])
            return Val(dims, self.terms.leaf(argument, version, index, value.dtype), value.dtype)
        return tuple(map(self.value, argument)) if isinstance(argument, (tuple, list)) else argument

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(as_size(n) for n in fake(self.node).shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = fake(self.node).dtype
        return dtype
