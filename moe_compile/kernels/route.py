"""From logits_TE to weights_TK and ids_TK by a RouterSpec in one launch, and the gradient of the logits in another.

In: logits [T, E], E up to 1024, the selection bias and the experts' scales. Out: weights_TK in spec.out, ids_TK int64.
A warp routes a token. Selection is discontinuous, so what decides it is computed as torch computes it on CUDA, bit for
bit: the same exp and log1p (libdevice's, not the hardware's faster ones), IEEE division, the softmax's sum in the order
of torch's warp kernel (lane l adds the experts l, l + 32, ... in turn, then lanes l and l ^ 16, l ^ 8, ...), every
rounding to the dtypes of the scores and of the choices. Hence the chosen set is torch.topk's, ties included: there the
lowest ids win. Chosen experts of one value come in ascending ids; torch.topk leaves their order open. The weights
differ at most in the last bit, by the order of the renormalization's sum.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from ..reference import route as route_reference
from ..spec import RouterSpec, torch_dtype
from .epilogue import _log1p as _log1p_plain
from .launch import Bound, power_of_2

__all__ = ["route", "route_backward", "route_reference"]

_LEAST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below the key of every value
_INF = tl.constexpr(float("inf"))
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

if triton.knobs.runtime.interpret:  # which has no libdevice; numpy's exp is exact there

    @triton.jit
    def _exp(x):
        return tl.exp(x)

    @triton.jit
    def _log1p(x):
        return _log1p_plain(x)

else:

    @triton.jit
    def _exp(x):
        return libdevice.exp(x)

    @triton.jit
    def _log1p(x):
        return libdevice.log1p(x)


@triton.jit
def _pointwise_score(x, SCORE: tl.constexpr, TYPE: tl.constexpr):
    """sigmoid or sqrt(softplus) of fp32 x, each function's result rounded to TYPE."""
    if SCORE == "sigmoid":
        s = tl.div_rn(1.0, 1.0 + _exp(-x))
    else:
        s = tl.where(x > 20.0, x, _log1p(_exp(tl.minimum(x, 20.0))))
        s = tl.sqrt_rn(s.to(TYPE).to(tl.float32))
    return s.to(TYPE).to(tl.float32)


