"""One expert's function, read off its output's term: second linear, activation, first linear, hidden states.

y[h] = sum_i act(gate, up)[i] * down[h, i] + bias[h], gate and up being rows of the first linear. Which expert a weight
belongs to is asked of `choose`, so the same reader serves weights indexed by ids and weights of one known expert.
A leaf on the way is opened: read as the term that defines its node (walk.definition).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..activation import Expr, apply, const, pointwise_table
from ..algebra.affine import Affine, Axis, axis_index, times
from ..algebra.terms import Term
from ..verdict import Unproved
from .place import Place
from .reading import Stream, factors_of, scalar_value, sizes_of, strip

Choose = Callable[[Term, str], "tuple[Affine, ...] | None"]
"""choose(leaf, role): the leaf's index without that of its expert, which was checked; None where it is no weight."""


@dataclass(frozen=True, kw_only=True)
class Expert:
    """Leaves and roles of one expert's function. `streams`: in the order that the activation names gate and up."""

    hidden: Term
    streams: tuple[Stream, ...]
    act: Expr
    act_dtype: torch.dtype
    i: Axis
    down: Term
    down_storage: str
    down_bias: Term | None
    weight: Term | None
    """The routing weight that multiplies the hidden states, if one does."""


def read_expert(place: Place, choose: Choose, y: Term) -> Expert:
    """The function whose output at h_out is `y`; Unproved where it is none."""
    return _Reader(place, choose).read(y)


