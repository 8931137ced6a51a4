"""The experts' benchmark on a GPU: every column of a small geometry is right and timed, or says why not."""

import dataclasses

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moe_compile import contest, suite
from moe_compile.verdict import Reject

DEVICE = torch.device("cuda", 0)
SMALL = dataclasses.replace(suite.GEOMETRIES["qwen3_30b"], E=16, K=4, H=256, I=128)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(suite.GEOMETRIES, "small", SMALL)


@pytest.mark.parametrize("T", [1, 300])
def test_columns_are_timed_or_say_why_not(T):
    of = contest.Contest("small", DEVICE, rounds=3, only=("moe", "torch", "hf_grouped", "vllm", "sonicmoe"))
    of.compile(T)
    cell = of.cell(T)
    ours = {"moe", "moe_tuned", "moe_grouped"} | ({"moe_decode"} if T == 1 else set())
    assert ours | {"torch._grouped_mm", "hf_grouped_mm"} <= set(cell.times), cell.failed
    assert {"vllm", "sonicmoe"} <= set(cell.times) | set(cell.failed)
    eps = torch.finfo(torch.bfloat16).eps
    assert all(0 < t.median < 0.1 for t in cell.times.values()) and all(0 < e < 4 * eps for e in cell.errors.values())
    assert cell.chosen["moe_tuned"].startswith("triton_")


def test_what_cannot_be_captured_costs_no_other_its_time(monkeypatch):
    def right(x, ids, w, weights):
        return offered(x, ids, w, weights)

    def reads_on_the_host(x, ids, w, weights):
        return offered(x, ids, w, weights) * (1 if int(ids.max()) < SMALL.E else 2)

    offered = contest.contenders(SMALL, 5, DEVICE, tactics=0, peers=True)["torch._grouped_mm"]["torch._grouped_mm"]()
    assert not isinstance(offered, Reject)
    made = {
        "before": {"before": lambda: right},
        "host": {"host": lambda: reads_on_the_host},
        "after": {"a": lambda: right},
    }
    monkeypatch.setattr(contest, "contenders", lambda *a, **k: made)
    cell = contest.Contest("small", DEVICE, rounds=2).cell(5)
    assert set(cell.times) == {"before", "after"} and set(cell.failed) == {"host"}, cell.failed
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert "captur" in cell.failed["host"]
