"""The experts of a few tokens in two launches, without sorting: a program streams weight rows for one route or token.

In: x_TH, ids_TK, weights_TK, expert tensors in their native layout (strides are read, nothing is copied).
  up    act_RI[r] = cast(act(gate, up), x)  for route r = t * K + k, from x[t] and the rows of expert ids[t, k]
  down  out_TH[t] = cast(sum_k w[t, k] * (down[ids[t, k]] @ act_RI[t * K + k] + bias), out), one program over all slots
Products are FMAs in fp32: at a few rows per expert the weights' bytes are the time, and tensor cores would only wait.
An expert that two routes share is read twice (from L2 where they run side by side), so this is for T * K below about E.
Invariants: a route outside [0, E) reads nothing and adds exactly 0; one program writes an element, in a fixed order:
bitwise repeatable. Both launches start early (PDL, 0.3 to 0.6 us); the second fetches its first weights, and waits
before it reads act_RI.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .grouped import gate_and_up
from .launch import Bound, ceil_div, power_of_2
from .listed import Experts, alignment, base, tensor_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Blocks: weight rows (of I, of H) and columns that a program holds at a time (`down`: of each slot), and warps."""

    UP_N: int
    UP_K: int
    DOWN_N: int
    DOWN_K: int
    UP_warps: int = 4
    DOWN_warps: int = 4


