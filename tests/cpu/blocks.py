"""MoE blocks in plain torch, as small as can be, for tests of recognition: one true block and ways to get it wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers transformers::grouped_mm_fallback)
from torch import nn

E, K, H, I = 6, 2, 16, 8
Tensor = torch.Tensor


def sorted_rows(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sorted ids, permutation, offsets) of flat expert ids."""
    values, perm = torch.sort(ids)
    counts = torch.histc(values.float(), bins=E, min=0, max=E - 1)
    return values, perm, torch.cumsum(counts, dim=0, dtype=torch.int32)


def grouped(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, offs=offsets)


@dataclass
class Parts:
    """What a variant may change of the true block; each is called where its name says."""

    route: Callable[..., Any] = lambda s, probs: torch.topk(probs, K, dim=-1)
    second_ids: Callable[..., Any] = lambda s, ids: ids
    rows: Callable[..., Any] = lambda s, x, perm: x[perm // K]
    between: Callable[..., Any] = lambda s, g, u, ids_sorted, perm: F.silu(g) * u
    weigh: Callable[..., Any] = lambda s, y, w: y * w.unsqueeze(-1)
    back: Callable[..., Any] = lambda s, perm, other: perm
    finish: Callable[..., Any] = lambda s, y: y.sum(dim=1)
    before_return: Callable[..., Any] = field(default=lambda s, out, env: out)


class GroupedBlock(nn.Module):
    """softmax -> top-k -> renormalize; sort; grouped linears; unsort; weighted sum. `parts` replaces pieces."""

    def __init__(self, parts: Parts | None = None) -> None:
        super().__init__()
        self.p = parts or Parts()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * 0.2)

        self.gate = parameter(E, H)
        self.gate_up, self.down = parameter(E, 2 * I, H), parameter(E, H, I)
        self.other = parameter(E, H)

    def forward(self, x: Tensor) -> Tensor:
        p = self.p
        logits = F.linear(x, self.gate)
        probs = F.softmax(logits, dim=-1, dtype=torch.float32)
        weights, ids = p.route(self, probs)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        flat = ids.reshape(-1)
        ids_sorted, perm, offsets = sorted_rows(flat)
        rows = p.rows(self, x, perm)
        g, u = grouped(rows, self.gate_up.transpose(-2, -1), offsets).chunk(2, dim=-1)
        a = p.between(self, g, u, ids_sorted, perm)
        second = p.second_ids(self, flat)
        if second is not flat:
            _, _, offsets = sorted_rows(second)
        y = grouped(a, self.down.transpose(-2, -1), offsets)
        y = p.weigh(self, y, weights.reshape(-1)[perm])
        inverse = torch.empty_like(perm)
        inverse[p.back(self, perm, ids_sorted)] = torch.arange(perm.numel())
        out = p.finish(self, y[inverse].view(-1, K, H))
        return p.before_return(self, out, {"x": x, "ids": ids, "weights": weights})


class GatheredBlock(nn.Module):
    """The same block with the experts' weights gathered per route; `change` edits (ids, second ids, x, weights)."""

    def __init__(self, change: Callable[..., Any] | None = None) -> None:
        super().__init__()
        base = GroupedBlock()
        self.gate, self.gate_up, self.down = base.gate, base.gate_up, base.down
        self.change = change or (lambda ids, x, w: (ids, ids, x, w))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(F.softmax(F.linear(x, self.gate), dim=-1, dtype=torch.float32), K, dim=-1)
        first, second, x, weights = self.change(ids, x, weights)
        rows = x.repeat_interleave(K, dim=0)
        up = torch.bmm(self.gate_up[first.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1)
        g, u = up.chunk(2, dim=-1)
        y = torch.bmm(self.down[second.reshape(-1)], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        return (y * weights.reshape(-1, 1)).view(-1, K, H).sum(dim=1)
