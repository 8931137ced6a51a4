"""In bf16 the operators are as exact as the nodes that they replace, by the measure of rounding.py.

Some of the families each time; docs/measured/rounding_cpu.json has all of them, and is held to the same bound.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from rounding import rounding
from table import FAMILIES

BOUND = 1.1
MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measured" / "rounding_cpu.json"
REPLACED = [name for name, f in FAMILIES.items() if "stays" not in f]


@pytest.mark.parametrize("name", REPLACED[3::16])
def test_operators_are_as_exact_as_the_nodes_they_replace(name: str) -> None:
    try:
        r = rounding(name)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"not in transformers {transformers.__version__}: {error}")
    assert r.blocks == FAMILIES[name]["blocks"]
    assert r.tokens >= 100 and r.left_out <= 0.1 * r.tokens
    assert r.ratio <= BOUND, r


def test_every_family_was_measured_and_is_within_the_bound() -> None:
    rows = {row["family"]: row for row in json.loads(MEASURED.read_text())["rows"]}
    assert list(rows) == REPLACED
    assert all(row["blocks"] == FAMILIES[name]["blocks"] and row["tokens"] >= 32 for name, row in rows.items())
    assert max(row["ours"] / row["original"] for row in rows.values()) <= BOUND
