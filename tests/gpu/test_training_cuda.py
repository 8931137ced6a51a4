"""Training and routing on a CUDA device: gradients against fp64 beside torch's, repeatability, a compiled block; the
experts that torch.topk chooses."""

import functools
import math

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytest.importorskip("triton")

from test_triton_kernels import GPU, OAI, draw, spec_of  # noqa: E402

from moe_compile import journal, ops, reference  # noqa: E402
from moe_compile.backend import moe_backend  # noqa: E402
from moe_compile.hardware import facts  # noqa: E402
from moe_compile.kernels.tape import Tape  # noqa: E402
from moe_compile.operands import ExpertWeights  # noqa: E402
from moe_compile.providers import Plan, aten_backward, triton_backward, triton_route  # noqa: E402
from moe_compile.providers.trainer import Trainer  # noqa: E402
from moe_compile.providers.triton_grouped import TritonGrouped  # noqa: E402
from moe_compile.providers.triton_hopper import TritonHopper  # noqa: E402
from moe_compile.spec import Layout, RouterSpec, torch_dtype  # noqa: E402
from moe_compile.verdict import Reject  # noqa: E402

CASES = [
    {},
    {"gate_up": Layout(storage="EHG", halves="gate_up_interleaved"), "down": "EIH", "bias": "both", "act": OAI},
    {"gate_up": Layout(halves="separate"), "act": "geglu"},
    {"gate_up": Layout(halves="up"), "act": "relu2", "bias": "down"},
    {"weight": "input", "K": 1, "bias": "gate_up"},
    {"H": 1024, "I": 384},
    {"H": 2304, "I": 384, "gate_up": Layout(halves="up_gate_interleaved"), "x": "f16"},
]


