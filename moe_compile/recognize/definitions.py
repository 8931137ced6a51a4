"""Operations that are worked out when somebody asks, over the values that their arguments had when they ran.

Most of a graph is not a block's. Views and casts of what no route touches wait until a rule reads them, which is
seldom; of other floats that no route touches the walk makes leaves. A dense block, which computes every expert for
every token, is touched only when its outputs are weighted: its leaves are opened then, one operation at a time, as far
as a reader asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from ..algebra.affine import Affine, Axis, Size, as_size
from ..algebra.layout import Val, decode
from ..algebra.terms import LeafKey, Term, Terms
from ..canonical import Call
from ..nodes import fake
from ..rules.registry import CASTS, CUTS, RULES
from ..verdict import Reject, Unproved

if TYPE_CHECKING:
    from .walk import Walk


class Made:
    """A node's call and its arguments' values with their versions. Values are immutable, so later writes don't change
    them."""

    def __init__(self, walk: Walk, node: torch.fx.Node, call: Call) -> None:
        self.node, self.call = node, call
        self._arguments = {n: (walk.held(n), walk.versions.of(n)) for n in node.all_input_nodes}
        self._results: dict[bool, Any] = {}

    def value(self, walk: Walk, cut: bool) -> Any:
        """What the operation's rule makes of them, or a Reject; `cut` as rules know it."""
        if cut not in self._results:
            context = _Then(walk, self.node, self._arguments, cut)
            self._results[cut] = ruled(context, RULES[self.call.op], self.call)
        return self._results[cut]


def ruled(context: Any, rule: Any, call: Call) -> Any:
    """The rule's result for the context's node; a Reject where it has none, or one that the graph contradicts."""
    try:
        result = rule(context, call)
    except Unproved as stop:
        return stop.verdict
    if isinstance(result, Val) and result.sizes != context.sizes:
        return Reject("a rule's result has another shape than the graph's", f"{result.sizes}, not {context.sizes}")
    if isinstance(result, Val) and result.dtype != context.dtype:
        return Reject("a rule's result has another dtype than the graph's", f"{result.dtype}, not {context.dtype}")
    return result


class Definitions:
    """What made leaves, by leaf."""

    def __init__(self) -> None:
        self._made: dict[LeafKey, Made] = {}

    def record(self, walk: Walk, made: Made) -> None:
        """The node is a leaf of itself although a rule could follow it."""
        if made.call.op in CUTS or made.call.op in CASTS:
            self._made[LeafKey(made.node, walk.versions.of(made.node))] = made

    def of(self, walk: Walk, leaf: Term) -> Term | None:
        """The leaf's element as the operation computes it; None where no rule can tell."""
        made = self._made.get(leaf.attr)
        value = None if made is None else made.value(walk, cut=False)
        if not isinstance(value, Val) or not value.plain:
            return None
        at: dict[Axis, Affine] = {}
        try:
            for index, dim in zip(leaf.index, value.dims, strict=True):
                at.update(decode(walk.terms, index, dim))
        except Unproved:
            return None
        return walk.terms.substitute(value.term, at)


class _Then:
    """What a rule sees of one node: its arguments as they were. A leaf that is opened is followed."""

    def __init__(
        self, walk: Walk, node: torch.fx.Node, arguments: dict[torch.fx.Node, tuple[Any, int]], cut: bool
    ) -> None:
        self.terms: Terms = walk.terms
        self.node, self.ranges, self.distinct, self.cut, self.follow = node, walk.ranges, walk.distinct, cut, not cut
        self.selections: dict[torch.fx.Node, Val] = {}
        self._walk, self._arguments = walk, arguments

    def value(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            held, version = self._arguments[argument]
            known = held.value(self._walk, cut=True) if isinstance(held, Made) else held
            return self._walk.whole(argument, version) if known is None or isinstance(known, Reject) else known
        return tuple(map(self.value, argument)) if isinstance(argument, (tuple, list)) else argument

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(as_size(n) for n in tensor(self.node).shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = tensor(self.node).dtype
        return dtype


def tensor(node: torch.fx.Node) -> Any:
    """The tensor that a node makes; of several, the first."""
    value = fake(node)
    return value if isinstance(value, torch.Tensor) else value[0]
