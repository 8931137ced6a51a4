"""A block that computes every expert for every token, sum_e s[t, e] * y[t, e, h], read as a sum over choices.

s is a scatter of one value for each choice into zeros. Its ids are the indices of a top-k, so distinct: the sum over e
is the sum over k of what it adds up at e = ids[t, k]; all other experts are multiplied by exactly 0. (The two differ
where an expert that was not chosen overflows: 0 * inf is not 0.)
"""

from __future__ import annotations

from ..activation import Expr, apply, const
from ..algebra.affine import Axis, axis_index
from ..algebra.terms import Term, Terms, find, subterms
from ..verdict import Unproved
from .expert import Expert
from .reading import factors_of


def is_dense(t: Term) -> bool:
    """Whether a sum is over the experts that a scatter spreads its values over."""
    return len(t.bound) == 1 and find(t, lambda x: x.op == "scat" and x.index == (axis_index(t.bound[0]),)) is not None


def as_routed(terms: Terms, total: Term) -> tuple[tuple[Axis, ...], Term, bool]:
    """(the axes of k, the body at (t, k, h), whether the scattered value stands inside the experts)."""
    (e,), (body,) = terms.open(total)
    scats = [x for x in subterms(body) if x.op == "scat"]
    k_axes = tuple(Axis(b.size) for b in scats[0].bound)
    chosen: dict[Term, Term] = {}
    for s in scats:
        ids, value, base = s.args
        if s.index != (axis_index(e),) or tuple(b.size for b in s.bound) != tuple(a.size for a in k_axes):
            raise Unproved("weights scattered over something else than the experts", repr(s)[:200])
        if base.op != "const" or base.attr[1] != 0:
            raise Unproved("experts that were not chosen have a weight", repr(base))
        rename = {b: axis_index(a) for b, a in zip(s.bound, k_axes)}
        chosen[s] = terms.substitute(value, rename)
        chosen.setdefault(terms.const("ids"), terms.substitute(ids, rename))
        if chosen[terms.const("ids")] is not terms.substitute(ids, rename):
            raise Unproved("weights scattered at different ids", repr(ids))
    ids = chosen.pop(terms.const("ids"))
    inside = not any(f in chosen for f in factors_of(body))
    routed = terms.rewrite(body, chosen.get)
    return k_axes, terms.substitute(routed, {e: terms.value(ids)}), inside


def check_vanishes(expert: Expert, post: str) -> None:
    """An expert whose hidden states are multiplied by 0 must give 0."""

    def at_zero(e: Expr) -> Expr:
        return apply(e.op, *map(at_zero, e.args)) if e.args else e if e.op == "const" else const(0)

    biased = expert.down_bias is not None or any(s.bias is not None for s in expert.streams)
    if expert.weight is None or biased or post != "none" or at_zero(expert.act) != const(0):
        raise Unproved("experts that were not chosen contribute something")
