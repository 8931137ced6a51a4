"""Spellings of the experts, each a small program: proved with the fields named here, and equal to eager forward and
backward, with static and dynamic token counts. Beside each, programs wrong in one detail, refused for that reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import graphs
import pytest
import torch
import torch.nn.functional as F
from blocks import grouped

from moe_compile.recognize import recognize

T, E, K, H, I = 10, 4, 2, 16, 8
Tensor = torch.Tensor
Program = Callable[..., Tensor]


def stacked() -> list[Tensor]:
    """x, router, gate_up, down, a vector of H, and a bias per expert."""
    return list(_drawn((T, H), (E, H), (E, 2 * I, H), (E, H, I), (H,), (E, H)))


def listed() -> list[Tensor]:
    """x, router, then gate, up and down of each expert."""
    return list(_drawn((T, H), (E, H), *((I, H), (I, H), (H, I)) * E))


def biased() -> list[Tensor]:
    """x, router, then gate_up, its bias, down and its bias of each expert."""
    return list(_drawn((T, H), (E, H), *((2 * I, H), (2 * I,), (H, I), (H,)) * E))


def _drawn(*shapes: tuple[int, ...]) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=g) * 0.4 for shape in shapes)


def route(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    w, ids = torch.topk(F.softmax(F.linear(x, router), dim=-1), K, dim=-1)
    return w / w.sum(-1, keepdim=True), ids


SPELLINGS: dict[str, tuple[Program, Callable[[], list[Tensor]], dict[str, Any]]] = {}
MISSES: dict[str, tuple[Program, Callable[[], list[Tensor]], str]] = {}


def spelling(inputs: Callable[[], list[Tensor]], **fields: Any) -> Callable[[Program], Program]:
    def add(f: Program) -> Program:
        SPELLINGS[f.__name__] = f, inputs, fields
        return f

    return add


def miss(inputs: Callable[[], list[Tensor]], reason: str) -> Callable[[Program], Program]:
    def add(f: Program) -> Program:
        MISSES[f.__name__] = f, inputs, reason
        return f

    return add


# --- a norm of each expert's output -----------------------------------------------------------------------------------


def gathered(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, norm: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Weights gathered by einsum; norm(y, w) is what is summed over the choices."""
    w, ids = route(x, router)
    g, u = torch.einsum("tkgh,th->tkg", gate_up[ids], x).chunk(2, dim=-1)
    y = torch.einsum("tki,tkhi->tkh", F.silu(g) * u, down[ids])
    return norm(y, w.unsqueeze(-1)).sum(1)


def rms(z: Tensor, eps: float = 1e-3) -> Tensor:
    return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)


@spelling(stacked, post="scaled_rms", eps=1e-3)
def normed_after_a_scale(x, router, gate_up, down, scale, bias):
    return gathered(x, router, gate_up, down, lambda y, w: rms(y * (1 + scale)) * w)


@spelling(stacked, post="rms", eps=0.25)
def normed_by_a_power(x, router, gate_up, down, scale, bias):
    return gathered(
        x, router, gate_up, down, lambda y, w: w * (y * torch.pow((y * y).mean(-1, keepdim=True) + 0.25, -0.5))
    )


OTHER_NORM = "a norm of something else than the expert's output"


@miss(stacked, OTHER_NORM)
def normed_with_its_weight(x, router, gate_up, down, scale, bias):
    return gathered(x, router, gate_up, down, lambda y, w: rms(y * w))


@miss(stacked, OTHER_NORM)
def scaled_after_the_norm(x, router, gate_up, down, scale, bias):
    return gathered(x, router, gate_up, down, lambda y, w: rms(y) * scale * w)


