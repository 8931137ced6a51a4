"""Random MoE programs: router x dispatch x linear x activation x combination x dtype x layout x shapes, at random.

A `Program` is one choice from each table; `block` is what it spells, `inputs` its arguments. Whether recognition knows
a spelling is not asked here: what it takes, it must compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers transformers::grouped_mm_fallback)
from hypothesis import strategies as st

S = SimpleNamespace
Step = Callable[[S], Any]


def _renormalized(choice: Any) -> tuple[Any, Any]:
    w, ids = choice
    return w / w.sum(dim=-1, keepdim=True), ids


def _biased(s: S) -> tuple[Any, Any]:
    scores = s.logits.sigmoid()
    ids = torch.topk(scores + s.bias, s.K, dim=-1, sorted=False)[1]
    w = scores.gather(-1, ids)
    return w / (w.sum(dim=-1, keepdim=True) + 1e-20) * 2.5, ids


def _late(s: S) -> tuple[Any, Any]:
    w, ids = torch.topk(s.logits, s.K, dim=-1)
    return F.softmax(w, dim=-1, dtype=torch.float32), ids


def _looked_up(s: S) -> tuple[Any, Any]:
    return None, s.table[s.names]


ROUTERS: dict[str, Step] = {
    "softmax": lambda s: torch.topk(F.softmax(s.logits, dim=-1, dtype=torch.float32), s.K, dim=-1),
    "softmax, renormalized": lambda s: _renormalized(torch.topk(F.softmax(s.logits, dim=-1), s.K, dim=-1)),
    "sigmoid": lambda s: torch.topk(torch.sigmoid(s.logits.float()), s.K, dim=-1),
    "sigmoid with a bias": _biased,
    "softmax of the chosen": _late,
    "table": _looked_up,
}

SORTED = ("sort", "argsort")
BY_ROUTE = ("repeat", "index", "einsum")
HALVES = ("gate_up", "up_gate", "interleaved", "separate", "up")

ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "up first": lambda g, u: u * F.silu(g),
    "geglu": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "gelu": lambda g, u: F.gelu(g) * u,
    "reglu": lambda g, u: F.relu(g) * u,
    "relu squared": lambda g, u: torch.square(F.relu(g)) * u,
    "clamped": lambda g, u: (u.clamp(-0.5, 0.5) + 1) * (g.clamp(max=0.5) * torch.sigmoid(g.clamp(max=0.5) * 1.7)),
    "spelled out": lambda g, u: g / (1 + torch.exp(-g)) * u,
    "tanh and abs": lambda g, u: torch.tanh(g) * u.abs() - 0.25 * g,
}

SORTED_COMBINES: dict[str, Step] = {
    "argsort": lambda s: s.y[torch.argsort(s.perm)].view(-1, s.K, s.H).sum(dim=1),
    "scatter": lambda s: s.y[_inverse(s)].view(-1, s.K, s.H).sum(dim=-2),
    "index_add": lambda s: s.flat_x.new_zeros((s.flat_x.size(0), s.H)).index_add(0, s.perm // s.K, s.y),
    "index_add_": lambda s: torch.zeros_like(s.flat_x).index_add_(0, s.token, s.y),
    "scatter_add": lambda s: torch.zeros_like(s.flat_x).scatter_add(0, s.token.unsqueeze(-1).expand(-1, s.H), s.y),
}
ROUTE_COMBINES: dict[str, Step] = {
    "view": lambda s: s.y.view(-1, s.K, s.H).sum(dim=1),
    "reshape": lambda s: torch.sum(s.y.reshape(-1, s.K, s.H), 1),
    "unflatten": lambda s: s.y.unflatten(0, (-1, s.K)).sum(-2),
    "index_add": lambda s: torch.zeros_like(s.flat_x).index_add_(0, _routes(s) // s.K, s.y),
}


def _routes(s: S) -> Any:
    return torch.arange(s.flat_x.size(0) * s.K)


def _inverse(s: S) -> Any:
    inverse = torch.empty_like(s.perm)
    inverse[s.perm] = _routes(s)
    return inverse


@dataclass(frozen=True, kw_only=True)
class Program:
    tokens: tuple[int, ...]
    E: int
    K: int
    H: int
    I: int
    dtype: torch.dtype
    router: str
    dispatch: str
    counting: str
    transposed: bool
    halves: str
    activation: str
    bias: bool
    weight: str
    combine: str
    scaled: float | None
    back: bool

    @property
    def T(self) -> int:
        return prod(self.tokens)

    def inputs(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def tensor(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * 0.5).to(self.dtype)

        G = self.I * (1 if self.halves in ("separate", "up") else 2)
        first = (self.E, self.H, G) if self.transposed else (self.E, G, self.H)
        down = (self.E, self.I, self.H) if self.transposed else (self.E, self.H, self.I)
        return [
            tensor(*self.tokens, self.H), tensor(self.E, self.H), tensor(self.E), tensor(*first), tensor(*first),
            tensor(*down), tensor(self.E, G), tensor(self.E, G), tensor(self.E, self.H),
            torch.randint(0, self.E, (5, self.K), generator=generator),
            torch.randint(0, 5, (self.T,), generator=generator),
        ]  # fmt: skip

    def block(self) -> Callable[..., Any]:
        """The program; its arguments are `inputs`."""

        def block(x: Any, router: Any, bias: Any, first: Any, other_first: Any, down: Any, first_bias: Any,
                  other_first_bias: Any, down_bias: Any, table: Any, names: Any) -> Any:  # fmt: skip
            s = S(
                x=x, router=router, bias=bias, first=first, other_first=other_first, down=down, first_bias=first_bias,
                other_first_bias=other_first_bias, down_bias=down_bias, table=table, names=names,
                T=self.T, K=self.K, H=self.H, E=self.E, dtype=self.dtype,
            )  # fmt: skip
            s.flat_x = s.x.view(-1, self.H)
            s.logits = F.linear(s.flat_x, s.router)
            s.w, s.ids = ROUTERS[self.router](s)
            if s.w is not None:
                s.w = s.w.to(self.dtype) * self.scaled if self.scaled is not None else s.w.to(self.dtype)
            out = self._sorted(s) if self.dispatch in SORTED else self._by_route(s)
            return out.view(x.shape) if self.back else out

        return block

    def _activated(self, s: S, linear: Callable[[Any, Any], Any]) -> Any:
        act = ACTIVATIONS[self.activation]
        up = linear(s.first, s.first_bias)
        if self.halves == "up":
            return act(up, up)
        if self.halves == "separate":
            return act(up, linear(s.other_first, s.other_first_bias))
        if self.halves == "interleaved":
            return act(up[..., ::2], up[..., 1::2])
        a, b = up.chunk(2, dim=-1)
        return act(a, b) if self.halves == "gate_up" else act(b, a)

    def _sorted(self, s: S) -> Any:
        flat = s.ids.reshape(-1)
        if self.dispatch == "sort":
            ordered, s.perm = torch.sort(flat)
        else:
            s.perm = torch.argsort(flat, stable=True)
            ordered = flat[s.perm]
        s.token = s.perm // self.K
        counted = flat if self.counting == "flat" else ordered
        offsets = torch.cumsum(torch.histc(counted.float(), bins=self.E, min=0, max=self.E - 1), 0, dtype=torch.int32)
        rows = s.flat_x[s.token]
        w = None if s.w is None else s.w.reshape(-1)[s.perm].unsqueeze(-1)
        if w is not None and self.weight == "input":
            rows = rows * w

        def linear(weights: Any, bias: Any, x: Any = rows) -> Any:
            w = weights if self.transposed else weights.transpose(-2, -1)
            y = torch.ops.transformers.grouped_mm_fallback(x, w, offs=offsets)
            return y + bias[ordered] if self.bias else y

        s.y = linear(s.down, s.down_bias, self._activated(s, linear))
        if w is not None and self.weight == "output":
            s.y = s.y * w
        return SORTED_COMBINES[self.combine](s)

    def _by_route(self, s: S) -> Any:
        flat = s.ids if self.dispatch == "einsum" else s.ids.reshape(-1)
        if self.dispatch == "einsum":
            rows, w = s.flat_x, None if s.w is None else s.w.unsqueeze(-1)
        else:
            repeated = self.dispatch == "repeat"
            rows = s.flat_x.repeat_interleave(self.K, dim=0) if repeated else s.flat_x[_routes(s) // s.K]
            w = None if s.w is None else s.w.reshape(-1, 1)
        if w is not None and self.weight == "input":
            rows = rows.unsqueeze(1) * w if self.dispatch == "einsum" else rows * w

        def linear(weights: Any, bias: Any, x: Any = rows, given: bool = True) -> Any:
            chosen = weights[flat]
            if self.dispatch == "einsum":
                left = "th" if given and (w is None or self.weight != "input") else "tkh"
                y = torch.einsum(f"{left},tkhg->tkg" if self.transposed else f"{left},tkgh->tkg", x, chosen)
            elif self.transposed:
                y = torch.bmm(x.unsqueeze(1), chosen).squeeze(1)
            else:
                y = torch.matmul(chosen, x.unsqueeze(-1)).squeeze(-1)
            return y + bias[flat] if self.bias else y

        s.y = linear(s.down, s.down_bias, self._activated(s, linear), given=False)
        if w is not None and self.weight == "output":
            s.y = s.y * w
        if self.dispatch == "einsum":
            return s.y.sum(dim=1)
        return ROUTE_COMBINES[self.combine](s)


@st.composite
def programs(draw: st.DrawFn, dispatches: tuple[str, ...]) -> Program:
    """Tiny sizes, often equal or 1, where roles could be mixed up."""
    dispatch = draw(st.sampled_from(dispatches))
    E = draw(st.integers(2, 5))
    return Program(
        tokens=draw(st.sampled_from([(1,), (3,), (4,), (1, 1), (2, 3), (4, 1)])),
        E=E,
        K=draw(st.integers(1, min(E, 3))),
        H=draw(st.sampled_from([2, 4, 6])),
        I=draw(st.sampled_from([2, 3, 4])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])),
        router=draw(st.sampled_from(list(ROUTERS))),
        dispatch=dispatch,
        counting=draw(st.sampled_from(["flat", "ordered"])),
        transposed=draw(st.booleans()),
        halves=draw(st.sampled_from(HALVES)),
        activation=draw(st.sampled_from(list(ACTIVATIONS))),
        bias=draw(st.booleans()),
        weight=draw(st.sampled_from(["output", "output", "input", "none"])),
        combine=draw(st.sampled_from(list(SORTED_COMBINES if dispatch in SORTED else ROUTE_COMBINES))),
        scaled=draw(st.sampled_from([None, 0.5, 2])),
        back=draw(st.booleans()),
    )
