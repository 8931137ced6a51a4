"""Workloads: which tokens are measured, that they route as the model routes, and that looking changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import E, GatheredBlock, GroupedBlock, H, K, Parts
from torch import Tensor, nn

import moe_compile.ops  # noqa: F401  (registers the operator)
from moe_compile import replay, workload
from moe_compile.recognize import recognize
from moe_compile.spec import ExpertsSpec
from moe_compile.verdict import Reject
from moe_compile.workload import DRAWN, VARIED, ZIPF, Workload, collect

VOCABULARY, PADDING, PLACES = 40, 3, 12


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Tokens -> two blocks, with a cache that the graph writes (an argument) and a counter (a buffer)."""

    def __init__(self, embed: Callable[..., Tensor] = lambda s, ids: s.embedding(ids)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, H, padding_idx=PADDING)
        self.positions = nn.Embedding(PLACES, H)
        self.blocks = nn.ModuleList([GroupedBlock(), GroupedBlock()])
        self.register_buffer("calls", torch.zeros(1))
        self.embed = embed
        self.eval()

    def forward(self, input_ids: Tensor, position_ids: Tensor, cache: Tensor | None = None) -> Tensor:
        x = self.embed(self, input_ids)
        self.calls.add_(1)
        if cache is not None:
            cache.index_copy_(0, position_ids, x)
            x = x + 0.1 * cache.mean(0) + 0.1 * self.positions(position_ids)
        x = F.dropout(x, 0.1) if self.training else x
        for block in self.blocks:
            x = x + block(x)
        return x


def ids_of(*numbers: int) -> Tensor:
    return torch.tensor(numbers or (5, 5, 5, 5, 5))


def places(n: int = 5) -> Tensor:
    return torch.arange(n)


def collected(
    model: nn.Module, *inputs: Any, dynamic: bool | None = None, look: Callable[..., Any] = collect, **settings: Any
) -> Any:
    """What `look` makes of the graph, just as the backend sees it."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        regions = recognize(gm).regions
        assert regions
        found.append(look(gm, example_inputs, regions, **{"rows": 64, **settings}))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    return found[0]


def the(workloads: dict[ExpertsSpec, Any]) -> Any:
    (only,) = workloads.values()
    return only


def test_varied_tokens_run_through_the_graph() -> None:
    """The first block's rows are embeddings of all sorts of tokens, though the example has a single one."""
    w: Workload = the(collected(Model(), ids_of(), places()))
    model = Model()
    assert (w.kind, w.why, len(w.pools)) == (VARIED, "", 2)
    same = (w.pools[0].hidden_TH[:, None] == model.embedding.weight.detach()[None]).all(-1)
    assert bool(same.any(1).all())
    seen = set(same.int().argmax(1).tolist())
    assert len(seen) > 25 and PADDING not in seen
    with torch.no_grad():  # ids and weights are the router's own
        probs = F.softmax(F.linear(w.pools[0].hidden_TH, model.blocks[0].gate), dim=-1)
        weights, ids = torch.topk(probs, K)
    assert torch.equal(w.pools[0].ids_TK, ids)
    torch.testing.assert_close(w.pools[0].weights_TK, weights / weights.sum(-1, keepdim=True))
    one_token = len(w.pools[0].ids_TK[:1].unique())
    assert w.reach(1) == one_token == K < w.reach(64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_same_seed_gives_the_same_tokens_and_another_others(dynamic: bool) -> None:
    def hidden(seed: int) -> Tensor:
        torch._dynamo.reset()
        torch.manual_seed(seed + 7)  # the user's generator has no part in it
        return the(collected(Model(), ids_of(), places(), dynamic=dynamic, seed=seed)).pools[1].hidden_TH

    assert torch.equal(hidden(0), hidden(0))
    assert not torch.equal(hidden(0), hidden(1))


def test_looking_changes_nothing() -> None:
    """Values, addresses and versions of everything the graph reads or writes, the random generator, the modes."""
    model = Model().train()
    cache = torch.randn(PLACES, H)
    inputs = (ids_of(1, 2, 4, 5, 6), places(), cache)
    state = [*model.parameters(), *model.buffers(), *inputs]
    seen: list[Any] = []

    def facts() -> list[Any]:
        tensors = [(t.data_ptr(), t._version, t.detach().clone()) for t in state]
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled())
        return [tensors, torch.get_rng_state(), modes]

    def look(*args: Any, **kwargs: Any) -> Any:
        seen.append(facts())
        found = collect(*args, **kwargs)
        seen.append(facts())
        return found

    w = the(collected(model, *inputs, look=look))
    assert w.kind == VARIED
    (tensors, rng, modes), (tensors2, rng2, modes2) = seen
    assert torch.equal(rng, rng2) and modes == modes2
    for (address, version, value), (address2, version2, value2) in zip(tensors, tensors2):
        assert (address, version) == (address2, version2)
        assert torch.equal(value, value2)
    assert float(model.calls) == 1, "the call itself, and no other"