@miss(stacked, "the routing weight is applied more than once, or is an expression")
def normed_over_half_of_the_channels(x, router, gate_up, down, scale, bias):
    return gathered(
        x, router, gate_up, down,
        lambda y, w: y * torch.rsqrt(y[..., : H // 2].pow(2).mean(-1, keepdim=True) + 1e-3) * w,
    )  # fmt: skip


@miss(stacked, "a mean where a sum is expected")
def normed_over_the_choices(x, router, gate_up, down, scale, bias):
    return gathered(x, router, gate_up, down, lambda y, w: y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + 1e-3) * w)


# --- every expert for every token -------------------------------------------------------------------------------------


def spread(x: Tensor, router: Tensor, fill: float = 0.0) -> Tensor:
    """[T, E]: the weights, and `fill` where an expert was not chosen."""
    w, ids = route(x, router)
    return torch.full_like(F.linear(x, router), fill).scatter_(1, ids, w)


def dense(x: Tensor, gate_up: Tensor, down: Tensor, after: Callable[..., Tensor] | None = None) -> Tensor:
    """y[e, t, h] of x [e, t, h]."""
    g, u = torch.bmm(x, gate_up.transpose(1, 2)).chunk(2, dim=-1)
    a = F.silu(g) * u
    return torch.bmm(a if after is None else after(a), down.transpose(1, 2))


@spelling(stacked, weight="output")
def dense_weighted_at_the_output(x, router, gate_up, down, scale, bias):
    y = dense(x.repeat(E, 1).view(E, -1, H), gate_up, down)
    return (y * spread(x, router).transpose(0, 1).reshape(E, -1, 1)).sum(0)


@spelling(stacked, weight="output", bias="down")
def dense_with_a_bias_summed_by_einsum(x, router, gate_up, down, scale, bias):
    g, u = torch.einsum("th,egh->teg", x, gate_up).chunk(2, dim=-1)
    y = torch.einsum("tei,ehi->teh", F.silu(g) * u, down) + bias
    return torch.einsum("te,teh->th", spread(x, router), y)


@spelling(stacked, weight="input", w="f32")
def dense_weighted_at_the_input(x, router, gate_up, down, scale, bias):
    logits = F.linear(x, router)
    top, ids = torch.topk(logits, K, dim=1)
    s = torch.full_like(logits, float("-inf")).scatter_(1, ids, top).float().sigmoid()
    y = dense((x.repeat(E, 1) * s.transpose(0, 1).reshape(-1, 1)).view(E, -1, H), gate_up, down)
    return y.reshape(E, -1, H).sum(dim=0)


@miss(stacked, "experts that were not chosen have a weight")
def dense_with_a_floor_of_the_weights(x, router, gate_up, down, scale, bias):
    y = dense(x.repeat(E, 1).view(E, -1, H), gate_up, down)
    return (y * spread(x, router, 0.1).transpose(0, 1).reshape(E, -1, 1)).sum(0)


@miss(stacked, "experts that were not chosen contribute something")
def dense_at_the_input_with_a_bias(x, router, gate_up, down, scale, bias):
    y = dense((x.repeat(E, 1) * spread(x, router).transpose(0, 1).reshape(-1, 1)).view(E, -1, H), gate_up, down)
    return (y + bias[:, None]).sum(dim=0)


@miss(stacked, "experts that were not chosen contribute something")
def dense_at_the_input_of_a_function_of_zero(x, router, gate_up, down, scale, bias):
    x = (x.repeat(E, 1) * spread(x, router).transpose(0, 1).reshape(-1, 1)).view(E, -1, H)
    return dense(x, gate_up, down, lambda a: a + 1).sum(dim=0)


@miss(stacked, "the first linear's input is not a tensor of hidden states")
def dense_of_another_experts_tokens(x, router, gate_up, down, scale, bias):
    y = dense(torch.stack([x * e for e in range(E)]), gate_up, down)
    return (y * spread(x, router).transpose(0, 1).reshape(E, -1, 1)).sum(0)


# --- experts one after the other --------------------------------------------------------------------------------------


def expert(x: Tensor, weights: tuple[Tensor, ...], e: int) -> Tensor:
    gate, up, down = weights[3 * e : 3 * e + 3]
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def masked(x: Tensor, router: Tensor, weights: tuple[Tensor, ...], mask: Callable[..., Tensor], order=range(E)) -> Any:
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in order:
        out = out + expert(x, weights, e) * mask(w, ids, e)
    return out


@spelling(listed, tensors="listed", E=E)
def a_masked_sum_over_all_experts(x, router, *weights):
    return masked(x, router, weights, lambda w, ids, e: (w * (ids == e)).sum(-1, keepdim=True))


@spelling(listed, tensors="listed", E=E)
def weights_by_where(x, router, *weights):
    return masked(x, router, weights, lambda w, ids, e: torch.where(ids == e, w, 0.0).sum(-1, keepdim=True))


@spelling(listed, tensors="listed", E=E)
def a_column_of_spread_weights(x, router, *weights):
    full = spread(x, router)
    return masked(x, router, weights, lambda w, ids, e: full[:, e, None], (2, 0, 3, 1))


@spelling(listed, tensors="listed", E=E)
def rows_of_a_one_hot_mask_added(x, router, *weights):
    w, ids = route(x, router)
    out, mask = torch.zeros_like(x), F.one_hot(ids, num_classes=E).permute(2, 1, 0)
    for e in range(E):
        k, t = torch.where(mask[e])
        y = expert(x[None, t].reshape(-1, H), weights, e) * w[t, k, None]
        out.index_add_(0, t, y)
    return out


@spelling(listed, tensors="listed", E=E)
def rows_of_a_mask_added_in_place(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        out[t] += expert(x[t], weights, e) * w[t, k, None]
    return out


@spelling(listed, tensors="listed", E=E)
def routes_written_by_a_mask(x, router, *weights):
    w, ids = route(x, router)
    rows, flat = x.repeat_interleave(K, dim=0), ids.view(-1)
    y = torch.empty_like(rows)
    for e in range(E):
        y[flat == e] = expert(rows[flat == e], weights, e)
    return (y.view(-1, K, H) * w.unsqueeze(-1)).sum(1)


@spelling(listed, tensors="listed", E=E)
def tokens_that_any_choice_hits(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        mine = ids == e
        hit = mine.any(dim=-1)
        out[hit] = out[hit] + expert(x[hit], weights, e) * (w * mine).sum(-1)[hit].unsqueeze(-1)
    return out


@spelling(listed, tensors="listed", E=E)
def rows_put_with_accumulation(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = (ids == e).nonzero(as_tuple=True)
        out = out.index_put((t,), expert(x[t], weights, e) * w[t, k].unsqueeze(-1), accumulate=True)
    return out


@spelling(listed, tensors="listed", E=E)
def rows_added_by_scatter(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        y = expert(x.index_select(0, t), weights, e) * w[t, k].unsqueeze(-1)
        out = out.scatter_add(0, t.unsqueeze(-1).expand(-1, H), y)
    return out


@spelling(biased, tensors="listed", E=E, bias="both", act="geglu")
def linears_with_biases(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        gate_up, first, down, last = weights[4 * e : 4 * e + 4]
        g, u = F.linear(x, gate_up, first).chunk(2, dim=-1)
        out = out + F.linear(F.gelu(g) * u, down, last) * (w * (ids == e)).sum(-1, keepdim=True)
    return out


@spelling(stacked, tensors="stacked", E=E)
def slices_of_one_tensor(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        g, u = F.linear(x[t], gate_up[e]).chunk(2, dim=-1)
        out.index_add_(0, t, F.linear(F.silu(g) * u, down[e]) * w[t, k, None])
    return out


TO_ITSELF = "an expert's output is not selected by its own number, once"


@miss(listed, "an expert is missing from the loop")
def an_expert_left_out(x, router, *weights):
    return masked(x, router, weights, lambda w, ids, e: (w * (ids == e)).sum(-1, keepdim=True), (0, 2, 3))


@miss(listed, TO_ITSELF)
def an_expert_twice(x, router, *weights):
    return masked(x, router, weights, lambda w, ids, e: (w * (ids == e)).sum(-1, keepdim=True), (0, 1, 2, 3, 3))


@miss(listed, "the experts' outputs are weighted or normalized differently")
def one_expert_weighted_otherwise(x, router, *weights):
    return masked(
        x, router, weights, lambda w, ids, e: ((w.sigmoid() if e == 2 else w) * (ids == e)).sum(-1, keepdim=True)
    )


@miss(listed, "the expert ids differ between the linears")
def one_expert_chosen_by_other_ids(x, router, *weights):
    w, ids = route(x, router)
    other = torch.topk(F.linear(x, router), K, dim=-1)[1]
    out = torch.zeros_like(x)
    for e in range(E):
        out = out + expert(x, weights, e) * (w * ((other if e == 1 else ids) == e)).sum(-1, keepdim=True)
    return out


@miss(listed, "the experts of the loop are not alike")
def one_expert_reads_another_tensor(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        out = out + expert(x * 2 if e == 3 else x, weights, e) * (w * (ids == e)).sum(-1, keepdim=True)
    return out


@miss(listed, "the hidden states is not read at its own token and choice")
def rows_of_the_next_token(x, router, *weights):
    w, ids = route(x, router)
    rows, flat = x.repeat(K, 1), ids.view(-1)
    y = torch.empty_like(rows)
    for e in range(E):
        y[flat == e] = expert(rows[flat == e], weights, e)
    return (y.view(-1, K, H) * w.unsqueeze(-1)).sum(1)


@miss(listed, "rows that no expert writes")
def the_last_experts_rows_unwritten(x, router, *weights):
    w, ids = route(x, router)
    rows, flat = x.repeat_interleave(K, dim=0), ids.view(-1)
    y = torch.empty_like(rows).copy_(rows)
    for e in range(E - 1):
        y[flat == e] = expert(rows[flat == e], weights, e)
    return (y.view(-1, K, H) * w.unsqueeze(-1)).sum(1)


@miss(listed, "an expert's output is masked by the choices of another")
def tokens_that_another_choice_hits(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        hit = (ids == (e + 1) % E).any(dim=-1)
        out[hit] = out[hit] + expert(x[hit], weights, e) * (w * (ids == e)).sum(-1)[hit].unsqueeze(-1)
    return out


@miss(listed, "")
def rows_put_without_accumulation(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        out = out.index_put((t,), expert(x[t], weights, e) * w[t, k].unsqueeze(-1))
    return out


@miss(listed, "the experts' output is not a linear")
def rows_written_by_another_mask(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        t, _ = torch.where(ids == e)
        _, k = torch.where(ids == (e + 1) % E)
        out.index_add_(0, t, expert(x[t], weights, e) * w[t, k, None])
    return out


@miss(stacked, "the second linear of an expert is that of another")
def a_slice_of_another_expert(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        g, u = F.linear(x, gate_up[e]).chunk(2, dim=-1)
        out = out + F.linear(F.silu(g) * u, down[(e + 1) % E]) * (w * (ids == e)).sum(-1, keepdim=True)
    return out


# --- offsets of sorted rows -------------------------------------------------------------------------------------------


def in_order(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, offsets: Callable[..., Tensor], **other: Any
) -> Any:
    """Rows in expert order; offsets(flat ids, sorted ids) says where each expert's rows end."""
    w, ids = route(x, router)
    flat = ids.reshape(-1)
    ordered, perm = torch.sort(flat, stable=True)
    ends = offsets(flat, ordered)
    rows = x[perm // K]
    if "inside" in other:
        rows = rows * w.reshape(-1)[perm].unsqueeze(-1)
    g, u = grouped(rows, gate_up.transpose(1, 2), ends).chunk(2, dim=-1)
    y = grouped(F.silu(g) * u, down.transpose(1, 2), ends)
    if "inside" not in other:
        y = y * w.reshape(-1)[perm].unsqueeze(-1)
    return torch.zeros_like(x).scatter_add(0, (perm // K).reshape(-1, 1).expand(-1, H), y)


@spelling(stacked, E=E, weight="output")
def counted_by_a_histogram_up_to_e(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: torch.histc(flat.float(), bins=E, min=0, max=E).cumsum(0).to(torch.int32)
    return in_order(x, router, gate_up, down, ends)


@spelling(stacked, E=E, weight="output")
def counted_by_one_hot(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: F.one_hot(flat, num_classes=E).sum(0).cumsum(0).to(torch.int32)
    return in_order(x, router, gate_up, down, ends)


@spelling(stacked, E=E, weight="output")
def counted_by_comparison(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: (flat[:, None] == torch.arange(E)).sum(0).cumsum(0, dtype=torch.int32)
    return in_order(x, router, gate_up, down, ends)


@spelling(stacked, E=E, weight="output")
def counted_by_adding_ones(x, router, gate_up, down, scale, bias):
    def ends(flat: Tensor, ordered: Tensor) -> Tensor:
        counts = torch.zeros(E, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
        return counts.cumsum(0).to(torch.int32)

    return in_order(x, router, gate_up, down, ends)


@spelling(stacked, E=E, weight="output")
def ends_searched_in_sorted_ids(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: torch.searchsorted(ordered, torch.arange(E), right=True).to(torch.int32)
    return in_order(x, router, gate_up, down, ends)


@spelling(stacked, E=E, weight="input")
def weighted_before_the_experts(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: torch.histc(flat.float(), bins=E, min=0, max=E).cumsum(0).to(torch.int32)
    return in_order(x, router, gate_up, down, ends, inside=True)


OFFSETS = "offsets that are not proved to be the running count of the expert ids"


@miss(stacked, OFFSETS)
def starts_instead_of_ends(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: torch.searchsorted(ordered, torch.arange(E)).to(torch.int32)
    return in_order(x, router, gate_up, down, ends)


@miss(stacked, OFFSETS)
def searched_in_unsorted_ids(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: torch.searchsorted(flat, torch.arange(E), right=True).to(torch.int32)
    return in_order(x, router, gate_up, down, ends)


@miss(stacked, OFFSETS)
def counts_of_twice_the_ones(x, router, gate_up, down, scale, bias):
    def ends(flat: Tensor, ordered: Tensor) -> Tensor:
        counts = torch.zeros(E, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat) * 2)
        return counts.cumsum(0).to(torch.int32)

    return in_order(x, router, gate_up, down, ends)


@miss(stacked, "rows are sorted by other ids than the offsets count")
def counts_of_the_first_choices(x, router, gate_up, down, scale, bias):
    def ends(flat: Tensor, ordered: Tensor) -> Tensor:
        return F.one_hot(flat.view(-1, K)[:, :1].reshape(-1), num_classes=E).sum(0).cumsum(0).to(torch.int32)

    return in_order(x, router, gate_up, down, ends)


# --- combinations and weights in one product --------------------------------------------------------------------------


@spelling(stacked, weight="output")
def combined_by_einsum(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    g, u = torch.einsum("th,tkgh->tkg", x, gate_up[ids]).chunk(2, dim=-1)
    return torch.einsum("tk,tkh->th", w, torch.einsum("tki,tkhi->tkh", F.silu(g) * u, down[ids]))


@spelling(stacked, weight="output")
def combined_by_bmm(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    g, u = torch.einsum("th,tkgh->tkg", x, gate_up[ids]).chunk(2, dim=-1)
    y = torch.einsum("tki,tkhi->tkh", F.silu(g) * u, down[ids])
    return torch.bmm(w.unsqueeze(1), y).squeeze(1)


@miss(stacked, "")
def combined_with_the_choices_reversed(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    g, u = torch.einsum("th,tkgh->tkg", x, gate_up[ids]).chunk(2, dim=-1)
    y = torch.einsum("tki,tkhi->tkh", F.silu(g) * u, down[ids])
    return torch.einsum("tk,sjh->th", w, y)


# --- the tests --------------------------------------------------------------------------------------------------------


def outcomes(call: Program, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of the inputs."""
    mine = [t.clone().requires_grad_() for t in inputs]
    out = call(*mine)
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad(out.square().sum(), mine, materialize_grads=True)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(SPELLINGS))
def test_a_spelling_is_proved_and_equal_to_eager(name: str, dynamic: bool) -> None:
    program, make, fields = SPELLINGS[name]
    inputs = make()
    graph = graphs.trace(program, inputs, (0,) if dynamic else ())
    found = recognize(graph)
    assert len(found.regions) == 1, [str(r.verdict) for r in found.rejections]
    experts = found.regions[0].spec.experts
    assert {k: experts.act.name if k == "act" else getattr(experts, k) for k in fields} == fields
    call = graphs.replaced(graph)
    for got, want in zip(outcomes(call, inputs), outcomes(program, inputs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", list(MISSES))
def test_a_near_miss_is_refused_for_its_reason(name: str) -> None:
    program, make, reason = MISSES[name]
    found = recognize(graphs.trace(program, make()))
    assert not found.regions
    said = [str(r.verdict) for r in found.rejections]
    assert any(reason in text for text in said), said


def test_the_router_of_weights_that_the_block_computes() -> None:
    """No node holds sigmoid(logits[t, ids[t, k]]): the operator's weights are computed, or made by `route`."""
    program, make, _ = SPELLINGS["dense_weighted_at_the_input"]
    graph = graphs.trace(program, make())
    (region,) = recognize(graph).regions
    assert region.spec.router is not None
    assert (region.spec.router.score, region.spec.router.renorm) == ("topk_sigmoid", "none")
    for route_by in ("op", "nodes"):
        call = graphs.replaced(graph, route=route_by)
        for got, want in zip(outcomes(call, make()), outcomes(program, make()), strict=True):
            torch.testing.assert_close(got, want)
