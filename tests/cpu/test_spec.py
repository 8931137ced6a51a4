"""Specs, activations and plans: what prints parses back, derivatives are autograd's, and errors name the field."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile import activation as A
from moe_compile import spec as S
from moe_compile.activation import GATE, UP, Activation, Expr, apply, const, derivative, evaluate, parse_expr
from moe_compile.providers import Candidate, Plan, Tactic
from moe_compile.spec import ExpertsSpec, Layout, MoESpec, RouterSpec

OAI = "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))"
NAMES = A.activation_names()

sizes = st.integers(1, 10**5)
dtypes = st.sampled_from(tuple(S.DTYPES))
numbers = st.floats(allow_nan=False, width=64)


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> Expr:
    if depth == 0 or draw(st.booleans()):
        return draw(st.one_of(st.sampled_from((GATE, UP)), numbers.map(const)))
    op = draw(st.sampled_from(tuple(A.pointwise_table())))
    return apply(op, *(draw(expressions(depth=depth - 1)) for _ in range(A.pointwise_table()[op].arity)))


@st.composite
def experts_specs(draw: st.DrawFn) -> ExpertsSpec:
    act = draw(st.sampled_from((*NAMES, OAI)).map(Activation.parse))
    placements = [h for h in S.HALVES if h != "up"] if act.gated else ["up"]
    layout = Layout(storage=draw(st.sampled_from(S.GATE_UP_STORAGE)), halves=draw(st.sampled_from(placements)))
    return ExpertsSpec(
        **{field: draw(sizes) for field in "EKHI"},
        act=act,
        gate_up=layout,
        down=draw(st.sampled_from(S.DOWN_STORAGE)),
        bias=draw(st.sampled_from(S.BIASES)),
        weight=draw(st.sampled_from(S.WEIGHT_SIDES)),
        **{field: draw(dtypes) for field in ("x", "w", "out")},
        tensors=draw(st.sampled_from(S.TENSORS)),
        post=(post := draw(st.sampled_from(S.POSTS))),
        eps=0.0 if post == "none" else draw(st.floats(0, 1)),
    )


@st.composite
def router_specs(draw: st.DrawFn) -> RouterSpec:
    groups, size = draw(st.integers(1, 8)), draw(st.integers(1, 64))
    E = groups * size
    score, bias = draw(st.sampled_from(S.SCORES)), draw(st.booleans())
    masked = groups > 1 and not bias and not score.startswith("topk_")
    return RouterSpec(
        E=E,
        K=draw(st.integers(1, E)),
        score=score,
        score_dtype=draw(dtypes),
        bias=bias,
        groups=groups,
        top_groups=draw(st.integers(1, groups)),
        group_score=draw(st.sampled_from(("max", "top2_sum"))) if groups > 1 else "none",
        group_fill=draw(st.sampled_from((0.0, -math.inf))),
        values=draw(st.sampled_from(S.VALUES)) if masked else "score",
        renorm=draw(st.sampled_from(S.RENORMS)),
        eps=draw(st.floats(0, 1)),
        scale=draw(st.floats(1e-3, 1e3)),
        expert_scale=draw(st.booleans()),
        logits=draw(dtypes),
        out=draw(dtypes),
    )


tactics = st.lists(
    st.tuples(st.from_regex(r"[A-Za-z_]+", fullmatch=True), st.integers() | st.from_regex(r"[a-z]+", fullmatch=True))
).map(lambda knobs: Tactic(tuple(knobs)))
candidates = st.builds(Candidate, provider=st.from_regex(r"[a-z_]+", fullmatch=True), tactic=tactics)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    bounds = (*sorted(draw(st.sets(st.integers(1, 10**6), max_size=4))), None)
    return Plan(tuple((b, draw(candidates)) for b in bounds))


@given(experts_specs(), st.none() | router_specs())
def test_specs_print_on_one_line_and_parse_back(experts, router):
    if router:
        experts = dataclasses.replace(experts, E=max(1, router.E - 1), K=router.K)
    spec = MoESpec(experts=experts, router=router)
    line = str(spec)
    assert "\n" not in line
    parsed = MoESpec.parse(line)
    assert parsed == spec
    assert hash(parsed) == hash(spec)
    assert ExpertsSpec.parse(str(experts)) == experts
    if router:
        assert RouterSpec.parse(str(router)) == router


@settings(max_examples=300)
@given(expressions())
def test_expressions_parse_back(expr):
    if any(math.isnan(c) for c in A._constants(expr)):
        return  # a folded log(-1): equal to nothing
    assert parse_expr(str(expr)) == expr


@given(plans())
def test_plans_parse_back(plan):
    assert Plan.parse(str(plan)) == plan


@given(plans(), st.integers(0, 2 * 10**6))
def test_plan_serves_each_count_by_the_first_bucket_that_holds_it(plan, T):
    fits = [c for bound, c in plan.buckets if bound is None or T <= bound]
    assert plan.at(T) == fits[0]


def test_plan_text():
    text = "16:aten;*:triton_grouped(BLOCK_M=64,path=wide)"
    plan = Plan.parse(text)
    assert plan.at(16) == Candidate(provider="aten")
    assert plan.at(17) == Candidate(provider="triton_grouped", tactic=Tactic.of(BLOCK_M=64, path="wide"))
    assert str(plan) == text


@pytest.mark.parametrize("text", ["", "16:aten", "*:aten;16:aten", "16:aten;16:aten;*:aten", "*:aten;*:aten", "x:aten"])
def test_bad_plans(text):
    with pytest.raises(ValueError, match=r"plan|bucket|candidate"):
        Plan.parse(text)


def test_weight_shapes():
    spec = ExpertsSpec(E=4, K=2, H=8, I=3, act=Activation.parse("swiglu"))
    assert (spec.G, spec.weight_shapes()) == (6, ((4, 6, 8), (4, 8, 3)))
    separate = dataclasses.replace(spec, gate_up=Layout(storage="EHG", halves="separate"), down="EIH")
    assert separate.weight_shapes() == ((4, 8, 3), (4, 8, 3), (4, 3, 8))
    up = dataclasses.replace(spec, act=Activation.parse("relu2"), gate_up=Layout(halves="up"))
    assert (up.G, up.gated, up.weight_shapes()) == (3, False, ((4, 3, 8), (4, 8, 3)))


SWIGLU = Activation.parse("swiglu")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Layout(storage="HEG"), "storage='HEG' is not one of EGH, EHG"),
        (lambda: Layout.parse("EGH:both"), "halves='both' is not one of"),
        (lambda: ExpertsSpec(E=0, K=1, H=1, I=1, act=SWIGLU), "E=0 must be at least 1"),
        (lambda: ExpertsSpec(E=1, K=1, H=1, I=1, act=SWIGLU, x="f8"), "x='f8' is not one of f64, f32, bf16, f16"),
        (lambda: ExpertsSpec(E=1, K=1, H=1, I=1, act=SWIGLU, gate_up=Layout(halves="up")), "disagree: is there a gate"),
        (lambda: ExpertsSpec.parse("experts(E=1)"), "K, H, I, act missing"),
        (lambda: ExpertsSpec.parse("experts(E=1 Q=2)"), "'Q' is not one of E, K"),
        (lambda: ExpertsSpec.parse("router(E=1)"), "is not 'experts"),
        (lambda: RouterSpec(E=8, K=9), "K=9 must be in 1..E=8"),
        (lambda: RouterSpec(E=8, K=2, groups=3, group_score="max"), "groups=3 must divide E=8"),
        (lambda: RouterSpec(E=8, K=2, groups=4, top_groups=5, group_score="max"), "top_groups=5 be in 1..groups"),
        (lambda: RouterSpec(E=8, K=2, groups=2), "groups=2 and group_score=none disagree"),
        (lambda: RouterSpec(E=8, K=2, score="tanh"), "score='tanh' is not one of"),
        (lambda: MoESpec.parse("experts"), "is not 'experts"),
        (lambda: parse_expr("mul(gate,up"), "ends too early"),
        (lambda: parse_expr("mul(gate)"), "mul takes 2 arguments"),
        (lambda: parse_expr("swish(gate)"), "unknown 'swish'; known are gate, up"),
        (lambda: parse_expr("gate up"), "not an expression of"),
        (lambda: parse_expr("gate)"), "left over"),
        (lambda: Candidate.parse("a-b"), "is not 'provider' or"),
    ],
)
def test_errors_name_the_field(build, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the message is asserted below, without a regex)
        build()
    assert message in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_named_activations_keep_their_names(name):
    act = Activation.parse(name)
    assert str(act) == act.name == name
    assert Activation.parse(str(act.expr)) == act


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (OAI, "swiglu_oai(alpha=1.702,limit=7)"),
        ("mul(silu(minimum(gate,10)),minimum(maximum(up,-10),10))", "swiglu_clamped(limit=10)"),
        ("mul(minimum(silu(gate),7),minimum(maximum(up,-7),7))", "swiglu_step(limit=7)"),
        ("mul(tanh(gate),up)", "expression"),
        ("mul(silu(minimum(gate,10)),minimum(maximum(up,-9),9))", "expression"),
    ],
)
def test_names_with_parameters(text, name):
    assert Activation.parse(text).name == name


def test_normal_form():
    assert parse_expr("mul(up,silu(gate))") == parse_expr("mul(silu(gate),up)")
    assert parse_expr("add(mul(up,1),0)") == UP
    assert parse_expr("mul(up,mul(2,3))") == parse_expr("mul(6,up)")
    assert parse_expr("sub(up,gate)") != parse_expr("sub(gate,up)")


def _gradients(expr: Expr, gate: torch.Tensor, up: torch.Tensor) -> None:
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    value = evaluate(expr, gate, up)
    wanted = torch.autograd.grad(value.sum(), (gate, up), allow_unused=True, materialize_grads=True)
    for variable, want in zip(("gate", "up"), wanted, strict=True):
        got = evaluate(derivative(expr, variable), gate.detach(), up.detach())
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("op", [op for op in A.pointwise_table() if op not in ("le", "lt", "ge", "gt")])
def test_derivative_of_each_function_is_autograds(op):
    torch.manual_seed(0)
    # positive for log, sqrt and pow; no two equal, so no kink is hit
    gate, up = (torch.rand(64, dtype=torch.float64) + 0.1 for _ in range(2))
    args = (GATE, UP)[: A.pointwise_table()[op].arity]
    _gradients(Expr(op, args), gate, up)
    _gradients(apply("mul", UP, apply(op, *(apply("mul", a, UP) for a in args))), gate, up)
    if op not in ("log", "log1p", "sqrt", "rsqrt", "pow"):
        _gradients(Expr(op, args), torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64))


@pytest.mark.parametrize("text", [*NAMES, OAI, "mul(silu(minimum(gate,10)),minimum(maximum(up,-10),10))"])
def test_derivative_of_activations_is_autograds(text):
    torch.manual_seed(0)
    gate, up = (5 * torch.randn(256, dtype=torch.float64) for _ in range(2))
    _gradients(parse_expr(A._NAMED.get(text, text)), gate, up)


def test_gradient_passes_at_a_clamps_bound_as_torch_clamp_does():
    x = torch.tensor([-8.0, -7.0, 0.0, 7.0, 8.0], dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(x.clamp(-7, 7).sum(), x)
    got = evaluate(derivative(parse_expr("minimum(maximum(up,-7),7)"), "up"), None, x.detach())
    torch.testing.assert_close(got, want)


def test_asking_torch_about_a_clamps_bound_starts_no_engine(monkeypatch):
    """It would ask for CUDA devices, and a process forked after that can't use one."""
    x = torch.zeros((), requires_grad=True)
    (want,) = torch.autograd.grad(x.clamp(max=0.0), x)
    monkeypatch.setattr("torch.autograd._engine_run_backward", None)
    with pytest.raises(TypeError):
        torch.autograd.grad(x.clamp(max=0.0), x)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert A._passes_at_a_bound() == bool(want.item())


def test_constant_expressions_have_the_inputs_shape_and_dtype():
    up = torch.ones(2, 3, dtype=torch.bfloat16)
    value = evaluate(const(2.5), None, up)
    assert (value.shape, value.dtype, value.unique().tolist()) == (up.shape, up.dtype, [2.5])


@pytest.mark.parametrize(("short", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16), ("f64", torch.float64)])
def test_dtype_names(short, dtype):
    assert S.torch_dtype(short) is dtype
    assert S.short_dtype(dtype) == short
    assert S.short_dtype(torch.int64) is None


@pytest.mark.parametrize("text", ["swiglu", "reglu", "mul(add(silu(gate),tanh(gate)),mul(silu(gate),up))", "relu2"])
def test_evaluation_that_reuses_memory_gives_the_same_and_leaves_the_inputs(text: str) -> None:
    expr = Activation.parse(text).expr
    gate, up = torch.randn(2, 5, 7, dtype=torch.float64).unbind()
    kept = gate.clone(), up.clone()
    assert torch.equal(evaluate(expr, gate, up, reuse=True), evaluate(expr, gate, up))
    assert torch.equal(gate, kept[0])
    assert torch.equal(up, kept[1])
