"""From the definitions of a block's ids and weights to a RouterSpec.

The slice of the graph that makes them, back to the logits, is walked again with nothing cut, so that the weights
become a term over logits[t, e] and each top-k says what it chose from. That term is compared with the terms a
RouterSpec means; hash-consing makes the comparison exact. Anything else keeps its nodes, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from ..algebra.affine import Affine, Axis, as_size, axis_index, flat, times
from ..algebra.layout import Val, number_of
from ..algebra.terms import Term, find
from ..canonical import Writes, canonical
from ..nodes import fake, storage
from ..spec import RouterSpec, short_dtype
from ..verdict import Reject, Unproved
from .match import Match
from .reading import scalar_value, sizes_of, strip

if TYPE_CHECKING:
    from .walk import Walk

_SLICE_LIMIT = 200
_OPAQUE = {"linear", "matmul", "einsum", "grouped_mm", "baddbmm", "addmm"}


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
    try:
        nodes = _slice(writes, root, (block.ids, block.weights))
        return _read(walk, nodes, block)
    except Unproved as m:
        return m.verdict


def _slice(writes: Writes, root: torch.fx.Node, ends: tuple[torch.fx.Node, ...]) -> list[torch.fx.Node]:
    """The nodes that make `ends`, back to linears and inputs, with whatever writes their memory, in program order."""

    def writers(memory: int) -> list[torch.fx.Node]:
        return [w for w in writes.to.get(memory, ()) if writes.position[w] < writes.position[root]]

    chosen: set[torch.fx.Node] = set()
    memories: set[int] = set()
    todo = list(ends)
    while todo:
        n = todo.pop()
        if n in chosen:
            continue
        call = canonical(n)
        memories.add(storage(n))
        if call is None or call.op in _OPAQUE:
            continue
        chosen.add(n)
        if len(chosen) > _SLICE_LIMIT:
            raise Unproved("the router is not a short function of logits", f"more than {_SLICE_LIMIT} operations")
        todo.extend(n.all_input_nodes)
        todo.extend(w for w in writers(storage(n)) if w not in chosen)
    late = [w for m in memories for w in writers(m) if w not in chosen]
    if late:
        raise Unproved("the router's tensors are written by an operation that no rule knows", late[0].name)
    return writes.ordered(chosen)


def _read(walk: Walk, nodes: list[torch.fx.Node], block: Match) -> RouterMatch:
    opened = type(walk)(cut=False, terms=walk.terms)
    for n in nodes:
        opened.visit(n)
    if block.ids not in opened.selections:
        raise Unproved("the expert ids are not the indices of a top-k", block.ids.name)
    weights = opened.value(block.weights)
    ids = opened.value(block.ids)
    if not isinstance(weights, Val) or not isinstance(ids, Val) or weights.sizes != ids.sizes:
        raise Unproved("weights and ids differ in shape")
    return _Router(opened, nodes, block, weights, ids).read()


class _Router:
    def __init__(self, walk: Walk, nodes: list[torch.fx.Node], block: Match, weights: Val, ids: Val) -> None:
        self.walk, self.terms, self.nodes, self.block = walk, walk.terms, nodes, block
        self.weights = weights
        self.choice = walk.selections[block.ids]
        self.E = self.choice.sizes[-1]
        digits = [a for a in self.choice.dims[-1] if isinstance(a, Axis)]
        if self.E != block.spec.E or len(digits) not in (1, 2):
            raise Unproved("the top-k is not over all experts", f"{self.E} of {block.spec.E}")
        # the experts' axis; where a mask of groups split it, e = g * size + j
        self.e = digits[0] if len(digits) == 1 else Axis(self.E)
        self.group = digits if len(digits) == 2 else None
        self.split = (
            {} if not self.group else {self.e: axis_index(digits[0]).scaled(digits[1].size) + axis_index(digits[1])}
        )
        self.t_axes = [a for d in self.choice.dims[:-1] for a in d if isinstance(a, Axis)]
        # name the weights' axes as the choice's: tokens alike, and k as the ids'
        self.k_axes = [a for a in ids.dims[-1] if isinstance(a, Axis)]
        mapping: dict[Axis, Affine] = {}
        for have, want in zip(weights.dims, ids.dims):
            if len(have) != len(want):
                raise Unproved("weights and ids differ in layout")
            mapping.update({a: axis_index(b) for a, b in zip(have, want)})  # type: ignore[arg-type, misc]
        self.w = self.terms.substitute(weights.term, mapping)
        self.ids = ids.term

    def read(self) -> RouterMatch:
        w, scale = self._scaled(self.w)
        numerator, renorm, eps = self._renormalized(w)
        score, dtype, logits, score_at_e = self._score(strip(numerator))
        bias, groups = self._selection(score_at_e)
        spec = RouterSpec(
            E=self.block.spec.E, K=self.block.spec.K, score=score, score_dtype=_short(dtype), bias=bias is not None,
            **groups, renorm=renorm, eps=eps, scale=scale, logits=_short(logits.dtype),
            out=_short(fake(self.block.weights).dtype),  # type: ignore[arg-type]
        )  # fmt: skip
        self._whole(logits)
        return RouterMatch(spec=spec, logits=logits.attr.node, bias=bias, expert_scale=None, nodes=tuple(self.nodes))

    def _scaled(self, w: Term) -> tuple[Term, float]:
        """Peels multiplications by numbers."""
        scale = 1.0
        w = strip(w)
        while w.op == "pw" and w.attr in ("mul", "div"):
            numbers = [a for a in w.args if a.op in ("const", "scalar")]
            if len(numbers) != 1 or (w.attr == "div" and numbers[0] is not w.args[1]):
                break
            n = float(numbers[0].attr[1]) if numbers[0].op == "const" else scalar_value(numbers[0])
            scale = scale * n if w.attr == "mul" else scale / n
            w = strip(next(a for a in w.args if a is not numbers[0]))
        return w, scale

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
        expected = self.terms.bind("sum", tuple(self.k_axes), (numerator,), dtype=total.dtype)
        if total is not expected:
            raise Unproved("the weights are divided by something else than their sum", repr(denominator)[:200])
        return numerator, kind, eps

    def _score(self, s: Term) -> tuple[str, torch.dtype, Term, Term]:
        """(score, its dtype, the logits leaf at (t, e), the selection score at (t, e)) of the scores at the ids."""
        if s.op == "softmax":
            axes, (body,) = self.terms.open(s)
            body = _before_cast(body, s.dtype)
            if body.op != "leaf" or len(axes) != 1:
                raise Unproved("a softmax of something else than logits", repr(body)[:200])
            if s.index == (self.terms.value(self.ids),):  # over the experts, read at the ids
                logits = self.terms.substitute(body, {axes[0]: axis_index(self.e)})
                at_e = self.terms.make("softmax", s.args, (axis_index(self.e),), s.bound, s.attr, s.dtype)
                return "softmax", s.dtype, logits, at_e
            if [axis_index(a) for a in self.k_axes] == list(s.index):  # over the chosen
                logits = self._at_expert(self.terms.substitute(body, {axes[0]: axis_index(self.k_axes[0])}))
                return "topk_softmax", s.dtype, logits, logits
            raise Unproved("a softmax over neither the experts nor the choices", repr(s)[:200])
        name = "sigmoid"
        inner = s
        if s.op == "pw" and s.attr == "sqrt":
            name, inner = "sqrtsoftplus", s.args[0]
        function = {"sigmoid": "sigmoid", "sqrtsoftplus": "softplus"}[name]
        if inner.op != "pw" or inner.attr != function or inner.dtype != s.dtype:
            raise Unproved("an unknown score function", repr(s)[:200])
        chosen = _before_cast(inner.args[0], s.dtype)
        if chosen.op != "leaf":
            raise Unproved("a score of something else than logits", repr(chosen)[:200])
        logits = self._at_expert(chosen)
        at_e = self._expand(s, chosen, logits)
        chose = self.choice.term
        by_logits = chose is logits or (chose.op == "pw" and chose.attr == "add" and logits in chose.args)
        if by_logits and name == "sigmoid" and not self.group:
            return "topk_sigmoid", s.dtype, logits, logits
        return name, s.dtype, logits, at_e

    def _expand(self, s: Term, chosen: Term, logits: Term) -> Term:
        """`s` with the chosen logits replaced by the logits of every expert."""
        if s is chosen:
            return logits
        args = tuple(self._expand(a, chosen, logits) for a in s.args)
        return self.terms.make(s.op, args, s.index, s.bound, s.attr, s.dtype)

    def _at_expert(self, leaf: Term) -> Term:
        """The leaf read at the ids, read at e instead."""
        at = self.terms.value(self.ids)
        if leaf.op != "leaf" or at not in leaf.index:
            raise Unproved("the weights are not scores at the chosen experts", repr(leaf)[:200])
        index = tuple(axis_index(self.e) if i == at else i for i in leaf.index)
        return self.terms.make("leaf", (), index, (), leaf.attr, leaf.dtype)

    def _selection(self, score: Term) -> tuple[torch.fx.Node | None, dict[str, Any]]:
        """The bias and the groups with which the ids were chosen from `score`."""
        choice = self.choice.term
        groups: dict[str, Any] = {}
        if self.group:
            choice, groups = self._grouped(choice, *self.group)
        score, at = self.terms.substitute(score, self.split), self.split.get(self.e, axis_index(self.e))
        if choice is score or (score.op == "leaf" and _uncast(choice) is score):
            return None, groups
        if choice.op == "pw" and choice.attr == "add" and score in choice.args:
            bias = _uncast(next((a for a in choice.args if a is not score), score))
            sizes = tuple(sizes_of(bias)) if bias.op == "leaf" else ()
            whole = bias.op == "leaf" and flat(bias.index, sizes) == at and times(*sizes) == self.E
            if whole and choice.dtype == torch.promote_types(score.dtype, bias.dtype):
                return bias.attr.node, groups
        raise Unproved("the experts are chosen by something else than the scores", repr(choice)[:200])

    def _grouped(self, masked: Term, g: Axis, j: Axis) -> tuple[Term, dict[str, Any]]:
        """where(not in a chosen group, fill, c) at e = g * size + j: c, and what the choice of groups means."""
        if masked.op != "pw" or masked.attr != "where":
            raise Unproved("a choice over groups in an unknown form", repr(masked)[:200])
        mask, fill, c = masked.args
        inverted = mask.op == "pw" and mask.attr == "invert"
        inner = mask.args[0] if inverted else mask
        inner = inner.args[0] if inner.op == "cast" else inner
        if not inverted or inner.op != "scat" or fill.op != "const" or inner.index != (axis_index(g),):
            raise Unproved("a mask of groups in an unknown form", repr(mask)[:200])
        _, (ids, value, base) = self.terms.open(inner)
        scores = self.walk.selections.get(ids.attr.node) if ids.op == "leaf" else None
        if scores is None or float(value.attr[1]) != 1 or float(base.attr[1]) != 0:
            raise Unproved("groups that are not chosen by a top-k", repr(mask)[:200])
        return c, {
            "groups": g.size, "top_groups": as_size(fake(ids.attr.node).shape[-1]),
            "group_score": self._group_score(scores, c, g, j), "group_fill": float(fill.attr[1]),
        }  # fmt: skip

    def _group_score(self, scores: Val, c: Term, g: Axis, j: Axis) -> str:
        """How the groups' scores come from their members' `c`."""
        axes = [a for d in scores.dims for a in d if isinstance(a, Axis)]
        if scores.sizes[-1] != g.size or [a.size for a in axes] != [*(a.size for a in self.t_axes), g.size]:
            raise Unproved("groups that are not the choice's", f"{scores.sizes}")
        mapping = {a: axis_index(b) for a, b in zip(axes, [*self.t_axes, g])}
        total = strip(self.terms.substitute(scores.term, mapping))
        if total.op not in ("sum", "max") or len(total.bound) != 1:
            raise Unproved("an unknown score of groups", repr(total)[:200])
        (axis,), (body,) = self.terms.open(total)
        if total.op == "max":
            if axis.size == j.size and body is self.terms.substitute(c, {j: axis_index(axis)}):
                return "max"
            raise Unproved("an unknown score of groups", repr(total)[:200])
        chosen = find(body, lambda t: any(_choice(b) for i in t.index for b, _ in i.items))
        best = None if chosen is None else next(b for i in chosen.index for b, _ in i.items if _choice(b))
        where = tuple(map(axis_index, (axis, *self.t_axes, g)))
        if best is None or axis.size != 2 or best.index != where:
            raise Unproved("an unknown score of groups", repr(total)[:200])
        if body is not self.terms.substitute(c, {j: self.terms.value(best)}):
            raise Unproved("groups are scored by something else than their members' choice scores", repr(body)[:200])
        return "top2_sum"

    def _whole(self, logits: Term) -> None:
        sizes = sizes_of(logits)
        t = number_of(self.t_axes)
        whole = times(*(a.size for a in self.t_axes), self.E)
        if flat(logits.index, tuple(sizes)) != t.scaled(self.E) + axis_index(self.e) or times(*sizes) != whole:
            raise Unproved("the logits are not a whole tensor of tokens by experts", repr(logits))


def _choice(base: object) -> bool:
    return isinstance(base, Term) and base.op == "choice"


def _before_cast(t: Term, dtype: torch.dtype) -> Term:
    """The leaf under a cast to the score's dtype, which a RouterSpec means too."""
    return t.args[0] if t.op == "cast" and t.dtype == dtype and t.args[0].op == "leaf" else t


def _uncast(t: Term) -> Term:
    """Through one widening cast, which no selection depends on."""
    if t.op == "cast" and t.args[0].op == "leaf" and isinstance(t.args[0].dtype, torch.dtype):
        narrow = t.args[0].dtype
        if narrow.is_floating_point and torch.finfo(narrow).bits <= torch.finfo(t.dtype).bits:
            return t.args[0]
    return t


def _short(dtype: torch.dtype) -> str:
    short = short_dtype(dtype)
    if short is None:
        raise Unproved("a dtype that specs don't have", str(dtype))
    return short
