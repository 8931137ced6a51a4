"""Experts in tensors of their own on a CUDA device: read where they are, with one tensor's bits, not copied."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytest.importorskip("triton")

from moe_compile import journal, ops  # noqa: E402, F401
from moe_compile.backend import moe_backend  # noqa: E402
from moe_compile.hardware import facts  # noqa: E402
from moe_compile.operands import ExpertWeights, Listed  # noqa: E402
from moe_compile.plan import shortlist  # noqa: E402
from moe_compile.providers import Plan, launcher  # noqa: E402
from moe_compile.spec import ExpertsSpec, Layout  # noqa: E402
from moe_compile.suite import GEOMETRIES, tokens_of, weights_of  # noqa: E402

GPU = torch.device("cuda", 0)
QWEN = GEOMETRIES["qwen3_30b"]
SEPARATE = Layout(halves="separate")


def apart(p: ExpertWeights) -> ExpertWeights:
    """The same experts, each in tensors of its own."""

    def each(w: torch.Tensor) -> Listed:
        return Listed(tuple(t.clone() for t in w))

    return dataclasses.replace(
        p, gate_up=tuple(map(each, p.gate_up)), down=each(p.down), gate_up_bias=tuple(map(each, p.gate_up_bias)),
        down_bias=None if p.down_bias is None else each(p.down_bias),
    )  # fmt: skip


def spec_of(**changes: Any) -> tuple[ExpertsSpec, ExpertsSpec]:
    """(experts in one tensor, in tensors of their own)."""
    spec = dataclasses.replace(QWEN, **changes)
    return spec, dataclasses.replace(spec, tensors="listed")


def peak(call: Any) -> int:
    """Bytes that a call needs beside what is allocated."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("T", [1, 16, 256, 4096])
@pytest.mark.parametrize("changes", [{}, {"gate_up": SEPARATE, "bias": "both"}], ids=["together", "separate"])
def test_the_bits_of_one_tensor(changes: dict[str, Any], T: int) -> None:
    """At the size of qwen3_30b, for what the plan would measure; also from a CUDA graph."""
    together, alone = spec_of(**changes)
    p = weights_of(together, GPU)
    own = apart(p)
    inputs = tokens_of(together, T, GPU)
    inputs[1][0, 0] = together.E  # a route of no expert
    for priced in shortlist(alone, facts(GPU), T, ("triton_decode", "triton_grouped")):
        want = launcher(priced.candidate, together, GPU)(*inputs, p)
        run = launcher(priced.candidate, alone, GPU)
        got = run(*inputs, own)
        assert torch.equal(got, want), str(priced.candidate)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = run(*inputs, own)
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, want), str(priced.candidate)
        routes = T * together.K * (together.H + together.I) * 2
        assert peak(functools.partial(run, *inputs, own)) <= 2 * routes + (1 << 22)


@pytest.mark.parametrize("T", [1, 16, 256, 4096])
def test_the_plan_picks_them(T: int) -> None:
    _, alone = spec_of()
    best = shortlist(alone, facts(GPU), T, ("aten", "triton_decode", "triton_grouped"))[0]
    assert best.candidate.provider in ("triton_decode", "triton_grouped")


def test_a_capture_without_a_call_before_is_left_to_aten() -> None:
    together, alone = spec_of(E=8, I=256, H=512)
    p = weights_of(together, GPU)
    own, other = apart(p), apart(p)
    inputs = tokens_of(together, 16, GPU)
    candidate = shortlist(alone, facts(GPU), 16, ("triton_grouped",))[0].candidate
    run = launcher(candidate, alone, GPU)
    want = run(*inputs, own)
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="no table of the experts' addresses"), torch.cuda.graph(graph):
        got = run(*inputs, other)
    graph.replay()
    assert ((got - want).norm() / want.norm()).item() < 1e-2
    assert torch.equal(run(*inputs, other), want)


def test_a_first_call_on_another_stream() -> None:
    together, alone = spec_of(E=8, I=256, H=512)
    p = weights_of(together, GPU)
    own = apart(p)
    inputs = tokens_of(together, 16, GPU)
    candidate = shortlist(alone, facts(GPU), 16, ("triton_grouped",))[0].candidate
    want = launcher(candidate, together, GPU)(*inputs, p)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = [launcher(candidate, alone, GPU)(*inputs, own) for _ in range(3)]
    torch.cuda.synchronize()
    assert all(torch.equal(g, want) for g in got)


def test_weights_that_move_are_read_where_they_are() -> None:
    together, alone = spec_of(E=8, I=256, H=512, gate_up=SEPARATE)
    p = weights_of(together, GPU)
    own = apart(p)
    inputs = tokens_of(together, 16, GPU)
    candidate = shortlist(alone, facts(GPU), 16, ("triton_grouped",))[0].candidate
    operator = functools.partial(torch.ops.moe_compile.experts, *inputs)
    plan = str(Plan.of([(None, candidate)]))
    first = operator(*own.arguments(), str(alone), plan)
    assert torch.equal(first, operator(*p.arguments(), str(together), plan))
    for t in own.down.tensors:
        t.data = -t
    assert torch.equal(operator(*own.arguments(), str(alone), plan), -first)


class Expert(nn.Module):
    def __init__(self, H: int, I: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False), nn.Linear(I, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Loop(nn.Module):
    """A ModuleList of experts, written out one after the other. The router is in fp32: no choice is a near tie."""

    def __init__(self, E: int, K: int, H: int, I: int) -> None:
        super().__init__()
        self.router, self.K = nn.Linear(H, E, bias=False), K
        self.experts = nn.ModuleList(Expert(H, I) for _ in range(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, ids = torch.topk(F.softmax(self.router(x.float()), dim=-1), self.K, dim=-1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (w * (ids == e)).sum(-1, keepdim=True).to(x.dtype)
        return out


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_list_of_modules_is_not_copied(mode: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    E, K, H, I = 16, 4, 2048, 768
    model = Loop(E, K, H, I).to(GPU, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    for m in (model, exact):
        m.router.float()
    backend = functools.partial(moe_backend, mode=mode, options={"moe.strict": True})
    with torch.no_grad(), journal.capture() as events:
        run = torch.compile(model, backend=backend, dynamic=False)
        for T in (1, 64):
            for seed in range(3):
                x = torch.randn(T, H, generator=torch.Generator().manual_seed(seed)).to(GPU, torch.bfloat16)
                torch.compiler.cudagraph_mark_step_begin()
                got, want = run(x).double(), exact(x.double())
                assert ((got - want).norm() / want.norm()).item() < 1e-2
        plans = [e.plan for e in events if isinstance(e, journal.Planned)]
        assert len(plans) == 2
        assert all("triton" in plan and "aten" not in plan for plan in plans), plans
        one = sum(p.numel() * p.itemsize for p in model.experts[0].parameters())
        x = torch.randn(64, H, device=GPU, dtype=torch.bfloat16)
        run(x)
        assert peak(lambda: run(x)) < one
