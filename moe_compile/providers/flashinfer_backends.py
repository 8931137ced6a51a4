"""The table of FlashInfer's backends for 16-bit weights: layouts, limits and calls.

Limits are those that FlashInfer enforces only once it is called, each with its place in FlashInfer 0.7.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..hardware import Device
from ..operands import ExpertWeights
from ..spec import ExpertsSpec
from ..verdict import OK, Reject, Verdict
from ..work import Work
from . import flashinfer_api as fi
from .base import Tactic
from .flashinfer import FlashInfer, Limit, Ready, _choose
from .stored import Stored

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NO_BIAS: Limit = (lambda s: s.bias == "none", "its unified API takes no biases (MoEWeightPack has no field for them)")


class Cutlass(FlashInfer):
    """CUTLASS grouped GEMMs: `cutlass_fused_moe`, tuned through its runner of the unified API. PICK: the tactics of the
    first and the second linear."""

    name = "flashinfer_cutlass"
    config, runner = "CutlassBf16Config", "fused_moe.runners:CutlassBf16Runner"
    modules = ("trtllm_utils", "fused_moe")
    any_size = True
    limits = (
        (lambda s: s.H % 8 == 0 and s.I % 8 == 0, "H and I must be multiples of 8 (cutlass_fused_moe_binding.cu, TMA)"),
        (lambda s: s.bias in ("none", "both"), "takes both biases or none (cutlass_fused_moe_binding.cu, run_moe)"),
    )

    def _constants(self, ready: Ready) -> dict[str, Any]:
        params = fi.module("fused_moe.runners")._cutlass_activation_params(ready.act, ready.spec.E, ready.device)
        return {"activation": {k: v for k, v in params.items() if v is not None}, "workspaces": {}}

    def _call(self, ready: Ready, x: Tensor, ids: Tensor, w: Tensor, weights: ExpertWeights, pick: Any) -> Tensor:
        import torch

        core, s = fi.module("fused_moe.core"), ready.spec
        bucket, sizes = self.bucket(x.shape[0]), ready.constants["workspaces"]
        if bucket not in sizes:
            sizes[bucket] = core.cutlass_fused_moe_workspace_size(
                bucket, s.H, s.I, s.E, s.K, x_dtype=x.dtype, weight_dtype=x.dtype, output_dtype=x.dtype,
                activation_type=ready.act.type, use_fused_finalize=self.fused, device=ready.device,
            )  # fmt: skip
        out = torch.empty_like(x)
        core.cutlass_fused_moe(
            x, ids, w, weights.gate_up[0], weights.down, x.dtype, [],
            fc1_expert_biases=weights.gate_up_bias[0] if weights.gate_up_bias else None,
            fc2_expert_biases=weights.down_bias, output=out, activation_type=ready.act.type,
            use_fused_finalize=self.fused, profile_ids=list(pick),
            workspace_buffer=torch.empty(sizes[bucket], dtype=torch.uint8, device=x.device),
            **ready.constants["activation"],
        )  # fmt: skip
        return out

    def _make_runner(self, spec: ExpertsSpec, device: torch.device) -> Any:
        runner = self._runner_class()(fi.config(spec, fi.activation(spec), self._config()), device=device)
        runner._use_fused_finalize = self.fused
        runner.check_support()
        runner.build()
        return runner

    def _tune(self, ready: Ready, x: Tensor, ids: Tensor, w: Tensor, weights: ExpertWeights) -> Any:
        try:
            return super()._tune(ready, x, ids, w, weights)
        finally:
            # Calls bring a workspace of their own; the runner's, and the profiler's in the C++ object that it shares
            # with others, go (58 MB at 1024 tokens of qwen3_30b). Both are made again where they are needed.
            inner, ready.runner = ready.runner._inner, None
            shared = type(inner).runner_dict
            for key in [k for k, v in shared.items() if v is inner.fused_moe_runner]:
                del shared[key]


class FrostLowLatency(FlashInfer):
    """CuTe-DSL kernels for up to 8 tokens, FMA or tensor cores. PICK: "ffma" and columns, or "wgmma" and its tile."""

    name = "flashinfer_frost_low_latency"
    config, runner = "FrostLowLatencyConfig", "fused_moe.backends.frost_low_latency.runner:FrostLowLatencyRunner"
    stored = Stored(multiple=128)
    most_tokens = 8
    absent = 0  # computed with weight 0: ids must be in [0, E) (FrostLowLatencyConfig's docstring)
    packages = (("nvidia-cutlass-dsl", (4, 8)),)
    limits = (
        NO_BIAS,
        (lambda s: s.H % 128 == 0, "H must be a multiple of 128 (frost_low_latency/runner.py, _accepts_shape)"),
        (lambda s: s.I % 32 == 0, "I must be a multiple of 32 (frost_low_latency/runner.py, _check_support)"),
        (lambda s: s.K <= 32, "K must be at most 32 (frost_low_latency/runner.py, _check_support)"),
    )

    def _config(self) -> Any:
        return fi.module("fused_moe.api").FrostLowLatencyConfig(max_num_tokens=8)

    def bucket(self, T: int) -> int:
        return T

    def compiles(self, T: int) -> int:
        return T

    def _view(self, ready: Ready, weights: ExpertWeights) -> dict[str, Tensor]:
        return {"w1_weight": weights.gate_up[0], "w2_weight": weights.down}

    def _call(self, ready: Ready, x: Tensor, ids: Tensor, w: Tensor, weights: ExpertWeights, pick: Any) -> Tensor:
        inputs = ready.runner.pack_inputs(*self._packs(ready, x, ids, w, weights))
        return ready.runner.forward(inputs, tactic=pick)


class CuteDslSm90(FlashInfer):
    """Hopper's CuTe-DSL kernels, `cute_dsl_fused_moe_bf16`. PICK: tile; tile and swizzle of the first linear; tile,
    cluster and raster of the second."""

    name = "flashinfer_cute_dsl_sm90"
    config, runner = "cute_dsl_fused_moe_bf16", "fused_moe.cute_dsl.sm90_tuner:CuteDslFusedMoESm90Runner"
    stored = Stored(block=32)
    modules = ("trtllm_utils", "moe_utils")
    packages = (("nvidia-cutlass-dsl", (4, 8)),)
    limits = (
        (lambda s: s.bias == "none", "cute_dsl_fused_moe_bf16 takes no biases"),
        (lambda s: s.H % 8 == 0, "H must be a multiple of 8 (sm90_fused_moe.py, docstring)"),
        (lambda s: s.I % (32 if s.gated else 8) == 0, "I must be a multiple of 32, without a gate of 8 (the same)"),
        (lambda s: s.E <= 2048 and s.K <= 32, "moe_sort takes 2048 experts, 32 of a token (runners.py, _MOE_SORT_MAX)"),
    )

    def tactics(self, spec: ExpertsSpec, device: Device, T: int) -> list[tuple[Tactic, Work]]:
        """Named ones: FlashInfer's default (the first) and those next to it. Its tuner takes 20 s a size, and found
        1.3 of the default's speed (qwen3_30b, T=64, H200, 2026-11-30)."""
        picks = [
            Tactic.of(PICK=f"{m}_{m}_{n}_1_{m}_{n}_1_1_0") for m, n in ((128, 64), (64, 64), (64, 128), (128, 128))
        ]
        return [(tactic, self.work(tactic, spec, device)) for tactic in picks]

    def _config(self) -> Any:
        return _Sm90

    def _class_says(self, spec: ExpertsSpec, act: Any) -> Verdict:
        able = fi.module("fused_moe.cute_dsl.moe_utils").SM90_CUTE_DSL_MOE_ACTIVATION_TYPES
        if act.type not in able:
            return Reject("activation", f"{spec.act.name}; it has {', '.join(t.name for t in able)}")
        return OK

    def _make_runner(self, spec: ExpertsSpec, device: torch.device) -> Any:
        sm90, act = fi.module("fused_moe.cute_dsl.sm90_fused_moe"), fi.activation(spec)
        return self._runner_class()(
            forward_impl=sm90._moe_core_impl, num_experts=spec.E, top_k=spec.K, num_local_experts=spec.E,
            use_fused_finalize=self.fused, activation_type=int(act.type), **self._swiglu(act),
        )  # fmt: skip

    def _swiglu(self, act: Any) -> dict[str, float]:
        fields = ("alpha", "beta", "limit")
        return {f"swiglu_{f}": getattr(act, f) for f in fields if hasattr(act, f)}

    def pick_of(self, parts: tuple[Any, ...]) -> Any:
        tile, m1, n1, swizzle, m2, n2, c1, c2, raster = parts
        return tile, ((m1, n1), swizzle), ((m2, n2), (c1, c2), bool(raster))

    def _tune(self, ready: Ready, x: Tensor, ids: Tensor, w: Tensor, weights: ExpertWeights) -> Any:
        import torch

        sm90, tuner = fi.module("fused_moe.cute_dsl.sm90_fused_moe"), fi.module("autotuner")
        inputs = [x, ids, w, weights.gate_up[0], weights.down, torch.empty_like(x)]
        with tuner.autotune(True, tuning_buckets=(self.bucket(x.shape[0]),), round_up=True):
            return _choose(
                sm90._sm90_moe_autotune_op_name(int(ready.act.type)), ready.runner, ready.runner.tuning_config, inputs,
            )  # fmt: skip

    def _call(self, ready: Ready, x: Tensor, ids: Tensor, w: Tensor, weights: ExpertWeights, pick: Any) -> Tensor:
        return fi.module("fused_moe.cute_dsl.sm90_fused_moe").cute_dsl_fused_moe_bf16(
            x, ids, w, weights.gate_up[0], weights.down, ready.spec.E, ready.spec.K, use_fused_finalize=self.fused,
            activation_type=int(ready.act.type), tactic=pick, **self._swiglu(ready.act),
        )  # fmt: skip


