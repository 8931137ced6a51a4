"""The examples run and show what they say. Their models are compiled with moe.inner=eager, which keeps this short."""

import runpy
from pathlib import Path

import pytest
import torch

from moe_compile import journal

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _inner_eager(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("MOE_COMPILE", "inner=eager,strict=1")


def main_of(name):
    return runpy.run_path(str(EXAMPLES / name))["main"]


def replaced(events):
    return [e.regions for e in events if isinstance(e, journal.Lowered)]


def test_every_example_is_tested():
    assert sorted(p.name for p in EXAMPLES.glob("*.py")) == ["01_compile.py", "02_explain.py", "03_generate.py"]


def test_compile():
    with journal.capture() as events:
        assert main_of("01_compile.py")() < 1e-5
    assert replaced(events) == [2]


def test_explain(capsys):
    report = main_of("02_explain.py")()
    assert len(report.regions) == 4
    experts = report.regions[0].spec.experts
    assert (str(experts.gate_up), experts.bias, experts.down) == ("EHG:gate_up_interleaved", "both", "EIH")
    assert experts.act.name == "swiglu_oai(alpha=1.702,limit=7)"
    text = capsys.readouterr().out
    assert "model.layers.0.mlp.experts ... model.layers.3.mlp.experts: 4 blocks" in text
    assert "model.layers.0.mlp.experts: 8 experts, 2 a token, activation swiglu_oai" in text


def test_generate():
    with journal.capture() as events:
        compiled, eager = main_of("03_generate.py")()
    assert compiled == eager
    assert len(set(compiled[10:])) > 4  # the model says more than one thing
    assert set(replaced(events)) == {2}
