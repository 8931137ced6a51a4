"""The first families' blocks on a GPU in bf16: replaced, run by the planned kernels, as exact as the original graph."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import zoo
from test_families import BOUND, SEEDS, error, outcomes

from moe_compile import journal
from moe_compile.backend import moe_backend


@pytest.mark.parametrize("implementation", [None, "batched_mm"], ids=["default", "batched_mm"])
@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_block_is_as_exact_on_cuda(family: str, implementation: str | None) -> None:
    torch._dynamo.reset()
    block = zoo.moe_block(zoo.build(family, torch.bfloat16, implementation)).cuda()
    oracle = zoo.in_float64(block)
    truth = outcomes(oracle, oracle, torch.float64)
    original = outcomes(block, block, torch.bfloat16)
    with journal.capture() as events:
        backend = functools.partial(moe_backend, options={"moe.inner": "aot_eager", "moe.strict": True})
        ours = outcomes(block, torch.compile(block, backend=backend, dynamic=False), torch.bfloat16)
    plans = [e.plan for e in events if isinstance(e, journal.Planned)]
    assert plans
    assert all("triton" in p for p in plans), plans
    assert len(ours["output"]) == len(SEEDS)
    for name in set(truth) & set(original):
        for kind, a, b in zip(("max", "rms"), error(ours[name], truth[name]), error(original[name], truth[name])):
            assert a <= BOUND * b, f"{name}: {kind} error {a:.3e}, the original's is {b:.3e}"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_whole_model_under_cuda_graphs(family: str) -> None:
    """mode="reduce-overhead", several calls: replays give what the first call gave, and what eager gives."""
    torch._dynamo.reset()
    model: Any = zoo.build(family, torch.float32).cuda()
    run = torch.compile(
        model, backend=functools.partial(moe_backend, mode="reduce-overhead", options={"moe.strict": True})
    )
    with torch.no_grad():
        for seed in range(4):
            ids = zoo.tokens(1, 16, seed).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            got = run(input_ids=ids, use_cache=False).logits.clone()
            expected = model(input_ids=ids, use_cache=False).logits
            assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()
