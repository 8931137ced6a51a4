"""Recognition costs as much for every layer: counted in function calls, which no busy machine changes.

Times are in docs/measured/recognition.json.
"""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import graphs
import pytest
from steps import GATHERED, GROUPED, Table, inputs, program

from moe_compile.recognize import recognize

PER_LAYER = 25_000  # function calls; these blocks take 12,000 to 17,000


def calls(table: Table, layers: int, dynamic: bool) -> int:
    """Function calls in recognizing a stack of residual blocks."""
    block = program(table)

    def stack(x: Any, router: Any, gate_up: Any, down: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        for _ in range(layers):
            x = x + block(x, router, gate_up, down, a, b, c, d, e, f)
        return x

    graph = graphs.trace(stack, inputs(), (0,) if dynamic else ())
    recognize(graph)  # what is cached once for all is not a layer's
    profile = cProfile.Profile()
    result = profile.runcall(recognize, graph)
    assert len(result.regions) == layers
    return int(pstats.Stats(profile).total_calls)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("table", [GROUPED, GATHERED], ids=["grouped", "gathered"])
def test_cost_is_linear_in_layers(table: Table, dynamic: bool) -> None:
    few, many = calls(table, 3, dynamic), calls(table, 12, dynamic)
    assert many / 12 < 1.05 * few / 3
    assert many / 12 < PER_LAYER
