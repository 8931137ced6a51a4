"""Both Triton providers end to end in the interpreter, against an fp64 evaluation of the spec and the torch twins.

fp32 and fp16 only: the interpreter's tl.dot is wrong in bf16 (triton 3.9).
"""

import dataclasses

import pytest
import torch

from moe_compile import cost, reference
from moe_compile.activation import Activation, evaluate
from moe_compile.hardware import facts
from moe_compile.kernels import decode, grouped, launch, route
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.finalize import finalize, finalize_reference
from moe_compile.kernels.sort import sort_routes
from moe_compile.operands import ExpertWeights
from moe_compile.providers import Candidate, launcher
from moe_compile.providers.base import Tactic
from moe_compile.providers.triton_decode import TritonDecode
from moe_compile.providers.triton_grouped import TritonGrouped
from moe_compile.spec import GATE_UP_STORAGE, HALVES, ExpertsSpec, Layout, RouterSpec, torch_dtype
from moe_compile.verdict import OK, Reject

CPU = torch.device("cpu")
OAI = "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))"
GROUPED = [
    Tactic.parse(f"M={m},N1={n1},K1={k1},W1=4,S1=2,SWAP1={s1},TMA1={t1},N2={n2},K2={k2},W2=4,S2=2,SWAP2={s2},TMA2={t2}")
    for m, n1, k1, s1, t1, n2, k2, s2, t2 in [
        (16, 16, 32, 0, 0, 32, 16, 0, 0), (16, 32, 16, 1, 0, 16, 32, 1, 0), (16, 16, 32, 1, 1, 32, 16, 0, 1),
        (32, 16, 16, 0, 1, 16, 16, 1, 1),
    ]
]  # fmt: skip
DECODE = [Tactic.parse("N1=4,K1=32,W1=4,N2=8,K2=32,W2=4"), Tactic.parse("N1=16,K1=16,W1=4,N2=32,K2=16,W2=4")]
RUNS = [(TritonGrouped(), t) for t in GROUPED] + [(TritonDecode(), t) for t in DECODE]
run_ids = [f"{p.name}({t})" for p, t in RUNS]


def spec_of(**changes) -> ExpertsSpec:
    fields = {"E": 5, "K": 2, "H": 40, "I": 24, "act": "swiglu", "x": "f32", "w": "f32", "out": "f32", **changes}
    fields["act"] = Activation.parse(fields["act"])
    return ExpertsSpec(**fields)


def draw(spec: ExpertsSpec, T: int, seed: int = 0):
    """(hidden_TH, ids_TK, weights_TK, weights), moderate values."""
    g = torch.Generator().manual_seed(seed)
    x = torch_dtype(spec.x)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=g) * scale).to(x)

    tensors = [normal(*s, scale=s[1 if k else 2] ** -0.5 * 2) for s, k in zip(spec.weight_shapes(), (0, 0, 0))]
    rows = spec.I if spec.gate_up.halves == "separate" else spec.G
    bias = tuple(normal(spec.E, rows, scale=0.5) for _ in tensors[:-1]) if spec.has_gate_up_bias else ()
    down_bias = normal(spec.E, spec.H, scale=0.5) if spec.has_down_bias else None
    ids = torch.rand((T, spec.E), generator=g).argsort(1)[:, : spec.K]
    weights = torch.rand((T, spec.K), generator=g).to(torch_dtype(spec.w))
    packed = ExpertWeights(gate_up=tuple(tensors[:-1]), down=tensors[-1], gate_up_bias=bias, down_bias=down_bias)
    return normal(T, spec.H), ids, None if spec.weight == "none" else weights, packed


def exact(spec: ExpertsSpec, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor | None, p: ExpertWeights):
    """The spec's meaning in fp64."""
    k_major, out = spec.gate_up.storage == "EGH", torch.zeros(x.shape[0], spec.H, dtype=torch.float64)
    gate, up = grouped.gate_and_up(p.gate_up, spec.gate_up.halves, 1 if k_major else 2)
    gate_bias, up_bias = grouped.gate_and_up(p.gate_up_bias, spec.gate_up.halves, 1) if p.gate_up_bias else (None, None)

    def linear(a, weight, bias, e, rows_first):
        if weight is None:
            return None
        y = (weight[e].double() if rows_first else weight[e].double().T) @ a
        return y if bias is None else y + bias[e].double()

    for t in range(x.shape[0]):
        for k, e in enumerate(ids[t].tolist()):
            if not 0 <= e < spec.E:
                continue
            a = x[t].double() * (w[t, k].double() if spec.weight == "input" else 1)
            h = evaluate(spec.act.expr, linear(a, gate, gate_bias, e, k_major), linear(a, up, up_bias, e, k_major))
            y = linear(h, p.down, p.down_bias, e, spec.down == "EHI")
            out[t] += y * (w[t, k].double() if spec.weight == "output" else 1)
    return out


