"""Training on our kernels: a forward that keeps gate_up_RG, and the gradients of the experts.

In: ExpertsSpec, the forward's operands, and the gradient of out_TH. Out: as aten_backward.backward. Of the forward
gate_up_RG is kept, R x G in x's dtype, or part of it (`moe.keep`), and its schedule's plan, 9 bytes a route: routes are
sorted once a step. The rest and the activation are computed again. The kernels are training_products.py's. The formulas
are aten_backward's:

    dv = down[e]^T dout      dw = dv . a + bias . dout      ddown[e] = sum dout (w a)^T
    dgate_up = w dv (act_gate, act_up)      dgate_up[e] = sum dgate_up x^T      dx[t] = sum_k gate_up[e]^T dgate_up

With weight=input, x is w x in the weights' gradients, dx is scaled by w, and dw = (gate_up[e]^T dgate_up) . x.
The backward comes in halves, of the second linear and of the first, so that gate_up_RG can go before gradients as large
as the weights come.
Invariants: bitwise repeatable (no sums by atomics); no gradient of dropped routes; weights are read in place. Kernels
count in a plan while they run (sort.Schedule), so those of one plan run one after another: autograd runs a backward on
its forward's stream, as often as it is asked to.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..hardware import Device, facts
from ..operands import ExpertWeights
from ..spec import ELEMENT_BYTES, ExpertsSpec, torch_dtype
from ..verdict import Reject, Verdict
from .base import Plan
from .training_products import Tiles, kept_columns, products, tiles_of
from .triton_grouped import one_stride_pattern, triton_available, triton_supports
from .triton_hopper import FEWEST_ROWS

if TYPE_CHECKING:
    import torch


def supports(spec: ExpertsSpec, device: Device) -> Verdict:
    """OK where these kernels train `spec` on such a device."""
    if spec.post != "none":
        return Reject("a norm of each expert's output", f"post={spec.post}")
    if spec.tensors == "listed":
        return Reject("experts in tensors of their own", "the backward's kernels address one tensor by expert number")
    return triton_available() and triton_supports(spec, device)


def trains(spec: ExpertsSpec, device: Device, plan: Plan) -> Verdict:
    """OK where these kernels train `spec` under `plan`; elsewhere aten's backward does."""
    if plan.train == "aten":
        return Reject("moe.train=aten")
    if not any(candidate.provider.startswith("triton_") for _, candidate in plan.buckets):
        return Reject("no kernel of ours is in the plan")
    return supports(spec, device)


def in_words(spec: ExpertsSpec, device: Device, plan: Plan) -> str:
    """Whose kernels train `spec` under `plan`, and what a forward keeps."""
    verdict = trains(spec, device, plan)
    if not verdict:
        return f"by aten, which computes all again ({verdict})"
    kept = kept_columns(spec, plan.keep) * spec.K * ELEMENT_BYTES[spec.x]
    few, many = FEWEST_ROWS * spec.E // spec.K, 1 << 24
    hopper = tiles_of(spec, many, device, plan.train).hopper
    who = f"by triton_grouped up to {few} tokens, then triton_hopper" if hopper else "by triton_grouped"
    return f"{who}; keeps {kept} bytes a token of the first linear's result"


def reads(weights: ExpertWeights) -> Verdict:
    """OK where these very tensors can be read in place."""
    return one_stride_pattern(weights)


