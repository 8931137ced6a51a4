"""triton_hopper without its GPU: what it supports and offers, which knobs it refuses, and that its kernels compile."""

import dataclasses
import json
from pathlib import Path

import pytest
from absent import printed

from moe_compile import cost
from moe_compile.hardware import named
from moe_compile.providers.base import Tactic
from moe_compile.providers.triton_grouped import TritonGrouped
from moe_compile.providers.triton_hopper import TritonHopper
from moe_compile.spec import Layout
from moe_compile.suite import GEOMETRIES
from moe_compile.work import Tiled

pytest.importorskip("triton")
HOPPER = TritonHopper()
QWEN = GEOMETRIES["qwen3_30b"]
MEASURED = Path(__file__).parents[2] / "docs" / "measured"


def test_what_it_supports():
    assert HOPPER.supports(QWEN, named("H200")) and HOPPER.supports(GEOMETRIES["gpt_oss_20b"], named("H100"))
    for spec, device, reason in [
        (QWEN, "B200", "9.0"),
        (QWEN, "A100", "9.0"),
        (dataclasses.replace(QWEN, x="f32", out="f32"), "H200", "fp16 only"),
        (dataclasses.replace(QWEN, I=772), "H200", "16-byte"),
        (dataclasses.replace(QWEN, gate_up=Layout(storage="EHG")), "H200", "far apart"),
        (dataclasses.replace(QWEN, tensors="listed"), "H200", "tensors of their own"),
    ]:
        assert reason in str(HOPPER.supports(spec, named(device)))


def test_tactics_are_for_many_rows_an_expert_and_build_takes_them():
    assert HOPPER.tactics(QWEN, named("H200"), 256) == []
    for spec in GEOMETRIES.values():
        for tactic, work in HOPPER.tactics(spec, named("H200"), 8192):
            assert HOPPER.work(tactic, spec, named("H200")) == work
    for spec, ways in ((QWEN, {True, False}), (dataclasses.replace(QWEN, H=2056), {True})):
        works = [work for _, work in HOPPER.tactics(spec, named("H200"), 8192)]
        assert {any(step.name == "permute" for step in work.steps) for work in works} == ways
        assert {step.M for work in works for step in work.steps if isinstance(step, Tiled)} == {128, 160, 192}


def test_tiles_of_64_and_of_160_rows_are_for_some_rows_an_expert():
    def offered(spec, T, rows=160):
        knobs = [dict(tactic.knobs) for tactic, _ in HOPPER.tactics(spec, named("H200"), T)]
        return [k["GATHER"] for k in knobs if k["M"] == rows]

    assert [offered(QWEN, T, 64) for T in (256, 512, 768, 1024)] == [[], [1], [1], []]
    assert offered(GEOMETRIES["gpt_oss_20b"], 256, 64) == offered(dataclasses.replace(QWEN, H=2056), 512, 64) == []
    assert [offered(QWEN, T) for T in (1024, 2048, 4096, 16384)] == [[0, 1], [0, 1], [0], []]
    assert offered(GEOMETRIES["gpt_oss_20b"], 1024) == [0]


def test_prices_choose_the_height_of_tiles():
    """In each cell measured the cheapest tactic takes little more than the fastest."""
    cells = json.loads((MEASURED / "variants_h200.json").read_text())["swapped"]["cells"]
    chosen = {}
    for cell in (c for c in cells if c["kind"] == "whole"):
        spec, T = GEOMETRIES[cell["geometry"]], cell["T"]
        load = cost.Load.uniform(spec.E, spec.K)
        offers = HOPPER.tactics(spec, named("H200"), T)
        knobs = dict(min(offers, key=lambda o: cost.estimate(o[1], named("H200"), load, T).seconds)[0].knobs)
        name = f"M={knobs['M']}" + (",GATHER=1" if knobs["GATHER"] else "")
        chosen[cell["geometry"], T] = knobs["M"]
        assert cell["us"][name] < 1.02 * min(cell["us"].values()), (cell, name)
    for many in [("mixtral", 512), ("mixtral", 1024), ("qwen3_30b", 2048), ("gpt_oss_20b", 1024), ("dsv3", 4096)]:
        assert chosen[many] == 160
    for more in [("qwen3_30b", 4096), ("qwen3_30b", 8192), ("olmoe", 4096)]:
        assert chosen[more] == 128
    assert chosen["qwen3next", 8192] == 192


