"""The sum over each token's routes, one kernel: out_TH[t] = cast(sum_k w[t, k] * post(y_RH[t * K + k]), out).

In: y_RH in route order (grouped.py), ids and routing weights. Out: out_TH. A route outside [0, E) adds exactly 0 and
its y is never read. Invariant: slot order, fp32: bitwise repeatable.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .launch import Bound, ceil_div, power_of_2


@triton.jit
def _finalize_kernel(
    y_ptr, ids_ptr, weights_ptr, post_ptr, out_ptr,
    E: tl.constexpr, K: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, POST: tl.constexpr,
    POST_SCALE: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token; with POST, all of them."""
    if PDL:
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if POST_SCALE:
        post = tl.load(post_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        e = tl.load(ids_ptr + t * K + k)
        here = (e >= 0) & (e < E)
        y = tl.load(y_ptr + (t * K + k) * H + h, mask=h < tl.where(here, H, 0), other=0.0).to(tl.float32)
        if POST_SCALE:
            y *= post
        if POST:
            mean = tl.sum(y * y, axis=0) / H
            y = y / tl.sqrt_rn(tl.where(here, mean + EPS, 1.0))
        if SCALE:
            y *= tl.where(here, tl.load(weights_ptr + t * K + k).to(tl.float32), 0.0)
        total += y
    tl.store(out_ptr + t * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)


@lru_cache(1024)
def _finalize_bound(
    E: int, K: int, H: int, dtype: Any, device: torch.device, ids: Any, weights: Any, out: Any, post: str, eps: float,
    post_dtype: Any,
) -> tuple[Bound, int]:  # fmt: skip
    block = power_of_2(H) if post != "none" else min(1024, power_of_2(H))
    constants = (E, K, H, weights is not None, post != "none", post == "scaled_rms", eps, block)
    warps = 8 if block > 1024 else 4
    return Bound(_finalize_kernel, constants, device, warps=warps, overlap=True), ceil_div(H, block)


def finalize(
    y_RH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, E: int, dtype: torch.dtype,
    *, post: str = "none", eps: float = 0.0, post_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """out_TH [T, H] in `dtype`: sum over k, in slot order and fp32, of w * post(y) (w = 1 without weights_TK).

    post, eps: as in spec.ExpertsSpec; post_scale [H] of post=scaled_rms.
    """
    T, K = ids_TK.shape
    H = y_RH.shape[1]
    weights = None if weights_TK is None else weights_TK.dtype
    bound, blocks = _finalize_bound(
        E, K, H, y_RH.dtype, y_RH.device, ids_TK.dtype, weights, dtype, post, eps,
        None if post_scale is None else post_scale.dtype,
    )  # fmt: skip
    out = torch.empty((T, H), dtype=dtype, device=y_RH.device)
    arguments = (
        y_RH, ids_TK.contiguous(), y_RH if weights_TK is None else weights_TK.contiguous(),
        y_RH if post_scale is None else post_scale.contiguous(), out,
    )  # fmt: skip
    bound((T, blocks), arguments)
    return out


def finalize_reference(
    y_RH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, E: int, dtype: torch.dtype,
    *, post: str = "none", eps: float = 0.0, post_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The torch twin of `finalize`."""
    T, K = ids_TK.shape
    here = ((ids_TK >= 0) & (ids_TK < E))[:, :, None]
    y = torch.where(here, y_RH.view(T, K, -1).float(), 0.0)
    y = y if post_scale is None else y * post_scale.float()
    if post != "none":
        y = torch.where(here, y / (y.square().mean(-1, keepdim=True) + eps).sqrt(), 0.0)
    y = y if weights_TK is None else torch.where(here, y * weights_TK[:, :, None].float(), 0.0)
    return y.sum(1).to(dtype)