def test_memory_that_two_inputs_share_is_shared_by_the_copies() -> None:
    class Aliased(Model):
        def forward(self, input_ids: Tensor, position_ids: Tensor, cache: Tensor, view: Tensor) -> Tensor:
            cache.index_copy_(0, position_ids, self.embedding(input_ids))
            return self.blocks[0](F.layer_norm(view[:5], (H,)))  # what was just written

    cache = torch.zeros(PLACES, H)
    w = the(collected(Aliased(), ids_of(), places(), cache, cache[:8]))
    assert w.kind == VARIED and bool((w.pools[0].hidden_TH.abs().sum(1) > 0).all())


def test_a_write_that_nobody_foresaw_is_refused_before_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(replay.Writes):
        def __init__(self, graph: torch.fx.Graph) -> None:
            super().__init__(graph)
            self.of, self.to = {}, {}

    monkeypatch.setattr(replay, "Writes", Blind)
    cache = torch.randn(PLACES, H)
    before, calls = cache.clone(), []

    def look(*args: Any, **kwargs: Any) -> Any:
        found = collect(*args, **kwargs)
        calls.append(torch.equal(cache, before))
        return found

    w = the(collected(Model(), ids_of(), places(), cache, look=look))
    assert calls == [True]
    assert w.kind == ZIPF and "writes into an input" in w.why


def test_without_memory_for_a_copy_of_the_cache_the_next_rung_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room for a KV cache")

    monkeypatch.setattr(replay, "_elsewhere", full)
    w = the(collected(Model(), ids_of(), places(), torch.zeros(PLACES, H)))
    assert w.kind == ZIPF and "OutOfMemoryError: no room for a KV cache" in w.why


def test_modes_that_the_graph_enters_are_left_when_the_run_stops_inside() -> None:
    class Autocast(Model):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=True, dtype=torch.bfloat16):
                x = self.embedding(input_ids)
                with torch.autocast("cpu", enabled=False):
                    return self.blocks[0](x) @ self.positions.weight.T

    states: list[bool] = []

    def look(*args: Any, **kwargs: Any) -> Any:
        states.append(torch.is_autocast_enabled("cpu"))
        found = collect(*args, **kwargs)
        states.append(torch.is_autocast_enabled("cpu"))
        return found

    assert the(collected(Autocast(), ids_of(), places(), look=look)).kind == VARIED
    assert states[0] == states[1]


def test_higher_order_operators_run_too_and_copy_no_weights() -> None:
    from torch.nn.attention.flex_attention import flex_attention
    from torch.utils.checkpoint import checkpoint

    class Flex(Model):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            x = self.embedding(input_ids)
            q = x.view(1, 1, -1, H)
            x = x + flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 0.5).view(-1, H)
            x = checkpoint(lambda y: F.layer_norm(y @ self.positions.weight.T @ self.positions.weight, (H,)), x,
                           use_reentrant=False)  # fmt: skip
            return self.blocks[0](x)

    model = Flex()
    w = the(collected(model, ids_of(), places()))
    assert w.kind == VARIED, w.why
    assert w.pools[0].rest[0][0].data_ptr() == model.blocks[0].gate_up.data_ptr()


def test_a_block_alone_gets_drawn_hidden_states() -> None:
    block = GatheredBlock()
    w = the(collected(block, torch.full((6, H), 2.0)))
    assert w.kind == DRAWN and "no token ids" in w.why
    rows = w.pools[0].hidden_TH
    assert len(rows) == 64 and 0.5 < float(rows.std()) < 1.5
    assert len(w.pools[0].ids_TK.unique()) > K, "constant rows would reach K experts"


