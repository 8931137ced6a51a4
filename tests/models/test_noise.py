"""Families that draw random numbers in or before their experts when they are trained.

In families.json, `noise` lists the settings that bring it about, and with `kept` why the block then stays as it is.
Jitter of hidden states or logits is computed before the operator, with the model's own random numbers; a dropout
inside of an expert draws a mask for the rows of its own loop, which no operator does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from table import FAMILIES, outcome
from test_table import GAP

DOCS = Path(__file__).resolve().parents[2] / "docs" / "proof.md"
OFFLINE = {"minimax", "minimax_m2", "nllb_moe"}  # mixtral's code, and a model that takes 15 s to capture
NOISES = [(name, noise) for name, f in FAMILIES.items() for noise in f.get("noise", ())]


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        pytest.param(*n, marks=[pytest.mark.offline] if n[0] in OFFLINE or "kept" in n[1] else [], id=f"{n[0]}-{i}")
        for i, n in enumerate(NOISES)
    ],
)
def test_noise_stays_and_the_experts_behind_it_are_replaced(name: str, noise: dict[str, Any]) -> None:
    o = outcome(name, noise=noise["settings"])
    if o.absent:
        pytest.skip(o.absent)
    assert o.calls == (0 if "kept" in noise else FAMILIES[name]["blocks"]), o.rejections
    assert o.gap <= GAP


def test_the_docs_say_so() -> None:
    page = DOCS.read_text().splitlines()
    for name, noise in NOISES:
        blocks = FAMILIES[name]["blocks"]
        replaced = f"{0 if 'kept' in noise else blocks} of {blocks}"
        row = f"| {name} | {said(noise['settings'])} | {replaced} | {noise.get('kept', '')} |"
        assert row in page, row


def said(settings: dict[str, Any]) -> str:
    flat = {k: v for x in settings.items() for k, v in (x[1].items() if isinstance(x[1], dict) else (x,))}
    return ", ".join(f"{k}={v}" for k, v in flat.items() if isinstance(v, (str, float)))