@triton.jit
def _keys(c, index):
    """int64 that order as torch.topk does: by value, NaN largest, then by ascending index."""
    bits = c.to(tl.int32, bitcast=True)
    bits = tl.where(c == c, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _exp_sum(x_ptr, top, E: tl.constexpr, TYPE: tl.constexpr, LANES: tl.constexpr, E_: tl.constexpr):
    """The sum over e of exp(x[e] - top), in the order of torch's warp kernel."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float32)
    for i in tl.static_range(E_ // LANES):
        e = i * LANES + lane
        x = tl.load(x_ptr + e, mask=e < E, other=-_INF).to(TYPE).to(tl.float32)
        total += _exp(x - top)
    for step in tl.static_range(5):
        if LANES >> step > 1:
            total = tl.sum(tl.reshape(total, (2, LANES >> (step + 1))), axis=0)
    return tl.sum(total, axis=0)


@triton.jit
def _group_choice(c, inside, GROUPS: tl.constexpr, TOP: tl.constexpr, BY_MAX: tl.constexpr, FILL: tl.constexpr,
                  TYPE: tl.constexpr, G_: tl.constexpr, S_: tl.constexpr):  # fmt: skip
    """c with FILL outside the best TOP groups; columns are g * S_ + j."""
    members = tl.reshape(tl.where(inside, c, -_INF), (G_, S_))
    best = tl.max(members, axis=1)
    if not BY_MAX:
        j = tl.arange(0, S_)[None, :]
        rest = tl.where(j == tl.argmax(members, axis=1)[:, None], -_INF, members)
        best = (best + tl.max(rest, axis=1)).to(TYPE).to(tl.float32)
    g = tl.arange(0, G_)
    keys = tl.where(g < GROUPS, _keys(best, g), _LEAST)
    kept = tl.zeros((G_,), tl.int32)
    for _ in range(TOP):
        won = keys == tl.max(keys, axis=0)
        kept = tl.where(won, 1, kept)
        keys = tl.where(won, _LEAST, keys)
    return tl.where(tl.reshape(tl.broadcast_to(kept[:, None], (G_, S_)), (G_ * S_,)) == 1, c, FILL)


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, scale_ptr, weights_ptr, ids_ptr, stride_t,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, LATE: tl.constexpr, SCORE_TYPE: tl.constexpr,
    BIAS: tl.constexpr, CHOICE_TYPE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BY_MAX: tl.constexpr, FILL: tl.constexpr, FIRST: tl.constexpr, BY_CHOICE: tl.constexpr, RENORM: tl.constexpr,
    EPS: tl.constexpr, FACTOR: tl.constexpr, WIDE_TYPE: tl.constexpr, EXPERT_SCALE: tl.constexpr,
    SCALED_TYPE: tl.constexpr, LANES: tl.constexpr, E_: tl.constexpr, G_: tl.constexpr, S_: tl.constexpr,
    K_: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + t * stride_t
    column = tl.arange(0, G_ * S_)
    g, j = column // S_, column % S_
    e, inside = g * (E // GROUPS) + j, (g < GROUPS) & (j < E // GROUPS)
    c = tl.load(x_ptr + e, mask=inside, other=-_INF).to(tl.float32)
    if not LATE:
        x = c.to(SCORE_TYPE).to(tl.float32)
        if SCORE == "softmax":
            top = tl.max(x, axis=0)
            total = _exp_sum(x_ptr, top, E, SCORE_TYPE, LANES, E_)
            c = tl.div_rn(_exp(x - top), total + tl.zeros_like(x)).to(SCORE_TYPE).to(tl.float32)
        else:
            c = _pointwise_score(x, SCORE, SCORE_TYPE)
    if BIAS:
        c = (c + tl.load(bias_ptr + e, mask=inside, other=0.0).to(tl.float32)).to(CHOICE_TYPE).to(tl.float32)
    if GROUPS > 1:
        c = _group_choice(c, inside, GROUPS, TOP_GROUPS, BY_MAX, FILL, CHOICE_TYPE, G_, S_)
    if FIRST:
        c += 0.0  # argmax takes -0 and 0 for equal, topk does not
    keys = tl.where(inside, _keys(c, e), _LEAST)
    k = tl.arange(0, K_)
    chosen_keys = tl.zeros((K_,), tl.int64)
    for i in range(K):
        best = tl.max(keys, axis=0)
        chosen_keys = tl.where(k == i, best, chosen_keys)
        keys = tl.where(keys == best, _LEAST, keys)
    ids = 0x7FFFFFFF - (chosen_keys & 0x7FFFFFFF).to(tl.int32)

    if BY_CHOICE:
        bits = (chosen_keys >> 32).to(tl.int32)
        w = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:  # the scores of the chosen, from their logits again
        w = tl.load(x_ptr + ids, mask=k < K, other=-_INF).to(SCORE_TYPE).to(tl.float32)
        if SCORE == "softmax":
            if LATE:
                top = tl.max(w, axis=0)
                total = tl.sum(_exp(w - top), axis=0)
            w = tl.div_rn(_exp(w - top), total + tl.zeros_like(w)).to(SCORE_TYPE).to(tl.float32)
        else:
            w = _pointwise_score(w, SCORE, SCORE_TYPE)
    if RENORM != "none":
        n = tl.sum(tl.where(k < K, w, 0.0), axis=0).to(WIDE_TYPE).to(tl.float32)
        if RENORM == "sum_plus_eps":
            n = (n + EPS).to(WIDE_TYPE).to(tl.float32)
        elif RENORM == "sum_at_least_eps":
            n = tl.maximum(n, EPS, propagate_nan=tl.PropagateNan.ALL).to(WIDE_TYPE).to(tl.float32)
        w = tl.div_rn(w, n + tl.zeros_like(w)).to(WIDE_TYPE).to(tl.float32)
    if FACTOR != 1.0:
        w = (w * FACTOR).to(WIDE_TYPE).to(tl.float32)
    if EXPERT_SCALE:
        w = w * tl.load(scale_ptr + ids, mask=k < K, other=0.0).to(tl.float32)
        w = w.to(SCALED_TYPE).to(tl.float32)
    tl.store(weights_ptr + t * K + k, w.to(weights_ptr.dtype.element_ty), mask=k < K)
    tl.store(ids_ptr + t * K + k, ids.to(tl.int64), mask=k < K)


@triton.jit
def _route_backward_kernel(
    grad_ptr, logits_ptr, ids_ptr, out_ptr, stride_g, stride_t,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, LATE: tl.constexpr, SCORE_TYPE: tl.constexpr,
    RENORM: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr, E_: tl.constexpr, K_: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """With v = s[ids], n their divisor, u = v / n: dv = (du - dn/dv sum_k du u) / n, then the score's derivative."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    x_ptr, row_ptr = logits_ptr + t * stride_t, out_ptr + t * E
    e, k = tl.arange(0, E_), tl.arange(0, K_)
    ids = tl.load(ids_ptr + t * K + k, mask=k < K, other=0)
    x = tl.load(x_ptr + ids, mask=k < K, other=-_INF).to(SCORE_TYPE).to(tl.float32)
    over = x
    if SCORE == "softmax":
        if not LATE:
            over = tl.load(x_ptr + e, mask=e < E, other=-_INF).to(SCORE_TYPE).to(tl.float32)
        top = tl.max(over, axis=0)
        total = tl.sum(tl.exp(over - top), axis=0)
        v = tl.exp(x - top) / total
    else:
        v = tl.where(k < K, _pointwise_score(x, SCORE, tl.float32), 0.0)
    d = tl.load(grad_ptr + t * stride_g + k, mask=k < K, other=0.0).to(tl.float32) * FACTOR
    if RENORM != "none":
        n = tl.sum(v, axis=0)
        moves = 1.0
        if RENORM == "sum_plus_eps":
            n += EPS
        elif RENORM == "sum_at_least_eps":
            moves = tl.where(n >= EPS, 1.0, 0.0)
            n = tl.maximum(n, EPS)
        d = (d - moves * tl.sum(d * (v / n), axis=0)) / n
    rest = tl.zeros((E_,), tl.float32)  # what every other expert gets
    if SCORE == "softmax":
        dot = tl.sum(d * v, axis=0)
        d = v * (d - dot)
        if not LATE:
            rest = -dot * (tl.exp(over - top) / total)
    elif SCORE == "sigmoid":
        d = d * v * (1.0 - v)
    else:
        d = d / (1.0 + tl.exp(-x)) / (2.0 * v)
    tl.store(row_ptr + e, rest.to(out_ptr.dtype.element_ty), mask=e < E)
    tl.debug_barrier()  # the chosen experts' come after
    tl.store(row_ptr + ids, d.to(out_ptr.dtype.element_ty), mask=k < K)


def route(
    spec: RouterSpec,
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None = None,
    expert_scale_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights_TK in spec.out, ids_TK int64), as reference.route, its twin. Nothing is fp64."""
    T, K = logits_TE.shape[0], spec.K
    logits = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    weights = torch.empty((T, K), dtype=torch_dtype(spec.out), device=logits.device)
    ids = torch.empty((T, K), dtype=torch.int64, device=logits.device)
    if not T:
        return weights, ids
    bias, scale = (v if v is None else v.contiguous() for v in (bias_E, expert_scale_E))
    arguments = (
        logits, logits if bias is None else bias, logits if scale is None else scale, weights, ids, logits.stride(0)
    )  # fmt: skip
    bound = _bound(spec, *(None if v is None else v.dtype for v in (bias, scale)), logits.device)
    bound((T, 1), arguments)
    return weights, ids


@lru_cache(1024)
def _bound(
    spec: RouterSpec, bias: torch.dtype | None, scale: torch.dtype | None, device: torch.device
) -> Bound:  # fmt: skip
    """The kernel of a spec, by the dtypes of the bias and the scales where they are."""
    late, score = spec.score.startswith("topk_"), torch_dtype(spec.score_dtype)
    choice = torch_dtype(spec.logits) if late else score
    choice = choice if bias is None else torch.promote_types(choice, bias)
    wide = torch.promote_types(score, torch_dtype(spec.out))
    scaled = wide if scale is None else torch.promote_types(wide, scale)
    by_choice = not late and bias is None and (spec.groups == 1 or spec.values == "choice")
    experts, groups, size = power_of_2(spec.E), power_of_2(spec.groups), power_of_2(spec.E // spec.groups)
    constants = (
        spec.E, spec.K, spec.score.removeprefix("topk_"), late, _TYPES[score], bias is not None, _TYPES[choice],
        spec.groups, spec.top_groups, spec.group_score == "max", spec.group_fill, spec.ties == "first", by_choice,
        spec.renorm, spec.eps, spec.scale, _TYPES[wide], scale is not None, _TYPES[scaled], min(32, experts), experts,
        groups, size, power_of_2(spec.K),
    )  # fmt: skip
    return Bound(_route_kernel, constants, device, warps=1, stages=1)


def route_backward(
    spec: RouterSpec, grad_TK: torch.Tensor, logits_TE: torch.Tensor, ids_TK: torch.Tensor
) -> torch.Tensor:
    """d logits [T, E] in their dtype of d weights [T, K], the ids held fixed. values=score, no scales of experts."""
    out = torch.empty(logits_TE.shape, dtype=logits_TE.dtype, device=logits_TE.device)
    if not len(out):
        return out
    grad, logits = (t if t.stride(1) == 1 else t.contiguous() for t in (grad_TK, logits_TE))
    arguments = (grad, logits, ids_TK.contiguous(), out, grad.stride(0), logits.stride(0))
    _backward_bound(spec, grad.dtype, logits.device)((len(out), 1), arguments)
    return out


@lru_cache(1024)
def _backward_bound(spec: RouterSpec, grad: torch.dtype, device: torch.device) -> Bound:
    late, score = spec.score.startswith("topk_"), _TYPES[torch_dtype(spec.score_dtype)]
    constants = (
        spec.E, spec.K, spec.score.removeprefix("topk_"), late, score, spec.renorm, spec.eps, spec.scale,
        power_of_2(spec.E), power_of_2(spec.K),
    )  # fmt: skip
    return Bound(_route_backward_kernel, constants, device, warps=1, stages=1)
