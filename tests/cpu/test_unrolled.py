"""Experts written out one after the other, in loops over modules or slices: proved as experts in tensors of their own
(or of one tensor), equal to eager, and refused where a loop is wrong in one detail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spelled import E, H, I, K, T, Table, Tensor, biased, listed, route, spread, stacked

from moe_compile import journal
from moe_compile.backend import moe_backend
from moe_compile.explain import explain
from moe_compile.outlook import replanned

TABLE = Table()
spelling, miss = TABLE.spelling, TABLE.miss


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
def weights_by_where_of_numbers(x, router, *weights):
    """Masks that are numbers, tested in every way that is one."""
    zero, tests = 0.0, (
        lambda mask, w: torch.where(mask != 0, w, zero),
        lambda mask, w: torch.where(mask != 1, zero, w),
        lambda mask, w: torch.where(mask > 0, w, zero),
        lambda mask, w: torch.where(torch.logical_not(mask), zero, w),
    )  # fmt: skip
    by = lambda w, ids, e: tests[e]((ids == e).to(torch.int64), w).sum(-1, keepdim=True)
    return masked(x, router, weights, by)


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


@miss(listed, "rows that no expert writes")
def weights_of_the_others_by_where(x, router, *weights):
    by = lambda w, ids, e: torch.where((ids == e).to(torch.int64) != 0, 0.0, w).sum(-1, keepdim=True)
    return masked(x, router, weights, by)


@miss(listed, "experts selected by something else than their number")
def weights_by_a_number_that_a_mask_never_is(x, router, *weights):
    by = lambda w, ids, e: torch.where((ids == e).to(torch.int64) != 2, 0.0, w).sum(-1, keepdim=True)
    return masked(x, router, weights, by)


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


@miss(listed, "an index that can't be split into digits")
def no_choices(x, router, *weights):
    w, ids = torch.topk(F.linear(x, router), 0, dim=-1)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        out = out.index_add(0, t, expert(x[t], weights, e) * w[t, k].unsqueeze(-1))
    return out


def numbered() -> list[Tensor]:
    """x, router, a number for each expert, then gate, up and down of each."""
    x, router, *weights = listed()
    return [x, router, torch.tensor([1, 0, 3, 2]), *weights]


@miss(numbered, TO_ITSELF)
def numbers_read_from_a_tensor(x, router, numbers, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        out = out + expert(x, weights, e) * (w * (ids == numbers[e])).sum(-1, keepdim=True)
    return out


@miss(listed, "dropout inside of a block")
def dropped_between_the_linears_of_an_expert(x, router, *weights):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        gate, up, down = weights[3 * e : 3 * e + 3]
        inner = F.dropout(F.silu(F.linear(x, gate)) * F.linear(x, up), 0.1, training=True)
        out = out + F.linear(inner, down) * (w * (ids == e)).sum(-1, keepdim=True)
    return out


@miss(stacked, "the second linear of an expert is that of another")
def a_slice_of_another_expert(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        g, u = F.linear(x, gate_up[e]).chunk(2, dim=-1)
        out = out + F.linear(F.silu(g) * u, down[(e + 1) % E]) * (w * (ids == e)).sum(-1, keepdim=True)
    return out


def more_first_linears() -> list[Tensor]:
    x, router, gate_up, *rest = stacked()
    return [x, router, torch.cat([gate_up, gate_up[:1]]), *rest]


@miss(more_first_linears, "an expert is missing from the loop")
def an_expert_whose_first_linear_alone_is_left_out(x, router, gate_up, down, scale, bias):
    w, ids = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        g, u = F.linear(x, gate_up[e]).chunk(2, dim=-1)
        out = out + F.linear(F.silu(g) * u, down[e]) * (w * (ids == e)).sum(-1, keepdim=True)
    return out


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", list(TABLE.spellings))
def test_a_spelling_is_proved_and_equal_to_eager(name: str, dynamic: bool) -> None:
    TABLE.check_spelling(name, dynamic)


@pytest.mark.parametrize("name", list(TABLE.misses))
def test_a_near_miss_is_refused_for_its_reason(name: str) -> None:
    TABLE.check_miss(name)


class Loop(torch.nn.Module):
    """Experts in a ModuleList, each on the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(H, E, bias=False)
        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({n: torch.nn.Linear(*s) for n, s in (("up", (H, I)), ("down", (I, H)))})
            for _ in range(E)
        )

    def forward(self, x: Tensor) -> Tensor:
        w, ids = route(x, self.router.weight)
        out = torch.zeros_like(x)
        for e, one in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out.index_add_(0, t, one["down"](F.relu(one["up"](x[t])) ** 2) * w[t, k, None])
        return out


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_loop_over_modules_behind_dynamo_leaves_nothing_of_itself(dynamic: bool) -> None:
    """Neither its masks nor the assertions about how many rows they pick."""
    module, x, left = Loop(), torch.randn(T, H), []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        call = moe_backend(gm, inputs, options={"moe.inner": "eager", "moe.strict": True})
        left.extend(str(n.target) for n in gm.graph.nodes)
        return call

    torch._dynamo.reset()
    flags = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(**flags), journal.capture() as events:
        got = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(x)
    (region,) = (e for e in events if isinstance(e, journal.RegionFound))
    assert "act=relu2" in region.spec
    assert "bias=both" in region.spec
    assert "tensors=listed" in region.spec
    torch.testing.assert_close(got, module(x))
    assert not [t for t in left if "where" in t or "assert" in t or "index_add" in t]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_a_gpu_would_read_them(dtype: torch.dtype) -> None:
    """In place by our kernels; from a copy where those don't do, which the report says."""
    inputs = [t.to(dtype) for t in listed()]
    report = replanned(explain(a_masked_sum_over_all_experts, *inputs), "H200")
    (region,) = report.regions
    assert region.spec.experts.tensors == "listed"
    ours = dtype == torch.float32
    assert ("triton_" in region.chosen) == ours != ("aten" in region.chosen)
    text = "read where they are, none copied" if ours else "aten copies all experts into one tensor for each product"
    assert text in str(report)
