"""The experts' benchmark on a CPU: the limit is the formula, a wrong contender is named and not timed, whole JSON."""

import dataclasses
import json

import pytest
import torch

from moe_compile import cli, suite
from moe_compile.hardware import facts
from moe_compile.providers import Candidate
from moe_compile.verdict import Reject

CPU = torch.device("cpu")
TINY = suite.GEOMETRIES["tiny"]


def test_the_limit_counts_active_experts_once_and_every_route():
    here, each = facts(CPU), TINY.H * 3 * TINY.I
    one = torch.tensor([[0, 1, 2, 3]])
    assert suite.limit(TINY, one) == pytest.approx(4 * each * 4 / here.bandwidth)
    many = one.expand(10_000, 4)
    assert suite.limit(TINY, many) == pytest.approx(2 * 40_000 * each / here.flop_rate("f32"))


def test_routes_are_distinct_and_weights_sum_to_one():
    x, ids, weights = suite.tokens_of(TINY, 50, CPU)
    assert x.shape == (50, TINY.H) and ids.shape == weights.shape == (50, TINY.K)
    assert all(len(set(row)) == TINY.K for row in ids.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))
    assert len(ids.unique()) > TINY.K


@pytest.mark.parametrize("name", sorted(set(suite.GEOMETRIES) - {"tiny"}))
def test_a_wrong_contender_is_named_and_not_timed(name, monkeypatch):
    spec = dataclasses.replace(suite.GEOMETRIES[name], E=6, K=2, H=32, I=48, x="f32", out="f32")

    def good(x, ids, w, weights):
        return suite.launcher(Candidate(provider="aten"), spec, CPU)(x, ids, w, weights)

    def fails(x, ids, w, weights):
        raise ValueError("no such kernel")

    offered = {
        "good": lambda: good, "near": lambda: lambda *a: good(*a) * 1.001, "fails": lambda: fails,
        "absent": Reject("not installed"),
    }  # fmt: skip
    monkeypatch.setitem(suite.GEOMETRIES, name, spec)
    monkeypatch.setattr(suite, "contenders", lambda *a, **k: offered)
    (cell,) = suite.cells([name], [5], CPU, rounds=2, layers=2)
    assert set(cell.times) == {"good"} and set(cell.failed) == {"near", "fails", "absent"}
    assert "wrong" in cell.failed["near"] and "no such kernel" in cell.failed["fails"]
    found = suite.record([cell], CPU)
    assert found["absent"][f"{name} absent"] == {"not installed": [5]}
    row = found["cells"][0]
    assert row["ratio"]["good"] == pytest.approx(row["us"]["good"] / row["limit_us"], rel=0.01)


def test_the_command_prints_a_line_a_cell_and_json(capsys):
    arguments = ["bench", "--tokens", "1,3", "--only", "moe,aten", "--rounds", "2", "--json"]
    assert cli.main(arguments) == 0
    out, lines = capsys.readouterr()
    found = json.loads(out)
    assert [c["T"] for c in found["cells"]] == [1, 3] and set(found["cells"][0]["us"]) == {"moe", "aten"}
    assert lines.count("tiny T=") == 2
    assert cli.main(["bench", "--geometry", "mixtrol"]) == 1
    assert "mixtral" in capsys.readouterr().err
