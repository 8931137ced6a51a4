"""The gradients of the experts, for any spec and device, over the same grouped rows as the forward.

In: the gradient of out_TH and the forward's operands. Out: the gradients asked for. Nothing of the forward is saved:
gate_up and h are computed again. Invariant: sums are accumulated in fp32 at least, the activation's derivative is
evaluated there, and an invalid route contributes exactly 0 to every gradient.

With dout the gradient of out[t], b the down bias, a = act(g, u), weight=output:

    dv = down[e]^T dout      dw = dv . a + b . dout      da = w dv      ddown[e] = sum_s (w dout) a^T
    dg = da act_g(g, u)      du = da act_u(g, u)         dgu = (dg, du) in gate_up's native row order
    dx = gate_up[e]^T dgu    dgate_up[e] = sum_s dgu x^T

Where dv is kept wider than x, dw is taken so, at the activation: y is not computed again, and rounded. Else dw =
dout . y, as the graph has it: dv sums H terms and y I, mostly fewer, and that error is what is left. With
weight=input, dv = da, x stands for z = w x, with dz = gate_up[e]^T dgu, dx = w dz and dw = dz . x.

Under a norm of y, n = z r with z = scale y, r = 1 / sqrt(mean_h(z^2) + eps): dn = w dout and dw = dout . n, then

    dz = r (dn - n mean_h(dn n))      dscale = sum_s dz y      dy = scale dz, and dv = down[e]^T dy needs no w
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..activation import derivative, evaluate
from ..operands import ExpertWeights, down_EHI, first_EGH, halves
from ..reference import accumulator
from ..spec import ExpertsSpec, torch_dtype
from .aten import PATHS, first_linear, grouped_mm_reads, normalized, path_of, scale_rows
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
    if not x_TH.shape[0]:
        tensors = (x_TH, w_TK, *p.tensors())
        return [t.new_zeros(t.shape) for t, need in zip(tensors, needs, strict=True) if need and t is not None]
    each = _needs_by_name(spec, needs)
    wanted = {name: any(several) for name, several in each.items()}
    path = path or path_of(spec, x_TH.device)
    rows = PATHS["blocks" if path == "grouped" and not grouped_mm_reads(p) else path](ids_TK, spec)
    grads = _gradients(spec, rows, dout_TH, x_TH, w_TK, p, wanted)
    out = []
    for name, several in each.items():
        if _listed(spec, name):  # outputs of an operator don't share memory
            out += [g.clone() for g, need in zip(grads[name].unbind(0), several, strict=True) if need]
        elif several[0]:
            out.append(grads[name].contiguous())
    return out


def _needs_by_name(spec: ExpertsSpec, needs: Sequence[bool]) -> dict[str, list[bool]]:
    """`needs` by operand: one entry, or E where the experts are listed."""
    rest, found = list(needs), {}
    for name in _names(spec):
        n = spec.E if _listed(spec, name) else 1
        found[name], rest = rest[:n], rest[n:]
    assert not rest
    return found


def _listed(spec: ExpertsSpec, name: str) -> bool:
    return spec.tensors == "listed" and name not in ("hidden", "weights", "post_scale")


def _first_names(spec: ExpertsSpec) -> tuple[str, ...]:
    return ("gate", "up") if spec.gate_up.halves == "separate" else ("gate_up",)


def _names(spec: ExpertsSpec) -> list[str]:
    biases = [f"{name}_bias" for name in _first_names(spec)] if spec.has_gate_up_bias else []
    last = [*(["down_bias"] if spec.has_down_bias else []), *(["post_scale"] if spec.post == "scaled_rms" else [])]
    return ["hidden", "weights", *_first_names(spec), "down", *biases, *last]


def _gradients(
    spec: ExpertsSpec,
    rows: Routes,
    dout_TH: Tensor,
    x_TH: Tensor,
    w_TK: Tensor | None,
    p: ExpertWeights,
    wanted: dict[str, bool],
) -> dict[str, Tensor]:
    acc, x_dtype = accumulator(spec), torch_dtype(spec.x)
    grads: dict[str, Tensor] = {}
    x_SH = z_SH = rows.gather(x_TH)
    dout_SH = rows.gather(dout_TH)
    w_S = None if w_TK is None else rows.of_route(w_TK).to(acc)
    if w_S is not None and spec.weight == "input":
        z_SH = scale_rows(x_SH, w_S)

    gate, up = halves(spec, first_linear(spec, rows, z_SH, p).to(acc))
    a_SI = evaluate(spec.act.expr, gate, up).to(x_dtype)
    if spec.post != "none":
        y_SH = rows.linear(a_SI, down_EHI(spec, p), p.down_bias)
        dout_SH, of_post = _through_post(spec, rows, y_SH, dout_SH.to(acc), w_S, p.post_scale, wanted)
        grads.update(of_post)
    dv_SI = rows.precise(dout_SH, down_EHI(spec, p).mT)
    da_SI = dv_SI.to(acc)
    dy_SH = dout_SH.to(acc)
    if w_S is not None and spec.weight == "output" and spec.post == "none":
        if wanted["weights"]:
            if x_dtype == dv_SI.dtype == acc:
                dw_S = (rows.linear(a_SI, down_EHI(spec, p), p.down_bias) * dy_SH).sum(-1)
            else:
                dw_S = (dv_SI.to(torch.promote_types(dv_SI.dtype, acc)) * a_SI).sum(-1)
                if p.down_bias is not None:
                    dw_S = dw_S + (rows.of_expert(p.down_bias) * dy_SH).sum(-1)
            grads["weights"] = rows.scatter(dw_S).to(torch_dtype(spec.w))
        da_SI, dy_SH = da_SI * w_S[:, None], dy_SH * w_S[:, None]
    if wanted["down"]:
        dy = dy_SH.to(x_dtype)
        grads["down"] = rows.outer(dy, a_SI) if spec.down == "EHI" else rows.outer(a_SI, dy)
    if wanted.get("down_bias"):
        grads["down_bias"] = rows.total(dy_SH).to(x_dtype)

    dgu_SG = torch.empty(rows.S, spec.G, dtype=acc, device=x_TH.device)
    for variable, out in zip(("gate", "up"), halves(spec, dgu_SG), strict=True):
        if out is not None:
            torch.mul(da_SI, evaluate(derivative(spec.act.expr, variable), gate, up), out=out)
    names = _first_names(spec)
    parts = dgu_SG.chunk(len(names), dim=-1)
    rounded = [part.to(x_dtype) for part in parts]
    for name, part, low in zip(names, parts, rounded, strict=True):
        if wanted[name]:
            grads[name] = rows.outer(low, z_SH) if spec.gate_up.storage == "EGH" else rows.outer(z_SH, low)
        if wanted.get(f"{name}_bias"):
            grads[f"{name}_bias"] = rows.total(part).to(x_dtype)

    if wanted["hidden"] or (wanted["weights"] and spec.weight == "input"):
        dz = [rows.precise(part, w.mT) for part, w in zip(parts, first_EGH(spec, p), strict=True)]
        dz_SH = dz[0].to(acc) if len(dz) == 1 else dz[0].to(acc) + dz[1].to(acc)
        if wanted["weights"] and spec.weight == "input":
            grads["weights"] = rows.scatter((dz_SH * x_SH).sum(-1)).to(torch_dtype(spec.w))
        grads["hidden"] = rows.combine(dz_SH, w_TK if spec.weight == "input" else None, acc).to(x_dtype)
    return grads


def _through_post(
    spec: ExpertsSpec,
    rows: Routes,
    y_SH: Tensor,
    dout_SH: Tensor,
    w_S: Tensor | None,
    scale_H: Tensor | None,
    wanted: dict[str, bool],
) -> tuple[Tensor, dict[str, Tensor]]:
    """(dy_SH, the gradients of weights and post_scale): back through the weighting and the norm of y."""
    grads: dict[str, Tensor] = {}
    n_SH, r_S1 = normalized(spec, y_SH, scale_H)
    dn_SH = dout_SH
    if w_S is not None and spec.weight == "output":
        if wanted["weights"]:
            grads["weights"] = rows.scatter((dout_SH * n_SH).sum(-1)).to(torch_dtype(spec.w))
        dn_SH = dout_SH * w_S[:, None]
    dz_SH = r_S1 * (dn_SH - n_SH * (dn_SH * n_SH).mean(-1, keepdim=True))
    if scale_H is None:
        return dz_SH, grads
    if wanted["post_scale"]:
        grads["post_scale"] = rows.total(dz_SH * y_SH.to(dz_SH.dtype)).sum(0).to(scale_H.dtype)
    return dz_SH * scale_H.to(dz_SH.dtype), grads
