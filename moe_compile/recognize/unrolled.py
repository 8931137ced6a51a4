"""Experts written out one after the other, sum_e [ids[t, k] == e] * w[t, k] * y_e[t, h], in whatever shape a loop has.

In: the term of the accumulated output. Out: the match. The term is multiplied out into products of guards (ids == e),
at most one sum over k, and factors; there must be one product for each expert 0 .. E - 1, all alike. Ids from E on may
give the hidden states back (identity experts). Ids that meet no guard contribute 0, as in the operator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..algebra.affine import Affine, Axis, axis_index, flat
from ..algebra.layout import Val
from ..algebra.terms import Term, Terms, find
from ..rules.masks import constant, indicator
from ..verdict import Unproved
from .combination import read_combination
from .expert import Choose, Expert, read_expert
from .place import Place
from .reading import sizes_of, strip

if TYPE_CHECKING:
    from .match import Match
    from .walk import Walk


@dataclass(frozen=True)
class _Product:
    """[all guards] * sum over k of the factors. `implied`: tests that some choice is of an expert (`any`)."""

    factors: tuple[Term, ...]
    guards: frozenset[Term] = frozenset()
    implied: frozenset[Term] = frozenset()
    excluded: frozenset[Term] = frozenset()
    k_axes: tuple[Axis, ...] = ()

    def times(self, other: _Product) -> _Product:
        if self.k_axes and other.k_axes:
            raise Unproved("a product of two sums over choices")
        return _Product(
            self.factors + other.factors, self.guards | other.guards, self.implied | other.implied,
            self.excluded | other.excluded, self.k_axes or other.k_axes,
        )  # fmt: skip


def accumulates(t: Term) -> bool:
    """Whether tests of expert ids select in `t`; where ids index weights too, a test is part of a router."""
    return t.guarded and not t.dots


def accumulated(value: Val) -> bool:
    """Whether a value may be the sum of experts written out: floating rows [.., h] that tests of expert ids decide."""
    if not accumulates(value.term) or not value.plain or not value.dims or len(value.dims[-1]) != 1:
        return False
    last = value.dims[-1][0]
    if not _floats(value.term.dtype) or last in value.term.chosen:
        return False
    # not one-hot ids, or weights spread by them, whose last dim is the experts'
    return find(value.term, lambda x: x.op in ("leaf", "dot") and last in x.free and _floats(x.dtype)) is not None


def _floats(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def match_unrolled(walk: Walk, value: Val) -> Match:
    """The match of an accumulated value; Unproved where it is none."""
    from .match import assemble

    products = _multiplied(walk.terms, value.term)
    if not products:
        raise Unproved("nothing is accumulated")
    k_axes = tuple(Axis(a.size) for a in products[0].k_axes)
    place = Place(walk, value, k_axes)
    by_expert: dict[int, _Product] = {}
    rest: list[_Product] = []
    for p in products:
        if tuple(a.size for a in p.k_axes) != tuple(a.size for a in k_axes):
            raise Unproved("experts summed over different choices")
        p = _renamed(walk.terms, p, dict(zip(p.k_axes, map(axis_index, k_axes))))
        if not p.guards and p.excluded:
            rest.append(p)
            continue
        e = _expert(place, p.guards)
        if e is None or e in by_expert:
            raise Unproved("an expert's output is not selected by its own number, once", str(e))
        (guard,) = p.guards
        some = walk.terms.bind("any", k_axes, (guard,), dtype=torch.bool) if k_axes else guard
        if not p.implied <= {some}:
            raise Unproved("an expert's output is masked by the choices of another", repr(p.implied))
        by_expert[e] = p
    ids = len(by_expert)
    if sorted(by_expert) != list(range(ids)):
        raise Unproved("an expert is missing from the loop", f"there are {sorted(by_expert)}")
    if rest:  # memory that was there before: no id may be left for it
        every = {g for p in by_expert.values() for g in p.guards}
        if place.ids is None or walk.ranges.get(place.ids.attr) != ids or any(p.excluded != every for p in rest):
            raise Unproved("rows that no expert writes", f"ids beyond {ids}")

    held: set[str] = set()
    parts = [read_combination(place, by_expert[e].factors) for e in range(ids)]
    first = read_expert(place, _chooser(0, held), parts[0].y)
    E = ids
    while E > 1 and parts[0].weight is not None and _gives_back(place, parts[E - 1].y, first):
        E -= 1
    experts = [first, *(read_expert(place, _chooser(e, held), parts[e].y) for e in range(1, E))]
    if len({(p.weight, p.post, p.eps, p.scale) for p in parts}) != 1:
        raise Unproved("the experts' outputs are weighted or normalized differently")
    if len(held) != 1 or len(set(map(_signature, experts))) != 1:
        raise Unproved("the experts of the loop are not alike")
    (how,) = held
    if how == "stacked" and len(set(map(_tensors, experts))) != 1:
        raise Unproved("the experts of the loop are slices of different tensors")
    if how == "stacked" and (several := [sizes_of(t)[0] for t in _read(first) if sizes_of(t)[0] != E]):
        raise Unproved("an expert is missing from the loop", f"{E} of {several[0]}")
    return replace(assemble(place, value.dtype, parts[0], experts, E, how), identities=ids - E)


def _gives_back(place: Place, y: Term, expert: Expert) -> bool:
    """Whether an expert's output is the hidden states that the others read, at its own token and channel."""
    y, hidden = strip(y), expert.hidden
    if y.op != "leaf" or y.attr != hidden.attr:
        return False
    H = place.h_out.size
    return flat(y.index, tuple(sizes_of(y))) == place.t.scaled(H) + axis_index(place.h_out)


