"""What the benchmark runs: in, the name of a published model's experts; out, their spec, weights, tokens and limit.

Routing is the top-k of a random linear router over random rows. limit = max(bytes of the active experts' weights /
bandwidth, FLOP / peak), from the datasheet (hardware.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from . import reference
from .activation import Activation
from .hardware import facts
from .operands import ExpertWeights, Listed
from .spec import ExpertsSpec, Layout, torch_dtype

OAI = "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))"
SWIGLU = Activation.parse("swiglu")
# bf16 experts of published models; `tiny` is for machines without a GPU
GEOMETRIES: dict[str, ExpertsSpec] = {
    "qwen3_30b": ExpertsSpec(E=128, K=8, H=2048, I=768, act=SWIGLU),
    "mixtral": ExpertsSpec(E=8, K=2, H=4096, I=14336, act=SWIGLU),
    "olmoe": ExpertsSpec(E=64, K=8, H=2048, I=1024, act=SWIGLU),
    "qwen3next": ExpertsSpec(E=512, K=10, H=2048, I=512, act=SWIGLU),
    "dsv3": ExpertsSpec(E=256, K=8, H=7168, I=2048, act=SWIGLU),
    "gpt_oss_20b": ExpertsSpec(
        E=32, K=4, H=2880, I=2880, act=Activation.parse(OAI), down="EIH", bias="both",
        gate_up=Layout(storage="EHG", halves="gate_up_interleaved"),
    ),
    "tiny": ExpertsSpec(E=16, K=4, H=128, I=64, act=SWIGLU, x="f32", out="f32"),
}  # fmt: skip
TOKENS = tuple(1 << i for i in range(14))


def weights_of(spec: ExpertsSpec, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Random weights of the spec's layout, N(0, 1 / depth)."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        w = torch.empty(shape, dtype=torch_dtype(spec.x), device=device)
        return w.normal_(0, scale, generator=generator)

    scales = (spec.H**-0.5, spec.I**-0.5, 0.1, 0.1)
    lists = [[draw(s, scale) for s in shapes] for shapes, scale in zip(spec.operand_shapes(), scales)]
    return ExpertWeights.of(spec, lists[0], lists[1], lists[2], lists[3])


def tokens_of(spec: ExpertsSpec, T: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(hidden_TH, ids_TK, weights_TK): random rows, routed by the softmax of a random linear router over them."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(T, spec.H, device=device, generator=generator)
    router = torch.randn(spec.E, spec.H, device=device, generator=generator) * spec.H**-0.5
    weights, ids = torch.softmax(x @ router.T, -1).topk(spec.K, -1)
    return x.to(torch_dtype(spec.x)), ids, (weights / weights.sum(-1, keepdim=True)).to(torch_dtype(spec.w))


def limit(spec: ExpertsSpec, ids: torch.Tensor) -> float:
    """Seconds below which no kernel can be on the device of `ids`."""
    device, each = facts(ids.device), spec.H * (spec.G + spec.I)
    size = torch_dtype(spec.x).itemsize
    active = len(torch.unique(ids))
    return max(active * each * size / device.bandwidth, 2 * ids.numel() * each / device.flop_rate(spec.x))


def exact(
    spec: ExpertsSpec, rows: Sequence[int], inputs: Sequence[torch.Tensor], weights: ExpertWeights
) -> torch.Tensor:
    """The spec's meaning in fp64, of some rows of `inputs` (tokens_of); only their experts are widened."""
    x, ids, w = (t[list(rows)] for t in inputs)
    used, small = torch.unique(ids, return_inverse=True)
    some = dataclasses.replace(spec, E=len(used))
    few = ExpertWeights(
        gate_up=tuple(_pick(t, used) for t in weights.gate_up), down=_pick(weights.down, used),
        gate_up_bias=tuple(_pick(t, used) for t in weights.gate_up_bias),
        down_bias=None if weights.down_bias is None else _pick(weights.down_bias, used),
    )  # fmt: skip
    return reference.experts(reference.exact(some), x.double(), small, w.double(), few)


def _pick(w: Any, experts: torch.Tensor) -> torch.Tensor:
    tensors = w.tensors if isinstance(w, Listed) else w
    return torch.stack([tensors[e] for e in experts.tolist()]).double()
