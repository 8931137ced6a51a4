"""From the term of a combined output to an ExpertsSpec: the term *is* the meaning, this reads it off and checks it.

out[t, h] = sum_k w[t, k] * norm(sum_i act(gate, up)[i] * down[e, h, i] + bias[e, h]), e = ids[t, k]. Every leaf must
be exactly one operand, read at exactly the indices that the spec's layouts mean, in full, and still hold what was read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.fx

from ..algebra.affine import Affine
from ..algebra.layout import Val
from ..algebra.terms import Term, find, leaves
from ..spec import ExpertsSpec, Layout, short_dtype
from ..verdict import Reject, Unproved
from .combination import Combination, read_combination
from .dense import as_routed, check_vanishes, is_dense
from .expert import Expert, read_expert
from .place import Computed, Place
from .reading import SWAPPED, halves_of, integral, named, sizes_of, strip, swap
from .unrolled import accumulates, match_unrolled

if TYPE_CHECKING:
    from .walk import Walk


@dataclass(frozen=True, kw_only=True)
class Match:
    """The spec, the operands' nodes as the operator takes them, and every leaf that the region reads.

    `identities`: how many ids from E on give the weighted hidden states back, beside what the spec computes.
    """

    spec: ExpertsSpec
    hidden: torch.fx.Node
    ids: torch.fx.Node
    weights: torch.fx.Node | Computed | None
    gate_up: tuple[torch.fx.Node, ...]
    down: tuple[torch.fx.Node, ...]
    gate_up_bias: tuple[torch.fx.Node, ...] = ()
    down_bias: tuple[torch.fx.Node, ...] = ()
    post_scale: torch.fx.Node | None = None
    leaves: tuple[Term, ...] = ()
    identities: int = 0

    def with_out(self, dtype: torch.dtype) -> Match | None:
        """The same with another result dtype; None where a spec can't hold it."""
        short = short_dtype(dtype)
        return None if short is None else dataclasses.replace(self, spec=dataclasses.replace(self.spec, out=short))


def collected(t: Term) -> bool:
    """Whether a value is a sum over choices of what routed linears made: whatever reads it is outside of a block."""
    t = strip(t)
    return t.op in ("sum", "mean") and t.chosen.issuperset(t.bound) and (t.dots or is_dense(t))


def combined(t: Term) -> bool:
    """Whether a value looks like the end of a block: a sum over choices of a product of nested routed linears.
    Experts written out one by one are `accumulated`; where their sum ends, only its readers show."""
    t = strip(t)
    if not collected(t):
        return False
    if not t.dots:
        return True
    return find(t, lambda x: x.op == "dot" and any(a.dots for a in x.args)) is not None


def match(walk: Walk, value: Val) -> Match | Reject:
    """The match of a combined or accumulated value, or why it is not one."""
    try:
        return match_unrolled(walk, value) if accumulates(value.term) else _routed(walk, value)
    except Unproved as m:
        return m.verdict


def _routed(walk: Walk, value: Val) -> Match:
    """A sum over k whose weights are read at ids[t, k], or over all experts with values scattered at ids[t, k]."""
    total = strip(value.term)
    if total.op == "mean":
        raise Unproved("a mean where a sum is expected")
    dense, inside = is_dense(total), False
    if dense:
        k_axes, body, inside = as_routed(walk.terms, total)
    else:
        k_axes, (body,) = walk.terms.open(total)
    place = Place(walk, value, k_axes)
    parts = read_combination(place, [body])
    if parts.weight is not None:
        place.route_value(parts.weight, "routing weight")

    def choose(leaf: Term, role: str) -> tuple[Affine, ...] | None:
        ids = leaf.index[0].single if len(leaf.index) in (2, 3) else None
        if not isinstance(ids, Term):
            return None
        place.expert_id(ids, role)
        assert place.ids is not None
        if walk.lowest.of(place.ids.attr.node) < 0:
            raise Unproved("expert ids that may be negative", repr(ids))
        return leaf.index[1:]

    expert = read_expert(place, choose, parts.y)
    if inside:
        check_vanishes(expert, parts.post)
    E = sizes_of(expert.down)[0]
    weights = [expert.down, *(s.weight for s in expert.streams)]
    biases = [t for t in (expert.down_bias, *(s.bias for s in expert.streams)) if t is not None]
    if any(sizes_of(t)[0] != E for t in weights + biases):
        raise Unproved("the linears have different numbers of experts", str([sizes_of(t)[0] for t in weights]))
    return assemble(place, value.dtype, parts, [expert], E, "stacked")


