"""FlashInfer's backends for Blackwell and Rubin: TensorRT-LLM's batched GEMMs, Prims-TS, and CuTe-DSL's.

In and out as in providers/flashinfer.py. Their layout is the library's own, block-major with shuffled rows: both
operands are copied, expert by expert, so no temporary is larger than one expert. None of them has run for us: their
architectures are checked, the layout is compared with FlashInfer's own preparation, and the packs pass its checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from ..operands import ExpertWeights, canonical
from ..spec import ExpertsSpec
from ..verdict import OK, Reject, Verdict
from . import flashinfer_api as fi
from .flashinfer import FlashInfer, Limit, Ready
from .flashinfer_backends import NO_BIAS, ThroughRunner
from .stored import Stored

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 64  # 16-bit elements of a 128-byte block along the reduced axis


@dataclass(frozen=True, kw_only=True)
class BlockMajor(Stored):
    """[E, H / 64, G, 64] and [E, I / 64, H, 64], rows shuffled as prepare_trtllm_bf16_weights does."""

    def copies(self, spec: ExpertsSpec) -> dict[str, tuple[int, ...]]:
        first = (spec.E, spec.H // _BLOCK, spec.G, _BLOCK)
        return {"gate_up": first, "down": (spec.E, spec.I // _BLOCK, spec.H, _BLOCK)}

    def part(self, spec: ExpertsSpec, name: str) -> tuple[object, ...]:
        return (name, "block-major")

    def fill_gate_up(self, spec: ExpertsSpec, weights: ExpertWeights, out: Tensor) -> None:
        import torch

        c, core = canonical(spec, weights), fi.module("fused_moe.core")
        gate, up = c.gate_EIH, c.up_EIH
        _fill(
            out,
            lambda e: up[e] if gate is None else torch.cat((up[e], gate[e])),
            lambda rows: core._maybe_get_cached_w3_w1_permute_indices({}, rows, 128, is_gated_act_gemm=spec.gated),
        )

    def fill_down(self, spec: ExpertsSpec, weights: ExpertWeights, out: Tensor) -> None:
        down, core = canonical(spec, weights).down_EHI, fi.module("fused_moe.core")
        _fill(
            out,
            lambda e: down[e].contiguous(),
            lambda rows: core.get_w2_permute_indices_with_cache({}, rows, 128, is_gated_act_gemm=spec.gated),
        )


def _fill(out: Tensor, expert: Callable[[int], Tensor], shuffle: Callable[[Tensor], Tensor]) -> None:
    import torch

    order = None
    for e in range(out.shape[0]):
        rows = expert(e)
        if order is None:
            order = shuffle(rows.view(torch.uint8)).to(rows.device)
        out[e].copy_(rows[order].unflatten(1, (-1, _BLOCK)).transpose(0, 1))  # type: ignore[no-untyped-call]


class Trtllm(ThroughRunner):
    """TensorRT-LLM's batched GEMMs (downloaded cubins), routed by the caller."""

    name = "flashinfer_trtllm_routed"
    config, runner = "TrtllmBf16Config", "fused_moe.runners:TrtllmBf16RoutedRunner"
    stored = BlockMajor()
    modules = ("trtllm_utils", "trtllm_moe")
    limits: ClassVar[tuple[Limit, ...]] = (
        NO_BIAS,
        (
            lambda s: s.H % _BLOCK == 0 and s.I % _BLOCK == 0,
            "H and I must be multiples of 64 (convert_to_block_layout)",
        ),
        (lambda s: s.E <= 512 and s.K <= 32, "takes 512 experts, 32 of a token (api.py, MAX_SUPPORTED_TOTAL_EXPERTS)"),
    )

    def _constants(self, ready: Ready) -> dict[str, Any]:
        return dict(fi.module("fused_moe.prepare")._activation_param_view(ready.act, ready.spec.E, ready.device))

    def _view(self, ready: Ready, weights: ExpertWeights) -> dict[str, Tensor]:
        return {"gemm1_weights": weights.gate_up[0], "gemm2_weights": weights.down, **ready.constants}


class TrtllmFromLogits(Trtllm):
    """The same kernels, routing from logits inside."""

    name = "flashinfer_trtllm"

    def on_arch(self, spec: ExpertsSpec, arch: int) -> Verdict:
        why = Reject("routes from logits", "the operator has ids and weights; flashinfer_trtllm_routed takes those")
        return super().on_arch(spec, arch) and why


class PrimsTs(Trtllm):
    """CuTe-DSL primitives and task scheduling between TensorRT-LLM's routing and finalize."""

    name = "flashinfer_prims_ts"
    config, runner = "PrimsTsConfig", "fused_moe.runners:PrimsTsRunner"
    packages = (("nvidia-cutlass-dsl", (4, 8)),)
    limits = (
        *Trtllm.limits,
        (lambda s: s.I % 128 == 0, "I must be a multiple of 128 (runners.py, PrimsTsRunner._check_support)"),
    )

    def on_arch(self, spec: ExpertsSpec, arch: int) -> Verdict:
        return super().on_arch(spec, arch) and _listed(spec, arch)


class CuteDsl(ThroughRunner):
    """CuTe-DSL kernels for block-scaled weights, which no spec has yet."""

    name = "flashinfer_cute_dsl"
    config, runner = "CuteDslConfig", "fused_moe.runners:CuteDslRunner"


@lru_cache(256)
def _listed(spec: ExpertsSpec, arch: int) -> Verdict:
    """Prims-TS's own list of pairs of kernels, for one token."""
    pairs = fi.module("prims_ts.moe.config_mapper").valid_prims_ts_bf16_moe_tactics(
        sm_arch=arch, activation_type=int(fi.activation(spec).type), num_tokens=1, top_k=spec.K,
        num_local_experts=spec.E, num_experts=spec.E,
        weight_layout=int(fi.module("tllm_enums").WeightLayout.BlockMajorK),
    )  # fmt: skip
    return OK if pairs else Reject("no kernel in its list", f"of Prims-TS for sm_{arch} and {spec.act.name}")


def blackwell() -> tuple[FlashInfer, ...]:
    return (Trtllm(), TrtllmFromLogits(), PrimsTs(), CuteDsl())
