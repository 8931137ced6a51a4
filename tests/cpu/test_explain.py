"""The report: built from events, grouped, printed; and `explain` on a real model, which it leaves as it was."""

import json

import pytest
import torch
from blocks import GroupedBlock, H

from moe_compile import journal
from moe_compile.explain import Report, explain
from moe_compile.journal import Where
from moe_compile.spec import MoESpec, RouterSpec
from moe_compile.tables import bucket_rows, places

EXPERTS = (
    "experts(E=8 K=2 H=64 I=32 act=swiglu gate_up=EGH:gate_up down=EHI bias=none weight=output x=f32 w=f32 out=f32)"
)
ROUTER = (
    "router(E=8 K=2 score=softmax score_dtype=f32 bias=0 groups=1 top_groups=1 group_score=none group_fill=0.0 "
    "renorm=sum eps=0.0 scale=1.0 logits=f32 out=f32)"
)
CANDIDATES = ("aten: ok", "triton_grouped: needs CUDA: cpu")


def found(graph, region, module, router_why="", spec=f"{EXPERTS} {ROUTER}"):
    where = Where(module=module, source="modeling.py:7", code="return self.experts(x)")
    return journal.RegionFound(
        graph=graph, region=region, spec=spec, where=where, root="sum_1", nodes=9, router_why=router_why
    )


def planned(graph, region, plan="16:aten;*:triton_grouped(BLOCK_M=64)"):
    return journal.Planned(graph=graph, region=region, candidates=CANDIDATES, plan=plan)


def graph_of(graph, layers, **kwargs):
    events = [journal.GraphSeen(graph=graph, nodes=100)]
    events += [found(graph, i, f"model.layers.{i}.mlp", **kwargs) for i in range(layers)]
    events += [planned(graph, i) for i in range(layers)]
    return [*events, journal.Lowered(graph=graph, regions=layers, nodes_before=100, nodes_after=40)]


def test_report_holds_what_was_recorded():
    rejected = journal.RegionRejected(
        graph=3, where=Where(module="m.9.mlp"), node="topk_9", reason="ids differ", detail="a, b"
    )
    report = Report.from_events([*graph_of(3, 2), rejected])
    assert (report.graphs, len(report.regions), report.failures) == (1, 2, ())
    first = report.regions[0]
    assert first.spec == MoESpec.parse(f"{EXPERTS} {ROUTER}")
    assert first.where == Where(module="model.layers.0.mlp", source="modeling.py:7", code="return self.experts(x)")
    assert first.candidates == CANDIDATES
    assert first.chosen == "16:aten;*:triton_grouped(BLOCK_M=64)"
    assert first.replaced
    (rejection,) = report.rejections
    assert (rejection.reason, rejection.detail, rejection.node) == ("ids differ", "a, b", "topk_9")


def test_equal_blocks_print_once():
    text = str(Report.from_events([*graph_of(0, 48), *graph_of(1, 48)]))
    assert text.splitlines()[0] == "moe_compile: 2 graphs, 96 of 96 MoE blocks replaced, 0 not proved"
    assert "model.layers.0.mlp ... model.layers.47.mlp: 96 blocks in 2 graphs" in text
    assert text.count(EXPERTS) == 1
    assert text.count(str(RouterSpec.parse(ROUTER))) == 1
    assert "computes    2 of 8 experts a token, 64 -> 32 -> 64, swiglu, weights in f32" in text
    assert "up to 16 tokens  aten\n" in text
    assert "more             triton_grouped(BLOCK_M=64)" in text
    assert "modeling.py:7  return self.experts(x)" in text


def test_blocks_that_differ_print_apart():
    text = str(Report.from_events([*graph_of(0, 2), *graph_of(1, 2, spec=EXPERTS, router_why="softmax over K")]))
    assert text.count("model.layers.0.mlp, model.layers.1.mlp: 2 blocks\n") == 2
    assert text.count("keeps its nodes: softmax over K") == 1


def test_a_failed_stage_is_told_and_its_blocks_are_not_counted_as_replaced():
    events = [e for e in graph_of(0, 2) if not isinstance(e, journal.Lowered)]
    failure = journal.StageFailed(graph=0, stage="lower", error="KeyError: 'x'")
    report = Report.from_events([*events, failure])
    assert not any(r.replaced for r in report.regions)
    text = str(report)
    assert "0 of 2 MoE blocks replaced" in text
    assert "chosen      not replaced" in text
    assert "stage lower failed, graph 0 was compiled as it was: KeyError: 'x'" in text


def test_rejections_print_reason_line_and_node():
    where = Where(module="model.layers.1.mlp", source="modeling.py:9", code="x = x.sort()")
    events = [
        journal.RegionRejected(graph=0, where=where, node="sort_1", reason="not a sort of ids", detail="dim 1"),
        journal.RegionRejected(graph=0, where=where, node="sort_2", reason="not a sort of ids", detail="dim 1"),
    ]
    text = str(Report.from_events([journal.GraphSeen(graph=0, nodes=4), *events]))
    assert "model.layers.1.mlp: not proved, left as it was (2 times)" in text
    assert "at          modeling.py:9  x = x.sort() [node sort_1]" in text


def test_empty_reports_say_so():
    assert "no graph was compiled" in str(Report.from_events([]))
    assert "nothing in the graphs looks like" in str(Report.from_events([journal.GraphSeen(graph=0, nodes=4)]))


