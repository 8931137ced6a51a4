"""Routers with one class more than experts: a mask gives such a route id 0 and weight 0, and the library's guard
against ids beyond the experts then tests ids that were masked. Near misses test other ids than the linears read.
"""

from __future__ import annotations

from typing import Any

import graphs
import pytest
import torch
import torch.nn.functional as F
from blocks import E, K
from steps import GROUPED, Table, inputs, program

from moe_compile.recognize import recognize

SKIPPING: Table = {
    "probs": lambda s: F.softmax(F.linear(s.x, torch.cat([s.logits_of, s.other[:1]])), dim=-1),
    "weights": lambda s: s.choice[0].masked_fill(s.choice[1] == E, 0),
    "ids": lambda s: s.choice[1].masked_fill(s.choice[1] == E, 0),
}


def guarded(s: Any, ids: Any) -> Any:
    """Each sorted row's weighed output, 0 where its id among `ids` [T, K] is beyond the experts."""
    beyond = (ids.reshape(-1)[s.perm] >= E).unsqueeze(-1)
    return (s.second * s.weights.reshape(-1)[s.perm].unsqueeze(-1)).masked_fill(beyond, 0.0)


def result_of(changes: Table) -> Any:
    return recognize(graphs.trace(program(GROUPED, {**SKIPPING, **changes}), inputs()))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_masked_ids_are_the_ones_that_the_guard_tests(seed: int) -> None:
    table = {**SKIPPING, "weighed": lambda s: guarded(s, s.ids)}
    given = inputs(seed)
    graph = graphs.trace(program(GROUPED, table), given)
    (region,) = recognize(graph).regions
    assert region.spec.router is not None
    assert (region.spec.experts.E, region.spec.router.E) == (E, E + 1)
    skipped = F.softmax(F.linear(given[0], torch.cat([given[1], given[6][:1]])), dim=-1).topk(K)[1] == E
    assert skipped.any() and not skipped.all()
    assert not graphs.differs(graphs.run(graph, given), graphs.run(graphs.replaced(graph), given))


MISSES: dict[str, Table] = {
    "the router's ids, where a skipped route keeps its weight": {
        "weights": lambda s: s.choice[0],
        "weighed": lambda s: guarded(s, s.choice[1]),
    },
    "ids that another number took the place of": {
        "weighed": lambda s: guarded(s, s.choice[1].masked_fill(s.choice[1] == E, 1)),
    },
    "a number below the experts'": {
        "weighed": lambda s: guarded(s, s.ids + 1),
    },
}


@pytest.mark.parametrize("name", list(MISSES))
def test_a_guard_of_other_ids_is_refused(name: str) -> None:
    result = result_of(MISSES[name])
    assert not result.regions
    reasons = [r.verdict.reason for r in result.rejections]
    assert "routes are masked by something else than ids beyond the experts" in reasons, reasons
