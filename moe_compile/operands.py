"""The experts' tensors, and canonical views of them whatever their layout.

In: an ExpertsSpec and tensors in the native layout it names. Out: views (never copies) with named axes, and a check
that says which operand is wrong. Everything above the spec reads weights through here, so a new storage or placement
of halves is one entry in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .spec import ExpertsSpec, torch_dtype


@dataclass(frozen=True)
class Listed:
    """One tensor an expert, where a stacked tensor has an axis E: `w[e]`, `w.mT`, `w.shape`, `w.unbind(0)`."""

    tensors: tuple[torch.Tensor, ...]

    def __getitem__(self, e: int) -> torch.Tensor:
        return self.tensors[e]

    def unbind(self, dim: int = 0) -> tuple[torch.Tensor, ...]:
        assert dim == 0, "only the experts' axis is a list"
        return self.tensors

    @property
    def mT(self) -> Listed:
        return Listed(tuple(t.mT for t in self.tensors))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.tensors), *self.tensors[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def stacked(self) -> torch.Tensor:
        """A copy of all of them in one tensor."""
        return torch.stack(self.tensors)


PerExpert = Any  # a Tensor [E, ...]; where spec.tensors == "listed", a Listed


def stacked(w: PerExpert) -> torch.Tensor:
    """`w` as one tensor; a copy where it is a list."""
    return w.stacked() if isinstance(w, Listed) else w


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The experts' tensors in their native layout (spec.weight_shapes()); biases are [E, G] (or two [E, I]) and [E, H].

    gate_up: one, or (gate, up) where spec.gate_up.halves == "separate". Biases are empty where there are none.
    post_scale: [H], of post=scaled_rms.
    """

    gate_up: tuple[PerExpert, ...]
    down: PerExpert
    gate_up_bias: tuple[PerExpert, ...] = ()
    down_bias: PerExpert | None = None
    post_scale: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        spec: ExpertsSpec,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        gate_up_bias: Sequence[torch.Tensor] = (),
        down_bias: Sequence[torch.Tensor] = (),
        post_scale: torch.Tensor | None = None,
    ) -> ExpertWeights:
        """Of the operator's arguments; where listed, a tensor an expert, those of gate before those of up."""
        if spec.tensors == "stacked":
            # a step of every call, which a frozen dataclass's own way makes four times as long
            weights = cls.__new__(cls)
            fields = weights.__dict__
            fields["gate_up"], fields["down"] = tuple(gate_up), down[0]
            fields["gate_up_bias"], fields["down_bias"] = tuple(gate_up_bias), down_bias[0] if down_bias else None
            fields["post_scale"] = post_scale
            return weights

        def lists(tensors: Sequence[torch.Tensor]) -> tuple[Listed, ...]:
            return tuple(Listed(tuple(tensors[i : i + spec.E])) for i in range(0, len(tensors), spec.E))

        return cls(
            gate_up=lists(gate_up), down=lists(down)[0], gate_up_bias=lists(gate_up_bias),
            down_bias=lists(down_bias)[0] if down_bias else None, post_scale=post_scale,
        )  # fmt: skip

    def arguments(self) -> tuple[Any, ...]:
        """The operator's arguments from gate_up to post_scale, as `of` takes them."""
        last = () if self.down_bias is None else (self.down_bias,)
        return (*map(_flat, (self.gate_up, (self.down,), self.gate_up_bias, last)), self.post_scale)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that there are, in operand order: gate_up, down, gate_up_bias, down_bias, post_scale."""
        *lists, scale = self.arguments()
        return (*(t for several in lists for t in several), *(() if scale is None else (scale,)))


def _flat(several: Sequence[PerExpert]) -> list[torch.Tensor]:
    return [t for x in several for t in (x.tensors if isinstance(x, Listed) else (x,))]


@dataclass(frozen=True, kw_only=True)
class Canonical:
    """Views of ExpertWeights with one meaning for every layout; the gate's are None where there is no gate."""

    gate_EIH: PerExpert | None
    up_EIH: PerExpert
    down_EHI: PerExpert
    gate_bias_EI: PerExpert | None
    up_bias_EI: PerExpert | None
    down_bias_EH: PerExpert | None


