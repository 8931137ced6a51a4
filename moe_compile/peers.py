"""Other people's experts, as columns of the benchmark: in, a spec and a device; out, a callable, or a Reject.

Each entry of PEERS is called once for a spec and returns run(hidden_TH, ids_TK, weights_TK, weights) -> out_TH on the
weights in their native layout. Nothing here is used to run a model; a peer whose library is missing says so.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from functools import lru_cache
from math import inf
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from .activation import Activation, evaluate
from .operands import ExpertWeights, halves
from .spec import ExpertsSpec
from .verdict import Reject

SWIGLU = Activation.parse("swiglu")
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights], torch.Tensor]


def _grouped_mm(spec: ExpertsSpec, device: torch.device) -> Run | Reject:
    """argsort, two torch._grouped_mm, activation in x's dtype, weighted sum, as eager torch calls."""
    if device.type != "cuda" or spec.x != "bf16" or spec.gate_up.halves == "separate":
        return Reject("bf16 on CUDA only, gate and up in one tensor")

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        order = ids.view(-1).argsort(stable=True)
        experts = ids.view(-1)[order]
        ends = torch.searchsorted(experts, torch.arange(1, spec.E + 1, device=x.device)).int()
        first = weights.gate_up[0].mT if spec.gate_up.storage == "EGH" else weights.gate_up[0]
        h = torch._grouped_mm(x[order // spec.K], first, offs=ends)
        if weights.gate_up_bias:
            h = h + weights.gate_up_bias[0][experts]
        second = weights.down.mT if spec.down == "EHI" else weights.down
        y = torch._grouped_mm(evaluate(spec.act.expr, *halves(spec, h)), second, offs=ends)
        if weights.down_bias is not None:
            y = y + weights.down_bias[experts]
        y = y * w.view(-1, 1)[order]
        out = torch.empty_like(y)
        out[order] = y
        return out.view(x.shape[0], spec.K, spec.H).sum(1).to(x.dtype)

    return run


# The HuggingFace experts whose weights lie as a spec's do: (storage, halves, down, bias) -> module, class
_EXPERTS = {
    ("EGH", "gate_up", "EHI", "none"): ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts"),
    ("EHG", "gate_up_interleaved", "EIH", "both"): ("gpt_oss.modeling_gpt_oss", "GptOssExperts"),
}


def _forward(experts: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> Any:
    return experts(x, ids, w)


def _huggingface(implementation: str, most: float = inf) -> Callable[[ExpertsSpec, torch.device], Run | Reject]:
    """transformers' experts under Inductor, as `generate` runs them; compiled for each T, and kept. most: bytes of one
    expert's weights for each route beyond which it is not tried, for batched_mm copies those."""

    @lru_cache(None)
    def peer(spec: ExpertsSpec, device: torch.device) -> Run | Reject:
        key = (spec.gate_up.storage, spec.gate_up.halves, spec.down, spec.bias)
        if key not in _EXPERTS or (spec.act == SWIGLU) != (spec.bias == "none"):
            return Reject("no HuggingFace experts of this layout and activation")
        module, name = _EXPERTS[key]
        cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        config = SimpleNamespace(
            num_experts=spec.E, num_local_experts=spec.E, hidden_size=spec.H, moe_intermediate_size=spec.I,
            intermediate_size=spec.I, hidden_act="silu", num_experts_per_tok=spec.K, swiglu_limit=7.0,
            _experts_implementation=implementation,
        )  # fmt: skip
        modules: dict[int, torch.nn.Module] = {}  # by id of a layer's weights, which it holds as they are

        def module_of(weights: ExpertWeights) -> torch.nn.Module:
            if id(weights) not in modules:
                weakref.finalize(weights, modules.pop, id(weights), None).atexit = False
                with torch.device("meta"):
                    made = cls(config).eval()
                bias = iter(t for t in (*weights.gate_up_bias, weights.down_bias) if t is not None)
                dense = iter((*weights.gate_up, weights.down))
                for name in [n for n, _ in made.named_parameters()]:
                    tensor = next(bias if name.endswith("bias") else dense)
                    setattr(made, name, torch.nn.Parameter(tensor, requires_grad=False))
                modules[id(weights)] = made
            return modules[id(weights)]

        compiled: dict[int, Any] = {}  # by T: beyond 8 shapes torch.compile gives up on a function

        def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
            if ids.numel() * spec.H * (spec.G + spec.I) * x.itemsize > most:
                raise ValueError(f"not tried where the weights of each route's expert are over {most / 1e9:.0f} GB")
            if x.shape[0] not in compiled:
                forward = FunctionType(_forward.__code__.replace(), globals())  # shapes are counted by code object
                compiled[x.shape[0]] = torch.compile(forward, fullgraph=True, dynamic=False)
            out: torch.Tensor = compiled[x.shape[0]](module_of(weights), x, ids, w.to(x.dtype))
            return out

        return run

    return peer


def _imported(module: str, package: str) -> Any:
    """The module, or a Reject that names what is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        if missing == module.partition(".")[0]:
            return Reject(f"{package} is not installed")
        return Reject(f"{package} doesn't import", str(error))


def _vllm(spec: ExpertsSpec, device: torch.device) -> Run | Reject:
    """vLLM's fused Triton experts with its own table of tiles."""
    if (spec.gate_up.storage, spec.gate_up.halves, spec.down, spec.bias) != ("EGH", "gate_up", "EHI", "none"):
        return Reject("not vLLM's layout")
    if spec.act != SWIGLU or device.type != "cuda":
        return Reject("SwiGLU on CUDA only")
    found = _imported("vllm.model_executor.layers.fused_moe", "vllm")
    if isinstance(found, Reject):
        return found
    fused: Any = found.fused_experts

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        out: torch.Tensor = fused(x, weights.gate_up[0], weights.down, w.float(), ids.int())
        return out

    return run


def _sonicmoe(spec: ExpertsSpec, device: torch.device) -> Run | Reject:
    """SonicMoE's CuTe-DSL kernels, as its layer calls them once tokens are routed, for inference; weights as views."""
    halves = ("gate_up", "gate_up_interleaved")  # its concat_layout, and its own
    if spec.gate_up.storage != "EGH" or spec.gate_up.halves not in halves or spec.down != "EHI" or spec.bias != "none":
        return Reject("not SonicMoE's layout")
    if spec.act != SWIGLU or spec.x not in ("bf16", "f16") or device.type != "cuda":
        return Reject("SwiGLU in 16 bits on CUDA only")
    steps = _imported("sonicmoe.functional", "sonic-moe")
    if isinstance(steps, Reject):
        return steps
    kind = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    concatenated = spec.gate_up.halves == "gate_up"

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        T, K, E = x.shape[0], spec.K, spec.E
        sizes = (T * K, T * K, T * K, E, E + 1)
        gather, scatter, back, counts, offsets = (torch.empty(n, dtype=torch.int32, device=x.device) for n in sizes)
        steps.TC_topk_router_metadata_triton(ids.int(), E, counts, offsets, gather, scatter, back)
        routes = (gather, scatter, back, None, False)  # each token has K experts
        first, second = weights.gate_up[0].permute(1, 2, 0), weights.down.permute(1, 2, 0)
        a, h = steps._UpProjection.apply(x, first, None, offsets, T * K, K, *routes, kind, True, concatenated)
        out: torch.Tensor = steps._DownProjection.apply(a, h, second, None, w.float(), offsets, T, K, *routes, kind)
        return out

    return run


PEERS: dict[str, Callable[[ExpertsSpec, torch.device], Run | Reject]] = {
    "torch._grouped_mm": _grouped_mm,
    "hf_grouped_mm": _huggingface("grouped_mm"),
    "hf_batched_mm": _huggingface("batched_mm", most=26e9),
    "vllm": _vllm,
    "sonicmoe": _sonicmoe,
}
