"""Operands for tests: random tensors of any spec, the specs that cover every layout, and the distance to an oracle."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from moe_compile.activation import Activation
from moe_compile.operands import ExpertWeights
from moe_compile.reference import exact, experts
from moe_compile.spec import (
    BIASES,
    DOWN_STORAGE,
    GATE_UP_STORAGE,
    HALVES,
    POSTS,
    TENSORS,
    WEIGHT_SIDES,
    ExpertsSpec,
    Layout,
    torch_dtype,
)

OAI = "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))"


def spec_of(dtype: str = "f32", **changes) -> ExpertsSpec:
    fields = {"E": 6, "K": 2, "H": 32, "I": 16, "act": "swiglu", "x": dtype, "w": dtype, "out": dtype, **changes}
    return ExpertsSpec(**{**fields, "act": Activation.parse(fields["act"])})


def layouts() -> list[dict]:
    """Every storage and placement of halves, twice, with every down storage, bias and weight side among them, experts
    in one tensor or many, and every norm of their outputs."""
    rest = itertools.cycle(itertools.product(DOWN_STORAGE, BIASES, WEIGHT_SIDES))
    more = itertools.cycle(itertools.product(TENSORS, POSTS))
    cases = []
    for storage, halves in itertools.product(GATE_UP_STORAGE, HALVES):
        for _ in range(2):
            down, bias, weight = next(rest)
            act = "relu2" if halves == "up" else OAI if "interleaved" in halves else "swiglu"
            layout = Layout(storage=storage, halves=halves)
            case = {"gate_up": layout, "down": down, "bias": bias, "weight": weight, "act": act}
            tensors, post = next(more)
            cases.append({**case, "tensors": tensors, "post": post, "eps": 0.0 if post == "none" else 1e-3})
    return cases


def layout_id(case: dict) -> str:
    return "-".join(str(case[k]) for k in ("gate_up", "down", "bias", "weight", "tensors", "post"))


@dataclasses.dataclass(frozen=True)
class Case:
    """An experts call; `args` are the operator's, without its plan."""

    spec: ExpertsSpec
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    p: ExpertWeights

    @property
    def args(self) -> tuple:
        return (self.hidden, self.ids, self.weights, *self.p.arguments(), str(self.spec))

    def map(self, change) -> Case:
        """The case with `change` applied to each floating operand."""
        *lists, scale = self.p.arguments()
        changed = ExpertWeights.of(
            self.spec, *([change(t) for t in several] for several in lists), None if scale is None else change(scale)
        )
        weights = None if self.weights is None else change(self.weights)
        return dataclasses.replace(self, hidden=change(self.hidden), weights=weights, p=changed)

    def leaves(self) -> list[torch.Tensor]:
        """The floating operands in the order of experts_backward's gradients."""
        return [t for t in (self.hidden, self.weights, *self.p.tensors()) if t is not None]

    def requires_grad(self) -> Case:
        return self.map(lambda t: t.detach().clone().requires_grad_())

    def oracle(self) -> torch.Tensor:
        """The reference in fp64 throughout, on the same (rounded) operands."""
        c = self.map(lambda t: t.double())
        return experts(exact(self.spec), c.hidden, c.ids, c.weights, c.p)


def case_of(spec: ExpertsSpec, T: int, *, seed: int = 0, ids: torch.Tensor | None = None) -> Case:
    """Random operands, scaled so that every linear keeps unit variance; distinct experts for each token by default."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, dtype: str = spec.x) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(torch_dtype(dtype))

    scales = (spec.H**-0.5, spec.I**-0.5, 1.0, 1.0)
    lists = [[draw(*s, scale=scale) for s in shapes] for shapes, scale in zip(spec.operand_shapes(), scales)]
    p = ExpertWeights.of(spec, *lists, draw(spec.H).abs() if spec.post == "scaled_rms" else None)
    if ids is None:
        ids = torch.rand(T, spec.E, generator=g).topk(spec.K).indices
    weights = None if spec.weight == "none" else draw(T, spec.K, dtype=spec.w).abs()
    return Case(spec, draw(T, spec.H), ids, weights, p)


def distance(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(max, RMS) error, each over the RMS of `want`."""
    error, scale = got.double() - want.double(), want.double().pow(2).mean().sqrt().clamp_min(1e-300)
    if not got.numel():
        return 0.0, 0.0
    return (error.abs().max() / scale).item(), (error.pow(2).mean().sqrt() / scale).item()


# (max, RMS) that a correct kernel stays under: a few roundings of the dtype, over sums of a hundred terms
TOLERANCE = {"f64": (1e-13, 1e-14), "f32": (1e-5, 1e-6), "bf16": (6e-2, 8e-3), "f16": (1.2e-2, 1e-3)}


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: str, slack: float = 1.0) -> None:
    assert got.shape == want.shape
    worst, rms = distance(got, want)
    assert worst <= slack * TOLERANCE[dtype][0], (worst, rms)
    assert rms <= slack * TOLERANCE[dtype][1], (worst, rms)
