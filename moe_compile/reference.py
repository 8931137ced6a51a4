"""The eager meaning of a spec, written from its docstring and nothing else: the oracle of every test.

In: a spec and tensors. Out: what the block computes, accumulated in fp32 at least (fp64 where an operand is fp64, or
where asked). Slow, plain, differentiable by autograd; kernels are compared with it, never the other way.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from .activation import evaluate
from .operands import ExpertWeights, PerExpert, canonical
from .spec import ExpertsSpec, RouterSpec, torch_dtype


def accumulator(spec: ExpertsSpec) -> torch.dtype:
    """The dtype that sums are kept in: fp64 where any operand of the spec is, else fp32."""
    return torch.float64 if "f64" in (spec.x, spec.w, spec.out) else torch.float32


def exact(spec: ExpertsSpec) -> ExpertsSpec:
    """`spec` in fp64 throughout: with upcast operands, its meaning without any rounding that matters."""
    return dataclasses.replace(spec, x="f64", w="f64", out="f64")


def tolerance(spec: ExpertsSpec) -> tuple[float, float]:
    """How far a right answer may be from the exact one, relative: (of the RMS, of the largest element).

    Roundings of the stored dtypes, plus those of the accumulator's sums, which grow with the root of their length.
    """
    stored = max(torch.finfo(torch_dtype(d)).eps for d in (spec.x, spec.out))
    rms = 2 * stored + (spec.H + spec.I) ** 0.5 * torch.finfo(accumulator(spec)).eps
    return rms, 4 * rms


def experts(
    spec: ExpertsSpec,
    hidden_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    weights: ExpertWeights,
    *,
    compute: torch.dtype | None = None,
) -> torch.Tensor:
    """out[t] = sum_k w[t, k] * post(down[e] @ cast(act(gate[e] @ x[t], up[e] @ x[t])) + bias), e = ids[t, k]; [T, H].

    The roundings are the docstring's: the activation's result to spec.x and the sum to spec.out. Everything else is in
    `compute` (accumulator(spec) if None). Routes with ids outside [0, E) contribute 0.
    """
    acc, x_dtype = compute or accumulator(spec), torch_dtype(spec.x)
    view = canonical(spec, weights)

    def linear(x: torch.Tensor, w_ENA: PerExpert, bias_EN: PerExpert | None, e: int) -> torch.Tensor:
        y = x @ w_ENA[e].to(acc).T
        return y if bias_EN is None else y + bias_EN[e].to(acc)

    out_TH = torch.zeros(hidden_TH.shape[0], spec.H, dtype=acc, device=hidden_TH.device)
    for e in range(spec.E):
        t, k = (ids_TK == e).nonzero(as_tuple=True)
        if not t.numel():
            continue
        x = hidden_TH[t].to(acc)
        w = None if weights_TK is None else weights_TK[t, k].to(acc)[:, None]
        if w is not None and spec.weight == "input":
            x = x * w
        gate = None if view.gate_EIH is None else linear(x, view.gate_EIH, view.gate_bias_EI, e)
        up = linear(x, view.up_EIH, view.up_bias_EI, e)
        h = evaluate(spec.act.expr, gate, up).to(x_dtype).to(acc)
        y = linear(h, view.down_EHI, view.down_bias_EH, e)
        if weights.post_scale is not None:
            y = y * weights.post_scale.to(acc)
        if spec.post != "none":
            y = y / (y.square().mean(-1, keepdim=True) + spec.eps).sqrt()
        if w is not None and spec.weight == "output":
            y = y * w
        out_TH = out_TH.index_add(0, t, y)
    return out_TH.to(torch_dtype(spec.out))


def score(spec: RouterSpec, logits: torch.Tensor) -> torch.Tensor:
    """The score function over the last axis, in score_dtype; torch's own calls, so it is bit-equal to a model's."""
    dtype = torch_dtype(spec.score_dtype)
    match spec.score.removeprefix("topk_"):
        case "softmax":
            return F.softmax(logits, dim=-1, dtype=dtype)
        case "sigmoid":
            return logits.to(dtype).sigmoid()
        case _:
            return F.softplus(logits.to(dtype)).sqrt()


def route(
    spec: RouterSpec,
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None = None,
    expert_scale_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights_TK in spec.out, ids_TK int64), by RouterSpec's five steps, each the torch call that models make.

    Selection is discontinuous: nothing here may be computed in another dtype or order.
    """
    late = spec.score.startswith("topk_")
    s_TE = logits_TE if late else score(spec, logits_TE)
    choice_TE = s_TE if bias_E is None else s_TE + bias_E
    if spec.groups > 1:
        choice_TE = choice_TE.masked_fill(~in_best_groups(spec, choice_TE), spec.group_fill)
    if spec.ties == "first":
        values_TK, ids_TK = choice_TE.max(dim=-1, keepdim=True)
    else:
        values_TK, ids_TK = torch.topk(choice_TE, spec.K, dim=-1)
    # where nothing but the score chose, top-k has gathered it already
    w_TK = values_TK if choice_TE is s_TE or spec.values == "choice" else s_TE.gather(-1, ids_TK)
    if late:
        w_TK = score(spec, w_TK)
    w_TK = w_TK.to(torch.promote_types(w_TK.dtype, torch_dtype(spec.out)))  # no rounding before the last one
    if spec.renorm != "none":
        total = w_TK.sum(dim=-1, keepdim=True)
        if spec.renorm == "sum_plus_eps":
            total = total + spec.eps
        elif spec.renorm == "sum_at_least_eps":
            total = total.clamp(min=spec.eps)
        w_TK = w_TK / total
    if spec.scale != 1.0:
        w_TK = w_TK * spec.scale
    if expert_scale_E is not None:
        w_TK = w_TK * expert_scale_E[ids_TK]
    return w_TK.to(torch_dtype(spec.out)), ids_TK


def in_best_groups(spec: RouterSpec, choice_TE: torch.Tensor) -> torch.Tensor:
    """Whether each expert is in one of its token's best `top_groups` groups; bool [T, E]."""
    size = spec.E // spec.groups
    grouped_TGe = torch.unflatten(choice_TE, -1, (spec.groups, size))
    if spec.group_score == "max":
        scores_TG = grouped_TGe.max(dim=-1).values
    else:
        scores_TG = grouped_TGe.topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(scores_TG, k=spec.top_groups, dim=-1, sorted=False)[1]
    kept_TG = torch.zeros_like(scores_TG).scatter_(1, best, 1)
    return kept_TG.unsqueeze(-1).expand(-1, spec.groups, size).reshape(-1, spec.E).bool()
