"""Top-1 routers by argmax or by the maximum of a dim: the block and its router are proved, near misses keep nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import graphs
import pytest
import torch
import torch.nn.functional as F
from spelled import E, H, T, Table, Tensor, assert_equal_outcomes, listed, stacked

from moe_compile import reference
from moe_compile.recognize import recognize
from moe_compile.spec import RouterSpec

TABLE = Table()
spelling = TABLE.spelling
Choice = Callable[[Tensor], Any]


def expert(x: Tensor, weights: tuple[Tensor, ...], e: int) -> Tensor:
    gate, up, down = weights[3 * e : 3 * e + 3]
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def masked(x: Tensor, router: Tensor, weights: tuple[Tensor, ...], choose: Choice) -> Any:
    """Every expert under the mask of its number; weight and id as `choose` makes them of the logits, [T] each."""
    w, ids = choose(F.linear(x, router))
    out = torch.zeros_like(x)
    for e in range(E):
        out = out + expert(x, weights, e) * (w * (ids == e)).unsqueeze(-1)
    return out


def best(logits: Tensor) -> Any:
    best = F.softmax(logits, dim=-1).max(dim=-1)
    return best[0], best[1]


def best_twice(logits: Tensor) -> Any:
    probs = F.softmax(logits, dim=-1)
    return torch.max(probs, dim=-1)[0], torch.argmax(probs, dim=-1)


def gathered(logits: Tensor) -> Any:
    scores = logits.sigmoid()
    ids = scores.argmax(-1, keepdim=True)
    return scores.gather(-1, ids).squeeze(-1) * 2.0, ids.squeeze(-1)


def late(logits: Tensor) -> Any:
    best = logits.max(dim=-1)
    return best[0].sigmoid(), best[1]


@spelling(listed, tensors="listed", E=E, K=1)
def the_maximum_and_its_index(x, router, *weights):
    return masked(x, router, weights, best)


@spelling(listed, tensors="listed", E=E, K=1)
def the_maximum_and_an_argmax(x, router, *weights):
    return masked(x, router, weights, best_twice)


@spelling(listed, tensors="listed", E=E, K=1)
def scores_gathered_at_an_argmax(x, router, *weights):
    return masked(x, router, weights, gathered)


@spelling(listed, tensors="listed", E=E, K=1)
def the_sigmoid_of_the_greatest_logit(x, router, *weights):
    return masked(x, router, weights, late)


@spelling(listed, tensors="listed", E=E, K=1)
def rows_written_by_a_mask(x, router, *weights):
    w, ids = best(F.linear(x, router))
    out = torch.zeros_like(x)
    for e in range(E):
        out[ids == e] = expert(x[ids == e], weights, e) * w[ids == e].unsqueeze(-1)
    return out


@spelling(stacked, tensors="stacked", E=E, K=1)
def weights_gathered_by_id(x, router, gate_up, down, scale, bias):
    best = F.softmax(F.linear(x, router), dim=-1).max(dim=-1, keepdim=True)
    ids = best[1].view(-1)
    gate, up = torch.bmm(gate_up[ids], x.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    y = torch.bmm(down[ids], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1) * best[0]
    return y.view(-1, 1, H).sum(1)


@spelling(stacked, tensors="stacked", E=E, K=1)
def a_weight_scattered_over_all_experts(x, router, gate_up, down, scale, bias):
    logits = F.linear(x, router)
    w, ids = best(logits)
    full = torch.zeros_like(logits).scatter(1, ids.unsqueeze(-1), w.unsqueeze(-1))
    gate, up = torch.einsum("th,egh->teg", x, gate_up).chunk(2, dim=-1)
    y = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down)
    return (y * full.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("name", list(TABLE.spellings))
def test_a_spelling_is_proved_and_equal_to_eager(name: str) -> None:
    TABLE.check_spelling(name, dynamic=False)
    program, make, _ = TABLE.spellings[name]
    (region,) = recognize(graphs.trace(program, make())).regions
    router = region.spec.router
    assert router is not None, region.router_why
    score = {"scores_gathered_at_an_argmax": "sigmoid", "the_sigmoid_of_the_greatest_logit": "topk_sigmoid"}
    assert (router.E, router.K, router.score) == (E, 1, score.get(name, "softmax"))
    assert router.scale == (2.0 if name == "scores_gathered_at_an_argmax" else 1.0)


def of_some(logits: Tensor) -> Any:
    probs = F.softmax(logits, dim=-1)
    return probs[:, : E - 1].max(dim=-1)[0], probs.argmax(-1)


def of_another_choice(logits: Tensor) -> Any:
    probs = F.softmax(logits, dim=-1)
    return probs.max(dim=-1)[0], (probs * logits).argmax(-1)


def of_other_scores(logits: Tensor) -> Any:
    return F.softmax(logits, dim=-1).max(dim=-1)[0], logits.argmax(-1)


def with_another_gradient(logits: Tensor) -> Any:
    """amax shares its gradient among equal scores."""
    probs = F.softmax(logits, dim=-1)
    return probs.amax(dim=-1), probs.argmax(-1)


def of_the_least(logits: Tensor) -> Any:
    probs = F.softmax(logits, dim=-1)
    return probs.min(dim=-1)[0], probs.argmax(-1)


@pytest.mark.parametrize("choose", [of_some, of_another_choice, of_other_scores, of_the_least, with_another_gradient])
def test_a_weight_of_something_else_than_the_choice_keeps_its_nodes(choose: Choice) -> None:
    def program(x: Tensor, router: Tensor, *weights: Tensor) -> Any:
        return masked(x, router, weights, choose)

    graph = graphs.trace(program, listed())
    (region,) = recognize(graph).regions
    assert region.spec.router is None
    assert_equal_outcomes(graphs.replaced(graph), program, listed())


@pytest.mark.parametrize("which", ["least", "over tokens", "over all"])
def test_ids_of_another_kind_are_no_choice(which: str) -> None:
    def choose(logits: Tensor) -> Any:
        probs = F.softmax(logits, dim=-1)
        ids = {
            "least": lambda: probs.argmin(-1),
            "over tokens": lambda: torch.cat([probs, probs, probs])[:T].argmax(0)[torch.arange(T) % E],
            "over all": lambda: probs.argmax().expand(T),
        }[which]()
        return probs.max(dim=-1)[0], ids

    def program(x: Tensor, router: Tensor, *weights: Tensor) -> Any:
        return masked(x, router, weights, choose)

    found = recognize(graphs.trace(program, listed())).regions
    assert not [r for r in found if r.spec.router is not None]


def test_of_equal_scores_the_first_is_taken() -> None:
    spec = RouterSpec(E=E, K=1, score="softmax", logits="f32", ties="first")
    assert RouterSpec.parse(str(spec)) == spec
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, torch.nan, 9.0, torch.nan]])
    weights, ids = reference.route(spec, logits)
    assert ids.tolist() == [[1], [0], [0]]  # a softmax of one NaN is NaN everywhere
    assert torch.equal(ids, F.softmax(logits, dim=-1).argmax(-1, keepdim=True))
    torch.testing.assert_close(weights, F.softmax(logits, dim=-1).max(-1, keepdim=True)[0], equal_nan=True)


def test_a_top_k_of_one_takes_what_torch_takes() -> None:
    spec = RouterSpec(E=8, K=1, score="sigmoid", logits="f32")
    logits = torch.zeros(300, 8)
    assert torch.equal(reference.route(spec, logits)[1], logits.sigmoid().topk(1).indices)
    with pytest.raises(ValueError, match="ties=first is for K=1"):
        RouterSpec(E=8, K=2, ties="first")


def chosen_by_top_k(logits: Tensor) -> Any:
    values, ids = F.softmax(logits, dim=-1).topk(1, dim=-1)
    return values.squeeze(-1), ids.squeeze(-1)


@pytest.mark.parametrize(("choose", "ties"), [(best, "first"), (gathered, "first"), (chosen_by_top_k, "any")])
def test_the_spec_says_which_of_equal_scores(choose: Choice, ties: str) -> None:
    def program(x: Tensor, router: Tensor, *weights: Tensor) -> Any:
        return masked(x, router, weights, choose)

    (region,) = recognize(graphs.trace(program, listed())).regions
    assert region.spec.router is not None
    assert region.spec.router.ties == ties
