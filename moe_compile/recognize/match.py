"""From the term of a combined output to an ExpertsSpec: the term *is* the meaning, this reads it off and checks it.

out[t, h] = sum_k w[t, k] * (sum_i act(gate, up)[i] * down[e, h, i] + bias[e, h]) with e = ids[t, k]. Roles come from
the binders, never from sizes. Every leaf must be exactly one operand, read at exactly the indices that the spec's
layouts mean, in full, and still hold what was read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from ..activation import Expr, apply, const, pointwise_table
from ..algebra.affine import Affine, Axis, Size, axis_index, flat, times
from ..algebra.layout import Val, decode, number_of
from ..algebra.terms import Term, find, leaves
from ..nodes import fake
from ..spec import ExpertsSpec, Layout, short_dtype
from ..verdict import Reject, Unproved
from .reading import (
    SWAPPED,
    Stream,
    expert_weight,
    factors_of,
    halves_of,
    integral,
    named,
    scalar_value,
    sizes_of,
    strip,
    swap,
)

if TYPE_CHECKING:
    from .walk import Walk


@dataclass(frozen=True, kw_only=True)
class Match:
    """The spec, the operands' nodes as the operator takes them, and every leaf that the region reads."""

    spec: ExpertsSpec
    hidden: torch.fx.Node
    ids: torch.fx.Node
    weights: torch.fx.Node | None
    gate_up: tuple[torch.fx.Node, ...]
    down: tuple[torch.fx.Node, ...]
    gate_up_bias: tuple[torch.fx.Node, ...] = ()
    down_bias: tuple[torch.fx.Node, ...] = ()
    post_scale: torch.fx.Node | None = None
    leaves: tuple[Term, ...] = ()

    def with_out(self, dtype: torch.dtype) -> Match | None:
        """The same with another result dtype; None where a spec can't hold it."""
        short = short_dtype(dtype)
        return None if short is None else dataclasses.replace(self, spec=dataclasses.replace(self.spec, out=short))


def combined(t: Term) -> bool:
    """Whether a value looks like the end of a block: a sum over a product of nested routed linears."""
    t = strip(t)
    return t.op == "sum" and t.dots and find(t, lambda x: x.op == "dot" and any(a.dots for a in x.args)) is not None


def match(walk: Walk, root: torch.fx.Node, value: Val) -> Match | Reject:
    """The match of a combined value, or why it is not one."""
    try:
        return _Reader(walk, root, value).read()
    except Unproved as m:
        return m.verdict


