"""Routers that are no RouterSpec: the experts are replaced all the same, and the reason says what the ids are."""

from __future__ import annotations

from typing import Any

import graphs
import pytest
import torch
import torch.nn.functional as F
from blocks import E, K
from steps import GATHERED, Table, inputs, program

from moe_compile.recognize import recognize


def scores(s: Any) -> Any:
    return F.softmax(F.linear(s.x, s.logits_of), dim=-1)


def number(values: Any) -> Any:
    """Some expert for each value."""
    return (values.abs() * 7).long() % E


def one_after_the_other(s: Any) -> Any:
    """The best expert, then the best of the others."""
    first = scores(s).topk(1, dim=-1)[1]
    second = scores(s).scatter(-1, first, -1.0).topk(1, dim=-1)[1]
    return torch.cat([first, second], dim=-1)


def within_capacity(s: Any) -> Any:
    """Weights of 0 for tokens that come when their expert has four."""
    ids = scores(s).topk(K, dim=-1)[1]
    earlier = F.one_hot(ids, E).sum(1).cumsum(0).gather(1, ids)
    return scores(s).gather(1, ids) * (earlier <= 4)


ROUTERS: dict[str, tuple[Table, str]] = {
    "looked up": (
        {"ids": lambda s: number(s.gate[:, :K, 0])[number(s.other[:, 0])]},
        "the expert ids are looked up in a table",
    ),
    "one after the other": (
        {"ids": one_after_the_other},
        "the expert ids are several choices side by side, not the indices of one top-k",
    ),
    "masked by something else": (
        {"ids": lambda s: torch.where(s.other[:, :1] > 0, s.choice[1], 0)},
        "the expert ids are masked by more than themselves",
    ),
    "a running sum over tokens": ({"weights": within_capacity}, "what a token is given depends on others"),
}


@pytest.mark.parametrize("name", list(ROUTERS))
def test_the_reason_says_what_the_ids_are(name: str) -> None:
    changes, reason = ROUTERS[name]
    graph, given = graphs.trace(program(GATHERED, changes), inputs()), inputs(1)
    (region,) = recognize(graph).regions
    assert region.spec.router is None
    assert region.router_why is not None
    assert str(region.router_why).startswith(reason)
    assert not graphs.differs(graphs.run(graph, given), graphs.run(graphs.replaced(graph), given))


def test_a_running_sum_over_experts_is_not_blamed() -> None:
    changes: Table = {"weights": lambda s: scores(s).cumsum(-1).gather(1, s.choice[1])}
    (region,) = recognize(graphs.trace(program(GATHERED, changes), inputs())).regions
    assert not str(region.router_why).startswith("what a token is given")
