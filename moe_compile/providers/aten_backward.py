"""The gradients of the experts, for any spec and device, over the same grouped rows as the forward.

In: the gradient of out_TH and the forward's operands. Out: the gradients asked for. Nothing of the forward is saved:
gate_up and h are computed again. Invariant: sums are accumulated in fp32 at least, the activation's derivative is
evaluated there, and an invalid route contributes exactly 0 to every gradient.

With dout the gradient of out[t], b the down bias, a = act(g, u), weight=output:

    dv = down[e]^T dout      dw = dv . a + b . dout      da = w dv      ddown[e] = sum_s (w dout) a^T
    dg = da act_g(g, u)      du = da act_u(g, u)         dgate_up[e] = sum_s (dg, du) x^T      dx = gate_up[e]^T (dg, du)

dw is taken at the activation, of I numbers, since that spares computing y again. With weight=input, dv = da,
x stands for w x, its gradient is dz = gate_up[e]^T (dg, du), and dx = w dz, dw = dz . x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..activation import derivative, evaluate
from ..operands import ExpertWeights, down_EHI, first_EGH, halves
from ..reference import accumulator
from ..spec import ExpertsSpec, torch_dtype
from .aten import PATHS, first_linear, grouped_mm_reads, path_of, scale_rows
from .routes import Routes


def backward(
    spec: ExpertsSpec,
    dout_TH: Tensor,
    x_TH: Tensor,
    ids_TK: Tensor,
    w_TK: Tensor | None,
    p: ExpertWeights,
    needs: Sequence[bool],
    path: str | None = None,
) -> list[Tensor]:
    """The gradients of (hidden, weights, *p.tensors()) for which `needs` is true, in that order, contiguous.

    `needs` has an entry for weights_TK even where it is None. `path` as in Aten's tactics.
    """
    wanted = dict(zip(_names(spec), needs, strict=True))
    if not x_TH.shape[0]:
        operands = (x_TH, w_TK, *p.tensors())
        return [torch.zeros_like(t, memory_format=torch.contiguous_format) for t, n in zip(operands, needs) if n and t is not None]
    path = path or path_of(spec, x_TH.device)
    rows = PATHS["blocks" if path == "grouped" and not grouped_mm_reads(p) else path](ids_TK, spec)
    grads = _gradients(spec, rows, dout_TH, x_TH, w_TK, p, wanted)
    return [grads[name].contiguous() for name, need in wanted.items() if need]


def _names(spec: ExpertsSpec) -> list[str]:
    first = ("gate", "up") if spec.gate_up.halves == "separate" else ("gate_up",)
    biases = [f"{name}_bias" for name in first] if spec.has_gate_up_bias else []
    return ["hidden", "weights", *first, "down", *biases, *(["down_bias"] if spec.has_down_bias else [])]


def _gradients(
    spec: ExpertsSpec, rows: Routes, dout_TH: Tensor, x_TH: Tensor, w_TK: Tensor | None, p: ExpertWeights,
    wanted: dict[str, bool],
) -> dict[str, Tensor]:  # fmt: skip
    acc, x_dtype, grads = accumulator(spec), torch_dtype(spec.x), {}
    x_SH = z_SH = rows.gather(x_TH)
    dout_SH = rows.gather(dout_TH)
    w_S = None if w_TK is None else rows.of_route(w_TK)
    if w_S is not None and spec.weight == "input":
        z_SH = scale_rows(x_SH, w_S, acc)

    gate, up = halves(spec, first_linear(spec, rows, z_SH, p).to(acc))
    a_SI = evaluate(spec.act.expr, gate, up).to(x_dtype)
    da_SI = rows.linear(dout_SH.to(x_dtype), down_EHI(spec, p).mT).to(acc)
    dy_SH = dout_SH
    if w_TK is not None and w_S is not None and spec.weight == "output":
        if wanted["weights"]:
            dw_S = (da_SI * a_SI).sum(-1)
            if p.down_bias is not None:
                dw_S = dw_S + (rows.of_expert(p.down_bias).to(acc) * dout_SH).sum(-1)
            grads["weights"] = rows.scatter(dw_S).to(w_TK.dtype)
        da_SI = da_SI * w_S.to(acc)[:, None]
        dy_SH = dout_SH.to(acc) * w_S.to(acc)[:, None]
    if wanted["down"]:
        dy = dy_SH.to(x_dtype)
        grads["down"] = rows.outer(dy, a_SI) if spec.down == "EHI" else rows.outer(a_SI, dy)
    if wanted.get("down_bias"):
        grads["down_bias"] = rows.total(dy_SH.to(acc)).to(x_dtype)

    d_SG = torch.empty(rows.S, spec.G, dtype=acc, device=x_TH.device)
    dgate, dup = halves(spec, d_SG)
    for variable, out in (("gate", dgate), ("up", dup)):
        if out is not None:
            torch.mul(da_SI, evaluate(derivative(spec.act.expr, variable), gate, up), out=out)
    parts = [(n, part) for n, part in zip(("gate", "up"), d_SG.split(spec.I, -1))] if "gate" in wanted else [("gate_up", d_SG)]
    low = [part.to(x_dtype) for _, part in parts]
    for (name, part), rounded in zip(parts, low):
        if wanted[name]:
            left, right = (rounded, z_SH) if spec.gate_up.storage == "EGH" else (z_SH, rounded)
            grads[name] = rows.outer(left, right)
        if wanted.get(f"{name}_bias"):
            grads[f"{name}_bias"] = rows.total(part).to(x_dtype)

    if wanted["hidden"] or (wanted["weights"] and spec.weight == "input"):
        products = [rows.linear(part, w.mT) for part, w in zip(low, first_EGH(spec, p), strict=True)]
        dz_SH = products[0] if len(products) == 1 else products[0].to(acc) + products[1].to(acc)
        if w_TK is not None and spec.weight == "input":
            if wanted["weights"]:
                grads["weights"] = rows.scatter((dz_SH.to(acc) * x_SH).sum(-1)).to(w_TK.dtype)
            grads["hidden"] = rows.combine(dz_SH, w_TK, acc).to(x_dtype)
        else:
            grads["hidden"] = rows.combine(dz_SH, None, acc).to(x_dtype)
    return grads
