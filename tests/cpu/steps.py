"""MoE blocks as tables of named steps, so that a test replaces one step and nothing else.

A step is a function of `s`, the values so far by name, and what it returns becomes `s.<step>`. `GROUPED` sorts routes
and multiplies by groups, `GATHERED` gathers weights for each route, `SEPARATE` is grouped with gate and up apart.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import blocks
import torch
import torch.nn.functional as F
from blocks import E, H, I, K

T = 10
Step = Callable[[SimpleNamespace], Any]
Table = dict[str, Step]

INPUTS: dict[str, tuple[int, ...]] = {
    "x": (T, H), "logits_of": (E, H), "gate_up": (E, 2 * I, H), "down": (E, H, I), "gate_up_bias": (E, 2 * I),
    "down_bias": (E, H), "other": (T, H), "gate": (E, I, H), "up": (E, I, H), "bias": (E,),
}  # fmt: skip


def inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Values for the arguments of every block."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).mul_(0.5).to(dtype) for shape in INPUTS.values()]


def halves(up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    g, u = up.chunk(2, dim=-1)
    return g, u


_ROUTER: Table = {
    "probs": lambda s: F.softmax(F.linear(s.x, s.logits_of), dim=-1, dtype=torch.float32),
    "choice": lambda s: torch.topk(s.probs, K, dim=-1),
    "weights": lambda s: s.choice[0] / s.choice[0].sum(-1, keepdim=True),
    "ids": lambda s: s.choice[1],
}
GROUPED: Table = {
    **_ROUTER,
    "flat": lambda s: s.ids.reshape(-1),
    "sort": lambda s: torch.sort(s.flat),
    "perm": lambda s: s.sort[1],
    "counts": lambda s: torch.histc(s.flat.float(), bins=E, min=0, max=E - 1),
    "offsets": lambda s: torch.cumsum(s.counts, 0, dtype=torch.int32),
    "rows": lambda s: s.x[s.perm // K],
    "first": lambda s: blocks.grouped(s.rows, s.gate_up.transpose(1, 2), s.offsets),
    "halves": lambda s: halves(s.first),
    "act": lambda s: F.silu(s.halves[0]) * s.halves[1],
    "second_offsets": lambda s: s.offsets,
    "second": lambda s: blocks.grouped(s.act, s.down.transpose(1, 2), s.second_offsets),
    "weighed": lambda s: s.second * s.weights.reshape(-1)[s.perm].unsqueeze(-1),
    "inverse": lambda s: torch.argsort(s.perm),
    "routes": lambda s: s.weighed[s.inverse].view(-1, K, H),
    "out": lambda s: s.routes.sum(dim=1),
}
SEPARATE: Table = {
    **GROUPED,
    "gate_rows": lambda s: s.rows,
    "up_rows": lambda s: s.rows,
    "first": lambda s: None,
    "halves": lambda s: (
        blocks.grouped(s.gate_rows, s.gate.transpose(1, 2), s.offsets),
        blocks.grouped(s.up_rows, s.up.transpose(1, 2), s.offsets),
    ),
}
GATHERED: Table = {
    **_ROUTER,
    "flat": lambda s: s.ids.reshape(-1),
    "rows": lambda s: s.x.repeat_interleave(K, dim=0),
    "first": lambda s: torch.bmm(s.gate_up[s.flat], s.rows.unsqueeze(-1)).squeeze(-1),
    "halves": lambda s: halves(s.first),
    "act": lambda s: F.silu(s.halves[0]) * s.halves[1],
    "second_flat": lambda s: s.flat,
    "second": lambda s: torch.bmm(s.down[s.second_flat], s.act.unsqueeze(-1)).squeeze(-1),
    "weighed": lambda s: s.second * s.weights.reshape(-1, 1),
    "routes": lambda s: s.weighed.view(-1, K, H),
    "out": lambda s: s.routes.sum(dim=1),
}


def program(table: Table, changes: Table | None = None) -> Callable[..., Any]:
    """The block as a function of INPUTS, with some steps changed; a step new to the table runs just before "out"."""
    changes = changes or {}
    assert changes.keys() <= table.keys(), changes.keys() - table.keys()
    steps = {**table, **changes}
    if table is SEPARATE:  # its rows of gate and up stand before its halves
        moved = ("gate_rows", "up_rows")
        order = [n for n in steps if n not in moved]
        at = order.index("halves")
        steps = {n: steps[n] for n in (*order[:at], *moved, *order[at:])}

    def block(x: Any, logits_of: Any, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any, other: Any,
              gate: Any, up: Any, bias: Any) -> Any:  # fmt: skip
        s = SimpleNamespace(x=x, logits_of=logits_of, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias,
                            down_bias=down_bias, other=other, gate=gate, up=up, bias=bias)  # fmt: skip
        for name, step in steps.items():
            setattr(s, name, step(s))
        return s.out

    return block


ADDED: Table = {"inverse": lambda s: None, "routes": lambda s: None}  # combined straight from sorted rows

# name: (table, lawful changes): every one is a block, spelled its own way
TRUE: dict[str, tuple[Table, Table]] = {
    "grouped": (GROUPED, {}),
    "gathered": (GATHERED, {}),
    "separate": (SEPARATE, {}),
    "added": (GROUPED, {
        **ADDED, "out": lambda s: torch.zeros_like(s.x).index_add_(0, s.perm // K, s.weighed)}),
    "written": (GROUPED, {
        "inverse": lambda s: _written(s.perm), "routes": lambda s: s.weighed[s.inverse].view(T, K, H)}),
    "weighed on the input": (GROUPED, {
        "rows": lambda s: s.x[s.perm // K] * s.weights.reshape(-1)[s.perm].unsqueeze(-1),
        "weighed": lambda s: s.second}),
    "biased": (GATHERED, {
        "first": lambda s: GATHERED["first"](s) + s.gate_up_bias[s.flat],
        "second": lambda s: GATHERED["second"](s) + s.down_bias[s.flat]}),
    "interleaved": (GATHERED, {"halves": lambda s: (s.first[..., ::2], s.first[..., 1::2])}),
    "einsum": (GATHERED, {
        "rows": lambda s: s.x, "flat": lambda s: s.ids,
        "first": lambda s: torch.einsum("tkgh,th->tkg", s.gate_up[s.flat], s.rows),
        "second": lambda s: torch.einsum("tki,tkhi->tkh", s.act, s.down[s.flat]),
        "weighed": lambda s: s.second * s.weights.unsqueeze(-1), "routes": lambda s: s.weighed}),
    "guarded": (GROUPED, {
        "weighed": lambda s: (s.second * s.weights.reshape(-1)[s.perm].unsqueeze(-1)).masked_fill(
            (s.sort[0] >= E).unsqueeze(-1), 0.0)}),
    "clamped": (GATHERED, {
        "act": lambda s: (s.halves[1].clamp(-0.5, 0.5) + 1) * _sigmoid_gated(s.halves[0].clamp(max=0.5))}),
    "in place": (GATHERED, {"weighed": lambda s: s.second.mul_(s.weights.reshape(-1, 1))}),
    "sigmoid with a bias": (GATHERED, {
        "probs": lambda s: F.linear(s.x, s.logits_of).sigmoid(),
        "choice": lambda s: _biased_choice(s),
        "weights": lambda s: s.choice[0] / (s.choice[0].sum(-1, keepdim=True) + 1e-20) * 2.5}),
    "groups": (GATHERED, {
        "probs": lambda s: F.linear(s.x, s.logits_of).sigmoid(), "choice": lambda s: _grouped_choice(s)}),
}  # fmt: skip


def _written(perm: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(T * K)
    return inverse


def _sigmoid_gated(g: torch.Tensor) -> torch.Tensor:
    return g * torch.sigmoid(g * 1.7)


def _biased_choice(s: SimpleNamespace) -> Any:
    ids = torch.topk(s.probs + s.bias, K, dim=-1, sorted=False)[1]
    return s.probs.gather(1, ids), ids


def _grouped_choice(s: SimpleNamespace) -> Any:
    groups = s.probs.view(-1, 3, E // 3).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(groups, k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, best, 1)
    kept = mask.unsqueeze(-1).expand(-1, 3, E // 3).reshape(-1, E)
    ids = torch.topk(s.probs.masked_fill(~kept.bool(), 0.0), K, dim=-1)[1]
    return s.probs.gather(1, ids), ids
