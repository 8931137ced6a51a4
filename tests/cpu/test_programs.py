"""Random programs are recognized or refused, never wrong; and most of them are recognized."""

from __future__ import annotations

import collections

import graphs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import BY_ROUTE, SORTED, Program, programs

from moe_compile.recognize import recognize

EXAMPLES = 260  # for each half
# A program rounds where the operator doesn't; routing is the same nodes, or the same calls, in both.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 4e-2}


@pytest.mark.parametrize(("dispatches", "share"), [(SORTED, 0.95), (BY_ROUTE, 0.75)], ids=["sorted", "by route"])
def test_programs_are_recognized_or_refused_never_wrong(dispatches: tuple[str, ...], share: float) -> None:
    """share: how many must be recognized, so that refusing everything is no way out."""
    seen: collections.Counter[str] = collections.Counter()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(program=programs(dispatches), dynamic=st.sampled_from([False] * 11 + [True]))
    def check(program: Program, dynamic: bool) -> None:
        graph = graphs.trace(
            program.block(), program.inputs(0), (0, 10) if dynamic and len(program.tokens) == 1 else ()
        )
        if not recognize(graph).regions:
            seen["refused"] += 1
            return
        seen["recognized"] += 1
        values = program.inputs(1)
        expected, ours = graphs.run(graph, values), graphs.run(graphs.replaced(graph), values)
        difference = graphs.differs(expected, ours, TOLERANCE[program.dtype])
        assert not difference, f"{program}: {difference}"

    check()
    assert seen.total() >= 250
    assert seen["recognized"] >= share * seen.total(), seen
