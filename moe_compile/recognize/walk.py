"""The walk: interprets the graph once, in program order, giving every node a value.

A value may be wrong in no case, only vague: what no rule describes is a leaf of its own node. Mutation is a new version
of a storage; entries of older versions turn into leaves when they are next read. What only moves elements that no route
touches waits until somebody reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from .. import rules
from ..algebra.affine import Size, as_size
from ..algebra.layout import Val, new_axes
from ..algebra.terms import LeafKey, Term, Terms
from ..canonical import Call
from ..nodes import fake, spelling
from ..rules.registry import positional
from ..verdict import Reject
from ..writes import Writes
from .definitions import Definitions, Made, ruled, tensor
from .gradients import Gradients
from .lowest import Lowest
from .versions import Versions


class Walk:
    """The state of the walk; also the context that rules see."""

    follow = False

    def __init__(self, writes: Writes, cut: bool = True, terms: Terms | None = None) -> None:
        self.writes = writes
        self.terms = terms or Terms()
        self.cut = cut
        self.versions = Versions()
        self.lowest = Lowest()
        self.definitions = Definitions()
        self.gradients = Gradients()
        self.selections: dict[torch.fx.Node, Val] = {}
        self.ranges: dict[LeafKey, int] = {}
        self.distinct: dict[LeafKey, int] = {}
        self.complaints: dict[torch.fx.Node, Reject] = {}
        self.node: torch.fx.Node = None  # type: ignore[assignment]
        self._env: dict[torch.fx.Node, tuple[Any, int]] = {}
        self._leaves: dict[tuple[torch.fx.Node, int], Val] = {}
        self._table = rules.load()

    # what rules ask

    def value(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            known = self.known(argument)
            return self.whole(argument, self.versions.of(argument)) if known is None else known
        if isinstance(argument, (tuple, list)):
            return tuple(self.value(a) for a in argument)
        return argument

    def leaf(self, node: torch.fx.Node) -> Val:
        """`node` itself, at its present version."""
        found: Val = self.whole(node, self.versions.of(node))
        return found

    def whole(self, node: torch.fx.Node, version: int) -> Any:
        """What a node is that no rule describes: a leaf of itself, None for several tensors, or its number."""
        value = fake(node)
        if not isinstance(value, torch.Tensor):
            return None if isinstance(value, tuple) else value
        found = self._leaves.get((node, version))
        if found is None:
            dims, index = new_axes([as_size(n) for n in value.shape])
            found = Val(dims, self.terms.leaf(node, version, index, value.dtype), value.dtype)
            self._leaves[node, version] = found
        return found

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(as_size(n) for n in tensor(self.node).shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = tensor(self.node).dtype
        return dtype

    # the walk

    def visit(self, node: torch.fx.Node) -> Reject | None:
        """Gives `node` its value; a Reject says why it is only a leaf."""
        value, call = fake(node), self.writes.calls.get(node)
        tensors = isinstance(value, (torch.Tensor, tuple, list)) or (call is not None and call.mutates)
        if node.op not in ("call_function", "call_method") or not tensors:
            self._written(node)
            for constant in self.gradients.switched(node):
                self._env.pop(constant, None)
            return None
        self.gradients.computed(node, call)
        self.node = node
        self.lowest.visit(node, call)
        untouched = self.cut and not self._touched(node)
        if untouched and self._waits(node, call):
            return None
        result = self._apply(node, call, untouched)
        if call is not None and call.mutates:
            target = call.args[call.mutates]
            if not isinstance(target, torch.fx.Node):
                return None
            self.versions.write(target)
            if isinstance(result, Val):
                wanted = fake(target)
                if result.dtype != wanted.dtype:
                    result = Val(result.dims, self.terms.make("cast", (result.term,), dtype=wanted.dtype), wanted.dtype)
            for n in (target, node):
                if isinstance(result, Val):
                    self._env[n] = (result, self.versions.of(n))
                else:
                    self._env.pop(n, None)
        else:
            self._written(node)
            if isinstance(result, (tuple, Val)):
                self._env[node] = (result, self.versions.of(node))
            elif result is None and self.cut and call is not None:
                self.definitions.record(self, Made(self, node, call))
        if not isinstance(result, Reject):
            return None
        self.complaints[node] = result
        return result

    def _waits(self, node: torch.fx.Node, call: Call | None) -> bool:
        """Whether a value that no route touches need not be worked out before somebody asks: elements only moved."""
        if call is None or call.op not in rules.MOVES or call.mutates:
            return False
        if sum(isinstance(fake(n), torch.Tensor) for n in node.all_input_nodes) > 1:  # indexed by a tensor
            return False
        made = Made(self, node, call)
        self._env[node] = (made, self.versions.of(node))
        self.definitions.record(self, made)
        return True

    def _touched(self, node: torch.fx.Node) -> bool:
        """Whether a rule described any of the node's arguments."""
        for n in node.all_input_nodes:
            held = self.held(n)
            if held is not None and not isinstance(held, Made):
                return True
        return False

    def _apply(self, node: torch.fx.Node, call: Call | None, untouched: bool) -> Any:
        if call is None:
            return Reject("no rule knows this operation", spelling(node))
        transfer: Any = self._table.get(call.op)
        if transfer is None:
            return Reject("no rule knows this operation", call.op)
        if untouched and call.op in rules.CUTS and _floats(node):
            return None
        target = call.args.get(call.mutates) if call.mutates else None
        if isinstance(target, torch.fx.Node) and isinstance(fake(target), torch.Tensor):
            self.node = target  # an in-place result has its target's shape and dtype
        result = ruled(self, transfer, call)
        if isinstance(result, Val) and self.cut and not self.follow and call.op in rules.CUTS and positional(result):
            return None
        return result

    def _written(self, node: torch.fx.Node) -> None:
        for argument in self.writes.targets.get(node, ()):
            if isinstance(fake(argument), torch.Tensor):
                self.versions.write(argument)

    def values(self) -> Iterator[tuple[torch.fx.Node, Val]]:
        """The nodes whose elements, in no sorted order, are known."""
        for node in tuple(self._env):
            value = self.known(node)
            if isinstance(value, Val) and value.plain:
                yield node, value

    def holders(self, leaf: Term) -> Iterator[tuple[torch.fx.Node, Val]]:
        """The nodes whose elements are, in some order, those of the tensor that `leaf` reads."""
        return ((n, v) for n, v in self.values() if v.term.op == "leaf" and v.term.attr == leaf.attr)

    def held(self, node: torch.fx.Node) -> Any:
        """The node's value where a rule gave it one, a `Made` where that waits; None where it is a leaf of itself."""
        held = self._env.get(node)
        return held[0] if held is not None and held[1] == self.versions.of(node) else None

    def known(self, node: torch.fx.Node) -> Any:
        """The node's value where a rule gives it one; None where it is a leaf of itself."""
        known = self.held(node)
        if isinstance(known, Made):
            known = known.value(self, cut=True)
            if isinstance(known, Reject):
                self.complaints[node] = known
                known = None
            self._env[node] = (known, self.versions.of(node))
        return known

    def definition(self, leaf: Term) -> Term | None:
        """The term of a leaf's element by the operation that made its node, where a rule can tell."""
        return None if leaf.attr.node in self.gradients.constants else self.definitions.of(self, leaf)

    def cut_at(self, node: torch.fx.Node) -> None:
        """From here on, `node` and what it wrote into are leaves of themselves."""
        for n in (node, *self.writes.targets.get(node, ())):
            self._env.pop(n, None)

    def current(self, leaf: Term) -> bool:
        """Whether a leaf still reads what it read."""
        return bool(self.versions.of(leaf.attr.node) == leaf.attr.version)


def _floats(node: torch.fx.Node) -> bool:
    value = fake(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()
