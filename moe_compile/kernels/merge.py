"""Routes as other libraries want them: int32 ids, fp32 weights, each expert at most once for a token.

In: ids_TK (int32 or int64, any values), weights_TK or None (1 each). Out: ids and weights of the same sum. A repeated
id keeps its first slot, with the sum of its weights; every other slot, and one whose id is not in [0, E), has weight 0
and the id `absent`, which the caller chooses so that its library skips the slot (or computes it for nothing).
Invariant: a token's weighted sum is unchanged but for the order of at most K fp32 additions; ids that are distinct and
valid, and their weights, are passed on exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch, power_of_2


@triton.jit
def _merge_kernel(
    ids_ptr, weights_ptr, out_ids_ptr, out_weights_ptr,
    E: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, ABSENT: tl.constexpr, WEIGHTED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, SLOTS)
    at = tl.program_id(0).to(tl.int64) * K + k
    ids = tl.load(ids_ptr + at, mask=k < K, other=-1)
    valid = (ids >= 0) & (ids < E)
    if WEIGHTED:
        w = tl.load(weights_ptr + at, mask=k < K, other=0.0).to(tl.float32)
    else:
        w = tl.full((SLOTS,), 1.0, tl.float32)
    same = (ids[:, None] == ids[None, :]) & valid[:, None] & valid[None, :]
    earlier = tl.sum((same & (k[None, :] < k[:, None])).to(tl.int32), axis=1)
    total = tl.sum(tl.where(same, w[None, :], 0.0), axis=1)
    kept = valid & (earlier == 0)
    tl.store(out_ids_ptr + at, tl.where(kept, ids, ABSENT).to(tl.int32), mask=k < K)
    tl.store(out_weights_ptr + at, tl.where(kept, total, 0.0), mask=k < K)


def merge_routes(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, E: int, absent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32, weights fp32), both contiguous [T, K], T >= 1. One launch; no synchronization."""
    T, K = ids_TK.shape
    ids = ids_TK.contiguous()
    weights = ids if weights_TK is None else weights_TK.contiguous()
    out_ids = torch.empty((T, K), dtype=torch.int32, device=ids.device)
    out_weights = torch.empty((T, K), dtype=torch.float32, device=ids.device)
    launch(
        _merge_kernel, (T, 1), (ids, weights, out_ids, out_weights), (),
        (E, K, power_of_2(K), absent, weights_TK is not None), warps=1,
    )  # fmt: skip
    return out_ids, out_weights


def merge_routes_torch(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, E: int, absent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    valid = (ids_TK >= 0) & (ids_TK < E)
    w = torch.ones(ids_TK.shape, device=ids_TK.device) if weights_TK is None else weights_TK.float()
    same = (ids_TK[:, :, None] == ids_TK[:, None, :]) & valid[:, :, None] & valid[:, None, :]
    kept = valid & ~same.tril(-1).any(-1)
    total = torch.where(same, w[:, None, :], 0.0).sum(-1)
    return torch.where(kept, ids_TK, absent).int(), torch.where(kept, total, 0.0)
