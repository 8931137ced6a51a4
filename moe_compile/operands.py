"""The experts' tensors, and canonical views of them whatever their layout.

In: an ExpertsSpec and tensors in the native layout it names. Out: views (never copies) with named axes, and a check
that says which operand is wrong. Everything above the spec reads weights through here, so a new storage or placement
of halves is one entry in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .spec import ExpertsSpec, torch_dtype


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The experts' tensors in their native layout (spec.weight_shapes()); biases are [E, G] (or two [E, I]) and [E, H].

    gate_up: one tensor, or (gate, up) where spec.gate_up.halves == "separate". Biases are empty where there are none.
    """

    gate_up: tuple[torch.Tensor, ...]
    down: torch.Tensor
    gate_up_bias: tuple[torch.Tensor, ...] = ()
    down_bias: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that there are, in operand order: gate_up, down, gate_up_bias, down_bias."""
        last = () if self.down_bias is None else (self.down_bias,)
        return (*self.gate_up, self.down, *self.gate_up_bias, *last)


@dataclass(frozen=True, kw_only=True)
class Canonical:
    """Views of ExpertWeights with one meaning for every layout; the gate's are None where there is no gate."""

    gate_EIH: torch.Tensor | None
    up_EIH: torch.Tensor
    down_EHI: torch.Tensor
    gate_bias_EI: torch.Tensor | None
    up_bias_EI: torch.Tensor | None
    down_bias_EH: torch.Tensor | None


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


def first_EGH(spec: ExpertsSpec, weights: ExpertWeights) -> tuple[torch.Tensor, ...]:
    """The first linear's tensors as [E, rows, H] views: one of G native rows, or gate and up of I rows each."""
    return weights.gate_up if spec.gate_up.storage == "EGH" else tuple(w.mT for w in weights.gate_up)


def down_EHI(spec: ExpertsSpec, weights: ExpertWeights) -> torch.Tensor:
    """The second linear as an [E, H, I] view."""
    return weights.down if spec.down == "EHI" else weights.down.mT


def canonical(spec: ExpertsSpec, weights: ExpertWeights) -> Canonical:
    """The canonical views of `weights`, strided where the halves are interleaved."""

    def pair(tensors: Sequence[torch.Tensor], dim: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not tensors:
            return None, None
        return (tensors[0], tensors[1]) if len(tensors) == 2 else halves(spec, tensors[0], dim)

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
Check = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Many, torch.Tensor, Many, torch.Tensor | None], None]


def checker(spec: ExpertsSpec) -> Check:
    """check(hidden, ids, weights, gate_up, down, gate_up_bias, down_bias) raises ValueError, naming the operand that
    `spec` contradicts, what it expects and what it got. What can be computed once is: a call costs about 2 us.
    """
    x, w, integers = torch_dtype(spec.x), torch_dtype(spec.w), (torch.int64, torch.int32)
    *gate_up_shapes, down_shape = spec.weight_shapes()
    rows, count = (spec.I if spec.gate_up.halves == "separate" else spec.G), len(gate_up_shapes)
    bias_count = count if spec.has_gate_up_bias else 0
    first, first_bias, last_bias = gate_up_shapes[0], (spec.E, rows), (spec.E, spec.H)

    def fail(operand: str, expected: object, got: object) -> None:
        raise ValueError(f"moe_compile::experts: {operand} is {got}, expected {expected} for {spec}")

    def tensor(operand: str, shape: tuple[object, ...], dtype: torch.dtype, t: torch.Tensor) -> None:
        if t.shape != shape or t.dtype != dtype:
            fail(operand, f"{dtype} {list(shape)}", f"{t.dtype} {list(t.shape)}")

    def check(
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        gate_up: Sequence[torch.Tensor],
        down: torch.Tensor,
        gate_up_bias: Sequence[torch.Tensor],
        down_bias: torch.Tensor | None,
    ) -> None:
        if hidden.dim() != 2 or hidden.shape[1] != spec.H or hidden.dtype != x:
            fail("hidden", f"{x} [T, {spec.H}]", f"{hidden.dtype} {list(hidden.shape)}")
        routes = (hidden.shape[0], spec.K)
        if ids.shape != routes or ids.dtype not in integers:
            fail("ids", f"int64 or int32 {list(routes)}", f"{ids.dtype} {list(ids.shape)}")
        if weights is not None and spec.weight != "none":
            tensor("weights", routes, w, weights)
        elif (weights is None) != (spec.weight == "none"):
            fail("weights", "None" if spec.weight == "none" else "a tensor", "None" if weights is None else "a tensor")
        if len(gate_up) != count:
            fail("gate_up", f"{count} tensor(s)", f"{len(gate_up)} tensor(s)")
        if len(gate_up_bias) != bias_count:
            fail("gate_up_bias", f"{bias_count} tensor(s)", f"{len(gate_up_bias)} tensor(s)")
        if (down_bias is not None) != spec.has_down_bias:
            fail("down_bias", "a tensor" if spec.has_down_bias else "None", "None" if down_bias is None else "a tensor")
        for t in gate_up:
            tensor("gate_up", first, x, t)
        tensor("down", down_shape, x, down)
        for t in gate_up_bias:
            tensor("gate_up_bias", first_bias, x, t)
        if down_bias is not None:
            tensor("down_bias", last_bias, x, down_bias)

    return check
