"""Planning: ranking by price, wishes of the user, the copy budget; on facts of devices that aren't here."""

import dataclasses

import pytest

from moe_compile import cost, plan
from moe_compile.activation import Activation
from moe_compile.hardware import named
from moe_compile.options import OptionError
from moe_compile.plan import TOKEN_BUCKETS, plan_experts, plan_route, shortlist
from moe_compile.providers import Plan, providers
from moe_compile.spec import ExpertsSpec, RouterSpec

pytest.importorskip("triton")
H200 = named("sm_90")
OURS = ("triton_decode", "triton_grouped")


def spec_of(**changes) -> ExpertsSpec:
    return ExpertsSpec(**{"E": 128, "K": 8, "H": 2048, "I": 768, "act": Activation.parse("swiglu"), **changes})


def test_a_list_is_ranked_by_price_and_the_plan_is_of_the_cheapest():
    planning = plan_experts(spec_of(), H200)
    assert tuple(planning.lists) == TOKEN_BUCKETS
    for bound, ranked in planning.lists.items():
        prices = [p.seconds for p in ranked]
        assert prices == sorted(prices)
        assert len(prices) <= plan.SHORT_LIST
        assert planning.plan.at(bound or 10**6) == ranked[0].candidate
    assert Plan.parse(str(planning.plan)) == planning.plan


def test_few_tokens_stream_and_many_are_tiled():
    planning = plan_experts(spec_of(), H200)
    assert planning.plan.at(1).provider == "triton_decode"
    assert planning.plan.at(256).provider == "triton_grouped"
    assert planning.plan.at(4096).provider == "triton_hopper"
    assert plan_experts(spec_of(), named("A100")).plan.at(4096).provider == "triton_grouped"


def test_named_knobs_win_and_the_others_are_completed():
    planning = plan_experts(spec_of(), H200, "triton_grouped(M=64,SWAP1=1)")
    for ranked in planning.lists.values():
        for p in ranked:
            knobs = dict(p.candidate.tactic.knobs)
            assert p.candidate.provider == "triton_grouped"
            assert (knobs["M"], knobs["SWAP1"]) == (64, 1)
            assert len(knobs) == 13


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ("triton_grouped(M=24)", "M=24 is not a power of two"),
        ("triton_grouped(path=hit)", "knobs are M, N1"),
        ("triton_grouped(N1=256,S1=8)", "shared memory"),
        ("aten(path=hit)", "counts on the host"),
    ],
)
def test_knobs_that_cannot_be_are_the_users_error(wish, says):
    with pytest.raises(OptionError, match=says):
        plan_experts(spec_of(), H200, wish)


def test_weights_are_copied_only_within_the_budget(monkeypatch):
    monkeypatch.setattr(providers()["triton_grouped"], "copies", lambda spec: {"its own layout": 1000})
    monkeypatch.setitem(plan.COMPETE, "cuda", ("triton_decode", "triton_grouped"))
    kept = plan_experts(spec_of(), H200)
    assert {p.candidate.provider for ranked in kept.lists.values() for p in ranked if p.work} == {"triton_decode"}
    assert f"triton_grouped: {plan.COPIES}: 1000 bytes, allowed are 0" in kept.candidates
    allowed = plan_experts(spec_of(), H200, weight_copy_bytes=1000)
    assert allowed.plan.at(4096).provider == "triton_grouped"
    assert allowed.copied_bytes == 1000


def test_launches_are_priced_by_who_makes_them():
    decode, grouped = (shortlist(spec_of(), H200, 1, (name,))[0].work for name in OURS)
    load = cost.Load.uniform(128, 8)
    for work in (decode, grouped):
        graph, eager = (cost.estimate(work, H200, load, 1, mode=mode) for mode in ("graph", "eager"))
        assert eager.seconds == max(graph.seconds, H200.launch_seconds * eager.total("launches"))
    assert eager.seconds > graph.seconds  # of the four launches
    large = [cost.estimate(grouped, H200, load, 4096, mode=mode).seconds for mode in ("graph", "eager")]
    assert large[0] == large[1]  # the device is the slower one


def test_a_router_is_fused_where_one_kernel_does_all_of_it():
    router = RouterSpec(E=256, K=8, score="sigmoid", bias=True, logits="f32")
    assert plan_route(router, H200)
    assert not plan_route(router, H200, "nodes")
    for spec, device, says in (
        (router, named("cpu"), "no kernel fuses routing on cpu"),
        (dataclasses.replace(router, score_dtype="f64"), H200, "fp64"),
        (dataclasses.replace(router, E=2048), H200, "too many experts"),
    ):
        assert says in str(plan_route(spec, device))
        assert plan_route(spec, device, "op")
