"""Every family of families.json: each MoE block becomes one operator call, the numbers stay, the row in the docs is so.

Families that this transformers does not have are skipped with the reason, which the docs list where they know it.
"""

from __future__ import annotations

import functools

import pytest
import table
import torch
import transformers
from table import DOCS, FAMILIES, Outcome, documented, line, outcome

import moe_compile

GAP = 1e-5  # of fp32 logits, to the largest; the largest seen is 1.4e-6


def check(name: str, o: Outcome) -> None:
    if o.absent:
        pytest.skip(o.absent)
    family = FAMILIES[name]
    assert o.gap <= GAP
    assert o.calls == (0 if "stays" in family else family["blocks"]), o.rejections
    kept = [w for w in o.router_whys if not w.startswith(family.get("router", "?"))]
    assert not kept, kept
    assert bool(o.router_whys) == ("router" in family)


BROKEN = {("switch_transformers", "2.11"): "Dynamo of torch 2.11 breaks the graph inside of its router"}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_block_is_replaced(name: str) -> None:
    if why := BROKEN.get((name, torch.__version__.rpartition(".")[0])):
        pytest.skip(why)
    o = outcome(name)
    if known := documented(DOCS.read_text(), transformers.__version__):
        row = line(name, o)
        assert row == known[row.split("|")[1].strip()], "run python tests/models/table.py"
    check(name, o)


def _has_batched_form(name: str) -> bool:
    """Whether the library's class can be told to gather weights by ids."""
    try:
        module = table._import(FAMILIES[name].get("module", name), "modeling")
    except ImportError:
        return False
    return "use_experts_implementation" in vars(module)


@pytest.mark.parametrize("name", [n for i, n in enumerate(FAMILIES) if i % 6 == 1])
def test_batched_form_with_dynamic_shapes(name: str) -> None:
    """A sixth of the families: the batched form is the same code of the library in all."""
    if not _has_batched_form(name):
        pytest.skip(f"{name} has no batched form")
    check(name, outcome(name, "batched_mm", dynamic=True))


STAYS = {
    "doge": "its experts are rows of embeddings (2 embeddings), no linears that expert ids choose",
    "vitpose_backbone": "nothing around it chooses experts by a top-k or a sort (6 linears in it)",
}


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if "stays" in f])
def test_explain_says_why_a_block_stays(name: str) -> None:
    if o := outcome(name).absent:
        pytest.skip(o)
    torch._dynamo.reset()
    model = table.build(name)
    with torch.no_grad():
        report = moe_compile.explain(model, **table.inputs(name, model))
    assert {o.why for o in report.overlooked} == {STAYS[name]}
    assert len(report.overlooked) == FAMILIES[name]["blocks"]


@functools.cache
def listed() -> set[str]:
    """Families that the docs name."""
    return {row.split("|")[1].strip() for row in DOCS.read_text().splitlines() if row.startswith("| ")}


def test_the_docs_have_every_family_and_no_other() -> None:
    titles = {f"{f['module']}, {f['branch']}" if "branch" in f else name for name, f in FAMILIES.items()}
    assert listed() == titles | {"family"}
    assert len([f for f in FAMILIES.values() if "branch" not in f]) >= 77
