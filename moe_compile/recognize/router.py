"""From the definitions of a block's ids and weights to a RouterSpec.

The slice of the graph that makes them, back to the logits, is walked again with nothing cut, so that the weights
become a term over logits[t, e] and each top-k says what it chose from. That term is compared with the terms a
RouterSpec means; hash-consing makes the comparison exact. Anything else keeps its nodes, with the reason.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from ..algebra.affine import Affine, Axis, Size, axis_index, flat, times
from ..algebra.layout import Val, decode, number_of
from ..algebra.terms import Term, leaves, subterms
from ..nodes import fake
from ..rules.masks import constant
from ..spec import RouterSpec, short_dtype
from ..verdict import Reject, Unproved
from ..writes import Writes
from .behind import behind, counts_tokens, floats_behind, no_top_k
from .match import Match
from .place import Computed
from .reading import scalar_value, sizes_of, strip
from .selection import Selection, undetached

if TYPE_CHECKING:
    from .walk import Walk


@dataclass(frozen=True, kw_only=True)
class RouterMatch:
    """The spec, the nodes of the logits ([..., E]) and of the vectors over experts, and the nodes of the slice."""

    spec: RouterSpec
    logits: torch.fx.Node
    bias: torch.fx.Node | None
    expert_scale: torch.fx.Node | None
    nodes: tuple[torch.fx.Node, ...]


def match_router(writes: Writes, walk: Walk, root: torch.fx.Node, block: Match) -> RouterMatch | Reject:
    """The router of a block, or why its nodes stay."""
    if block.weights is None:
        return Reject("the block has no routing weights")
    made = block.weights.nodes.values() if isinstance(block.weights, Computed) else (block.weights,)
    try:
        nodes = behind(writes, root, (block.ids, *made))
        if not walk.gradients.constants.isdisjoint(floats_behind(made, set(nodes))):
            raise Unproved("a part of the router is computed without gradients")
        return _read(walk, nodes, block)
    except Unproved as m:
        counting = counts_tokens(writes, (block.ids, *made))
        return m.verdict if counting is None else Reject("what a token is given depends on others", counting.name)


def _read(walk: Walk, nodes: list[torch.fx.Node], block: Match) -> RouterMatch:
    opened = type(walk)(walk.writes, cut=False, terms=walk.terms)
    for n in nodes:
        opened.visit(n)
    return _Router(opened, nodes, block).read()


class _Router:
    """Reads the weights' term from its end: scales, division, score; then what chose the ids."""

    def __init__(self, walk: Walk, nodes: list[torch.fx.Node], block: Match) -> None:
        self.walk, self.terms, self.nodes, self.block = walk, walk.terms, nodes, block
        ids = self._value(block.ids)
        weights = self._made(block.weights, ids)
        if not isinstance(weights, Val) or not isinstance(ids, Val) or weights.sizes != ids.sizes:
            raise Unproved("weights and ids differ in shape")
        self.out = weights.dtype
        self.ids, skips = self._skips(ids.term)
        if self.ids.op != "leaf" or self.ids.attr.node not in walk.selections:
            of = block.ids.args[0] if block.ids.target is operator.getitem else None
            refused = walk.complaints.get(of) if isinstance(of, torch.fx.Node) else None  # a top-k of another kind
            reason = no_top_k(walk.writes, block.ids) if refused is None else refused.reason
            raise Unproved(reason, block.ids.name)
        self.choice = Selection(walk, self.ids.attr.node)
        if self.choice.E < block.spec.E:
            raise Unproved("the top-k is not over all experts", f"{self.choice.E} of {block.spec.E}")
        w = self._named(weights, ids)
        if skips is not None:
            w = self._unskipped(w, skips)
        # name tokens and choices as the selection does; both number them alike
        tokens, choices = (ids.dims, ()) if block.spec.K == 1 else (ids.dims[:-1], ids.dims[-1])
        self.k_axes = [a for a in choices if isinstance(a, Axis)]
        t_axes = [a for d in tokens for a in d if isinstance(a, Axis)]
        if [a.size for a in t_axes] != [a.size for a in self.choice.t_axes]:
            raise Unproved("weights and choice differ in layout")
        names = {a: axis_index(b) for a, b in zip(t_axes, self.choice.t_axes) if a is not b}
        self.w, self.ids = self.terms.substitute(w, names), self.terms.substitute(self.ids, names)
        self.w = self.terms.rewrite(self.w, self._best)
        self.t = number_of(self.choice.t_axes)
        self._whole(self.ids, self.t.scaled(block.spec.K) + number_of(self.k_axes), block.spec.K)

    def read(self) -> RouterMatch:
        w, scale, expert_scale = self._scaled(self.w)
        w, renorm, eps = self._renormalized(w)
        score, at_e, body = self._score(strip(w))
        bias = self.choice.bias(at_e)
        values = "choice" if self._top_values(strip(w)) and self.choice.group else "score"
        logits = self._logits(body)
        spec = RouterSpec(
            E=self.choice.E, K=self.block.spec.K, score=score, score_dtype=_short(self.dtype), bias=bias is not None,
            **self.choice.fields, values=values, renorm=renorm, eps=eps, scale=scale,
            expert_scale=expert_scale is not None, logits=_short(fake(logits).dtype),
            out=_short(self.out), ties="first" if self.choice.argmax else "any",
        )  # fmt: skip
        for leaf in leaves(body), [t for t in (bias, expert_scale) if t is not None]:
            late = [t for t in leaf if not self.walk.current(t)]
            if late:
                raise Unproved("a tensor of the router is written after it was read", late[0].attr.name)
        bias_node, scale_node = (None if t is None else t.attr.node for t in (bias, expert_scale))
        return RouterMatch(spec=spec, logits=logits, bias=bias_node, expert_scale=scale_node, nodes=tuple(self.nodes))

    # names

    def _value(self, node: torch.fx.Node) -> Any:
        """A node's value; of a top-1 without the dim of choices, which some tensors have and some don't."""
        v = self.walk.value(node)
        if self.block.spec.K != 1 or not isinstance(v, Val):
            return v
        return Val(tuple(d for d in v.dims if d), v.term, v.dtype)

    def _made(self, weights: torch.fx.Node | Computed | None, ids: Any) -> Any:
        """The weights' value; where the block computes them of the router's, over the ids' axes."""
        if not isinstance(weights, Computed):
            return None if weights is None else self._value(weights)
        leaves = {leaf: (self._value(node), ids) for leaf, node in weights.nodes.items()}
        if not all(isinstance(v, Val) for pair in leaves.values() for v in pair):
            raise Unproved("weights and ids differ in shape")
        named = {leaf: self._named(*pair) for leaf, pair in leaves.items()}
        return Val(ids.dims, self.terms.rewrite(weights.term, named.get), weights.term.dtype)

    def _named(self, weights: Val, ids: Val) -> Term:
        """The weights' term over the ids' axes."""
        mapping: dict[Axis, Affine] = {}
        for have, want in zip(weights.dims, ids.dims):
            if len(have) != len(want):
                raise Unproved("weights and ids differ in layout")
            mapping.update({a: axis_index(b) for a, b in zip(have, want)})  # type: ignore[arg-type, misc]
        return self.terms.substitute(weights.term, mapping)

    def _skips(self, ids: Term) -> tuple[Term, Term | None]:
        """Of where(ids == E, any, ids), ids being at most E: ids and the mask. The experts give such routes 0."""
        if ids.op == "pw" and ids.attr == "where":
            mask, _, chosen = ids.args
            if mask.op == "pw" and mask.attr in ("eq", "ge") and mask.args[0] is chosen:
                none = constant(mask.args[1]) == self.block.spec.E
                last = chosen.op == "leaf" and self.walk.ranges.get(chosen.attr) == self.block.spec.E + 1
                if none and (last or mask.attr == "ge"):
                    return chosen, mask
        return ids, None

    def _unskipped(self, w: Term, skips: Term) -> Term:
        """Of where(skips, 0, w): w."""
        masked = w.op == "pw" and w.attr == "where" and w.args[0] is skips
        if not masked or w.args[1].op != "const" or float(w.args[1].attr[1]) != 0:
            raise Unproved("a route that skips the experts keeps a weight", repr(w)[:200])
        return w.args[2]

    def _best(self, t: Term) -> Term | None:
        """Of the greatest of all that a top-1 chose from: the same as what it chose, at the id."""
        if t.op != "max" or t.attr != "one" or self.block.spec.K != 1 or self.choice.group or len(t.bound) != 1:
            return None
        (axis,), (body,) = self.terms.open(t)
        at_e = undetached(self.terms, self.terms.substitute(body, {axis: self.choice.e}))
        if axis.size != self.choice.E or at_e is not self.choice.unmasked:
            return None
        return self.terms.substitute(body, {axis: self.terms.value(self.ids)})

    def _at_expert(self, t: Term) -> Term:
        """What `t` reads at the chosen experts, read at e instead."""
        return self.terms.rewrite(t, lambda x: self.terms.integer(self.choice.e) if x is self.ids else None)

    # the weights

    def _scaled(self, w: Term) -> tuple[Term, float, Term | None]:
        """Peels multiplications by numbers, and by one vector's element at the chosen expert."""
        scale, vector = 1.0, None
        w = strip(w)
        while w.op == "pw" and w.attr in ("mul", "div"):
            by = next((a for a in w.args if a.op in ("const", "scalar")), None)
            if by is not None and (w.attr == "mul" or by is w.args[1]):
                n = float(by.attr[1]) if by.op == "const" else scalar_value(by)
                scale = scale * n if w.attr == "mul" else scale / n
            else:
                by = next((a for a in w.args if self._per_expert(strip(a))), None)
                if by is None or w.attr == "div" or vector is not None:
                    break
                vector = strip(by)
            w = strip(w.args[0] if by is w.args[1] else w.args[1])
        return w, scale, vector

    def _per_expert(self, t: Term) -> bool:
        """Whether `t` is a whole vector over the experts, read at the chosen one."""
        return t.op == "leaf" and t.index == (self.terms.value(self.ids),) and sizes_of(t) == [self.choice.E]

    def _renormalized(self, w: Term) -> tuple[Term, str, float]:
        """Peels a division by the sum over the choices."""
        if w.op != "pw" or w.attr != "div":
            return w, "none", 0.0
        numerator, denominator = w.args
        eps, kind = 0.0, "sum"
        total = denominator
        if total.op == "pw" and total.attr in ("add", "maximum"):
            kind = "sum_plus_eps" if total.attr == "add" else "sum_at_least_eps"
            eps_term = next((a for a in total.args if a.op in ("const", "scalar")), None)
            if eps_term is not None:
                eps = float(eps_term.attr[1]) if eps_term.op == "const" else scalar_value(eps_term)
                total = next(a for a in total.args if a is not eps_term)
        same = self.terms.make("pw", (numerator,), attr="abs", dtype=total.dtype)  # no score is negative
        sums = [self.terms.bind("sum", tuple(self.k_axes), (n,), dtype=total.dtype) for n in (numerator, same)]
        if total not in sums:
            raise Unproved("the weights are divided by something else than their sum", repr(denominator)[:200])
        return numerator, kind, eps

    def _score(self, s: Term) -> tuple[str, Term, Term]:
        """(score, the selection score at (t, e), the logits there) of the scores at the ids; sets their dtype."""
        if self._top_values(s):
            name, logits = self._function(self.choice.unmasked)
            return name, self.choice.unmasked, logits
        self.dtype = s.dtype
        if s.op == "softmax" and s.index and list(s.index) == [axis_index(a) for a in self.k_axes]:  # over the chosen
            axes, (body,) = self.terms.open(s)
            body = self.terms.substitute(body, {a: axis_index(k) for a, k in zip(axes, self.k_axes)})
            logits = self._at_expert(_before_cast(body, s.dtype))
            return "topk_softmax", logits, logits
        at_e = self._at_expert(s)
        if at_e is s:
            raise Unproved("the weights are not scores at the chosen experts", repr(s)[:200])
        name, logits = self._function(at_e)
        chose = self.choice.unmasked
        if name == "sigmoid" and logits in (chose, *(chose.args if chose.op == "pw" and chose.attr == "add" else ())):
            return "topk_sigmoid", logits, logits
        return name, at_e, logits

    def _top_values(self, s: Term) -> bool:
        """Whether `s` is the values of the top-k that chose the ids, where no rule could say what they are."""
        if s.op != "leaf" or s.attr.version or s.attr.node.target is not operator.getitem:
            return False
        source, item = s.attr.node.args
        return item == 0 and source is self.ids.attr.node.args[0] and s.index == self.ids.index

    def _function(self, s: Term) -> tuple[str, Term]:
        """(score function, its argument) of the score at (t, e)."""
        self.dtype = s.dtype
        if s.op == "softmax":
            axes, (body,) = self.terms.open(s)
            if len(axes) != 1 or axes[0].size != self.choice.E or s.index != (self.choice.e,):
                raise Unproved("a softmax over neither the experts nor the choices", repr(s)[:200])
            body = self.terms.substitute(body, {axes[0]: self.choice.e})
            return "softmax", _before_cast(body, s.dtype)
        name, inner = ("sqrtsoftplus", s.args[0]) if s.op == "pw" and s.attr == "sqrt" else ("sigmoid", s)
        function = {"sigmoid": "sigmoid", "sqrtsoftplus": "softplus"}[name]
        if inner.op != "pw" or inner.attr != function or inner.dtype != s.dtype:
            raise Unproved("an unknown score function", repr(s)[:200])
        return name, _before_cast(inner.args[0], s.dtype)

    def _logits(self, t: Term) -> torch.fx.Node:
        """The node that holds `t` for every token and expert: a leaf's own, or that of something computed from it."""
        if self.ids in (t, *subterms(t)):
            raise Unproved("the logits depend on the chosen experts", repr(t)[:200])
        position = self.t.scaled(self.choice.E) + self.choice.e
        if t.op == "leaf":
            self._whole(t, position, self.choice.E)
            node: torch.fx.Node = t.attr.node
            return node
        size = times(*(a.size for a in self.choice.t_axes), self.choice.E)
        for node, value in self.walk.values():
            if times(*value.sizes) == size and value.dtype == t.dtype:
                with contextlib.suppress(Unproved):
                    digits = decode(self.terms, position, tuple(value.axes()))
                    if self.terms.substitute(value.term, digits) is t:
                        return node
        raise Unproved("a score of something that no tensor holds", repr(t)[:200])

    def _whole(self, leaf: Term, position: Affine, last: Size) -> None:
        sizes = sizes_of(leaf)
        whole = times(*(a.size for a in self.choice.t_axes), last)
        if flat(leaf.index, tuple(sizes)) != position or times(*sizes) != whole:
            raise Unproved("a tensor of the router is not read whole, at its own token", repr(leaf)[:200])


def _before_cast(t: Term, dtype: torch.dtype) -> Term:
    """What a cast to the score's dtype was given, which a RouterSpec casts too."""
    return t.args[0] if t.op == "cast" and t.dtype == dtype and t.args[0].dtype.is_floating_point else t


def _short(dtype: torch.dtype) -> str:
    short = short_dtype(dtype)
    if short is None:
        raise Unproved("a dtype that specs don't have", str(dtype))
    return short