@triton.jit(do_not_specialize=["R"])
def _up_kernel(
    x_ptr, ids_ptr, route_weight_ptr, w_ptr, v_ptr, bias_ptr, bias2_ptr, act_ptr, stride_xt, R,
    stride_xh: tl.constexpr, stride_we: tl.constexpr, stride_wn: tl.constexpr, stride_wk: tl.constexpr,
    stride_be: tl.constexpr, V_ROW: tl.constexpr, E: tl.constexpr, CHOICES: tl.constexpr, H: tl.constexpr,
    I: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, INTERLEAVED: tl.constexpr,
    GATE_FIRST: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, N_: tl.constexpr,
    K_: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """I rows n0.. of one route; PAIRED reads gate and up rows as one tile with alternating rows."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    route = tl.program_id(0) % R  # routes fastest: those that share an expert run side by side
    n0 = tl.program_id(0) // R * N_
    e = tl.load(ids_ptr + route)
    if (e < 0) | (e >= E):
        return
    kind: tl.constexpr = x_ptr.dtype.element_ty
    w_ptr = tensor_of(w_ptr, e, kind, LISTED)
    if GATED and not PAIRED:
        v_ptr = tensor_of(v_ptr, e, kind, LISTED)
    WIDTH: tl.constexpr = 2 * N_ if PAIRED else N_
    n, k = tl.arange(0, WIDTH), tl.arange(0, K_)
    if INTERLEAVED:
        row, inside = 2 * n0 + n, 2 * n0 + n < 2 * I
    elif PAIRED:
        row, inside = n0 + n // 2 + (n % 2) * V_ROW, n0 + n // 2 < I
    else:
        row, inside = n0 + n, n0 + n < I
    offset = e.to(tl.int64) * stride_we + row.to(tl.int64)[:, None] * stride_wn + k[None, :] * stride_wk
    x_ptrs = x_ptr + (route // CHOICES).to(tl.int64) * stride_xt + k * stride_xh
    acc = tl.zeros((WIDTH, K_), tl.float32)
    acc2 = tl.zeros((WIDTH, K_), tl.float32)
    for k0 in range(0, H, K_):
        mask = inside[:, None] & (k0 + k < H)[None, :]
        x = tl.load(x_ptrs + k0 * stride_xh, mask=k0 + k < H, other=0.0).to(tl.float32)[None, :]
        acc += tl.load(w_ptr + offset + k0 * stride_wk, mask=mask, other=0.0).to(tl.float32) * x
        if GATED and not PAIRED:
            at = offset + V_ROW * stride_wn + k0 * stride_wk
            acc2 += tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32) * x
    one, two = tl.sum(acc, axis=1), tl.sum(acc2, axis=1)
    if PAIRED:
        one, two = tl.split(tl.reshape(one, (N_, 2)))
    if SCALE:
        scale = tl.load(route_weight_ptr + route).to(tl.float32)
        one, two = one * scale, two * scale
    n = n0 + tl.arange(0, N_)
    if BIAS:
        bias_ptr = tensor_of(bias_ptr, e, kind, LISTED)
        bias2_ptr = tensor_of(bias2_ptr, e, kind, LISTED)
        at = e.to(tl.int64) * stride_be + (2 * n if INTERLEAVED else n)
        one += tl.load(bias_ptr + at, mask=n < I, other=0.0).to(tl.float32)
        if GATED:
            two += tl.load(bias2_ptr + at + (1 if INTERLEAVED else V_ROW), mask=n < I, other=0.0).to(tl.float32)
    if not GATED:
        value = ACT(one, one)
    elif GATE_FIRST:
        value = ACT(one, two)
    else:
        value = ACT(two, one)
    tl.store(act_ptr + route.to(tl.int64) * I + n, value.to(act_ptr.dtype.element_ty), mask=n < I)


@triton.jit(do_not_specialize=["T"])
def _down_kernel(
    act_ptr, ids_ptr, route_weight_ptr, w_ptr, bias_ptr, out_ptr, T,
    stride_we: tl.constexpr, stride_wn: tl.constexpr, stride_wk: tl.constexpr, stride_be: tl.constexpr,
    E: tl.constexpr, CHOICES: tl.constexpr, H: tl.constexpr, I: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    S_: tl.constexpr, N_: tl.constexpr, K_: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """H rows n0.. of one token: tiles [S_ slots, N_, K_], so that the weights of all slots are in flight at once."""
    t = tl.program_id(0) % T
    n, k = tl.program_id(0) // T * N_ + tl.arange(0, N_), tl.arange(0, K_)
    slot = tl.arange(0, S_)
    r = t * CHOICES + slot
    e = tl.load(ids_ptr + r, mask=slot < CHOICES, other=E).to(tl.int64)
    here = (e >= 0) & (e < E)
    scale = tl.full((S_,), 1.0, tl.float32)
    if SCALE:
        scale = tl.load(route_weight_ptr + r, mask=here, other=0.0).to(tl.float32)
    kind: tl.constexpr = act_ptr.dtype.element_ty
    w_ptr = tensor_of(w_ptr, tl.where(here, e, 0), kind, LISTED)
    if LISTED:
        w_ptr = w_ptr[:, None, None]
    w_ptrs = w_ptr + e[:, None, None] * stride_we + n.to(tl.int64)[None, :, None] * stride_wn
    w_ptrs += k[None, None, :] * stride_wk
    rows = here[:, None, None] & (n < H)[None, :, None]
    w = tl.load(w_ptrs, mask=rows & (k < I)[None, None, :], other=0.0)
    if PDL:  # the first weights are on their way while the first kernel ends
        gdc_wait()
    a_ptrs = act_ptr + r.to(tl.int64)[:, None] * I + k[None, :]
    a = tl.load(a_ptrs, mask=here[:, None] & (k < I)[None, :], other=0.0).to(tl.float32) * scale[:, None]
    acc = w.to(tl.float32) * a[:, None, :]
    for k0 in range(K_, I, K_):
        depth = k0 + k < I
        w = tl.load(w_ptrs + k0 * stride_wk, mask=rows & depth[None, None, :], other=0.0)
        a = tl.load(a_ptrs + k0, mask=here[:, None] & depth[None, :], other=0.0).to(tl.float32) * scale[:, None]
        acc += w.to(tl.float32) * a[:, None, :]
    y = tl.sum(acc, axis=2)
    if BIAS:
        bias_ptr = tensor_of(bias_ptr, tl.where(here, e, 0), kind, LISTED)
        if LISTED:
            bias_ptr = bias_ptr[:, None]
        at = bias_ptr + e[:, None] * stride_be + n[None, :]
        b = tl.load(at, mask=here[:, None] & (n < H)[None, :], other=0.0).to(tl.float32)
        y += b * scale[:, None]
    out = tl.sum(y, axis=0)
    tl.store(out_ptr + t.to(tl.int64) * H + n, out.to(out_ptr.dtype.element_ty), mask=n < H)


@lru_cache(1024)
def _up_bound(
    rows: Rows, act: Any, E: int, choices: int, sizes: tuple[int, int], gated: bool, halves: str, k_major: bool,
    dtype: Any, device: torch.device, ids: Any, stride_xh: int, w_strides: tuple[int, ...], bias_stride: int | None,
    weights: Any, listed: int,
) -> Bound:  # fmt: skip
    """The kernel for all calls that differ in addresses and in T only; see launch.Bound."""
    H, I = sizes
    interleaved = halves.endswith("interleaved")
    paired = gated and (interleaved or (halves != "separate" and k_major))
    n_axis, k_axis = (1, 2) if k_major else (2, 1)
    constants = (
        stride_xh, w_strides[0], w_strides[n_axis], w_strides[k_axis], bias_stride or 0,
        0 if halves in ("separate", "up") else 1 if interleaved else I, E, choices, H, I, gated, paired, interleaved,
        not halves.startswith("up_gate"), bias_stride is not None, weights is not None, act, rows.UP_N, rows.UP_K,
        listed,
    )  # fmt: skip
    return Bound(_up_kernel, constants, device, warps=rows.UP_warps, overlap=True)


@lru_cache(1024)
def _down_bound(
    rows: Rows, E: int, choices: int, I: int, H: int, k_major: bool, dtype: Any, device: torch.device, ids: Any,
    w_strides: tuple[int, ...], bias_stride: int | None, weights: Any, out: Any, listed: int,
) -> Bound:  # fmt: skip
    n_axis, k_axis = (1, 2) if k_major else (2, 1)
    constants = (
        w_strides[0], w_strides[n_axis], w_strides[k_axis], bias_stride or 0, E, choices, H, I,
        bias_stride is not None, weights is not None, power_of_2(choices), rows.DOWN_N, rows.DOWN_K, listed,
    )  # fmt: skip
    return Bound(_down_kernel, constants, device, warps=rows.DOWN_warps, overlap=True)


def up(
    x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, gate_up: tuple[Experts, ...],
    bias: tuple[Experts, ...], act: Any, *, E: int, sizes: tuple[int, int], gated: bool, halves: str,
    k_major: bool, rows: Rows,
) -> torch.Tensor:  # fmt: skip
    """act_RI [R, I] in x's dtype by route; rows of dropped routes stay unwritten. Arguments as of grouped.fc1."""
    w, v = gate_up[0], gate_up[-1]
    R, stride_xt, stride_xh = ids_TK.numel(), *x_TH.stride()
    bound = _up_bound(
        rows, act, E, ids_TK.shape[1], sizes, gated, halves, k_major, x_TH.dtype, x_TH.device, ids_TK.dtype, stride_xh,
        w.stride(), bias[0].stride(0) if bias else None, None if weights_TK is None else weights_TK.dtype,
        alignment(w, v, *bias),
    )  # fmt: skip
    out = torch.empty((R, sizes[1]), dtype=x_TH.dtype, device=x_TH.device)
    arguments = (
        x_TH, ids_TK.contiguous(), x_TH if weights_TK is None else weights_TK.contiguous(), base(w), base(v),
        base(bias[0]) if bias else x_TH, base(bias[-1]) if bias else x_TH, out, stride_xt,
    )  # fmt: skip
    bound((R * ceil_div(sizes[1], rows.UP_N), 1), arguments, (R,))
    return out


def down(
    act_RI: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, w: Experts,
    bias: Experts | None, dtype: torch.dtype, *, E: int, k_major: bool, rows: Rows,
) -> torch.Tensor:  # fmt: skip
    """out_TH [T, H] in `dtype`. w: [E, H, I] where k_major, else [E, I, H]; weights_TK None means 1."""
    T, choices = ids_TK.shape
    I, H = act_RI.shape[1], w.shape[1 if k_major else 2]
    bound = _down_bound(
        rows, E, choices, I, H, k_major, act_RI.dtype, act_RI.device, ids_TK.dtype, w.stride(),
        None if bias is None else bias.stride(0), None if weights_TK is None else weights_TK.dtype, dtype,
        alignment(w) if bias is None else alignment(w, bias),
    )  # fmt: skip
    out = torch.empty((T, H), dtype=dtype, device=act_RI.device)
    arguments = (
        act_RI, ids_TK.contiguous(), act_RI if weights_TK is None else weights_TK.contiguous(), base(w),
        act_RI if bias is None else base(bias), out,
    )  # fmt: skip
    bound((T * ceil_div(H, rows.DOWN_N), 1), arguments, (T,))
    return out


def up_reference(
    x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, gate_up: tuple[torch.Tensor, ...],
    bias: tuple[torch.Tensor, ...], act: Callable[..., torch.Tensor], *, halves: str, k_major: bool,
) -> torch.Tensor:  # fmt: skip
    """The torch twin of `up`: act is a function of fp32 (gate or None, up); rows of dropped routes are zero."""
    gate, up_ = gate_and_up(gate_up, halves, 1 if k_major else 2)
    gate_bias, up_bias = gate_and_up(bias, halves, 1) if bias else (None, None)
    E, K = up_.shape[0], ids_TK.shape[1]
    out = x_TH.new_zeros((ids_TK.numel(), up_.shape[1 if k_major else 2]))

    def linear(w: torch.Tensor | None, b: torch.Tensor | None, e: int, x: torch.Tensor) -> torch.Tensor | None:
        if w is None:
            return None
        y = (w[e].float() if k_major else w[e].float().T) @ x
        return y if b is None else y + b[e].float()

    for r, e in enumerate(ids_TK.reshape(-1).tolist()):
        if 0 <= e < E:
            x = x_TH[r // K].float()
            x = x if weights_TK is None else x * weights_TK.reshape(-1)[r].float()
            out[r] = act(linear(gate, gate_bias, e, x), linear(up_, up_bias, e, x)).to(out.dtype)
    return out


def down_reference(
    act_RI: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, w: torch.Tensor,
    bias: torch.Tensor | None, dtype: torch.dtype, *, k_major: bool,
) -> torch.Tensor:  # fmt: skip
    """The torch twin of `down`."""
    (T, K), E = ids_TK.shape, w.shape[0]
    out = torch.zeros((T, w.shape[1 if k_major else 2]), dtype=torch.float32, device=act_RI.device)
    for r, e in enumerate(ids_TK.reshape(-1).tolist()):
        if 0 <= e < E:
            y = (w[e].float() if k_major else w[e].float().T) @ act_RI[r].float()
            y = y if bias is None else y + bias[e].float()
            out[r // K] += y if weights_TK is None else y * weights_TK.reshape(-1)[r].float()
    return out.to(dtype)
