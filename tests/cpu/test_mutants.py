"""Mutation testing: random single edits of true blocks are refused, or computed exactly.

Nobody says whether an edit keeps the meaning: the mutant itself is run, and what recognition made of it beside it.
Blocks are in float64, so that a different sum can't hide behind rounding. A seed names a mutant.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterator

import graphs
import mutants
import pytest
import torch
from steps import TRUE, inputs, program

from moe_compile.recognize import recognize

SEEDS = 40  # a block; thousands were run before


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Mutants that can't run are no news."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(level)


def fate(original: torch.fx.GraphModule, seed: int) -> tuple[str, str]:
    """(what became of the mutant, what it was): invalid, refused, exact; or wrong, with the difference."""
    try:
        mutant, said = mutants.mutate(original, seed)
        graphs.propagate(mutant, inputs(0, torch.float64))
    except Exception:  # noqa: BLE001  there was no place for the edit, or what it left can't run
        return "invalid", ""
    if not recognize(mutant).regions:
        return "refused", said
    values = inputs(seed, torch.float64)
    try:
        expected, again = graphs.run(mutant, values), graphs.run(mutant, values)
    except Exception:  # noqa: BLE001  real values can raise where fake ones don't
        return "invalid", said
    if graphs.differs(expected, again):
        return "invalid", said  # it reads memory that nothing wrote
    difference = graphs.differs(expected, graphs.run(graphs.replaced(mutant), values))
    return ("wrong", f"{said}: {difference}") if difference else ("exact", said)


@pytest.mark.parametrize("name", list(TRUE))
def test_mutants_are_refused_or_exact(name: str) -> None:
    original = graphs.trace(program(*TRUE[name]), inputs(0, torch.float64))
    assert len(recognize(original).regions) == 1
    fates: collections.Counter[str] = collections.Counter()
    for seed in range(SEEDS):
        what, said = fate(original, seed)
        assert what != "wrong", f"mutant {seed} of {name}: {said}"
        fates[what] += 1
    assert fates["refused"] >= 3 and fates["exact"] >= 3, fates
