"""The reference against formulas written out by hand, and its router against the modules that models really run."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from operand_cases import assert_close, case_of, layout_id, layouts, spec_of

from moe_compile.operands import Listed, canonical, stacked
from moe_compile.providers import ExpertWeights
from moe_compile.reference import exact, experts, route
from moe_compile.spec import RouterSpec, torch_dtype


def test_experts_is_the_formula():
    spec = spec_of("f64", bias="both", E=4, K=3)
    c = case_of(spec, 5)
    got = experts(spec, c.hidden, c.ids, c.weights, c.p)
    want = torch.zeros(5, spec.H, dtype=torch.float64)
    for t in range(5):
        for k in range(3):
            e = c.ids[t, k]
            gate, up = (c.p.gate_up[0][e] @ c.hidden[t] + c.p.gate_up_bias[0][e]).chunk(2)
            y = c.p.down[e] @ (F.silu(gate) * up) + c.p.down_bias[e]
            want[t] += c.weights[t, k] * y
    assert_close(got, want, "f64")


@pytest.mark.parametrize("case", layouts(), ids=layout_id)
def test_every_layout_is_the_same_function_of_its_canonical_views(case):
    spec = spec_of("f64", **case)
    c = case_of(spec, 7)
    view = canonical(spec, c.p)
    storages = {t.untyped_storage().data_ptr() for t in c.p.tensors()}
    fields = [getattr(view, f.name) for f in dataclasses.fields(view)]
    views = [t for f in fields if f is not None for t in (f.tensors if isinstance(f, Listed) else (f,))]
    assert all(t.untyped_storage().data_ptr() in storages for t in views)
    assert (view.gate_EIH is None) == (not spec.gated)
    assert view.up_EIH.shape == (spec.E, spec.I, spec.H)

    halves = [view.gate_EIH, view.up_EIH] if spec.gated else [view.up_EIH]
    biases = [view.gate_bias_EI, view.up_bias_EI] if spec.gated else [view.up_bias_EI]
    layout = type(spec.gate_up)(halves="gate_up" if spec.gated else "up")
    plain = spec_of("f64", **{**case, "gate_up": layout, "down": "EHI", "tensors": "stacked"})
    p = ExpertWeights(
        gate_up=(torch.cat(list(map(stacked, halves)), 1),),
        down=stacked(view.down_EHI).contiguous(),
        gate_up_bias=(torch.cat(list(map(stacked, biases)), 1),) if spec.has_gate_up_bias else (),
        down_bias=None if c.p.down_bias is None else stacked(c.p.down_bias),
        post_scale=c.p.post_scale,
    )
    got, want = (experts(s, c.hidden, c.ids, c.weights, w) for s, w in ((spec, c.p), (plain, p)))
    assert_close(got, want, "f64")


def test_the_norm_of_an_experts_output_is_the_formula():
    spec = spec_of("f64", bias="down", post="scaled_rms", eps=0.25, K=1)
    c = case_of(spec, 4)
    got = experts(spec, c.hidden, c.ids, c.weights, c.p)
    for t, e in enumerate(c.ids[:, 0]):
        gate, up = (c.p.gate_up[0][e] @ c.hidden[t]).chunk(2)
        z = (c.p.down[e] @ (F.silu(gate) * up) + c.p.down_bias[e]) * c.p.post_scale
        assert_close(got[t], c.weights[t, 0] * z / ((z * z).sum() / spec.H + 0.25) ** 0.5, "f64")


def test_invalid_routes_contribute_nothing():
    spec = spec_of("f32", bias="both")
    ids = torch.tensor([[0, 6], [-1, 5], [9, -7]])
    c = case_of(spec, 3, ids=ids)
    got = experts(spec, c.hidden, ids, c.weights, c.p)
    alone = experts(spec, c.hidden, ids, torch.where((ids < 0) | (ids >= 6), 0, c.weights), c.p)
    assert torch.equal(got, alone)
    assert torch.equal(got[2], torch.zeros(spec.H))


def test_sums_are_kept_in_fp32_and_rounded_once():
    spec = spec_of("bf16", K=4)
    c = case_of(spec, 64)
    got, want = experts(spec, c.hidden, c.ids, c.weights, c.p), c.oracle()
    # an fp64 result rounded to bf16 differs from the oracle by half an ulp: 2^-9, uniform
    rounding = (want.to(torch.bfloat16).double() - want).pow(2).mean().sqrt()
    assert (got.double() - want).pow(2).mean().sqrt() < 1.5 * rounding
    more = experts(spec, c.hidden, c.ids, c.weights, c.p, compute=torch.float64)
    assert (more.dtype, exact(spec).x) == (torch.bfloat16, "f64")


# --- router -----------------------------------------------------------------------------------------------------------

T, E, H = 64, 16, 24


def _module(cls, config: dict, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    router = cls(SimpleNamespace(hidden_size=H, **config))
    for p in router.parameters():
        torch.nn.init.normal_(p)
    for b in router.buffers():
        torch.nn.init.normal_(b)
    return router.to(dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("normalized", [True, False])
def test_qwen3_moe(dtype, normalized):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = {"num_experts_per_tok": 4, "num_experts": E, "norm_topk_prob": normalized}
    router = _module(Qwen3MoeTopKRouter, config, torch_dtype(dtype))
    logits, weights, ids = router(torch.randn(T, H).to(torch_dtype(dtype)))
    spec = RouterSpec(E=E, K=4, renorm="sum" if normalized else "none", logits=dtype, out=dtype)
    got = route(spec, logits)
    assert torch.equal(got[1], ids)
    assert torch.equal(got[0], weights)


def test_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    router = _module(GptOssTopKRouter, {"num_experts_per_tok": 4, "num_local_experts": E}, torch.bfloat16)
    logits, weights, ids = router(torch.randn(T, H).bfloat16())
    got = route(RouterSpec(E=E, K=4, score="topk_softmax", score_dtype="bf16", logits="bf16", out="bf16"), logits)
    assert torch.equal(got[1], ids)
    assert torch.equal(got[0], weights)


def test_deepseek_v3_groups_and_bias():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = {
        "num_experts_per_tok": 3, "num_local_experts": E, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": True,
    }  # fmt: skip
    router = _module(DeepseekV3TopkRouter, config, torch.float32)
    logits, weights, ids = router(torch.randn(T, H))
    spec = RouterSpec(
        E=E, K=3, score="sigmoid", bias=True, groups=4, top_groups=2, group_score="top2_sum", group_fill=-torch.inf,
        renorm="sum_plus_eps", eps=1e-20, scale=2.5, logits="f32",
    )  # fmt: skip
    got_weights, got_ids = route(spec, logits, router.e_score_correction_bias)
    # the model asks for unsorted top-k: the same set, whose weights are summed in another order
    order, got_order = ids.argsort(-1), got_ids.argsort(-1)
    assert torch.equal(got_ids.gather(1, got_order), ids.gather(1, order))
    torch.testing.assert_close(got_weights.gather(1, got_order), weights.gather(1, order), rtol=3e-7, atol=0)


def test_group_limited_greedy():
    """DeepSeek-V2: a group's score is its maximum, and the other groups' scores become 0."""
    logits = torch.randn(T, E)
    spec = RouterSpec(E=E, K=3, groups=4, top_groups=2, group_score="max", scale=16.0, logits="f32")
    scores = logits.softmax(-1, dtype=torch.float32)
    groups = scores.view(T, 4, -1).max(-1).values.topk(2, sorted=False).indices
    mask = torch.zeros(T, 4).scatter_(1, groups, 1).repeat_interleave(4, 1).bool()
    weights, ids = scores.masked_fill(~mask, 0.0).topk(3)
    got = route(spec, logits)
    assert torch.equal(got[1], ids)
    assert torch.equal(got[0], weights * 16.0)


def test_more_choices_than_the_best_groups_have():
    """Experts of groups left out are chosen last; they weigh what they scored, or with values=choice what they are."""
    logits = torch.tensor([[4.0, 3, 2, 1]])
    fields = {"E": 4, "K": 3, "score": "sigmoid", "groups": 2, "top_groups": 1, "group_score": "max", "logits": "f32"}
    s = logits.sigmoid()[0]
    for values, last in (("score", s[2]), ("choice", torch.tensor(0.0))):
        weights, ids = route(RouterSpec(**fields, values=values), logits)
        assert ids[0, :2].tolist() == [0, 1]
        assert ids[0, 2] in (2, 3)
        if values == "score":
            last = s[ids[0, 2]]
        assert torch.equal(weights[0], torch.stack([s[0], s[1], last]))


def test_gemma4_scales_each_expert():
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    config = {"rms_norm_eps": 1e-6, "num_experts": E, "top_k_experts": 3}
    router = _module(Gemma4TextRouter, config, torch.float32)
    seen = []
    router.proj.register_forward_hook(lambda module, args, out: seen.append(out))
    _, weights, ids = router(torch.randn(T, H))
    got = route(
        RouterSpec(E=E, K=3, renorm="sum", expert_scale=True, logits="f32"), seen[0], None, router.per_expert_scale
    )
    assert torch.equal(got[1], ids)
    assert torch.equal(got[0], weights)


def test_sqrt_softplus_and_late_sigmoid():
    logits = torch.randn(T, E).bfloat16()
    weights, ids = route(RouterSpec(E=E, K=2, score="sqrtsoftplus", scale=1.5), logits)
    want = F.softplus(logits.float()).sqrt().topk(2)
    assert torch.equal(ids, want.indices)
    assert torch.equal(weights, want.values * 1.5)
    weights, ids = route(RouterSpec(E=E, K=1, score="topk_sigmoid", out="bf16"), logits)
    values, index = logits.topk(1)
    assert torch.equal(ids, index)
    assert torch.equal(weights, values.float().sigmoid().bfloat16())


def test_bias_chooses_but_does_not_weigh():
    logits = torch.zeros(1, 4)
    weights, ids = route(
        RouterSpec(E=4, K=1, score="sigmoid", bias=True, logits="f32"), logits, torch.tensor([0.0, 0, 9, 0])
    )
    assert (ids.tolist(), weights.tolist()) == ([[2]], [[0.5]])
