"""The aten provider and the operators on CUDA: both paths against the fp64 oracle, without a host sync, in graphs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from operand_cases import Case, assert_close, case_of, layout_id, layouts, spec_of

from moe_compile import ops  # noqa: F401  (registers the operators)
from moe_compile.providers import Tactic
from moe_compile.providers.aten import Aten, path_of
from moe_compile.providers.aten_backward import backward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
experts = torch.ops.moe_compile.experts
PLAN = "*:aten"


def on_cuda(c: Case) -> Case:
    return dataclasses.replace(c.map(torch.Tensor.cuda), ids=c.ids.cuda())


def paths(c: Case) -> list[str]:
    return ["blocks", *(["grouped"] if path_of(c.spec, c.hidden.device) == "grouped" else [])]


def run(c: Case, path: str) -> torch.Tensor:
    return Aten().build(Tactic.of(path=path), c.spec, c.hidden.device)(c.hidden, c.ids, c.weights, c.p)


def gradients(c: Case, dout: torch.Tensor, path: str) -> list[torch.Tensor]:
    needs = [True, c.weights is not None] + [True] * len(c.p.tensors())
    return backward(c.spec, dout, c.hidden, c.ids, c.weights, c.p, needs, path)


def oracle_gradients(c: Case, dout: torch.Tensor) -> list[torch.Tensor]:
    leaf = c.map(lambda t: t.detach().double().requires_grad_())
    return list(torch.autograd.grad(leaf.oracle(), leaf.leaves(), dout.double(), materialize_grads=True))


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
@pytest.mark.parametrize("case", layouts(), ids=layout_id)
def test_every_layout(case, dtype):
    """With invalid routes, and without a host sync (an empty expert is there, too: 5 of 6 are drawn)."""
    torch.manual_seed(0)
    ids = torch.randint(-1, 5, (33, 2))
    c = on_cuda(case_of(spec_of(dtype, **case), 33, ids=ids))
    dout = torch.randn_like(c.hidden)
    want, want_grads = c.oracle(), oracle_gradients(c, dout)
    for path in paths(c):
        run(c, path)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, grads = run(c, path), gradients(c, dout, path)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_close(out, want, dtype)
        for got, want_grad in zip(grads, want_grads, strict=True):
            assert_close(got, want_grad, dtype, slack=4)


@pytest.mark.parametrize("T", [1, 300])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_cuda_graph(dtype, T):
    c = on_cuda(case_of(spec_of(dtype, E=32, K=4, H=64, I=32, bias="both"), T))
    other = on_cuda(case_of(c.spec, T, seed=1))
    dout = torch.ones_like(c.hidden)
    for path in paths(c):
        static = c.map(torch.clone)
        static = dataclasses.replace(static, ids=c.ids.clone())
        run(static, path), gradients(static, dout, path)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, grads = run(static, path), gradients(static, dout, path)
        for case in (c, other):
            for a, b in zip((*static.leaves(), static.ids), (*case.leaves(), case.ids), strict=True):
                a.copy_(b)
            graph.replay()
            assert torch.equal(out, run(case, path))
            for got, want in zip(grads, gradients(case, dout, path), strict=True):
                assert_close(got, want, dtype)  # atomics add in any order


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_nothing_reaches_through_an_invalid_route(dtype):
    ids = torch.tensor([[0, 6], [-1, 7], [1, 0], [-5, 2]])
    c = on_cuda(case_of(spec_of(dtype, bias="both"), 4, ids=ids))
    invalid = (c.ids < 0) | (c.ids >= 6)
    hidden = c.hidden.masked_fill(invalid.all(1, keepdim=True), torch.nan)
    poison = dataclasses.replace(c, hidden=hidden, weights=c.weights.masked_fill(invalid, torch.nan))
    dout = torch.ones_like(c.hidden)
    for path in paths(c):
        torch.empty(1 << 26, device="cuda").fill_(torch.nan)  # what uninitialized memory may hold
        assert torch.equal(run(poison, path), run(c, path))
        assert not run(poison, path)[1].any()
        for got, want in zip(gradients(poison, dout, path), gradients(c, dout, path), strict=True):
            assert torch.isfinite(got).all()
            assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_operators(dtype):
    c = on_cuda(case_of(spec_of(dtype, bias="both"), 9)).requires_grad()
    torch.library.opcheck(experts.default, (*c.args, PLAN))
    with torch.autocast("cuda", torch.float16):
        assert_close(experts(*c.args, PLAN), c.oracle(), dtype)
    assert experts(*case_args_without_tokens(c), PLAN).shape == (0, 32)


def case_args_without_tokens(c: Case) -> tuple:
    return dataclasses.replace(c, hidden=c.hidden[:0], ids=c.ids[:0], weights=c.weights[:0]).args


def test_compiled_with_cuda_graphs():
    c = on_cuda(case_of(spec_of("bf16"), 16)).requires_grad()
    args = c.args

    def step(x: torch.Tensor) -> torch.Tensor:
        return experts(x * 2, *args[1:], PLAN) + x

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        grads = []
        for f in (step, compiled):
            x = c.hidden.detach().clone().requires_grad_()
            f(x).square().sum().backward()
            grads.append(x.grad.clone())
        assert_close(grads[1], grads[0], "bf16")
