"""The Triton providers where nothing can run them: verdicts, tactics and refusals. What they compute: tests/interpreter
and tests/gpu."""

import os
import subprocess
import sys

import pytest
import torch

from moe_compile import cost
from moe_compile.activation import Activation
from moe_compile.hardware import facts, named
from moe_compile.plan import shortlist
from moe_compile.providers.base import Tactic
from moe_compile.providers.triton_decode import TritonDecode
from moe_compile.providers.triton_grouped import TritonGrouped
from moe_compile.spec import ExpertsSpec, Layout
from moe_compile.verdict import Reject

pytest.importorskip("triton")
CPU = torch.device("cpu")
DEVICE = facts(CPU)
BOTH = (TritonGrouped(), TritonDecode())


def qwen3_30b(**changes) -> ExpertsSpec:
    return ExpertsSpec(**{"E": 128, "K": 8, "H": 2048, "I": 768, "act": Activation.parse("swiglu"), **changes})


def knobs(tactic: Tactic) -> dict[str, int | str]:
    return dict(tactic.knobs)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")
@pytest.mark.parametrize("provider", BOTH, ids=lambda p: p.name)
def test_a_cpu_without_the_interpreter_is_refused(provider):
    verdict = provider.supports(qwen3_30b(), DEVICE)
    assert isinstance(verdict, Reject)
    assert verdict.reason == "no CUDA device"


@pytest.mark.parametrize("provider", BOTH, ids=lambda p: p.name)
def test_fp64_is_refused(provider):
    assert provider.supports(qwen3_30b(x="f64", out="f64"), DEVICE).reason == "fp64 is not supported"


@pytest.mark.parametrize(("T", "height"), [(1, 16), (64, 16), (256, 32), (512, 64), (1024, 128), (16384, 128)])
def test_heights_are_offered_around_1_5_rows_an_expert(T, height):
    offered = TritonGrouped().tactics(qwen3_30b(), named("H200"), T)
    assert {knobs(t)["M"] for t, _ in offered} == {m for m in (16, 32, 64, 128) if height / 2 <= m <= 2 * height}
    assert all("TMA1" in knobs(t) for t, _ in offered)
    without = TritonGrouped().tactics(qwen3_30b(), named("A100"), T)
    assert not any(knobs(t)["TMA1"] or knobs(t)["TMA2"] for t, _ in without)
    priced = cost.estimate(offered[0][1], DEVICE, cost.Load.uniform(128, 8), T)
    assert priced.total("launches") == 4


def test_rows_an_expert_decide_not_tokens():
    few = TritonGrouped().tactics(qwen3_30b(E=16, K=1), DEVICE, 1024)[0][0]
    many = TritonGrouped().tactics(qwen3_30b(), DEVICE, 1024)[0][0]
    assert knobs(few)["M"] == knobs(many)["M"] == 128


def test_n_contiguous_weights_are_read_in_wide_rows():
    spec = qwen3_30b(gate_up=Layout(storage="EHG", halves="gate_up_interleaved"), down="EIH")
    decode = knobs(TritonDecode().tactics(spec, DEVICE, 1)[0][0])
    assert decode["N1"] * 2 >= 32  # 64 bytes
    assert decode["N2"] >= 32


def test_decode_reads_a_shared_expert_twice_and_says_so():
    spec = qwen3_30b(E=8, K=2)
    (_, grouped), (_, decode) = (p.tactics(spec, DEVICE, 32)[0] for p in BOTH)
    uniform = cost.Load.uniform(8, 2)
    decoded, tiled = (cost.estimate(work, DEVICE, uniform, 32) for work in (decode, grouped))
    assert decoded.total("flop") == tiled.total("flop")
    assert decoded.total("weights") + decoded.total("rereads") == pytest.approx(8 * tiled.total("weights"), rel=0.01)
    assert decoded.total("launches") == 2


def test_experts_in_tensors_of_their_own_cost_what_one_tensor_does_but_for_descriptors():
    h200 = named("H200")
    for T in (1, 16, 256, 4096):
        for provider in BOTH:
            assert provider.supports(qwen3_30b(tensors="listed"), h200)
            offered = provider.tactics(qwen3_30b(tensors="listed"), h200, T)
            assert not any(knobs(t).get("TMA1") or knobs(t).get("TMA2") for t, _ in offered)
            for tactic, work in offered:
                assert work == provider.work(tactic, qwen3_30b(), h200)
        names = ("aten", "triton_decode", "triton_grouped")
        best = shortlist(qwen3_30b(tensors="listed"), h200, T, names)[0].candidate.provider
        assert best == ("triton_decode" if T == 1 else "triton_grouped")
    with pytest.raises(ValueError, match="one tensor of all experts"):
        TritonGrouped().work(TritonGrouped().tactics(qwen3_30b(), h200, 4096)[0][0], qwen3_30b(tensors="listed"), h200)


def test_importing_providers_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from moe_compile.providers.triton_grouped import TritonGrouped\n"
        "from moe_compile.providers.triton_decode import TritonDecode\n"
        "for p in (TritonGrouped(), TritonDecode()): print(p.available())\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split("\n")[:2] == ["triton is not installed"] * 2


def test_what_the_kernels_do_not_read_is_refused_for_its_reason():
    assert "a norm of each expert's output" in str(TritonDecode().supports(qwen3_30b(post="rms"), DEVICE))
