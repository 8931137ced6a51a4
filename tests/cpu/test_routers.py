"""Routers: what becomes a RouterSpec, with which fields; what keeps its nodes; and that both compute what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import E, GatheredBlock, H, K
from torch import Tensor, nn

from moe_compile import journal
from moe_compile.backend import moe_backend
from moe_compile.spec import MoESpec, RouterSpec

T = 10
NEG = float("-inf")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Routed(GatheredBlock):
    """A block whose router is a function of (the module, logits). `classes`: what the router chooses among."""

    def __init__(self, route: Callable[..., Any], classes: int = E) -> None:
        super().__init__()
        self.route = route
        self.gate = nn.Parameter(torch.randn(classes, H, generator=torch.Generator().manual_seed(3)) * 0.4)
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, classes))
        self.register_buffer("table", torch.arange(classes * K).view(classes, K) % E)
        self.scale, self.other = nn.Parameter(torch.linspace(0.5, 2, E)), nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(self, F.linear(x, self.gate))
        up = torch.bmm(self.gate_up[ids.reshape(-1)], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        g, u = up.chunk(2, dim=-1)
        y = torch.bmm(self.down[ids.reshape(-1)], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        return (y * weights.reshape(-1, 1)).view(-1, K, H).sum(dim=1)


def outcome(run: Any, module: Routed) -> list[Tensor | None]:
    """Output and gradients of the parameters."""
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    out = run(x)
    return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()), allow_unused=True)]


def routed(module: Routed, tolerance: float = 1e-5) -> journal.RegionFound:
    """The one region, once the compiled block has given the numbers and gradients of the eager one."""
    options = {"moe.inner": "eager", "moe.strict": True, "moe.route": "op"}
    with journal.capture() as events:
        run = torch.compile(module, backend=lambda gm, inputs: moe_backend(gm, inputs, options=options))
        got, want = outcome(run, module), outcome(module, module)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()
    (region,) = (e for e in events if isinstance(e, journal.RegionFound))
    return region


def in_groups(scores: Tensor, keep: int = 2, mask: Callable[[Tensor], Tensor] = lambda kept: ~kept.bool()) -> Tensor:
    """scores with the experts outside the best `keep` of 3 groups set to 0."""
    best = scores.view(-1, 3, E // 3).max(dim=-1).values
    kept = torch.zeros_like(best).scatter_(1, torch.topk(best, k=2, dim=-1, sorted=False)[1][:, :keep], 1)
    return scores.masked_fill(mask(kept.unsqueeze(-1).expand(-1, 3, E // 3).reshape(-1, E)), 0.0)


def clamped_sum(s: Routed, logits: Tensor) -> Any:
    w, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    return w / torch.clamp(w.sum(-1, keepdim=True), min=1e-3), ids


def wide_bias(s: Routed, logits: Tensor) -> Any:
    scores = logits.to(torch.bfloat16).sigmoid()
    ids = torch.topk(scores + s.bias, K, dim=-1)[1]
    return scores.gather(1, ids).float() * 2.5, ids


def scored_after_selection(s: Routed, logits: Tensor) -> Any:
    ids = torch.topk(logits + s.bias, K, dim=-1)[1]
    w = logits.gather(1, ids).sigmoid()
    return w / (w.sum(-1, keepdim=True) + 1e-20), ids


def capped_logits(s: Routed, logits: Tensor) -> Any:
    scores = torch.sigmoid(torch.tanh(logits / 3.0) * 3.0)
    ids = torch.topk(scores + s.bias, K, dim=-1)[1]
    return scores.gather(1, ids), ids


def group_values(s: Routed, logits: Tensor) -> Any:
    w, ids = torch.topk(in_groups(F.softmax(logits, dim=-1)), K, dim=-1, sorted=False)
    return w * 3.0, ids


def group_scores(s: Routed, logits: Tensor) -> Any:
    scores = F.softmax(logits, dim=-1)
    ids = torch.topk(in_groups(scores), K, dim=-1)[1]
    return scores.gather(1, ids), ids


def scale_per_expert(s: Routed, logits: Tensor) -> Any:
    w, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    w /= w.sum(-1, keepdim=True)
    return w * s.scale[ids] * 0.5, ids


def skip_class(s: Routed, logits: Tensor) -> Any:
    scores = F.softmax(logits, dim=-1)
    ids = torch.topk(scores.detach() + s.bias, K, dim=-1)[1]
    skips = ids == E
    return scores.gather(1, ids).masked_fill(skips, 0), ids.masked_fill(skips, 0)


TRUE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "clamped sum": (clamped_sum, {"score": "softmax", "renorm": "sum_at_least_eps", "eps": 1e-3}),
    "bias wider than the scores": (wide_bias, {"score": "sigmoid", "score_dtype": "bf16", "bias": True, "scale": 2.5}),
    "scored after selection": (
        scored_after_selection, {"score": "topk_sigmoid", "bias": True, "renorm": "sum_plus_eps"}
    ),
    "computed logits": (capped_logits, {"score": "sigmoid", "bias": True, "logits": "f32"}),
    "values of masked scores": (
        group_values, {"groups": 3, "top_groups": 2, "group_score": "max", "values": "choice", "scale": 3.0}
    ),
    "scores chosen in groups": (group_scores, {"groups": 3, "top_groups": 2, "values": "score"}),
    "scale per expert": (scale_per_expert, {"renorm": "sum", "scale": 0.5, "expert_scale": True}),
    "a class that skips the block": (skip_class, {"E": E + 1, "bias": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TRUE))
def test_becomes_a_spec(name: str) -> None:
    route, fields = TRUE[name]
    module = Routed(route, E + 1 if name == "a class that skips the block" else E)
    region = routed(module, 2e-2 if fields.get("score_dtype") == "bf16" else 1e-5)
    router = MoESpec.parse(region.spec).router
    assert router is not None, region.router_why
    assert {k: getattr(router, k) for k in fields} == fields
    defaults = RouterSpec(E=E, K=K)
    rest = ("bias", "groups", "values", "renorm", "scale", "expert_scale")
    assert all(getattr(router, k) == getattr(defaults, k) for k in rest if k not in fields)


def biased_weights(s: Routed, logits: Tensor) -> Any:
    return torch.topk(logits.sigmoid() + s.bias, K, dim=-1)


def the_smallest(s: Routed, logits: Tensor) -> Any:
    return torch.topk(F.softmax(logits, dim=-1), K, dim=-1, largest=False)


def groups_left_out(s: Routed, logits: Tensor) -> Any:
    return torch.topk(in_groups(F.softmax(logits, dim=-1), mask=lambda kept: kept.bool()), K, dim=-1)


def one_group_of_two(s: Routed, logits: Tensor) -> Any:
    return torch.topk(in_groups(F.softmax(logits, dim=-1), keep=1), K, dim=-1)


def groups_kept_by_their_number(s: Routed, logits: Tensor) -> Any:
    """0 is the number of a group, and keeps none."""
    scores = F.softmax(logits, dim=-1)
    best = scores.view(-1, 3, E // 3).max(dim=-1).values
    groups = torch.topk(best, k=2, dim=-1)[1]
    kept = torch.zeros_like(best).scatter_(1, groups, torch.empty_like(best[:, :2]).copy_(groups))
    mask = kept.bool().unsqueeze(-1).expand(-1, 3, E // 3).reshape(-1, E)
    return torch.topk(scores.masked_fill(~mask, 0.0), K, dim=-1)


def detached_weights(s: Routed, logits: Tensor) -> Any:
    w, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    return w.detach(), ids


def some_of_the_choices(s: Routed, logits: Tensor) -> Any:
    w, ids = torch.topk(F.softmax(logits, dim=-1), K + 1, dim=-1)
    return w[:, 1:], ids[:, 1:]


def logits_written_later(s: Routed, logits: Tensor) -> Any:
    logits = logits.detach().clone()
    w, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    logits.fill_(0)
    return w, ids


def scaled_by_a_tensor(s: Routed, logits: Tensor) -> Any:
    w, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    return w * s.other, ids


def scaled_by_another_expert(s: Routed, logits: Tensor) -> Any:
    w, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    return w * s.scale[(ids + 1) % E], ids


def skips_that_weigh(s: Routed, logits: Tensor) -> Any:
    """Like skip_class, but those routes go to expert 0 with a weight."""
    w, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    skips = ids == E
    return w.masked_fill(skips, 0.5), ids.masked_fill(skips, 0)


def skips_a_real_expert(s: Routed, logits: Tensor) -> Any:
    w, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    skips = ids == E - 1
    return w.masked_fill(skips, 0), ids.masked_fill(skips, 0)


def looked_up(s: Routed, logits: Tensor) -> Any:
    ids = s.table[logits.argmax(-1)]
    return F.softmax(logits, dim=-1).gather(1, ids), ids


FALSE = (
    biased_weights, the_smallest, groups_left_out, one_group_of_two, groups_kept_by_their_number, detached_weights,
    some_of_the_choices, logits_written_later, scaled_by_a_tensor, scaled_by_another_expert, skips_that_weigh,
    skips_a_real_expert, looked_up,
)  # fmt: skip


@pytest.mark.parametrize("route", FALSE, ids=lambda route: route.__name__)
def test_keeps_its_nodes(route: Callable[..., Any]) -> None:
    """One detail off what a RouterSpec means: the experts are replaced, the router is not, and says why."""
    region = routed(Routed(route, E + 1 if route is skips_that_weigh else E))
    assert MoESpec.parse(region.spec).router is None
    assert region.router_why
    assert (route is the_smallest) == region.router_why.startswith("a top-k of the smallest")
