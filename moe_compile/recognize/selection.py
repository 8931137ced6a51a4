"""What a top-k chose from, compared with the scores: the selection bias and the groups of a RouterSpec.

In: the terms of the choice and of the score at (t, e). Out: the bias and the fields of the groups; `Unproved` where the
experts are chosen by anything else. All of it is exact: no cast is looked through but a widening one.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from ..algebra.affine import Axis, axis_index, flat, times
from ..algebra.layout import Val, number_of
from ..algebra.terms import Term, Terms, find
from ..canonical import canonical
from ..nodes import fake
from ..rules.masks import constant
from ..verdict import Unproved
from .reading import sizes_of, strip

if TYPE_CHECKING:
    from .walk import Walk


class Selection:
    """The choice of a token's experts. `e`: the index of an expert in it, in digits where a mask of groups split it."""

    def __init__(self, walk: Walk, ids: torch.fx.Node) -> None:
        self.walk, self.terms = walk, walk.terms
        self.value = walk.selections[ids]
        made = ids.args[0] if ids.target is operator.getitem else ids
        call = canonical(made) if isinstance(made, torch.fx.Node) else None
        self.argmax = call is not None and call.op in ("argmax", "amax")  # amax: the index that `max` gives with it
        if not self.value.dtype.is_floating_point:
            raise Unproved("the experts are chosen by something else than scores", str(self.value.dtype))
        self.E = self.value.sizes[-1]
        digits = [a for a in self.value.dims[-1] if isinstance(a, Axis)]
        if type(self.E) is not int or len(digits) not in (1, 2):
            raise Unproved("the top-k is not over a known number of experts", str(self.E))
        self.group = digits if len(digits) == 2 else None
        self.e = flat(tuple(map(axis_index, digits)), tuple(a.size for a in digits))
        self.t_axes = [a for d in self.value.dims[:-1] for a in d if isinstance(a, Axis)]
        self.fields: dict[str, Any] = {}
        self.unmasked = undetached(self.terms, self.value.term)
        if self.group:
            self.unmasked = self._grouped(self.unmasked, *self.group)

    def bias(self, score: Term) -> Term | None:
        """The bias that was added to `score` to choose; None where nothing was."""
        choice = self.unmasked
        if choice is score or (score.op == "leaf" and widened(choice) is score):
            return None
        if choice.op == "pw" and choice.attr == "add":
            first, second = choice.args
            score_side, other = (first, second) if widened(first) is score else (second, first)
            bias = widened(other)
            sizes = tuple(sizes_of(bias)) if bias.op == "leaf" else ()
            whole = bias.op == "leaf" and flat(bias.index, sizes) == self.e and times(*sizes) == self.E
            if widened(score_side) is score and whole and choice.dtype == torch.promote_types(score.dtype, bias.dtype):
                return bias
        raise Unproved("the experts are chosen by something else than the scores", repr(choice)[:200])

    def _grouped(self, masked: Term, g: Axis, j: Axis) -> Term:
        """where(not in a chosen group, fill, c) at e = g * size + j: c. Their meaning goes to `fields`."""
        if masked.op != "pw" or masked.attr != "where":
            raise Unproved("a choice over groups in an unknown form", repr(masked)[:200])
        mask, fill, c = masked.args
        if mask.op != "pw" or mask.attr != "invert" or fill.op != "const":
            raise Unproved("a mask of groups in an unknown form", repr(mask)[:200])
        kept = mask.args[0].args[0] if mask.args[0].op == "cast" else mask.args[0]
        if kept.op != "scat" or kept.index != (axis_index(g),):
            raise Unproved("a mask of groups in an unknown form", repr(mask)[:200])
        chosen, (ids, value, base) = self.terms.open(kept)
        scores = self.walk.selections.get(ids.attr.node) if ids.op == "leaf" else None
        if scores is None or constant(value) != 1 or constant(base) != 0:
            raise Unproved("groups that are not chosen by a top-k", repr(mask)[:200])
        sizes = sizes_of(ids)
        whole = flat(ids.index, tuple(sizes)) == number_of([*self.t_axes, *chosen])
        if not whole or sizes[-1] != times(*(a.size for a in chosen)) or sizes[-1] < 1:
            raise Unproved("only some of the chosen groups are kept", repr(ids)[:200])
        self.fields = {
            "groups": g.size, "top_groups": sizes[-1],
            "group_score": self._group_score(scores, c, g, j), "group_fill": float(fill.attr[1]),
        }  # fmt: skip
        return c

    def _group_score(self, scores: Val, c: Term, g: Axis, j: Axis) -> str:
        """How the groups' scores come from their members' `c`."""
        axes = [a for d in scores.dims for a in d if isinstance(a, Axis)]
        if scores.sizes[-1] != g.size or [a.size for a in axes] != [*(a.size for a in self.t_axes), g.size]:
            raise Unproved("groups that are not the choice's", f"{scores.sizes}")
        mapping = {a: axis_index(b) for a, b in zip(axes, [*self.t_axes, g])}
        total = strip(undetached(self.terms, self.terms.substitute(scores.term, mapping)))
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
        if best is None or axis.size != 2 or best.index != where or fake(best.attr)[0].shape[-1] != 2:
            raise Unproved("an unknown score of groups", repr(total)[:200])
        if body is not self.terms.substitute(c, {j: self.terms.value(best)}):
            raise Unproved("groups are scored by something else than their members' choice scores", repr(body)[:200])
        return "top2_sum"


def _choice(base: object) -> bool:
    return isinstance(base, Term) and base.op == "choice"


def undetached(terms: Terms, t: Term) -> Term:
    """Without detach, which no choice depends on."""
    return terms.rewrite(t, lambda x: x.args[0] if x.op == "pw" and x.attr == "detach" else None)


def widened(t: Term) -> Term:
    """Through one widening cast, which no comparison depends on."""
    if t.op == "cast" and isinstance(t.args[0].dtype, torch.dtype):
        narrow = t.args[0].dtype
        if narrow.is_floating_point and torch.finfo(narrow).bits <= torch.finfo(t.dtype).bits:
            return t.args[0]
    return t
