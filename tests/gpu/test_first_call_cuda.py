"""What a first call makes and keeps: in mode="reduce-overhead" it may come while Inductor warms up a CUDA graph."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytest.importorskip("triton")

# In a process of its own, since what is kept is made once.
PROGRAM = """
import dataclasses, sys, torch
from moe_compile import ops
from moe_compile.suite import GEOMETRIES, tokens_of, weights_of
device, T, plan = torch.device(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
spec = dataclasses.replace(GEOMETRIES["qwen3_30b"], E=16, H=256, I=128)
weights, text = weights_of(spec, device), str(spec)
for t in weights.tensors():  # as parameters are: Inductor copies other inputs of a CUDA graph to places of its own
    torch._dynamo.mark_static_address(t)
def block(x, ids, w, plan):
    return torch.ops.moe_compile.experts(x, ids, w, *weights.arguments(), text, plan)
compiled = torch.compile(lambda *tokens: block(*tokens, plan), mode="reduce-overhead", fullgraph=True)
with torch.no_grad():
    for seed in range(3):
        tokens = tokens_of(spec, T, device, seed)
        torch.compiler.cudagraph_mark_step_begin()
        got, expected = compiled(*tokens).clone(), block(*tokens, "*:aten")
        assert (got - expected).abs().max() <= 1e-2 * expected.abs().max()
"""
PLANS = {
    "triton_decode": (4, "N1=1,K1=256,W1=4,N2=4,K2=128,W2=4"),
    "triton_grouped": (2048, "M=64,N1=64,K1=64,W1=4,S1=3,SWAP1=0,TMA1=1,N2=128,K2=64,W2=4,S2=3,SWAP2=0,TMA2=1"),
    "triton_hopper": (2048, "M=128,N1=128,N2=256,GATHER=1"),
}


@pytest.mark.parametrize("provider", PLANS)
def test_a_first_call_in_a_warm_up(provider):
    T, knobs = PLANS[provider]
    program = [sys.executable, "-c", PROGRAM, "cuda:0", str(T), f"*:{provider}({knobs})"]
    run = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
