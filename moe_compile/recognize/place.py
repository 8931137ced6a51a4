"""Where a block's values are read: at token t of T and choice k of K. Roles come from these binders, never from sizes.

In: the axes of a combined value and of its sum. Out: for a leaf, proof that it is one whole operand, read at its own
token and choice, and the node that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.fx

from ..activation import torch_function
from ..algebra.affine import Affine, Axis, Size, flat, times
from ..algebra.layout import Val, decode, number_of
from ..algebra.terms import Term, leaves, subterms
from ..verdict import Unproved
from .reading import sizes_of, strip

if TYPE_CHECKING:
    from .walk import Walk


@dataclass(frozen=True)
class Computed:
    """A value that no node of the graph holds: a pointwise function of leaves, each at its own (t, k), and their
    nodes."""

    term: Term
    nodes: dict[Term, torch.fx.Node]


class Place:
    """t and k as numbers over the axes of one region, and the region's one ids tensor once it is known."""

    def __init__(self, walk: Walk, value: Val, k_axes: Sequence[Axis]) -> None:
        if not value.dims or len(value.dims[-1]) != 1 or not value.plain:
            raise Unproved("the result's last dim is not the hidden one")
        last = value.dims[-1][0]
        assert isinstance(last, Axis)
        t_axes = [a for d in value.dims[:-1] for a in d if isinstance(a, Axis)]
        self.walk, self.terms, self.h_out = walk, walk.terms, last
        self.T, self.t = times(*(a.size for a in t_axes)), number_of(t_axes)
        self.K, self.k = times(*(a.size for a in k_axes)), number_of(k_axes)
        if type(self.K) is not int or self.K < 1:
            raise Unproved("the number of choices is not a positive number", str(self.K))
        self.ids: Term | None = None
        self._ids_term: Term | None = None
        self._held: dict[int, torch.fx.Node | None] = {}

    @property
    def route(self) -> Affine:
        """The number of the route (t, k)."""
        return self.t.scaled(self.K) + self.k

    def route_leaf(self, t: Term, role: str) -> Term:
        """A leaf that is a whole [T, K] tensor read at (t, k)."""
        t = strip(t) if t.op != "leaf" else t
        if t.op != "leaf" or t.routed:
            raise Unproved(f"the {role} is not a tensor of tokens by choices", repr(t))
        numel = times(self.T, self.K)
        try:
            self.whole(t, self.route, numel, role)
        except Unproved:
            self._held[t.id] = self._holder(t, numel)
            if self._held[t.id] is None:
                raise
        return t

    def route_value(self, t: Term, role: str) -> Term:
        """A leaf as in `route_leaf`, or a function of such leaves that torch can compute from them alone."""
        if strip(t).op == "leaf":
            return self.route_leaf(t, role)
        made = self._made(t)
        if made is not None:
            return made
        for x in subterms(t):
            if x.op == "leaf":
                self.route_leaf(x, role)
            elif x.op not in ("const", "cast") and not (x.op == "pw" and torch_function(x.attr)):
                raise Unproved(f"the {role} is not a function of tensors of tokens by choices", repr(t)[:200])
        return t

    def expert_id(self, ids: Term, role: str) -> None:
        """`ids` must be the one ids tensor of the block, at (t, k)."""
        if ids is self._ids_term:
            return
        self._ids_term = self._ids_term or ids
        # ids that a mask changed (a class of the router that is no expert) are those of the node that holds them
        leaf = ids if ids.op == "leaf" and not ids.routed else self._made(ids) if ids.guarded else None
        if leaf is None:
            raise Unproved(f"the {role} is not read at the expert id", repr(ids))
        if self.ids is None:
            self.ids = self.route_leaf(leaf, "expert id")
        elif self.ids is not leaf:
            raise Unproved("the expert ids differ between the linears", f"{role}: {ids!r} and {self.ids!r}")

    def beyond(self, ids: Term, bound: int, E: int) -> bool:
        """Whether ids >= bound says that a route goes to none of E experts: the block's ids, as a leaf or as made."""
        return bound == E and ids in (self.ids, self._ids_term)

    def whole(self, leaf: Term, position: Affine, numel: Size, role: str) -> None:
        """The leaf must read its tensor at `position` (row-major), which has `numel` places: all of it."""
        sizes = tuple(sizes_of(leaf))
        if flat(leaf.index, sizes) != position:
            raise Unproved(f"the {role} is not read at its own token and choice", repr(leaf))
        if times(*sizes) != numel:
            raise Unproved(f"the {role} is only partly used", f"{sizes} holds more than {numel}")

    def _made(self, t: Term) -> Term | None:
        """A leaf of a node that is, whole and in this order, the value `t` for every route."""
        for node, value in self.walk.values():
            if value.term.op == t.op and value.term.attr == t.attr and times(*value.sizes) == times(self.T, self.K):
                try:
                    digits = decode(self.terms, self.route, tuple(value.axes()))
                except Unproved:
                    continue
                if self.terms.substitute(value.term, digits) is t:
                    whole = self.walk.leaf(node)
                    at = decode(self.terms, self.route, tuple(whole.axes()))
                    return self.terms.substitute(whole.term, at)
        return None

    def node(self, leaf: Term) -> torch.fx.Node:
        """The node that holds what a leaf reads."""
        node: torch.fx.Node = self._held.get(leaf.id) or leaf.attr.node
        return node

    def holder(self, t: Term) -> torch.fx.Node | Computed:
        """Of a route value: the node that holds it, or how to compute it."""
        return self.node(t) if t.op == "leaf" else Computed(t, {x: self.node(x) for x in leaves(t)})

    def _holder(self, leaf: Term, numel: Size) -> torch.fx.Node | None:
        """A node that is, whole and in this order, the part of the leaf's tensor that the block reads (a slice)."""
        for node, value in self.walk.holders(leaf):
            if times(*value.sizes) != numel:
                continue
            try:
                digits = decode(self.terms, self.route, tuple(value.axes()))
            except Unproved:
                continue
            if self.terms.substitute(value.term, digits) is leaf:
                return node
        return None