def forward(
    spec: ExpertsSpec, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None, p: ExpertWeights,
    tiles: Tiles | None = None, keep: str = "all",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out_TH in spec.out; of gate_up_RG, in spec.x, what `keep` keeps; the order of the routes, a schedule's plan)."""
    from ..kernels.finalize import finalize

    T, out = x_TH.shape[0], torch_dtype(spec.out)
    if not T:
        return x_TH.new_empty((0, spec.H), dtype=out), *empty_kept(spec, x_TH, keep)
    with on(x_TH.device):
        by = products(spec, x_TH, ids_TK, w_TK, p, tiles or tiles_of(spec, T, facts(x_TH.device)))
        kept, act_RI = by.first(keep)
        return finalize(by.second(act_RI), ids_TK, by.after, spec.E, out), kept, by.schedule.plan


def empty_kept(spec: ExpertsSpec, x_TH: torch.Tensor, keep: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors like those that `forward` keeps."""
    import torch

    from ..kernels.sort import plan_size

    R = x_TH.shape[0] * spec.K
    order = x_TH.new_empty(plan_size(R, spec.E), dtype=torch.int32)
    return x_TH.new_empty((R, kept_columns(spec, keep))), order


def of_down(spec: ExpertsSpec, p: ExpertWeights) -> list[bool]:
    """Of (hidden, weights, *p.tensors()): whether backward_down makes its gradient, or backward_gate_up."""
    firsts, biases = [False] * len(p.gate_up), [False] * len(p.gate_up_bias)
    return [False, spec.weight == "output", *firsts, True, *biases, *([] if p.down_bias is None else [True])]


def backward(
    spec: ExpertsSpec, dout_TH: torch.Tensor, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None,
    p: ExpertWeights, kept: torch.Tensor | None, needs: Sequence[bool], tiles: Tiles | None = None,
    order: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of (hidden, weights, *p.tensors()) that `needs` names, in that order: both halves together."""
    operands, down = (x_TH, ids_TK, w_TK, p), of_down(spec, p)
    dgate_up_RG, *first = backward_down(
        spec, dout_TH, *operands, kept, [n and d for n, d in zip(needs, down, strict=True)], tiles, order
    )
    del kept
    second = backward_gate_up(spec, dgate_up_RG, *operands, [n and not d for n, d in zip(needs, down)], tiles, order)
    return merged(first, second, needs, down)


def merged(first: Sequence[Any], second: Sequence[Any], needs: Sequence[bool], down: Sequence[bool]) -> list[Any]:
    """The gradients of both halves in the operands' order."""
    halves = iter(second), iter(first)
    return [next(halves[d]) for n, d in zip(needs, down, strict=True) if n]


def backward_down(
    spec: ExpertsSpec, dout_TH: torch.Tensor, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None,
    p: ExpertWeights, kept: torch.Tensor | None, needs: Sequence[bool], tiles: Tiles | None = None,
    order: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """[dgate_up_RG, then the gradients that `needs` names of those that are `of_down`].

    kept, order: as `forward` returned them, or None to compute them again.
    """
    from ..kernels.outer import Rows, route_dots, row_sum

    T, K, E = x_TH.shape[0], spec.K, spec.E
    if not T:
        return [x_TH.new_empty((0, spec.G)), *_zeros(x_TH, w_TK, p, needs)]
    weights, (down, *rest) = needs[1], needs[2 + len(p.gate_up) :]
    with on(x_TH.device):
        by = products(spec, x_TH, ids_TK, w_TK, p, tiles or tiles_of(spec, T, facts(x_TH.device)), order)
        dout_TH = dout_TH.to(x_TH.dtype)
        dout_TH = dout_TH if dout_TH.stride(1) == 1 else dout_TH.contiguous()
        dgate_up_RG, s_act_RI, parts = by.act(dout_TH, by.halves(kept), weights)
        found = [dgate_up_RG]
        if parts is not None:
            dots = (None, None) if p.down_bias is None else (p.down_bias, dout_TH)
            found.append(route_dots(parts, ids_TK, dots[0], dots[1], E, torch_dtype(spec.w), a_experts=True))
        if down:
            found.append(by.ddown(dout_TH, s_act_RI))
        if p.down_bias is not None and rest[-1]:
            rows = Rows(of=dout_TH, tokens=True, weights_TK=by.after)
            found.append(row_sum(rows, by.schedule, by.ends, choices=K))
    return found


def backward_gate_up(
    spec: ExpertsSpec, dgate_up_RG: torch.Tensor, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor | None,
    p: ExpertWeights, needs: Sequence[bool], tiles: Tiles | None = None, order: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients that `needs` names of those that are not `of_down`, from what backward_down returned first."""
    from ..kernels.outer import Rows, route_dots, row_sum

    T, E, K, n = x_TH.shape[0], spec.E, spec.K, len(p.gate_up)
    if not T:
        return _zeros(x_TH, w_TK, p, needs)
    (hidden, weights), firsts, biases = needs[:2], needs[2 : 2 + n], needs[3 + n : 3 + n + len(p.gate_up_bias)]
    found: list[torch.Tensor] = []
    sums, left = any(firsts), None
    with on(x_TH.device):
        by = products(spec, x_TH, ids_TK, w_TK, p, tiles or tiles_of(spec, T, facts(x_TH.device)), order)
        if hidden or weights:
            dx_RH = by.dx(dgate_up_RG, sums)
            if hidden:
                dx_TH, left = by.tokens(dx_RH, sums)
                found.append(dx_TH)
            if weights:
                found.append(route_dots(None, ids_TK, dx_RH, by.x_TH, E, torch_dtype(spec.w), a_experts=False))
            del dx_RH  # as large as the routes: gone, but for what is left, before gradients as large as the weights
        parts = dgate_up_RG.chunk(n, dim=1)
        if sums:
            found += by.dgate_up([part for part, need in zip(parts, firsts, strict=True) if need], left)
        rows = (Rows(of=part) for part, need in zip(parts, biases) if need)
        found += [row_sum(part, by.schedule, by.ends, choices=K) for part in rows]
    return found


def _zeros(
    x_TH: torch.Tensor, w_TK: torch.Tensor | None, p: ExpertWeights, needs: Sequence[bool]
) -> list[torch.Tensor]:
    return [t.new_zeros(t.shape) for t, n in zip((x_TH, w_TK, *p.tensors()), needs) if n and t is not None]


def on(device: torch.device) -> Any:
    """With `device` current: Triton launches on the current one, whatever its arguments say."""
    import torch

    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
