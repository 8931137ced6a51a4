"""The routing kernel in Triton's interpreter, against its twin and, where scores are equal, the rule for them."""

import dataclasses
import math

import pytest
import torch

from moe_compile import ops
from moe_compile.kernels.route import route, route_backward, route_reference
from moe_compile.spec import RouterSpec, torch_dtype

SPECS = {
    "qwen3": RouterSpec(E=16, K=4, renorm="sum", logits="bf16", out="bf16"),
    "odd": RouterSpec(E=60, K=5, logits="f32"),
    "one": RouterSpec(E=1, K=1, logits="f32"),
    "many": RouterSpec(E=1000, K=32, logits="f32", renorm="sum_at_least_eps", eps=0.5),
    "f16 scores": RouterSpec(E=64, K=6, score_dtype="f16", logits="f16", out="f16", renorm="sum"),
    "deepseek v2": RouterSpec(E=24, K=3, groups=4, top_groups=2, group_score="max", scale=16.0, logits="f32"),
    "deepseek v3": RouterSpec(
        E=24, K=4, score="sigmoid", bias=True, groups=4, top_groups=2, group_score="top2_sum", group_fill=-math.inf,
        renorm="sum_plus_eps", eps=1e-20, scale=2.5, logits="f32",
    ),
    "zeros between": RouterSpec(
        E=20, K=7, score="sigmoid", bias=True, groups=5, top_groups=2, group_score="max", renorm="sum", logits="f16",
    ),
    "deepseek v4": RouterSpec(E=16, K=4, score="sqrtsoftplus", bias=True, renorm="sum", scale=1.5, logits="f32"),
    "gpt-oss": RouterSpec(E=32, K=4, score="topk_softmax", logits="f32"),
    "llama4": RouterSpec(E=16, K=1, score="topk_sigmoid", logits="f16", out="f16"),
    "choice": RouterSpec(
        E=24, K=3, groups=6, top_groups=2, group_score="max", values="choice", expert_scale=True, logits="f32",
    ),
}  # fmt: skip


def operands(spec: RouterSpec, T: int = 7) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Logits without equal ones in a row, a bias and scales where the spec has them."""
    g = torch.Generator().manual_seed(spec.E)
    logits = (torch.rand(T, spec.E, generator=g).argsort(1) * (8 / spec.E) - 4).to(torch_dtype(spec.logits))
    bias = 0.1 * torch.randn(spec.E, generator=g) if spec.bias else None
    return logits, bias, torch.rand(spec.E, generator=g) + 0.5 if spec.expert_scale else None


@pytest.mark.parametrize("name", SPECS)
def test_it_chooses_and_weighs_as_the_reference(name):
    spec = SPECS[name]
    given = operands(spec)
    weights, ids = route(spec, *given)
    want_weights, want_ids = route_reference(spec, *given)
    assert (weights.dtype, ids.dtype) == (torch_dtype(spec.out), torch.int64)
    assert torch.equal(ids, want_ids)
    bound = {"bf16": 2**-7, "f16": 2**-10, "f32": 1e-6}[spec.out]
    torch.testing.assert_close(weights, want_weights, rtol=bound, atol=0)


@pytest.mark.parametrize("name", ["odd", "deepseek v3", "zeros between", "llama4"])
def test_of_equal_choices_the_lowest_ids_win(name):
    spec = SPECS[name]
    logits, bias, _ = operands(spec, 20)
    logits, bias = logits.round(), None if bias is None else torch.zeros_like(bias)
    _, ids = route(spec, logits, bias)
    c = logits.softmax(1) if spec.score == "softmax" else logits.float().sigmoid()
    if spec.groups > 1:
        members = c.unflatten(1, (spec.groups, -1))
        best = members.amax(2) if spec.group_score == "max" else members.topk(2, 2).values.sum(2)
        kept = torch.zeros_like(best).scatter_(1, best.sort(dim=1, descending=True, stable=True).indices[:, :2], 1.0)
        c = c.where(kept.bool().repeat_interleave(members.shape[2], 1), spec.group_fill)
    assert torch.equal(ids, c.sort(dim=1, descending=True, stable=True).indices[:, : spec.K])
    if spec.K == 1:
        first = dataclasses.replace(spec, ties="first")
        assert torch.equal(ids, route_reference(first, logits, bias)[1])
        assert torch.equal(ids, route(first, logits, bias)[1])
        zeros = -torch.zeros_like(logits)
        zeros[:, 3] = 0.0
        assert not route(first, zeros)[1].any() and not route_reference(first, zeros)[1].any()


@pytest.mark.parametrize("name", [n for n in SPECS if n != "choice"])
def test_its_gradient_is_the_operators(name):
    spec = SPECS[name]
    logits, bias, _ = operands(spec)
    _, ids = route_reference(spec, logits, bias)
    grad = torch.randn(len(ids), spec.K, generator=torch.Generator().manual_seed(2)).to(torch_dtype(spec.out))
    (want,) = ops._route_backward(grad, logits, ids, None, str(spec), [True, False])
    got = route_backward(spec, grad, logits, ids)
    assert got.dtype == want.dtype
    bound = {"bf16": 2**-7, "f16": 2**-10, "f32": 2e-6}[spec.logits]
    assert (got.double() - want.double()).abs().max() <= bound * want.double().abs().max()


def test_nan_is_the_greatest_and_no_token_is_no_launch():
    spec = SPECS["gpt-oss"]
    logits, *_ = operands(spec, 3)
    logits[1, 5] = float("nan")
    assert route(spec, logits)[1][1, 0] == 5
    assert route(spec, logits[:0])[0].shape == (0, 4)
    rows = torch.randn(3, 2 * spec.E)[:, : spec.E]  # strided
    assert torch.equal(route(spec, rows)[1], route(spec, rows.contiguous())[1])
