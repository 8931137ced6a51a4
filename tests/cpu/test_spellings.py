"""Spellings of the experts, each a small program: proved with the fields named here, and equal to eager forward and
backward, with static and dynamic token counts. Beside each, programs wrong in one detail, refused for that reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import graphs
import pytest
import torch
import torch.nn.functional as F
from blocks import GroupedBlock, grouped
from spelled import E, H, K, T, Table, Tensor, assert_equal_outcomes, route, spread, stacked

from moe_compile.recognize import recognize
from moe_compile.spec import Layout

TABLE = Table()
spelling, miss = TABLE.spelling, TABLE.miss


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


def dense(x: Tensor, gate_up: Tensor, down: Tensor, after: Callable[..., Tensor] | None = None) -> Tensor:
    """y[e, t, h] of x [e, t, h]."""
    g, u = torch.bmm(x, gate_up.transpose(1, 2)).chunk(2, dim=-1)
    a = F.silu(g) * u
    return torch.bmm(a if after is None else after(a), down.transpose(1, 2))


@spelling(stacked, weight="output")
def dense_weighted_at_the_output(x, router, gate_up, down, scale, bias):
    y = dense(x.repeat(E, 1).view(E, -1, H), gate_up, down)
    return (y * spread(x, router).transpose(0, 1).reshape(E, -1, 1)).sum(0)


@spelling(stacked, gate_up=Layout(storage="EGH", halves="gate_up"), down="EHI")
def rows_of_weights_turned_by_an_attribute(x, router, gate_up, down, scale, bias):
    """Read where they are, in the model's own order."""
    g, u = torch.bmm(x.repeat(E, 1).view(E, -1, H), gate_up.mT).chunk(2, dim=-1)
    y = torch.bmm(F.silu(g) * u, down.mT)
    return (y * spread(x, router).T.reshape(E, -1, 1)).sum(0)


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


@miss(stacked, "experts that were not chosen have a weight")
def dense_with_weights_as_integers_of_an_infinity(x, router, gate_up, down, scale, bias):
    y = dense(x.repeat(E, 1).view(E, -1, H), gate_up, down)
    whole = spread(x, router, float("-inf")).long().to(x.dtype)
    return (y * whole.transpose(0, 1).reshape(E, -1, 1)).sum(0)


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


# --- offsets of sorted rows -------------------------------------------------------------------------------------------