class _Reader:
    def __init__(self, walk: Walk, root: torch.fx.Node, value: Val) -> None:
        self.walk, self.terms, self.root, self.value = walk, walk.terms, root, value
        if not value.dims or len(value.dims[-1]) != 1 or not value.plain:
            raise Unproved("the result's last dim is not the hidden one")
        last = value.dims[-1][0]
        assert isinstance(last, Axis)
        self.h_out = last
        t_axes = [a for d in value.dims[:-1] for a in d if isinstance(a, Axis)]
        sizes = tuple(a.size for a in t_axes)
        self.T = times(*sizes)
        self.t = number_of(t_axes)
        self.ids: Term | None = None
        self.hidden: Term | None = None
        self.h_in: Axis | None = None
        self.guard: tuple[Term, Any] | None = None
        self.held: dict[int, torch.fx.Node | None] = {}
        self.input_weight: Term | None = None

    def read(self) -> Match:
        total = strip(self.value.term)
        k_axes, (body,) = self.terms.open(total)
        self.K = times(*(a.size for a in k_axes))
        self.k = number_of(k_axes)
        if type(self.K) is not int:
            raise Unproved("the number of choices is not static", str(self.K))
        weight, y = self._weighted(body)
        y, down_bias = self._biased(y)
        i, down, act = self._down(y)
        self.i = i
        streams: list[Stream] = []
        expr = self._activation(act, streams)
        return self._spec(weight, down, down_bias, streams, expr)

    # the output side

    def _weighted(self, body: Term) -> tuple[Term | None, Term]:
        factors = factors_of(body)
        factors = [y for f in factors for y in (factors_of(self._guarded(f)) if f.dots else [f])]
        experts = [f for f in factors if f.dots]
        others = [f for f in factors if not f.dots]
        if len(experts) != 1:
            raise Unproved(
                "the combined value is not one expert output times a weight", f"{len(experts)} expert outputs"
            )
        if len(others) > 1:
            raise Unproved(
                "the routing weight is applied more than once, or is an expression", f"{len(others)} factors"
            )
        return (self._route_leaf(others[0], "routing weight") if others else None), experts[0]

    def _guarded(self, y: Term) -> Term:
        """Of where(ids >= E, 0, y): y as it is where ids < E. The operator gives other routes exactly 0 itself."""
        if y.op != "pw" or y.attr != "where":
            return y
        outside, zero, inner = y.args
        if outside.op != "pw" or outside.attr != "ge" or zero.op != "const" or zero.attr[1] != 0:
            return y
        ids, bound = outside.args
        if bound.op != "const" or not integral(ids):
            return y
        guard = self.guard = (ids, bound.attr[1])

        def assume(t: Term) -> Term | None:
            if t.op == "pw" and t.attr == "where" and t.args[0] is outside:
                return t.args[2]
            if t.op == "pw" and t.attr == "minimum" and t.args[0] is ids and t.args[1].op == "const":
                return ids if t.args[1].attr[1] >= guard[1] - 1 else None
            return None

        return self.terms.rewrite(inner, assume)

    def _route_leaf(self, t: Term, role: str) -> Term:
        """A leaf that is a whole [T, K] tensor read at (t, k)."""
        t = strip(t) if t.op != "leaf" else t
        if t.op != "leaf" or t.routed:
            raise Unproved(f"the {role} is not a tensor of tokens by choices", repr(t))
        position, numel = self.t.scaled(self.K) + self.k, times(self.T, self.K)
        try:
            self._whole(t, position, numel, role)
        except Unproved:
            self.held[t.id] = self._holder(t, position, numel)
            if self.held[t.id] is None:
                raise
        return t

    def _holder(self, leaf: Term, position: Affine, numel: Size) -> torch.fx.Node | None:
        """A node that is, whole and in this order, the part of the leaf's tensor that the block reads (a slice)."""
        for node, value in self.walk.holders(leaf):
            if times(*value.sizes) != numel:
                continue
            try:
                digits = decode(self.terms, position, tuple(value.axes()))
            except Unproved:
                continue
            if self.terms.substitute(value.term, digits) is leaf:
                return node
        return None

    def _node(self, leaf: Term) -> torch.fx.Node:
        """The node that holds what a leaf reads."""
        node: torch.fx.Node = self.held.get(leaf.id) or leaf.attr.node
        return node

    def _whole(self, leaf: Term, position: Affine, numel: Size, role: str) -> None:
        sizes = tuple(sizes_of(leaf))
        if flat(leaf.index, sizes) != position:
            raise Unproved(f"the {role} is not read at its own token and choice", repr(leaf))
        if times(*sizes) != numel:
            raise Unproved(f"the {role} is only partly used", f"{sizes} holds more than {numel}")

    def _biased(self, y: Term) -> tuple[Term, Term | None]:
        y = strip(y)
        if y.op == "pw" and y.attr == "add":
            a, b = y.args
            linear, bias = (a, b) if a.dots else (b, a)
            if linear.dots and not bias.dots:
                bias = strip(bias)
                if bias.op != "leaf" or len(bias.index) != 2 or bias.index[1] != axis_index(self.h_out):
                    raise Unproved("what is added to the experts' output is not a bias per expert", repr(bias))
                self._expert(bias.index[0], "output bias")
                return strip(linear), bias
        return y, None

    def _expert(self, index: Affine, role: str) -> None:
        """The index must be the one ids tensor of the block, at (t, k)."""
        ids = index.single
        if not isinstance(ids, Term) or ids.op != "leaf" or ids.routed:
            raise Unproved(f"the {role} is not read at the expert id", repr(index))
        if self.ids is None:
            self._route_leaf(ids, "expert id")
            if self.walk.lowest.of(ids.attr.node) < 0:
                raise Unproved("expert ids that may be negative", repr(ids))
            self.ids = ids
        elif self.ids is not ids:
            raise Unproved("the expert ids differ between the linears", f"{role}: {ids!r} and {self.ids!r}")

    def _down(self, y: Term) -> tuple[Axis, Term, Term]:
        if y.op != "dot":
            raise Unproved("the experts' output is not a linear", repr(y)[:200])
        axes, (a, b) = self.terms.open(y)
        down, act = (a, b) if b.dots else (b, a)
        if len(axes) != 1:
            raise Unproved("the second linear contracts more or less than one dim", str(axes))
        if down.op != "leaf" or down.dots:
            raise Unproved("the second linear's weights are computed in the graph", repr(down)[:200])
        if len(down.index) != 3:
            raise Unproved("the second linear's weights are not a tensor of experts by rows by columns", repr(down))
        self._expert(down.index[0], "second linear")
        return axes[0], down, act

    # the activation

    def _activation(self, t: Term, streams: list[Stream]) -> Expr:
        """The expression over up to two streams, named s0 and s1 in order of appearance, as `gate` and `up`."""
        memo: dict[int, Expr] = {}
        self.act_dtype = t.dtype

        def visit(t: Term) -> Expr:
            t = strip(t)
            found = memo.get(t.id)
            if found is None:
                found = memo[t.id] = read(t)
            return found

        def read(t: Term) -> Expr:
            if t.op == "const":
                return const(float(t.attr[1]))
            if t.op == "scalar":
                return const(scalar_value(t))
            stream = self._stream(t)
            if stream is not None:
                if stream not in streams:
                    streams.append(stream)
                if len(streams) > 2:
                    raise Unproved("the activation reads more than a gate and an up projection")
                return Expr(("gate", "up")[streams.index(stream)])
            if t.op == "pw":
                if t.attr not in pointwise_table() or (t.attr == "add" and t.dtype == torch.bool):  # a logical or
                    raise Unproved("the activation uses a function that kernels don't have", str(t.attr))
                return apply(t.attr, *map(visit, t.args))
            if t.op == "leaf" or not t.dots:
                raise Unproved("the activation reads something else than the first linear", repr(t)[:200])
            raise Unproved("between the linears there is more than a pointwise function", repr(t)[:200])

        return visit(t)

    def _stream(self, t: Term) -> Stream | None:
        bias: Term | None = None
        if t.op == "pw" and t.attr == "add":
            a, b = map(strip, t.args)
            linear, added = (a, b) if a.op == "dot" else (b, a)
            if linear.op != "dot" or added.op != "leaf" or not added.routed:
                return None
            t, bias = linear, added
        if t.op != "dot":
            return None
        axes, (a, b) = self.terms.open(t)
        weight, x = (a, b) if expert_weight(a) else (b, a)
        if not expert_weight(weight) or x.dots:
            raise Unproved("the first linear is not a token's hidden state times an expert's weights", repr(t)[:200])
        if len(axes) != 1:
            raise Unproved("the first linear contracts more or less than one dim", str(axes))
        h = axes[0]
        self._hidden(x, h)
        self._expert(weight.index[0], "first linear")
        if weight.index[2] == axis_index(h):
            storage, row = "EGH", weight.index[1]
        elif weight.index[1] == axis_index(h):
            storage, row = "EHG", weight.index[2]
        else:
            raise Unproved("the first linear's weights are not read along hidden", repr(weight))
        items = dict(row.items)
        coefficient = items.pop(self.i, None)
        if items or coefficient is None:
            raise Unproved("the first linear's rows are not the activation's channels", repr(row))
        if bias is not None:
            if len(bias.index) != 2 or bias.index[1] != row:
                raise Unproved("the first linear's bias is read at other channels", repr(bias))
            self._expert(bias.index[0], "first bias")
        return Stream(weight, storage, coefficient, row.const, bias)

    def _hidden(self, x: Term, h: Axis) -> None:
        x, *others = sorted(factors_of(x), key=lambda f: h not in f.free)
        if len(others) > 1:
            raise Unproved("the first linear's input is a product of more than hidden states and a weight")
        weight = self._route_leaf(others[0], "routing weight") if others else None
        if self.hidden is not None and self.input_weight is not weight:
            raise Unproved("gate and up are weighted differently")
        self.input_weight = weight
        if x.op != "leaf" or x.routed:
            raise Unproved("the first linear's input is not a tensor of hidden states", repr(x)[:200])
        H = h.size
        self._whole(x, self.t.scaled(H) + axis_index(h), times(self.T, H), "hidden states")
        self.h_in = self.h_in or h
        x = self.terms.substitute(x, {h: axis_index(self.h_in)})
        if self.hidden not in (None, x):
            raise Unproved("gate and up read different hidden states", f"{self.hidden!r} and {x!r}")
        self.hidden = x

    # the spec

    def _spec(
        self, weight: Term | None, down: Term, down_bias: Term | None, streams: list[Stream], expr: Expr
    ) -> Match:
        assert self.ids is not None
        hidden = self.hidden
        if hidden is None:
            raise Unproved("the activation does not depend on the hidden states")
        H, I = self.h_out.size, self.i.size
        E, *_ = sizes_of(down)
        if any(type(n) is not int for n in (E, H, I)):
            raise Unproved("the experts' sizes are not static", f"E={E} H={H} I={I}")
        if self.guard is not None and self.guard != (self.ids, E):
            raise Unproved(
                "routes are masked by something else than ids beyond the experts", f"{self.guard}, not {self.ids}, {E}"
            )
        index = (axis_index(self.h_out), axis_index(self.i))
        if down.index[1:] == index:
            down_storage, shape = "EHI", [E, H, I]
        elif down.index[1:] == index[::-1]:
            down_storage, shape = "EIH", [E, I, H]
        else:
            raise Unproved("the second linear's weights are not read along channels and hidden", repr(down))
        if sizes_of(down) != shape:
            raise Unproved("the second linear's weights are only partly used", f"{sizes_of(down)}, not {shape}")
        if down_bias is not None and sizes_of(down_bias) != [E, H]:
            raise Unproved("the output bias is only partly used", str(sizes_of(down_bias)))
        if weight is not None and self.input_weight is not None:
            raise Unproved("the routing weight is applied twice")
        halves, order = halves_of(streams, E, H, I)
        if order != [0, 1] and len(streams) == 2:
            streams = [streams[1], streams[0]]
            expr = swap(expr)
        act, swapped = named(expr, len(streams))
        if swapped:
            halves = SWAPPED.get(halves, halves)
            streams = streams[::-1]
        tensors = {"hidden states": hidden, "first linear": streams[0].weight, "second linear": down}
        dtypes = {role: short_dtype(t.dtype) for role, t in tensors.items()}
        if len(set(dtypes.values())) != 1 or None in dtypes.values() or self.act_dtype != hidden.dtype:
            raise Unproved(
                "hidden states, activation and expert weights differ in dtype", f"{dtypes}, activation {self.act_dtype}"
            )
        biases = [t for t in (*(s.bias for s in streams), down_bias) if t is not None]
        if any(t.dtype != hidden.dtype for t in biases) or not integral(self.ids):
            raise Unproved(
                "biases or expert ids of a dtype that the operator does not take",
                f"{[t.dtype for t in biases]}, ids {self.ids.dtype}",
            )
        route = weight if weight is not None else self.input_weight
        out = short_dtype(fake(self.root).dtype)
        w = short_dtype(route.dtype) if route is not None else dtypes["hidden states"]
        if out is None or w is None:
            raise Unproved(
                "a dtype that specs don't have", f"weights {route and route.dtype}, result {self.value.dtype}"
            )
        present = (streams[0].bias is not None, down_bias is not None)
        spec = ExpertsSpec(
            E=E, K=self.K, H=H, I=I, act=act, gate_up=Layout(storage=streams[0].storage, halves=halves),
            down=down_storage, bias={(0, 0): "none", (1, 0): "gate_up", (0, 1): "down", (1, 1): "both"}[present],
            weight="input" if self.input_weight is not None else "output" if weight is not None else "none",
            x=str(dtypes["hidden states"]), w=w, out=out,
        )  # fmt: skip
        read = tuple(leaves(self.value.term))
        stale = [leaf for leaf in read if not self.walk.current(leaf)]
        if stale:
            raise Unproved("a tensor was changed after the block read it", stale[0].attr.name)
        held = streams if halves == "separate" else streams[:1]
        return Match(
            spec=spec,
            hidden=hidden.attr.node,
            ids=self._node(self.ids),
            weights=self._node(route) if route is not None else None,
            gate_up=tuple(s.weight.attr.node for s in held),
            down=(down.attr.node,),
            gate_up_bias=tuple(s.bias.attr.node for s in held if s.bias),
            down_bias=() if down_bias is None else (down_bias.attr.node,),
            leaves=read,
        )