def check(provider, tactic: Tactic, spec: ExpertsSpec, inputs) -> torch.Tensor:
    x, ids, w, packed = inputs
    got = provider.build(tactic, spec, CPU)(x, ids, w, packed)
    want = exact(spec, x, ids, w, packed)
    assert got.shape == want.shape
    assert got.dtype == torch_dtype(spec.out)
    if got.numel():
        error = ((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-9)).item()
        assert error < (1e-5 if {spec.x, spec.out} == {"f32"} else 4e-3)
    return got


LAYOUTS = [(s, h) for s in GATE_UP_STORAGE for h in HALVES]


@pytest.mark.parametrize(("storage", "halves"), LAYOUTS, ids=[f"{s}:{h}" for s, h in LAYOUTS])
@pytest.mark.parametrize(("provider", "tactic"), RUNS, ids=run_ids)
def test_layouts_with_biases(provider, tactic, storage, halves):
    spec = spec_of(
        gate_up=Layout(storage=storage, halves=halves),
        down="EHI" if storage == "EGH" else "EIH",
        bias="both",
        act="silu" if halves == "up" else OAI,
    )
    check(provider, tactic, spec, draw(spec, 5))


@pytest.mark.parametrize(("provider", "tactic"), RUNS, ids=run_ids)
@pytest.mark.parametrize(
    "changes",
    [
        {"act": "geglu", "down": "EIH"},
        {"act": "mul(tanh(gate),pow(up,2))", "bias": "gate_up", "weight": "input"},
        {"act": "reglu", "weight": "none", "K": 1},
        {"act": "relu2", "gate_up": Layout(halves="up"), "bias": "down"},
        {"H": 37, "I": 19},
        {"E": 1, "K": 1, "H": 16, "I": 17},
        {"x": "f16", "w": "f16", "out": "f16", "H": 48, "I": 32},
        {"x": "f16", "out": "f32", "act": "geglu_tanh"},
    ],
    ids=str,
)
def test_variants(provider, tactic, changes):
    spec = spec_of(**changes)
    check(provider, tactic, spec, draw(spec, 7, seed=3))


@pytest.mark.parametrize(("provider", "tactic"), RUNS[:: len(GROUPED)], ids=run_ids[:: len(GROUPED)])
def test_a_thousand_experts_and_32_choices(provider, tactic):
    spec = spec_of(E=1024, K=32, H=16, I=16)
    check(provider, tactic, spec, draw(spec, 3))


@pytest.mark.parametrize(("provider", "tactic"), RUNS, ids=run_ids)
@pytest.mark.parametrize("T", [0, 1])
def test_no_token_and_one_token(provider, tactic, T):
    spec = spec_of(E=6, K=3)
    check(provider, tactic, spec, draw(spec, T))


@pytest.mark.parametrize(("provider", "tactic"), RUNS, ids=run_ids)
def test_sentinels_never_touch_poisoned_weights(provider, tactic):
    spec = spec_of(bias="both", H=41, I=23)  # neighbours of every tile edge are poison too
    x, ids, w, packed = draw(spec, 12)
    ids[ids == 2] = -1
    ids[ids == 4] = spec.E
    ids[5] = -1
    w[ids < 0] = float("nan")
    for tensor in (*packed.gate_up, packed.down, *packed.gate_up_bias, packed.down_bias):
        tensor[2] = float("nan")
        tensor[4] = float("nan")
    got = check(provider, tactic, spec, (x, ids, w, packed))
    assert (got[5] == 0).all()


@pytest.mark.parametrize(("provider", "tactic"), RUNS, ids=run_ids)
def test_one_expert_takes_every_row(provider, tactic):
    spec = spec_of(E=4, K=1)
    x, ids, w, packed = draw(spec, 40)
    ids[:] = 3
    check(provider, tactic, spec, (x, ids, w, packed))


@pytest.mark.parametrize(("provider", "tactic"), RUNS, ids=run_ids)
def test_views_and_int32_ids(provider, tactic):
    spec = spec_of(gate_up=Layout(halves="separate"))
    x, ids, w, packed = draw(spec, 6)
    wide = torch.full((6, 2 * spec.H), float("nan"))
    wide[:, ::2] = x
    padded = torch.full((2, spec.E, spec.I, spec.H + 8), float("nan"))
    padded[..., : spec.H] = torch.stack(packed.gate_up)
    views = dataclasses.replace(packed, gate_up=padded[..., : spec.H].unbind())
    assert provider.reads(views)
    ids = torch.cat([ids, ids], 1).int()[:, :2]
    check(provider, tactic, spec, (wide[:, ::2], ids, w.T.contiguous().T, views))