def test_as_dict_is_json():
    report = Report.from_events(graph_of(0, 1))
    back = json.loads(json.dumps(report.as_dict()))
    assert MoESpec.parse(back["regions"][0]["spec"]) == report.regions[0].spec
    assert back["regions"][0]["where"]["module"] == "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        (["a.0.m", "a.1.m", "a.2.m"], "a.0.m ... a.2.m"),
        (["a.0.m", "a.1.m"], "a.0.m, a.1.m"),
        (["a.0.m", "a.0.m"], "a.0.m"),
        (["mlp", "a.0.m", "a.1.m"], "mlp, a.0.m, a.1.m"),
        ([""], "(module unknown)"),
        (["a.0.m", "a.0.n"], "a.0.m, a.0.n"),
    ],
)
def test_places(modules, text):
    assert places(modules) == text


# --- explain on a model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen():
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).eval()


IDS = torch.arange(12).reshape(1, 12)


def test_explain_covers_every_layer(qwen):
    with torch.no_grad():
        report = explain(qwen, IDS, use_cache=False)
    assert report.graphs == 1
    assert [r.where.module for r in report.regions] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert all(r.replaced and r.chosen for r in report.regions)
    experts = report.regions[0].spec.experts
    assert (experts.E, experts.K, experts.H, experts.I, str(experts.act)) == (8, 2, 32, 16, "swiglu")
    assert report.regions[0].spec.router is not None
    assert (report.rejections, report.failures) == ((), ())
    assert "model.layers.0.mlp.experts, model.layers.1.mlp.experts: 2 blocks" in str(report)


def test_explain_leaves_the_model_as_it_was(qwen):
    state = {k: (v.data_ptr(), v.clone()) for k, v in qwen.state_dict().items()}
    attributes = dict(vars(qwen))
    with torch.no_grad():
        eager = qwen(IDS, use_cache=False).logits
        explain(qwen, IDS, use_cache=False)
        again = qwen(IDS, use_cache=False).logits
    assert torch.equal(eager, again)
    assert vars(qwen) == attributes
    for name, (address, value) in state.items():
        assert qwen.state_dict()[name].data_ptr() == address
        assert torch.equal(qwen.state_dict()[name], value)


def test_explain_sees_a_model_that_is_compiled_already(qwen):
    compiled = torch.compile(qwen, backend="moe", options={"moe.inner": "eager"})
    with torch.no_grad():
        compiled(IDS, use_cache=False)
        assert len(explain(compiled, IDS, use_cache=False).regions) == 2
        assert len(explain(compiled, IDS, use_cache=False).regions) == 2  # and every time
        counter = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        compiled(IDS, use_cache=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counter  # its own code is still there


def test_explain_passes_options_on(qwen):
    with torch.no_grad():
        report = explain(qwen, IDS, use_cache=False, moe_options={"moe.provider": "aten", "moe.route": "nodes"})
    assert {r.chosen.partition("(")[0] for r in report.regions} == {"*:aten"}
    with pytest.raises(Exception, match=r"did you mean 'moe\.route'"), torch.no_grad():
        explain(qwen, IDS, use_cache=False, moe_options={"moe.rout": "nodes"})


def test_explain_takes_a_function_and_reports_nothing_found():
    report = explain(lambda x: torch.relu(x) + 1, torch.randn(3))
    assert (report.graphs, report.regions, report.rejections) == (1, (), ())


def bucket(tokens: int, chosen: str, *offers: tuple[str, float], bound: int | None = None, **steps: float):
    return journal.Bucket(
        bound=bound,
        tokens=tokens,
        limit=10e-6,
        bound_by="memory",
        active=8.0,
        chosen=chosen,
        offers=tuple(journal.Offer(candidate=c, predicted=s) for c, s in offers),
        steps=(("fc1", tuple(steps.items())),),
    )


def test_buckets_that_chose_alike_are_one_row_with_the_runner_up():
    narrow, wide = "triton_grouped(M=16,N1=32)", "triton_grouped(M=64,N1=32)"
    rows = bucket_rows(
        [
            bucket(1, narrow, (narrow, 12e-6), ("aten", 24e-6), bound=1),
            bucket(2, narrow, (narrow, 20e-6), ("aten", 25e-6), bound=2, fill=0.125, waves=1.5),
            bucket(4, wide, (wide, 40e-6), (narrow, 44e-6), bound=4, fill=0.5, waves=3.0),
            bucket(8, narrow, (narrow, 50e-6), fill=0.25, waves=4.0),  # again: a run of its own
        ]
    )
    assert rows[1:] == [
        ("2", "20.0", "10.0", "50%", "memory", "8", "12%", "1.5", "aten, 1.25 x"),
        ("4", "40.0", "10.0", "25%", "memory", "8", "50%", "3.0", "M=16, 1.10 x"),
        ("8", "50.0", "10.0", "20%", "memory", "8", "25%", "4.0", "none"),
    ]


def test_the_plan_of_a_real_block_is_accounted_for():
    torch._dynamo.reset()
    with torch.no_grad():
        report = explain(GroupedBlock(), torch.randn(4, H))
    (region,) = report.regions
    assert [b.tokens for b in region.buckets] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    for b in region.buckets:
        predicted = {o.candidate: o.predicted for o in b.offers}
        assert predicted[b.chosen] == min(predicted.values())
        assert 0 < b.limit < predicted[b.chosen], "nothing is faster than the datasheet"
    assert "predicted   on CPU (cpu" in str(report)


def test_what_cannot_run_is_refused():
    with pytest.raises(TypeError, match="explain: model is a str, neither a module nor a function"):
        explain("./my-model")