def assemble(place: Place, dtype: torch.dtype, parts: Combination, experts: list[Expert], E: int, held: str) -> Match:
    """The match, from what was read of each expert, or of one for all that are stacked; they are alike."""
    first = experts[0]
    assert place.ids is not None
    H, I = place.h_out.size, first.i.size
    if any(type(n) is not int or n < 1 for n in (E, H, I)):
        raise Unproved("the experts' sizes are not positive numbers", f"E={E} H={H} I={I}")
    if parts.guard is not None and not place.beyond(*parts.guard, E):
        raise Unproved(
            "routes are masked by something else than ids beyond the experts", f"{parts.guard}, not {place.ids}, {E}"
        )
    if first.down_bias is not None and sizes_of(first.down_bias)[-1] != H:
        raise Unproved("the output bias is only partly used", str(sizes_of(first.down_bias)))
    if parts.weight is not None and first.weight is not None:
        raise Unproved("the routing weight is applied twice")
    weight = parts.weight if parts.weight is not None else first.weight
    if weight is not None:
        weight = place.route_value(weight, "routing weight")
    halves, order = halves_of(first.streams, H, I)
    expr = first.act
    if order != [0, 1] and len(order) == 2:
        expr = swap(expr)
    act, swapped = named(expr, len(order))
    if swapped:
        halves, order = SWAPPED.get(halves, halves), order[::-1]
    streams = [[e.streams[n] for e in experts] for n in order]
    hidden, down = first.hidden, [e.down for e in experts]
    tensors = {"hidden states": [hidden], "first linear": [s.weight for several in streams for s in several]}
    dtypes = {role: {t.dtype for t in several} for role, several in {**tensors, "second linear": down}.items()}
    # an activation in a narrower dtype (autocast) is a rounding that kernels may skip; a wider one they would add
    narrow = torch.promote_types(first.act_dtype, hidden.dtype) == hidden.dtype
    if set().union(*dtypes.values()) != {hidden.dtype} or not narrow:
        raise Unproved(
            "hidden states, activation and expert weights differ in dtype", f"{dtypes}, activation {first.act_dtype}"
        )
    first_bias = [s.bias for several in streams for s in several if s.bias is not None]
    down_bias = [e.down_bias for e in experts if e.down_bias is not None]
    if any(t.dtype != hidden.dtype for t in first_bias + down_bias) or not integral(place.ids):
        raise Unproved(
            "biases or expert ids of a dtype that the operator does not take",
            f"{[t.dtype for t in first_bias + down_bias]}, ids {place.ids.dtype}",
        )
    x, out = short_dtype(hidden.dtype), short_dtype(dtype)
    w = short_dtype(weight.dtype) if weight is not None else x
    if x is None or out is None or w is None:
        raise Unproved("a dtype that specs don't have", f"{hidden.dtype}, {weight and weight.dtype}, {dtype}")
    spec = ExpertsSpec(
        E=E, K=place.K, H=H, I=I, act=act, gate_up=Layout(storage=first.streams[0].storage, halves=halves),
        down=first.down_storage, bias=_BIAS[bool(first_bias), bool(down_bias)],
        weight="none" if weight is None else "input" if first.weight is not None else "output",
        x=x, w=w, out=out, tensors=held, post=parts.post, eps=parts.eps,
    )  # fmt: skip
    operands = [hidden, place.ids, *(() if weight is None else (weight,)), *down, *first_bias, *down_bias]
    operands += [s.weight for several in streams for s in several] + ([parts.scale] if parts.scale is not None else [])
    read = tuple({leaf.attr: leaf for t in operands for leaf in leaves(t)}.values())
    stale = [leaf for leaf in read if not place.walk.current(leaf)]
    if stale:
        raise Unproved("a tensor was changed after the block read it", stale[0].attr.name)

    kept = streams if halves == "separate" else streams[:1]
    if held == "stacked":  # what each expert was seen to read is one tensor
        kept, down, down_bias = [several[:1] for several in kept], down[:1], down_bias[:1]
    return Match(
        spec=spec,
        hidden=hidden.attr.node,
        ids=place.node(place.ids),
        weights=None if weight is None else place.holder(weight),
        gate_up=tuple(s.weight.attr.node for several in kept for s in several),
        down=tuple(t.attr.node for t in down),
        gate_up_bias=tuple(s.bias.attr.node for several in kept for s in several if s.bias is not None),
        down_bias=tuple(t.attr.node for t in down_bias),
        post_scale=None if parts.scale is None else parts.scale.attr.node,
        leaves=read,
    )


_BIAS = {(False, False): "none", (True, False): "gate_up", (False, True): "down", (True, True): "both"}