@pytest.mark.parametrize(("provider", "tactic"), RUNS, ids=run_ids)
def test_gate_and_up_strided_differently_are_left_to_aten(provider, tactic):
    spec = spec_of(gate_up=Layout(halves="separate"))
    x, ids, w, packed = draw(spec, 6)
    gate = torch.full((spec.E, spec.I, spec.H + 8), float("nan"))
    gate[:, :, : spec.H] = packed.gate_up[0]
    views = dataclasses.replace(packed, gate_up=(gate[:, :, : spec.H], packed.gate_up[1]))
    assert provider.reads(views).reason == "gate and up are strided differently"
    run, want = launcher(Candidate(provider=provider.name, tactic=tactic), spec, CPU), exact(spec, x, ids, w, packed)
    for enabled in (False, True):  # the spec decides aten's dtypes too
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            got = run(x, ids, w, views).double()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("provider", "tactic"), RUNS[:: len(GROUPED)], ids=run_ids[:: len(GROUPED)])
@pytest.mark.parametrize("operand", ["gate_up_bias", "down_bias"])
def test_biases_whose_rows_are_strided_are_left_to_aten(provider, tactic, operand):
    spec = spec_of(bias="both")
    x, ids, w, packed = draw(spec, 6)
    columns = [t.T.contiguous().T for t in (packed.gate_up_bias[0], packed.down_bias)]
    odd = {"gate_up_bias": (columns[0],)} if operand == "gate_up_bias" else {"down_bias": columns[1]}
    views = dataclasses.replace(packed, **odd)
    assert provider.reads(packed)
    assert provider.reads(views).reason == "biases are not in contiguous rows"
    run = launcher(Candidate(provider=provider.name, tactic=tactic), spec, CPU)
    torch.testing.assert_close(run(x, ids, w, views).double(), exact(spec, x, ids, w, packed), rtol=2e-5, atol=2e-6)


def test_twins():
    spec = spec_of(bias="both", gate_up=Layout(halves="up_gate"))
    x, ids, w, p = draw(spec, 8)
    ids[3, 1] = -1
    act, twin_act = epilogue(spec.act.expr), lambda g, u: evaluate(spec.act.expr, g, u)
    tile = grouped.Tile(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
    schedule = sort_routes(ids, spec.E, 16)
    n = int((ids >= 0).sum())
    first = grouped.fc1(
        x, p.gate_up, p.gate_up_bias, None, schedule, act, choices=spec.K, sizes=(spec.H, spec.I), gated=True,
        halves="up_gate", k_major=True, tile=tile,
    )  # fmt: skip
    twin = grouped.fc1_reference(
        x, p.gate_up, p.gate_up_bias, None, schedule, twin_act, choices=spec.K, halves="up_gate", k_major=True
    )
    torch.testing.assert_close(first[:n], twin[:n])
    y = grouped.fc2(first, p.down, p.down_bias, schedule, k_major=True, tile=tile)
    y_twin = grouped.fc2_reference(twin, p.down, p.down_bias, schedule, k_major=True)
    here = ids.reshape(-1) >= 0
    torch.testing.assert_close(y[here], y_twin[here])
    out = finalize(y, ids, w, spec.E, torch.float32)
    torch.testing.assert_close(out, finalize_reference(y_twin, ids, w, spec.E, torch.float32))
    rows = decode.Rows(UP_N=4, UP_K=32, DOWN_N=4, DOWN_K=32)
    a = decode.up(
        x, ids, w, p.gate_up, p.gate_up_bias, act, E=spec.E, sizes=(spec.H, spec.I), gated=True, halves="up_gate",
        k_major=True, rows=rows,
    )  # fmt: skip
    a_twin = decode.up_reference(x, ids, w, p.gate_up, p.gate_up_bias, twin_act, halves="up_gate", k_major=True)
    torch.testing.assert_close(a[here], a_twin[here])
    z = decode.down(a_twin, ids, w, p.down, p.down_bias, torch.float32, E=spec.E, k_major=True, rows=rows)
    torch.testing.assert_close(
        z, decode.down_reference(a_twin, ids, w, p.down, p.down_bias, torch.float32, k_major=True)
    )


@pytest.mark.parametrize("post", ["rms", "scaled_rms"])
def test_a_norm_of_each_experts_output(post):
    spec = spec_of(post=post, eps=1e-5, bias="both", K=3)
    x, ids, w, p = draw(spec, 9)
    scale = torch.linspace(0.5, 2, spec.H) if post == "scaled_rms" else None
    p = dataclasses.replace(p, post_scale=scale)
    ids[4, 1], ids[6] = spec.E, -1
    double = ExpertWeights(
        gate_up=tuple(t.double() for t in p.gate_up), down=p.down.double(),
        gate_up_bias=tuple(t.double() for t in p.gate_up_bias), down_bias=p.down_bias.double(),
        post_scale=None if scale is None else scale.double(),
    )  # fmt: skip
    want = reference.experts(reference.exact(spec), x.double(), ids, w.double(), double)
    out = launcher(Candidate(provider="triton_grouped", tactic=GROUPED[0]), spec, CPU)(x, ids, w, p)
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-4)
    assert not out[6].any()
    y = torch.randn(27, spec.H)
    got, twin = (
        f(y, ids, w, spec.E, torch.float32, post=post, eps=spec.eps, post_scale=scale)
        for f in (finalize, finalize_reference)
    )
    torch.testing.assert_close(got, twin)
    assert "norm" in str(TritonDecode().supports(spec, facts(CPU)))