def in_order(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, offsets: Callable[..., Tensor], **other: Any
) -> Any:
    """Rows in expert order; offsets(flat ids, sorted ids) says where each expert's rows end."""
    w, ids = route(x, router)
    flat = other.get("changed", lambda ids: ids)(ids).reshape(-1)
    ordered, perm = torch.sort(flat, stable=True)
    ends, product = offsets(flat, ordered), other.get("product", grouped)
    rows = x[perm // K]
    if "inside" in other:
        rows = rows * w.reshape(-1)[perm].unsqueeze(-1)
    g, u = product(rows, gate_up.transpose(1, 2), ends).chunk(2, dim=-1)
    y = product(F.silu(g) * u, down.transpose(1, 2), ends)
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


@miss(stacked, "a histogram whose last bin may hold ids beyond the experts")
def ids_beyond_the_experts_counted_with_the_last(x, router, gate_up, down, scale, bias):
    """2 * 2 is no expert of four; the histogram's last bin, which is closed, has it."""
    ends = lambda flat, ordered: torch.histc(flat.float(), bins=E, min=0, max=E).cumsum(0).to(torch.int32)
    return in_order(x, router, gate_up, down, ends, inside=True, changed=lambda ids: ids * ids)


OFFSETS = "offsets that are not proved to be the running count of the expert ids"


@miss(stacked, OFFSETS)
def starts_instead_of_ends(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: torch.searchsorted(ordered, torch.arange(E)).to(torch.int32)
    return in_order(x, router, gate_up, down, ends)


@miss(stacked, OFFSETS)
def searched_in_unsorted_ids(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: torch.searchsorted(flat, torch.arange(E), right=True).to(torch.int32)
    return in_order(x, router, gate_up, down, ends)


def narrow() -> list[Tensor]:
    """As torch's own grouped product takes them on a CPU; it also says how many offsets there are."""
    return [t.bfloat16() for t in stacked()]


LENGTH = "a bincount whose length depends on the ids"


@miss(narrow, LENGTH)
def a_bincount_that_ends_at_the_largest_id(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: torch.bincount(flat, minlength=E - 1).cumsum(0).to(torch.int32)
    return in_order(x, router, gate_up, down, ends, product=torch._grouped_mm)


@miss(narrow, LENGTH)
def a_bincount_of_ids_without_a_bound(x, router, gate_up, down, scale, bias):
    ends = lambda flat, ordered: torch.bincount(flat + 1, minlength=E).cumsum(0).to(torch.int32)
    return in_order(x, router, gate_up, down, ends, product=torch._grouped_mm)


@miss(narrow, "rows are sorted by other ids than the offsets count")
def a_bincount_of_another_top_k(x, router, gate_up, down, scale, bias):
    other = torch.topk(F.linear(x, -router), K)[1].reshape(-1)
    ends = lambda flat, ordered: torch.bincount(other, minlength=E).cumsum(0).to(torch.int32)
    return in_order(x, router, gate_up, down, ends, product=torch._grouped_mm)


@miss(stacked, OFFSETS)
def counts_of_twice_the_ones(x, router, gate_up, down, scale, bias):
    def ends(flat: Tensor, ordered: Tensor) -> Tensor:
        counts = torch.zeros(E, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat) * 2)
        return counts.cumsum(0).to(torch.int32)

    return in_order(x, router, gate_up, down, ends)


def numbered() -> list[Tensor]:
    """x, router, gate_up, down, a number for each expert."""
    return [*stacked()[:4], torch.tensor([1, 0, 3, 2])]


@miss(numbered, OFFSETS)
def counts_of_other_numbers(x, router, gate_up, down, numbers):
    ends = lambda flat, ordered: (flat[:, None] == numbers).sum(0).cumsum(0, dtype=torch.int32)
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


@spelling(stacked, weight="output", K=1)
def one_choice_combined_by_einsum(x, router, gate_up, down, scale, bias):
    w, ids = torch.topk(F.softmax(F.linear(x, router), dim=-1), 1, dim=-1)
    g, u = torch.einsum("th,tkgh->tkg", x, gate_up[ids]).chunk(2, dim=-1)
    return torch.einsum("tk,tkh->th", w, torch.einsum("tki,tkhi->tkh", F.silu(g) * u, down[ids]))


@miss(stacked, "")
def combined_with_the_choices_reversed(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    g, u = torch.einsum("th,tkgh->tkg", x, gate_up[ids]).chunk(2, dim=-1)
    y = torch.einsum("tki,tkhi->tkh", F.silu(g) * u, down[ids])
    return torch.einsum("tk,sjh->th", w, y)


@miss(stacked, "the experts of the loop are slices of different tensors")
def a_slice_of_an_edited_tensor(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        g, u = F.linear(x, gate_up[e]).chunk(2, dim=-1)
        second = down - 1 if e == 2 else down
        out = out + F.linear(F.silu(g) * u, second[e]) * (w * (ids == e)).sum(-1, keepdim=True)
    return out


# --- slots: so many tokens for each expert, the others are dropped ---------------------------------------------------

SLOTS = "rows of experts in slots, of which there may be too few: tokens without one are dropped"


def through_slots(x: Tensor, gate_up: Tensor, down: Tensor, put: Tensor, take: Tensor) -> Tensor:
    rows = torch.einsum("tec,th->ech", put, x)
    g, u = torch.bmm(rows, gate_up.transpose(1, 2)).chunk(2, dim=-1)
    return torch.einsum("tec,ech->th", take, torch.einsum("eci,ehi->ech", F.silu(g) * u, down))


@miss(stacked, SLOTS)
def two_choices_in_slots(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    chosen = F.one_hot(ids, num_classes=E)
    order = torch.cumsum(chosen.transpose(0, 1).reshape(-1, E), 0).reshape(K, -1, E).transpose(0, 1) - 1
    slot = (order * chosen).sum(-1)
    kept = F.one_hot(slot.clamp(max=2), num_classes=3) * (slot < 3).unsqueeze(-1)
    take = torch.einsum("tke,tkc->tec", w.unsqueeze(-1) * chosen, kept.to(x.dtype))
    return through_slots(x, gate_up, down, (take > 0).to(x.dtype), take)


@miss(stacked, SLOTS)
def the_best_choice_in_slots(x, router, gate_up, down, scale, bias):
    w, ids = F.softmax(F.linear(x, router), dim=-1).max(dim=-1)
    chosen = F.one_hot(ids, num_classes=E)
    order = torch.cumsum(chosen, 0) * chosen
    kept = F.one_hot((order * (order <= 3)).sum(-1), num_classes=4)[:, 1:]
    put = (chosen.unsqueeze(-1) * kept.unsqueeze(1)).to(x.dtype)
    return through_slots(x, gate_up, down, put, put * w.view(-1, 1, 1))


# --- choices that are no experts, and what does nothing ---------------------------------------------------------------


def with_identities() -> list[Tensor]:
    """x, the router of two choices more than there are experts, gate_up, down."""
    x, _, gate_up, down, *_ = stacked()
    return [x, torch.randn(E + 2, H, generator=torch.Generator().manual_seed(1)), gate_up, down]


def some_chosen(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """(the experts' part, [T, K] the weights of choices that are no experts)"""
    w, ids = route(x, router)
    none = ids >= E
    flat, share = ids.masked_fill(none, 0).reshape(-1), w.masked_fill(none, 0.0).reshape(-1, 1)
    g, u = torch.bmm(gate_up[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    y = torch.bmm(down[flat], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
    return (y * share).view(-1, K, H).sum(dim=1), w * none


@spelling(with_identities, E=E, K=K, weight="output")
def zero_experts_in_a_block(x, router, gate_up, down):
    return some_chosen(x, router, gate_up, down)[0]


@spelling(with_identities, E=E, K=K, weight="output")
def identity_experts_in_a_block(x, router, gate_up, down):
    out, rest = some_chosen(x, router, gate_up, down)
    return out + x * rest.sum(dim=-1, keepdim=True)


def loop_with(others: Callable[[Tensor, int], Tensor], x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Any:
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E + 2):
        y = others(x, e)
        if e < E:
            g, u = F.linear(x, gate_up[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(g) * u, down[e])
        out = out + y * (w * (ids == e)).sum(-1, keepdim=True)
    return out


@spelling(with_identities, E=E, K=K, weight="output")
def identity_experts_in_a_loop(x, router, gate_up, down):
    return loop_with(lambda x, e: x, x, router, gate_up, down)


@spelling(with_identities, E=E, K=K, weight="output")
def rows_of_identity_experts_in_a_loop(x, router, gate_up, down):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E + 2):
        t, k = torch.where(ids == e)
        y = x[t]
        if e < E:
            g, u = F.linear(y, gate_up[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(g) * u, down[e])
        out.index_add_(0, t, y * w[t, k, None])
    return out


@miss(with_identities, "the experts' output is not a linear")
def an_expert_that_gives_twice_the_hidden_states_back(x, router, gate_up, down):
    return loop_with(lambda x, e: 2 * x if e == E + 1 else x, x, router, gate_up, down)


@miss(with_identities, "the experts' output is not a linear")
def an_expert_that_gives_another_tokens_hidden_states_back(x, router, gate_up, down):
    return loop_with(lambda x, e: x.flip(0), x, router, gate_up, down)


@spelling(stacked, weight="output", act="swiglu")
def dropout_outside_of_training(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    g, u = torch.einsum("th,tkgh->tkg", x, gate_up[ids]).chunk(2, dim=-1)
    hidden = F.dropout(F.silu(g) * u, 0.5, training=False)
    return torch.einsum("tk,tkh->th", w, torch.einsum("tki,tkhi->tkh", hidden, down[ids]))


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(TABLE.spellings))
def test_a_spelling_is_proved_and_equal_to_eager(name: str, dynamic: bool) -> None:
    TABLE.check_spelling(name, dynamic)


@pytest.mark.parametrize("name", list(TABLE.misses))
def test_a_near_miss_is_refused_for_its_reason(name: str) -> None:
    TABLE.check_miss(name)


@pytest.mark.parametrize("dynamic", [(), (0,)], ids=["static", "dynamic"])
def test_a_bincount_of_a_top_k_is_what_a_histogram_counts(dynamic: tuple[int, ...]) -> None:
    """Where each id is below minlength: the same operator, and so the same numbers."""

    def counted(count: Callable[[Tensor], Tensor]) -> Any:
        ends = lambda flat, ordered: count(flat).cumsum(0).to(torch.int32)
        program = lambda x, router, gate_up, down: in_order(x, router, gate_up, down, ends, product=torch._grouped_mm)
        graph = graphs.trace(program, narrow()[:4], dynamic)
        (region,) = recognize(graph).regions
        return region.spec, graphs.replaced(graph)(*narrow()[:4])

    spec, got = counted(lambda flat: torch.bincount(flat, minlength=E))
    same, want = counted(lambda flat: torch.histc(flat.float(), bins=E, min=0, max=E - 1))
    assert spec == same
    assert torch.equal(got, want)


def test_the_router_of_weights_that_the_block_computes() -> None:
    """No node holds sigmoid(logits[t, ids[t, k]]): the operator's weights are computed, or made by `route`."""
    program, make, _ = TABLE.spellings["dense_weighted_at_the_input"]
    graph = graphs.trace(program, make())
    (region,) = recognize(graph).regions
    assert region.spec.router is not None
    assert (region.spec.router.score, region.spec.router.renorm) == ("topk_sigmoid", "none")
    for route_by in ("op", "nodes"):
        assert_equal_outcomes(graphs.replaced(graph, route=route_by), program, make())


@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_graphs(decomposed: bool) -> None:
    """ATen operations by the same rules."""
    block = GroupedBlock()
    exported = torch.export.export(block, (torch.randn(T, H),))
    graph = (exported.run_decompositions() if decomposed else exported).module()
    (region,) = recognize(graph).regions
    assert (region.spec.experts.E, region.spec.experts.K, str(region.spec.experts.gate_up)) == (6, 2, "EGH:gate_up")