READERS = {
    "arithmetic": lambda s, ids: s.embedding((ids + 1) % VOCABULARY),
    "a table without a bound that we know": lambda s, ids: s.embedding(ids) * torch.gather(s.calls, 0, ids - ids)[0],
}


@pytest.mark.parametrize("reader", READERS)
def test_tokens_that_something_unknown_reads_are_not_varied(reader: str) -> None:
    w = the(collected(Model(READERS[reader]), ids_of(), places()))
    assert w.kind == ZIPF
    assert "something else than an embedding" in w.why and "no hidden states" in w.why


def test_the_smallest_table_bounds_the_tokens() -> None:
    class TwoTables(Model):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            small = self.positions.weight[input_ids]
            return self.blocks[0](F.layer_norm(self.embedding(input_ids) + small, (H,)))

    assert the(collected(TwoTables(), ids_of(), places())).kind == VARIED  # a larger id would have raised


def test_zipf_is_neither_constant_nor_uniform() -> None:
    w = the(collected(Model(READERS["arithmetic"]), ids_of(), places(), rows=512))
    ids = w.pools[0].ids_TK
    assert all(len(set(row)) == K for row in ids.tolist())
    counts = torch.bincount(ids.reshape(-1), minlength=E).float()
    assert float(counts.min()) > 0 and 1.4 < float(counts.max() / counts.mean()) < E / K


def test_fake_inputs_are_a_reason_not_a_crash() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def look(gm: Any, inputs: Sequence[Any], regions: Any, **settings: Any) -> Any:
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in inputs]
        return collect(gm, fakes, regions, **settings)

    found = the(collected(Model(), ids_of(), places(), look=look))
    assert isinstance(found, Reject) and "not real tensors" in str(found)


def test_batches_sample_the_pool() -> None:
    w: Workload = the(collected(Model(), ids_of(), places(), rows=64))
    few, again, other = w.batch(16), w.batch(16), w.batch(16, 2)
    assert few is again and not torch.equal(few.hidden_TH, other.hidden_TH)
    assert w.batch(16, 1).rest[0][0] is w.pools[1].rest[0][0], "another batch, another block's weights"
    whole = w.batch(w.rows)
    assert sorted(map(tuple, whole.hidden_TH.tolist())) == sorted(map(tuple, w.pools[0].hidden_TH.tolist()))
    many = w.batch(3 * w.rows + 1)
    assert len(many.ids_TK) == 3 * w.rows + 1
    for batch in (few, many):  # a row keeps its ids and weights
        index = (batch.hidden_TH[:, None] == w.pools[0].hidden_TH[None]).all(-1).float().argmax(1)
        assert torch.equal(batch.ids_TK, w.pools[0].ids_TK[index])
        assert torch.equal(batch.weights_TK, w.pools[0].weights_TK[index])
    counts, rows = w.counts()
    assert sum(counts) == rows * K and rows == 2 * w.rows and counts == sorted(counts, reverse=True)


def divided_in_place(block: Any, probs: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(probs, K)
    weights /= 2  # a second division of the same memory would show
    return weights, ids


@pytest.mark.parametrize("block", [GroupedBlock, GatheredBlock, lambda: GroupedBlock(Parts(route=divided_in_place))])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_blocks_own_nodes_give_what_the_operator_gives(block: Any, dynamic: bool) -> None:
    w = the(collected(block(), torch.randn(9, H), dynamic=dynamic))
    assert w.original is not None
    experts = functools.partial(torch.ops.moe_compile.experts, *w.original.arguments, str(w.spec), "*:aten")
    first = w.original.call()
    torch.testing.assert_close(experts(), first.reshape(9, H))
    torch.testing.assert_close(w.original.call(), first, rtol=0, atol=0)


def test_rows_come_from_blocks_all_over_the_model() -> None:
    class Deep(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([GroupedBlock() for _ in range(7)])

    w = the(collected(Deep(), ids_of(), places()))
    assert len(w.pools) == workload.SITES
    assert len({p.rest[0][0].data_ptr() for p in w.pools}) == workload.SITES