class _Reader:
    def __init__(self, place: Place, choose: Choose) -> None:
        self.place, self.terms, self.choose = place, place.terms, choose
        self.hidden: Term | None = None
        self.h_in: Axis | None = None
        self.weight: Term | None = None
        self.streams: list[Stream] = []

    def read(self, y: Term) -> Expert:
        y, down_bias = self._biased(self._opened(y))
        (self.i,), down, act = self._down(y)
        storage = self._down_storage(down)
        expr = self._activation(act)
        if self.hidden is None:
            raise Unproved("the activation does not depend on the hidden states")
        return Expert(
            hidden=self.hidden, streams=tuple(self.streams), act=expr, act_dtype=self.act_dtype, i=self.i, down=down,
            down_storage=storage, down_bias=down_bias, weight=self.weight,
        )  # fmt: skip

    def _opened(self, t: Term) -> Term:
        """`t` without casts, and where that is a leaf that a rule can define, the definition instead."""
        t = strip(t)
        while t.op == "leaf":
            found = self.place.walk.definition(t)
            if found is None:
                break
            t = strip(found)
        return t

    def _linear(self, t: Term) -> Term:
        """`t` without casts; the product, where it is a leaf that one made."""
        opened = self._opened(t)
        return opened if opened.op == "dot" else strip(t)

    def _biased(self, y: Term) -> tuple[Term, Term | None]:
        if y.op == "pw" and y.attr == "add":
            a, b = map(self._linear, y.args)
            linear, bias = (a, b) if a.op == "dot" else (b, a)
            if linear.op == "dot" and not bias.dots:
                index = self.choose(bias, "output bias") if bias.op == "leaf" else ()
                if index is None:
                    raise Unproved("the output bias is not read at the expert id", repr(bias))
                if index != (axis_index(self.place.h_out),):
                    raise Unproved("what is added to the experts' output is not a bias per expert", repr(bias))
                return linear, bias
        return y, None

    def _down(self, y: Term) -> tuple[tuple[Axis, ...], Term, Term]:
        if y.op != "dot":
            raise Unproved("the experts' output is not a linear", repr(y)[:200])
        axes, (a, b) = self.terms.open(y)
        if len(axes) != 1:
            raise Unproved("the second linear contracts more or less than one dim", str(axes))
        h = self.place.h_out  # the activation has no part in it
        down, act = (a, b) if h in a.free else (b, a)
        if down.op != "leaf" or h in act.free:
            raise Unproved("the second linear's weights are computed in the graph", repr(down)[:200])
        return axes, down, act

    def _down_storage(self, down: Term) -> str:
        index = self.choose(down, "second linear")
        if index is None or len(index) != 2:
            raise Unproved("the second linear's weights are not a tensor of experts by rows by columns", repr(down))
        h, i = axis_index(self.place.h_out), axis_index(self.i)
        if index not in ((h, i), (i, h)):
            raise Unproved("the second linear's weights are not read along channels and hidden", repr(down))
        shape = [h.items[0][0].size, self.i.size]
        if sizes_of(down)[-2:] != (shape if index == (h, i) else shape[::-1]):
            raise Unproved("the second linear's weights are only partly used", f"{sizes_of(down)}, not {shape}")
        return "EHI" if index == (h, i) else "EIH"

    # the activation

    def _activation(self, t: Term) -> Expr:
        """The expression over up to two streams, in order of appearance, as `gate` and `up`."""
        memo: dict[int, Expr] = {}
        self.act_dtype = t.dtype

        def visit(t: Term) -> Expr:
            t = strip(t)
            found = memo.get(t.id)
            if found is None:
                found = memo[t.id] = read(self._opened(t))
            return found

        def read(t: Term) -> Expr:
            if t.op == "const":
                return const(float(t.attr[1]))
            if t.op == "scalar":
                return const(scalar_value(t))
            stream = self._stream(t)
            if stream is not None:
                if stream not in self.streams:
                    self.streams.append(stream)
                if len(self.streams) > 2:
                    raise Unproved("the activation reads more than a gate and an up projection")
                return Expr(("gate", "up")[self.streams.index(stream)])
            if t.op == "pw":
                if t.attr not in pointwise_table() or (t.attr == "add" and t.dtype == torch.bool):  # a logical or
                    raise Unproved("the activation uses a function that kernels don't have", str(t.attr))
                return apply(t.attr, *map(visit, t.args))
            refused = self.place.walk.complaints.get(t.attr.node) if t.op == "leaf" else None
            if refused is not None:  # what a rule said of the operation that made it
                raise Unproved(refused.reason, f"{t.attr.name}: {refused.detail}" if refused.detail else t.attr.name)
            if t.op == "leaf" or not t.dots:
                raise Unproved("the activation reads something else than the first linear", repr(t)[:200])
            raise Unproved("between the linears there is more than a pointwise function", repr(t)[:200])

        return visit(t)

    def _stream(self, t: Term) -> Stream | None:
        bias: Term | None = None
        if t.op == "pw" and t.attr == "add":
            a, b = map(self._linear, t.args)
            linear, added = (a, b) if a.op == "dot" else (b, a)
            if linear.op != "dot" or added.op != "leaf" or self.choose(added, "first bias") is None:
                return None
            t, bias = linear, added
        if t.op != "dot":
            return None
        axes, (a, b) = self.terms.open(t)
        weight, x = (a, b) if self.i in a.free else (b, a)
        if weight.op != "leaf" or self.i in x.free or x.dots:
            raise Unproved("the first linear is not a token's hidden state times an expert's weights", repr(t)[:200])
        if len(axes) != 1:
            raise Unproved("the first linear contracts more or less than one dim", str(axes))
        index = self.choose(weight, "first linear")
        if index is None or len(index) != 2:
            raise Unproved("the first linear is not a token's hidden state times an expert's weights", repr(t)[:200])
        h = axes[0]
        self._hidden(x, h)
        if index[1] == axis_index(h):
            storage, row = "EGH", index[0]
        elif index[0] == axis_index(h):
            storage, row = "EHG", index[1]
        else:
            raise Unproved("the first linear's weights are not read along hidden", repr(weight))
        items = dict(row.items)
        coefficient = items.pop(self.i, None)
        if items or coefficient is None:
            raise Unproved("the first linear's rows are not the activation's channels", repr(row))
        if bias is not None and self.choose(bias, "first bias") != (row,):
            raise Unproved("the first linear's bias is read at other channels", repr(bias))
        return Stream(weight, storage, coefficient, row.const, bias)

    def _hidden(self, x: Term, h: Axis) -> None:
        x, *others = sorted(factors_of(x), key=lambda f: h not in f.free)
        if len(others) > 1:
            raise Unproved("the first linear's input is a product of more than hidden states and a weight")
        weight = self.place.route_value(others[0], "routing weight") if others else None
        if self.hidden is not None and self.weight is not weight:
            raise Unproved("gate and up are weighted differently")
        self.weight = weight
        if x.op != "leaf" or x.routed:
            raise Unproved("the first linear's input is not a tensor of hidden states", repr(x)[:200])
        place, H = self.place, h.size
        place.whole(x, place.t.scaled(H) + axis_index(h), times(place.T, H), "hidden states")
        self.h_in = self.h_in or h
        x = self.terms.substitute(x, {h: axis_index(self.h_in)})
        if self.hidden not in (None, x):
            raise Unproved("gate and up read different hidden states", f"{self.hidden!r} and {x!r}")
        self.hidden = x
