"""The router's gradient by torch's own calls: for any RouterSpec, on any device.

In: d weights [T, K], and the router's operands; the ids are held fixed. Out: the gradients of the logits and of the
experts' scales. Computed in fp32 at least. With v = s[ids] and n the divisor (sum_k v and its epsilon): u = v / n gives
dv = (du - dn/dv sum_k du u) / n; the score has its own derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import reference
from ..spec import RouterSpec, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


def backward(
    spec: RouterSpec, grad: Tensor, logits: Tensor, ids: Tensor, expert_scale: Tensor | None, needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients of [logits, expert_scale] that `needs` names."""
    import torch
    import torch.nn.functional as F

    acc = torch.promote_types(torch_dtype(spec.score_dtype), torch.float32)
    late = spec.score.startswith("topk_")
    x = logits.to(torch_dtype(spec.score_dtype)).to(acc)
    if late:
        x = x.gather(1, ids)
    kind = spec.score.removeprefix("topk_")
    s = x.softmax(-1) if kind == "softmax" else x.sigmoid() if kind == "sigmoid" else F.softplus(x).sqrt()
    v = s if late else s.gather(1, ids)
    kept = None
    if spec.values == "choice":
        kept = reference.in_best_groups(spec, reference.score(spec, logits)).gather(1, ids)
        v = v.where(kept, spec.group_fill)
    total = v.sum(-1, keepdim=True)
    by_renorm: dict[str, tuple[Tensor, Any]] = {
        "none": (torch.ones_like(total), 0.0),
        "sum": (total, 1.0),
        "sum_plus_eps": (total + spec.eps, 1.0),
        "sum_at_least_eps": (total.clamp(min=spec.eps), (total >= spec.eps).to(acc)),
    }
    n, moves = by_renorm[spec.renorm]
    u, du = v / n, grad.to(acc) * spec.scale
    out = []
    if needs[1] and expert_scale is not None:
        d_scale = torch.zeros(spec.E, dtype=acc, device=ids.device)
        out.append(d_scale.index_add_(0, ids.flatten(), (du * u).flatten()).to(expert_scale.dtype))
    if not needs[0]:
        return out
    if expert_scale is not None:
        du = du * expert_scale[ids]
    d = (du - moves * (du * u).sum(-1, keepdim=True)) / n
    if kept is not None:
        d = d * kept
    if not late:
        d = torch.zeros_like(s).scatter_add_(1, ids, d)
    if kind == "softmax":
        d = s * (d - (d * s).sum(-1, keepdim=True))
    elif kind == "sigmoid":
        d = d * s * (1 - s)
    else:
        d = d * x.sigmoid() / (2 * s)
    if late:
        d = torch.zeros_like(logits, dtype=acc).scatter_add_(1, ids, d)
    return [d.to(logits.dtype), *out]