class _Sm90:
    """`cute_dsl_fused_moe_bf16` has no configuration class; it is for compute capability 9.0 (its decorator)."""

    @staticmethod
    def supported(arch: int) -> bool:
        return arch == 90


class ThroughRunner(FlashInfer):
    """Backends that are called through their runner of the unified API, whose workspace serves one stream at a time."""

    limits: ClassVar[tuple[Limit, ...]] = (NO_BIAS,)

    def _call(self, ready: Ready, x: Tensor, ids: Tensor, w: Tensor, weights: ExpertWeights, pick: Any) -> Tensor:
        runner = ready.runner
        inputs = runner.pack_inputs(*self._packs(ready, x, ids, w, weights))
        return runner.forward(inputs, tactic=pick, **runner.launch_kwargs_for(inputs))


class CuTile(ThroughRunner):
    """cuTile kernels; JIT by cuda-tile and tileiras."""

    name = "flashinfer_cutile"
    config, runner = "CuTileBf16Config", "fused_moe.runners:CuTileBf16Runner"
    stored = Stored(storage="EHG", halves="gate_up", down="EIH")
    absent = 0  # MoEActivationPack: negative ids are undefined behaviour for it
    any_size = True
    packages = (("cuda-tile", (1, 4)),)
    remedy = 'pip install "cuda-tile[tileiras]"'

    def compiles(self, T: int) -> int:
        return T  # kernels are specialized on what sizes are divisible by (runners.py, _precompile_bucket_variants)

    def _view(self, ready: Ready, weights: ExpertWeights) -> dict[str, Tensor]:
        return {"w1": weights.gate_up[0], "w2": weights.down}