@pytest.mark.parametrize(
    ("T", "train", "keep"), [(5, "auto", "all"), (700, "grouped", "all"), (700, "auto", "all"), (700, "auto", "half")]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_as_exact_as_torchs(case, T, train, keep):
    spec = spec_of(**case)
    tiles = triton_backward.tiles_of(spec, T, facts(GPU), train)
    on_hopper = torch.cuda.get_device_capability() == (9, 0) and bool(TritonHopper().available())
    assert tiles.hopper == (on_hopper and T == 700 and train == "auto")
    x, ids, w, p = draw(spec, T)
    ids[0, 0] = spec.E
    leaves = [x, w, *p.tensors()]
    twin = [t.double().requires_grad_() for t in leaves]
    lengths = [len(several) for several in p.arguments()[:-1]]
    q = ExpertWeights.of(spec, *ops._split(twin[2:], lengths), None)
    want = reference.experts(reference.exact(spec), twin[0], ids, twin[1], q)
    dout = torch.randn_like(want).to(x.dtype)
    wanted = torch.autograd.grad(want, twin, dout.double())
    needs = [True] * len(leaves)
    out, kept, order = triton_backward.forward(spec, x, ids, w, p, tiles, keep)
    assert kept.shape == (T * spec.K, triton_backward.kept_columns(spec, keep))
    got = triton_backward.backward(spec, dout, x, ids, w, p, kept, needs, tiles, order)
    same = kept if kept.shape[1] < spec.G else None  # all of it computed again is the same
    again = triton_backward.backward(spec, dout, x, ids, w, p, same, needs, tiles)
    base = aten_backward.backward(spec, dout, x, ids, w, p, needs)

    def off(a: torch.Tensor, b: torch.Tensor) -> float:
        return ((a.double() - b).norm() / b.norm()).item()

    assert off(out, want) < 6e-3
    for a, b, c, d in zip(got, again, base, wanted, strict=True):
        assert torch.equal(a, b)
        # of few elements, as of dw at T=5, the errors are draws that scatter
        assert off(a, d) <= (1.1 if a.numel() > 1000 else 1.5) * off(c, d) + 1e-4, (off(a, d), off(c, d))


@pytest.mark.parametrize("train", ["grouped", "auto"])
def test_powers_of_two_of_a_tokens_gradient_pass_through_to_the_bit(train):
    spec, T = spec_of(H=1024, I=384), 700
    x, ids, w, p = draw(spec, T)
    tiles = triton_backward.tiles_of(spec, T, facts(GPU), train)
    _, kept, order = triton_backward.forward(spec, x, ids, w, p, tiles)
    dout = torch.randn_like(x)
    sizes = 2.0 ** torch.randint(-60, 60, (T, 1), device=GPU)  # far beyond fp16's
    needs = [True, True, *(False for _ in p.tensors())]
    one, other = (
        triton_backward.backward(spec, d, x, ids, w, p, kept, needs, tiles, order)
        for d in (dout, dout * sizes.to(x.dtype))
    )
    assert all(torch.equal(b, a * sizes.to(a.dtype)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("weight", ["output", "input"])
@pytest.mark.parametrize(("T", "train"), [(90, "grouped"), (300, "auto")])
def test_dropped_routes_and_idle_experts(T, train, weight):
    spec = spec_of(bias="both", x="f16", weight=weight)
    x, ids, w, p = draw(spec, T)
    ids[ids >= 5], ids[7] = -1, spec.E
    w[(ids < 0) | (ids == spec.E)] = math.nan
    for t in p.tensors():
        t[5:] = math.nan
    tiles = triton_backward.tiles_of(spec, len(x), facts(GPU), train)
    out, kept, order = triton_backward.forward(spec, x, ids, w, p, tiles)
    grads = triton_backward.backward(spec, out, x, ids, w, p, kept, [True] * (2 + len(p.tensors())), tiles, order)
    assert all(g.isfinite().all() for g in (out, *grads))
    assert not out[7].any() and not grads[0][7].any() and not grads[1][w.isnan()].any()
    assert all(not g[5:].any() for g in grads[2:])


@pytest.mark.parametrize("train", ["grouped", "auto"])
def test_routes_past_2_to_the_31(train):
    """The last tokens' gradients among 2.3e9 numbers of the routes', against those of the last tokens alone."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of free GPU memory")
    spec, T, few = spec_of(E=8, K=8, H=2048, I=64), 140_000, 1000
    x, ids, w, p = draw(spec, T)
    dout = torch.zeros_like(x)
    dout[-few:].normal_()
    tiles = triton_backward.tiles_of(spec, T, facts(GPU), train)

    def gradients(*operands):
        dout, *given = operands
        _, kept, order = triton_backward.forward(spec, *given, p, tiles)
        return triton_backward.backward(spec, dout, *given, p, kept, [True] * 4, tiles, order)

    got, want = gradients(dout, x, ids, w), gradients(*(t[-few:].contiguous() for t in (dout, x, ids, w)))
    assert not got[0][:-few].any() and not got[1][:-few].any()
    for a, b in zip((got[0][-few:], got[1][-few:], *got[2:]), want, strict=True):
        assert (a.double() - b.double()).norm() <= 4e-3 * b.double().norm()


def step_of(spec, T):
    """(inputs of a step, its function): the output and all gradients, through the operator."""
    x, ids, w, p = draw(spec, T)
    tactic = TritonGrouped().tactics(spec, facts(GPU), T)[0][0]
    leaves = [t.requires_grad_() for t in (x, w, *p.tensors())]
    dout = torch.randn(T, spec.H, device=GPU).to(x.dtype)

    def step():
        plan = f"*:triton_grouped({tactic})"
        out = torch.ops.moe_compile.experts(x, ids, w, *p.arguments(), str(spec), plan)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return x, step


@pytest.mark.parametrize("T", [40, 3000])
def test_steps_on_two_streams_and_in_a_graph_are_the_same(T):
    steps = [step_of(spec_of(H=1024, I=384, bias=bias), T + n)[1] for n, bias in enumerate(("none", "both"))]
    want = [step() for step in steps]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in steps], []
    for _ in range(5):
        for n, (stream, step) in enumerate(zip(streams, steps)):
            with torch.cuda.stream(stream):
                found.append((n, step()))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for n, got in found for a, b in zip(got, want[n], strict=True))

    x, step = step_of(spec_of(H=1024, I=384), T)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for n in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, device=GPU, generator=torch.Generator(GPU).manual_seed(n)))
        graph.replay()
        kept = [t.clone() for t in got]
        assert all(map(torch.equal, kept, step()))


@pytest.mark.parametrize(("T", "keep"), [(40, "all"), (40, "none"), (700, "all"), (700, "half"), (700, "none")])
@pytest.mark.parametrize("bias", ["none", "both"])
def test_replayed_steps_are_those_as_written(T, keep, bias):
    spec = spec_of(bias=bias, H=1024, I=384)
    trainer = Trainer(spec, Plan.parse(f"keep={keep};*:triton_grouped"), GPU)
    for seed in range(3):
        x, ids, w, p = draw(spec, T)
        x, ids = x.roll(seed, 0), ids.roll(seed, 1)
        dout, tiles = torch.randn_like(x), triton_backward.tiles_of(spec, T, facts(GPU))
        down = triton_backward.of_down(spec, p)
        rest = [not d for d in down]
        out, kept, order = trainer.forward(x, ids, w, p)
        first = trainer.backward_down(dout, x, ids, w, p, kept, order, down)
        second = trainer.backward_gate_up(first[0], x, ids, w, p, order, rest)
        want, wanted, _ = triton_backward.forward(spec, x, ids, w, p, tiles, keep)
        found = triton_backward.merged(first[1:], second, [True] * len(down), down)
        wanted = triton_backward.backward(spec, dout, x, ids, w, p, wanted, [True] * len(down), tiles)
        assert all(map(torch.equal, (out, *found), (want, *wanted)))
    assert len(trainer.tapes.known) == 3
    tapes = trainer.tapes.known.values()
    assert all(isinstance(tape, Tape) and tape.together for tape in tapes), [vars(tape) for tape in tapes]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_compiled_block_trains(inner):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4)
    config._experts_implementation = "batched_mm"
    with GPU:
        block = Qwen3MoeSparseMoeBlock(config).to(torch.float32)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0, 0.05)

    def step(f):
        block.zero_grad()
        x = torch.randn(1, 200, 256, device=GPU, generator=torch.Generator(GPU).manual_seed(1)).requires_grad_()
        out = f(x)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        return [out, x.grad, *(q.grad for q in block.parameters())]

    options = {"moe.inner": inner, "moe.strict": True}
    with journal.capture() as events:
        got = step(torch.compile(block, backend=functools.partial(moe_backend, options=options), dynamic=False))
    plans = [e.plan for e in events if isinstance(e, journal.Planned)]
    assert plans
    assert all("triton" in plan for plan in plans)
    for a, b in zip(got, step(block), strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


ROUTERS = [
    RouterSpec(E=128, K=8, renorm="sum", logits="bf16", out="bf16"),
    RouterSpec(E=60, K=4, score_dtype="f16", logits="f16", out="f16"),
    RouterSpec(E=1000, K=32, logits="f32", renorm="sum_at_least_eps", eps=0.5),
    RouterSpec(E=160, K=6, groups=8, top_groups=3, group_score="max", scale=16.0, logits="f32"),
    RouterSpec(
        E=256, K=8, score="sigmoid", bias=True, groups=8, top_groups=4, group_score="top2_sum", group_fill=-math.inf,
        renorm="sum_plus_eps", eps=1e-20, scale=2.5, logits="f32",
    ),
    RouterSpec(E=256, K=6, score="sqrtsoftplus", bias=True, renorm="sum", scale=1.5, logits="f32"),
    RouterSpec(E=32, K=4, score="topk_softmax", score_dtype="bf16", logits="bf16", out="bf16"),
    RouterSpec(
        E=64, K=12, groups=8, top_groups=1, group_score="max", values="choice", expert_scale=True, logits="bf16",
    ),
]  # fmt: skip


@pytest.mark.parametrize("spread", [1.5, 12.0])  # the second saturates: many equal scores
@pytest.mark.parametrize("spec", ROUTERS, ids=str)
def test_the_experts_that_torch_chooses(spec, spread):
    torch.manual_seed(1)
    logits = (spread * torch.randn(5000, spec.E, device=GPU)).to(torch_dtype(spec.logits))
    bias = 0.3 * torch.randn(spec.E, device=GPU) if spec.bias else None
    scale = torch.rand(spec.E, device=GPU) if spec.expert_scale else None
    weights, ids = triton_route.route(spec, logits, bias, scale)
    want_weights, want_ids = reference.route(spec, logits, bias, scale)
    place, want_place = ids.argsort(1), want_ids.argsort(1)
    assert torch.equal(ids.gather(1, place), want_ids.gather(1, want_place))
    bound = {"bf16": 2**-7, "f16": 2**-10, "f32": 1e-6}[spec.out]
    torch.testing.assert_close(weights.gather(1, place), want_weights.gather(1, want_place), rtol=bound, atol=0)


@pytest.mark.parametrize("spec", [s for s in ROUTERS if s.values == "score"], ids=str)
def test_the_routers_gradient_is_torchs(spec, monkeypatch):
    logits = torch.randn(3000, spec.E, device=GPU).to(torch_dtype(spec.logits))
    bias = 0.3 * torch.randn(spec.E, device=GPU) if spec.bias else None
    weights, ids = triton_route.route(spec, logits, bias, None)
    grad = torch.randn_like(weights)
    got = triton_route.backward(spec, grad, logits, ids)
    monkeypatch.setattr(triton_route, "backward_supports", lambda *_: Reject("torch's own calls"))
    (want,) = ops._route_backward(grad, logits, ids, None, str(spec), [True, False])
    bound = {"bf16": 2**-7, "f16": 2**-10, "f32": 1e-5}[spec.logits]
    assert (got.double() - want.double()).abs().max() <= bound * want.double().abs().max()
