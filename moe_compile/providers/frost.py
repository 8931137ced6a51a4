"""cuDNN Frost, by way of FlashInfer: kernels for sm_107a and sm_120a, and its three siblings for quantized weights.

In: ExpertsSpec and a device, as in providers/flashinfer.py. Beyond FlashInfer's formats and activations, Frost is asked
itself: its eligibility of the geometry, and whether its catalog has a kernel for each linear (the plan is listed, not
compiled). The siblings are planned only: a spec's weights are 16-bit, and each says which format it takes.
"""

from __future__ import annotations

from functools import lru_cache

from ..spec import ExpertsSpec
from ..verdict import OK, Reject, Verdict
from . import flashinfer_api as fi
from .flashinfer import FlashInfer
from .flashinfer_backends import NO_BIAS, ThroughRunner


class CudnnFrostBf16(ThroughRunner):
    """Two generated kernels, or FMA ones for few tokens of two geometries. PICK: FlashInfer's tactic."""

    name = "cudnn_frost_bf16"
    config = "CudnnFrostBf16Config"
    runner = "fused_moe.backends.cudnn_frost.bf16.moe:CudnnFrostBf16MoeRunner"
    limits = (NO_BIAS,)
    packages = (("nvidia-cutlass-dsl", (4, 8)),)

    def on_arch(self, spec: ExpertsSpec, arch: int) -> Verdict:
        return super().on_arch(spec, arch) and _listed(spec, arch)


class Sibling(CudnnFrostBf16):
    """A Frost for weights in another format, which no spec has yet."""

    def __init__(self, form: str) -> None:
        self.name = f"cudnn_frost_{form}"
        camel = "".join(part.capitalize() for part in form.split("_"))
        self.config = f"CudnnFrost{camel}Config"  # type: ignore[misc]
        self.runner = f"fused_moe.backends.cudnn_frost.{form}.moe:CudnnFrost{camel}MoeRunner"  # type: ignore[misc]


@lru_cache(256)
def _listed(spec: ExpertsSpec, arch: int) -> Verdict:
    """Frost's own answer for one token: the geometry is eligible, and both linears have kernels."""
    import torch

    act, frost = fi.activation(spec), "fused_moe.backends.cudnn_frost"
    x = torch.empty((1, spec.H), dtype=torch.bfloat16, device="meta")
    ids = torch.empty((1, spec.K), dtype=torch.int32, device="meta")
    api, bf16 = fi.module("fused_moe.api"), fi.module(f"{frost}.bf16.moe")
    pack = api.MoEActivationPack(x, None, ids, torch.empty((1, spec.K), device="meta"))
    try:
        name = fi.module(f"{frost}.activations").activation_name(act)
    except NotImplementedError as error:
        return Reject("activation", str(error))
    if not fi.module(f"{frost}.bf16.support").is_eligible(fi.config(spec, act, None), pack, arch):
        return Reject("outside its limits", "H and I must be multiples of 128, E at most 1024 (cudnn_frost/support.py)")
    roots = fi.module(f"{frost}.bf16.runtime")._artifact_roots()
    first, second = bf16._matching_kernels(roots, f"sm_{arch}a", spec.K, spec.H, spec.I, spec.E, name)
    if not (first and second):
        return Reject("no kernel in its catalog", f"{len(first)} for the first linear, {len(second)} for the second")
    return OK


def frosts() -> tuple[FlashInfer, ...]:
    return (CudnnFrostBf16(), *map(Sibling, ("mxfp8", "nvfp4", "mxfp8_mxfp4")))
