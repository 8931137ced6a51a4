"""Who routes: the one-launch Triton kernel (kernels/route.py) where it can, else torch's own calls (reference.route).

In: a RouterSpec and a device, or its operands. Out: a verdict, or weights_TK and ids_TK. The router's linear stays
outside: its sums decide the selection, and no other kernel adds them in the order of the one that the model calls.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from .. import reference
from ..hardware import Device, facts
from ..spec import RouterSpec
from ..verdict import OK, Reject, Verdict
from .triton_grouped import triton_available

if TYPE_CHECKING:
    import torch

_MOST_EXPERTS, _MOST_CHOICES = 1024, 128


@lru_cache(1024)
def supports(spec: RouterSpec, device: Device) -> Verdict:
    """OK where the kernel routes `spec` on such a device."""
    import torch

    if device.type != "cuda" or torch.version.hip:
        return Reject(f"no kernel fuses routing on {device.type}")
    if not (available := triton_available()):
        return available
    if "f64" in (spec.score_dtype, spec.logits, spec.out):
        return Reject("fp64 is not supported", f"score={spec.score_dtype} logits={spec.logits} out={spec.out}")
    if spec.E > _MOST_EXPERTS or spec.K > _MOST_CHOICES:
        return Reject("too many experts or choices", f"E={spec.E} K={spec.K}")
    return OK


def route(
    spec: RouterSpec, logits_TE: torch.Tensor, bias_E: torch.Tensor | None, expert_scale_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights_TK in spec.out, ids_TK int64) on any device."""
    import torch

    vectors = [v for v in (bias_E, expert_scale_E) if v is not None]
    if torch.float64 in [v.dtype for v in vectors] or not supports(spec, facts(logits_TE.device)):
        return reference.route(spec, logits_TE, bias_E, expert_scale_E)
    from ..kernels import route as kernel

    with torch.cuda.device(logits_TE.device):
        return kernel.route(spec, logits_TE, bias_E, expert_scale_E)


def backward_supports(spec: RouterSpec, device: Device) -> Verdict:
    """OK where a kernel makes the gradient of the logits."""
    if spec.values != "score" or spec.expert_scale:
        return Reject("values of masked scores, or a scale per expert", f"values={spec.values}")
    return supports(spec, device)


def backward(spec: RouterSpec, grad_TK: torch.Tensor, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """d logits [T, E] of d weights [T, K], the ids held fixed, where `backward_supports` says OK."""
    import torch

    from ..kernels import route as kernel

    with torch.cuda.device(logits_TE.device):
        return kernel.route_backward(spec, grad_TK, logits_TE, ids_TK)