def halves(spec: ExpertsSpec, x: torch.Tensor, dim: int = -1) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(gate, up) views of x, whose axis `dim` has the G rows of the first linear; gate is None where there is none.

    Two separate tensors count as gate_up here: what they produce is laid side by side, gate first.
    """
    match spec.gate_up.halves:
        case "up":
            return None, x
        case "gate_up" | "separate":
            return x.narrow(dim, 0, spec.I), x.narrow(dim, spec.I, spec.I)
        case "up_gate":
            return x.narrow(dim, spec.I, spec.I), x.narrow(dim, 0, spec.I)
        case interleaved:
            first, second = torch.unflatten(x, dim, (spec.I, 2)).unbind(dim if dim < 0 else dim + 1)
            return (first, second) if interleaved == "gate_up_interleaved" else (second, first)


def first_EGH(spec: ExpertsSpec, weights: ExpertWeights) -> tuple[PerExpert, ...]:
    """The first linear's tensors as [E, rows, H] views: one of G native rows, or gate and up of I rows each."""
    return weights.gate_up if spec.gate_up.storage == "EGH" else tuple(w.mT for w in weights.gate_up)


def down_EHI(spec: ExpertsSpec, weights: ExpertWeights) -> PerExpert:
    """The second linear as an [E, H, I] view."""
    return weights.down if spec.down == "EHI" else weights.down.mT


def canonical(spec: ExpertsSpec, weights: ExpertWeights) -> Canonical:
    """The canonical views of `weights`, strided where the halves are interleaved."""

    def pair(tensors: Sequence[PerExpert], dim: int) -> tuple[PerExpert | None, PerExpert | None]:
        if not tensors:
            return None, None
        if len(tensors) == 2:
            return tensors[0], tensors[1]
        if not isinstance(tensors[0], Listed):
            return halves(spec, tensors[0], dim)
        gates, ups = zip(*(halves(spec, t, dim) for t in tensors[0].tensors))
        return (Listed(gates) if spec.gated else None), Listed(ups)

    gate, up = pair(first_EGH(spec, weights), -2)
    gate_bias, up_bias = pair(weights.gate_up_bias, -1)
    assert up is not None
    return Canonical(
        gate_EIH=gate,
        up_EIH=up,
        down_EHI=down_EHI(spec, weights),
        gate_bias_EI=gate_bias,
        up_bias_EI=up_bias,
        down_bias_EH=weights.down_bias,
    )


Many = Sequence[torch.Tensor]
Check = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Many, Many, Many, Many, torch.Tensor | None], None]


def checker(spec: ExpertsSpec) -> Check:
    """check(hidden, ids, weights, gate_up, down, gate_up_bias, down_bias, post_scale) raises ValueError, naming the
    operand that `spec` contradicts, what it expects and what it got. What can be computed once is: a call costs about
    2 us, and 0.1 us a tensor of listed experts.
    """
    x, w, integers = torch_dtype(spec.x), torch_dtype(spec.w), (torch.int64, torch.int32)
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    # operand: how many tensors, and the shape of each
    lists = [(n, len(shapes), shapes[0] if shapes else ()) for n, shapes in zip(names, spec.operand_shapes())]
    H, K, weighted, scaled, scale_shape = spec.H, spec.K, spec.weight != "none", spec.post == "scaled_rms", (spec.H,)

    def fail(operand: str, expected: object, got: object) -> None:
        raise ValueError(f"moe_compile::experts: {operand} is {got}, expected {expected} for {spec}")

    def check(
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        gate_up: Many,
        down: Many,
        gate_up_bias: Many,
        down_bias: Many,
        post_scale: torch.Tensor | None,
    ) -> None:
        rows = hidden.shape
        if len(rows) != 2 or rows[1] != H or hidden.dtype != x:
            fail("hidden", f"{x} [T, {H}]", f"{hidden.dtype} {list(rows)}")
        routes = (rows[0], K)
        if ids.shape != routes or ids.dtype not in integers:
            fail("ids", f"int64 or int32 {list(routes)}", f"{ids.dtype} {list(ids.shape)}")
        if weights is not None and weighted:
            if weights.shape != routes or weights.dtype != w:
                fail("weights", f"{w} {list(routes)}", f"{weights.dtype} {list(weights.shape)}")
        elif (weights is not None) != weighted:
            fail("weights", "a tensor" if weighted else "None", "None" if weights is None else "a tensor")
        for (operand, number, shape), tensors in zip(lists, (gate_up, down, gate_up_bias, down_bias)):
            if len(tensors) != number:
                fail(operand, f"{number} tensor(s)", f"{len(tensors)} tensor(s)")
            for t in tensors:
                if t.shape != shape or t.dtype != x:
                    fail(operand, f"{x} {list(shape)}", f"{t.dtype} {list(t.shape)}")
        if (post_scale is not None) != scaled or (post_scale is not None and post_scale.shape != scale_shape):
            got = "None" if post_scale is None else list(post_scale.shape)
            fail("post_scale", [H] if scaled else "None", got)

    return check