def test_sums_of_tokens_wider_than_a_program():
    y, ids = torch.randn(6, 2100), torch.tensor([[0, 4], [5, 1], [-1, 5]])
    got, want = (f(y, ids, torch.rand(3, 2, generator=torch.Generator().manual_seed(1)), 5, torch.float32)
                 for f in (finalize, finalize_reference))  # fmt: skip
    torch.testing.assert_close(got, want)
    assert not got[2].any()


def test_runs_twice_bitwise():
    spec = spec_of()
    inputs = draw(spec, 3)
    for provider, tactic in RUNS:
        run = provider.build(tactic, spec, CPU)
        assert torch.equal(run(*inputs), run(*inputs))


def launches(call) -> int:
    launch.note(noted := [])
    try:
        call()
    finally:
        launch.note(None)
    return len(noted)


@pytest.mark.parametrize(("provider", "tactic"), RUNS[:: len(GROUPED)], ids=run_ids[:: len(GROUPED)])
def test_a_call_makes_as_many_launches_as_its_work_says(provider, tactic):
    spec = spec_of()
    inputs, run = draw(spec, 3), provider.build(tactic, spec, CPU)
    priced = cost.estimate(provider.work(tactic, spec, facts(CPU)), facts(CPU), cost.Load.uniform(spec.E, spec.K), 3)
    assert launches(lambda: run(*inputs)) == priced.total("launches") == (4 if "M" in dict(tactic.knobs) else 2)


def test_routing_and_sorting_are_two_launches_for_any_number_of_tokens(monkeypatch):
    router = RouterSpec(E=5, K=2, logits="f32")
    for alone in (True, False):
        monkeypatch.setattr("moe_compile.kernels.sort.counts_alone", lambda R, E, alone=alone: alone)
        assert launches(lambda: sort_routes(route.route(router, torch.randn(40, 5))[1], 5, 16)) == 2


def test_every_ranked_tactic_builds_and_states_its_work():
    device = facts(CPU)
    for provider in (TritonGrouped(), TritonDecode()):
        for x in ("f32", "f16", "bf16"):
            spec = spec_of(E=128, K=8, H=2048, I=768, x=x, out=x)
            for T in (0, 1, 16, 300, 5000):
                ranked = provider.tactics(spec, device, T)
                assert ranked
                for tactic, work in ranked:
                    assert callable(provider.build(tactic, spec, CPU))
                    assert work == provider.work(tactic, spec, device)
                    priced = cost.estimate(work, device, cost.Load.uniform(128, 8), max(T, 1))
                    assert priced.total("flop") == 2 * max(T, 1) * 8 * 3 * 2048 * 768
                    assert priced.total("weights") > 0
                    assert priced.seconds > 0


def test_verdicts():
    for provider in (TritonGrouped(), TritonDecode()):
        assert provider.available() == OK
        assert provider.supports(spec_of(), facts(CPU)) == OK
        verdict = provider.supports(spec_of(x="f64"), facts(CPU))
        assert isinstance(verdict, Reject)
        assert verdict.reason == "fp64 is not supported"
        assert provider.version().count("+") >= 1


@pytest.mark.parametrize(
    ("provider", "text", "says"),
    [
        (TritonGrouped(), str(GROUPED[0]).replace("M=16", "M=24"), "M=24"),
        (TritonGrouped(), str(GROUPED[0]).replace("N1=16", "N1=8192"), "shared memory"),
        (TritonGrouped(), "M=16", "knobs are"),
        (TritonDecode(), "N1=3,K1=32,W1=4,N2=2,K2=32,W2=4", "N1=3"),
        (TritonDecode(), "N1=x,K1=32,W1=4,N2=2,K2=32,W2=4", "whole number"),
    ],
)
def test_impossible_tactics_are_value_errors(provider, text, says):
    with pytest.raises(ValueError, match=says):
        provider.build(Tactic.parse(text), spec_of(), CPU)