class Cudnn(ThroughRunner):
    """cuDNN's grouped GEMMs between FlashInfer's permute and finalize kernels."""

    name = "flashinfer_cudnn"
    config, runner = "CudnnGroupedGemmBf16Config", "fused_moe.runners:CudnnGroupedGemmBf16Runner"
    modules = ("trtllm_utils", "moe_utils")
    packages = (("nvidia-cudnn-frontend", (1, 32)),)
    remedy = 'pip install "nvidia-cudnn-cu13>=9.21"'
    limits = (
        NO_BIAS,
        (lambda s: s.H % 8 == 0 and s.I % 8 == 0, "H and I must be multiples of 8 (CudnnGroupedGemmBf16Config)"),
        (lambda s: s.E <= 2048 and s.K <= 32, "moe_sort takes 2048 experts, 32 of a token (runners.py, _MOE_SORT_MAX)"),
        (
            lambda s: s.act.name in ("swiglu", "geglu", "gelu", "relu", "silu", "identity"),
            "SwiGLU with default alpha, beta and limit only (runners.py, _check_activation_parameters)",
        ),
    )

    def compiles(self, T: int) -> int:
        return T  # cuDNN's plans are of exact sizes


def hopper_and_older() -> tuple[FlashInfer, ...]:
    """Those that exist for compute capability 9.0, or before, too."""
    return (Cutlass(), FrostLowLatency(), CuteDslSm90(), CuTile(), Cudnn())