def _expert(place: Place, guards: frozenset[Term]) -> int | None:
    """The expert that the one guard asks for, at the place's own token and choice."""
    if len(guards) != 1:
        return None
    ids, number = next(iter(guards)).args
    place.expert_id(ids, "guard")
    n = number.index[0]
    return n.const if not n.items and type(n.const) is int else None


def _chooser(e: int, held: set[str]) -> Choose:
    """How expert e's tensors are told from others: they are its own, or read at the number e."""

    def choose(leaf: Term, role: str) -> tuple[Affine, ...] | None:
        own = 1 if "bias" in role else 2
        if leaf.routed or len(leaf.index) not in (own, own + 1):
            return None
        if len(leaf.index) == own:
            held.add("listed")
            return leaf.index
        if leaf.index[0] != Affine.of(e):
            if not leaf.index[0].items:
                raise Unproved(f"the {role} of an expert is that of another", f"{leaf!r} for {e}")
            return None
        held.add("stacked")
        return leaf.index[1:]

    return choose


def _read(x: Expert) -> list[Term]:
    """The weights and biases that an expert reads."""
    every = (x.down, x.down_bias, *(t for s in x.streams for t in (s.weight, s.bias)))
    return [t for t in every if t is not None]


def _tensors(x: Expert) -> tuple[object, ...]:
    """The tensors that an expert's weights and biases are read from."""
    return tuple(t.attr for t in _read(x))


def _signature(x: Expert) -> tuple[object, ...]:
    """What the experts of one block have in common."""
    tensors = {s.weight.attr: n for n, s in enumerate(x.streams)}
    streams = tuple(
        (s.storage, s.row, s.bias is None, tuple(sizes_of(s.weight)), tensors[s.weight.attr]) for s in x.streams
    )
    down = (x.down_storage, x.down_bias is None, tuple(sizes_of(x.down)))
    return (x.hidden.attr, x.weight, x.act, x.act_dtype, x.i.size, streams, down)


def _renamed(terms: Terms, p: _Product, at: dict[Axis, Affine]) -> _Product:
    def of(several: frozenset[Term]) -> frozenset[Term]:
        return frozenset(terms.substitute(t, at) for t in several)

    factors = tuple(terms.substitute(f, at) for f in p.factors)
    return _Product(factors, of(p.guards), of(p.implied), of(p.excluded))


def _multiplied(terms: Terms, t: Term) -> list[_Product]:
    """The products whose sum `t` is."""
    t = strip(t)
    test = indicator(t) if t.guarded else None
    if test is not None:
        return [_Product((), guards=frozenset({test})) if test.op == "pw" else _Product((), implied=frozenset({test}))]
    if not t.guarded:
        return [] if t.op == "const" and t.attr[1] == 0 else [_Product((t,))]
    if t.op == "sum":
        axes, (body,) = terms.open(t)
        found = _multiplied(terms, body)
        if any(p.k_axes for p in found):
            raise Unproved("a sum over choices within another")
        return [replace(p, k_axes=axes) for p in found]
    if t.op == "scat" and t.args[2].op == "const" and t.args[2].attr[1] == 0:
        axes, (ids, value, _) = terms.open(t)
        return [_Product((value,), guards=frozenset({terms.equal(ids, t.index[0], torch.bool)}), k_axes=axes)]
    if t.op != "pw":
        raise Unproved("experts selected by something else than a sum of masks", repr(t)[:200])
    if t.attr == "add":
        return [p for a in t.args for p in _multiplied(terms, a)]
    if t.attr == "mul":
        left, right = (_multiplied(terms, a) for a in t.args)
        return [a.times(b) for a in left for b in right]
    if t.attr == "where":
        return _selected(terms, *t.args)
    return [_Product((t,))]


def _selected(terms: Terms, test: Term, then: Term, otherwise: Term) -> list[_Product]:
    """where(test, then, otherwise), of a test for one expert; what stands in `otherwise` must be of other experts."""
    negates = test.op == "pw" and (test.attr == "invert" or (test.attr == "ne" and constant(test.args[1]) == 1))
    if negates and (inner := indicator(test.args[0])) is not None:
        test, then, otherwise = inner, otherwise, then
    guard = indicator(test)
    if guard is None:
        raise Unproved("experts selected by something else than their number", repr(test)[:200])
    mine = _multiplied(terms, then)
    if guard.op == "any":
        found = [replace(p, implied=p.implied | {guard}) for p in mine]
    else:
        found = [replace(p, guards=p.guards | {guard}) for p in mine]
    for p in _multiplied(terms, otherwise):
        others = {g.args[1] for g in p.guards if guard.op == "pw" and g.args[0] is guard.args[0]}
        if p.guards and others.isdisjoint({guard.args[-1]}) and len(others) == len(p.guards):
            found.append(p)  # another number: the test fails wherever this one's guard holds
        elif not p.guards and guard.op == "pw":
            found.append(replace(p, excluded=p.excluded | {guard}))
        else:
            raise Unproved("experts selected one over the other", repr(otherwise)[:200])
    return found
