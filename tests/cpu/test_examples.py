"""The examples run and show what they say. Their models are compiled with moe.inner=eager, which keeps this short."""

import re
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
    names = ["01_compile.py", "02_explain.py", "03_generate.py", "04_inspect.py", "05_bisect.py", "06_plan.py"]
    assert sorted(p.name for p in EXAMPLES.glob("*.py")) == names


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


def test_inspect(tmp_path):
    home = main_of("04_inspect.py")(str(tmp_path))
    assert home.parent == tmp_path
    page = (home / "report.html").read_text()
    assert "1 of 1 MoE block replaced" in page and "groups=4 top_groups=2" in page and "<svg" in page


def test_bisect():
    found = main_of("05_bisect.py")()
    assert [blocks for blocks, _ in found.values()] == [3, 1, 1, 0, 3]
    assert found["none"][1] == 0
    assert all(difference < 1e-5 for _, difference in found.values())


def test_plan():
    heading, *rows = main_of("06_plan.py")()
    assert heading[:3] == ("tokens", "us", "limit")
    # all experts' weights at 4.8 TB/s take as long as the FLOP of 3296 tokens at 989 TFLOP/s
    assert [r[4] for r in rows] == ["compute" if int(r[0]) > 3296 else "memory" for r in rows]
    assert {r[4] for r in rows} == {"compute", "memory"}
    assert rows[-1][:1] == ("8192",) and rows[-1][2] == "625.4"  # 8192 * 8 * 2 * 3 * 2048 * 768 FLOP / 989 TFLOP/s


def test_the_tutorials_programs_run(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "docs" / "tutorial.md").read_text(), flags=re.S)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    with journal.capture() as events:
        for block in blocks[:2]:  # the third is 03_generate.py
            exec(compile(block, "tutorial.md", "exec"), {})
    assert replaced(events) == [4]
    assert float(re.search(r"tensor\((.*?)\)", capsys.readouterr().out)[1]) < 1e-5