def test_prices_choose_with_few_rows_an_expert():
    """In each cell measured, the cheapest height of tiles, or triton_grouped, takes little more than the fastest."""
    cells = json.loads((MEASURED / "variants_h200.json").read_text())["middle"]["cells"]
    chosen = {}
    for cell in (c for c in cells if c["kind"] == "whole" and c["run"] == 3 and c["T"] < 4096):
        spec, T = GEOMETRIES[cell["geometry"]], cell["T"]
        load = cost.Load.uniform(spec.E, spec.K)
        offers = [
            (cost.estimate(work, named("H200"), load, T).seconds, provider.name, dict(tactic.knobs)["M"])
            for provider in (HOPPER, TritonGrouped())
            for tactic, work in provider.tactics(spec, named("H200"), T)
        ]
        _, provider, rows = min(offers)
        name = f"M={rows}," if provider == HOPPER.name else provider
        taken = min(us for text, us in cell["us"].items() if text.startswith(name))
        chosen[cell["geometry"], T] = name
        assert taken < 1.02 * min(cell["us"].values()), (cell, name)
    assert chosen["mixtral", 128] == chosen["qwen3_30b", 512] == chosen["qwen3next", 2048] == "M=64,"
    assert chosen["qwen3_30b", 1024] == chosen["mixtral", 256] == "M=128,"
    assert chosen["gpt_oss_20b", 256] == chosen["qwen3_30b", 256] == "triton_grouped"


@pytest.mark.parametrize(
    ("changes", "named_by"),
    [
        ({"N1": 96}, "N1=96"), ({"N2": 64}, "N2=64"), ({"GATHER": 2}, "GATHER=2"), ({"N1": 256}, "512 columns"),
        ({"M": 96}, "M=96"), ({"M": 64, "N2": 128}, "256 columns"), ({"S": 4}, "knobs are"),
        ({"GATHER": "yes"}, "whole number"),
    ],
)  # fmt: skip
def test_knobs_that_cannot_be(changes, named_by):
    knobs = {"M": 192, "N1": 128, "N2": 256, "GATHER": 1, **changes}
    with pytest.raises(ValueError, match=named_by):
        HOPPER.work(Tactic.of(**knobs), QWEN, named("H200"))


def test_gathering_wants_whole_blocks_of_columns():
    good = Tactic.of(M=128, N1=128, N2=256, GATHER=1)
    with pytest.raises(ValueError, match="H=2056"):
        HOPPER.work(good, dataclasses.replace(QWEN, H=2056), named("H200"))


COMPILE = """
from moe_compile.activation import Activation
from moe_compile.kernels import hopper
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.sort import Schedule
plan = Schedule(torch.zeros(1000, dtype=torch.int32), 20, 64)
act = epilogue(Activation.parse("swiglu").expr, fast=True)
x, bias = bf16(32, 256), (bf16(4, 384),)
for gather, rows, halves, w in [
    (1, 128, "gate_up", bf16(4, 384, 256)), (0, 192, "up_gate_interleaved", bf16(4, 256, 384)),
    (1, 160, "gate_up", bf16(4, 384, 256)), (0, 160, "up_gate_interleaved", bf16(4, 256, 384)),
    (1, 64, "gate_up", bf16(4, 384, 256)), (0, 64, "up_gate_interleaved", bf16(4, 256, 384)),
]:
    tile = hopper.Persistent(N=128, GATHER=gather, ROWS=rows, AHEAD=not gather)
    a = hopper.fc1(x if gather else hopper.permute(x, plan, 2), (w,), bias, None, plan, act, choices=2,
                   sizes=(256, 192), gated=True, halves=halves, k_major=halves == "gate_up", tile=tile)
for rows in (128, 160, 64):
    tile = hopper.Persistent(N=256, ROWS=rows, AHEAD=True)
    hopper.fc2(a, bf16(4, 256, 192), None, plan, k_major=True, tile=tile)
kernels = [m.asm for m in made if "wgmma" in m.asm["ptx"]]
counted = [("ptx", "setmaxnreg"), ("ptx", "cp.async.cg"), ("sass", "HGMMA"), ("sass", "WARPGROUP.DEPBAR")]
def line(asm):
    early = asm["ptx"].index("cp.async.bulk.tensor") < asm["ptx"].index("griddepcontrol.wait")
    return [*(asm[text].count(word) for text, word in counted), early]
print(json.dumps([line(asm) for asm in kernels]))
"""


def test_kernels_compile_and_are_warp_specialized():
    found = printed(COMPILE)
    for (registers, copies, products, waits, early), gathers in zip(found, (1, 0, 1, 0, 1, 0, 0, 0, 0), strict=True):
        assert registers and bool(copies) == bool(gathers)
        assert products >= 2 * waits  # else ptxas had each product waited for
        assert early == (not gathers)  # weights are fetched before the kernel waits for the one ahead of it
