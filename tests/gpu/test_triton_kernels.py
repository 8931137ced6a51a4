"""Our Triton kernels on a CUDA device against fp64: layouts, dtypes, sentinels, graphs, 64-bit offsets."""

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytest.importorskip("triton")

from moe_compile.activation import Activation, evaluate  # noqa: E402
from moe_compile.hardware import facts  # noqa: E402
from moe_compile.kernels.grouped import gate_and_up  # noqa: E402
from moe_compile.operands import ExpertWeights  # noqa: E402
from moe_compile.peers import PEERS  # noqa: E402
from moe_compile.plan import shortlist  # noqa: E402
from moe_compile.providers import Candidate, launcher  # noqa: E402
from moe_compile.providers.base import Tactic  # noqa: E402
from moe_compile.providers.triton_decode import TritonDecode  # noqa: E402
from moe_compile.providers.triton_grouped import TritonGrouped  # noqa: E402
from moe_compile.providers.triton_hopper import VALID, TritonHopper  # noqa: E402
from moe_compile.spec import GATE_UP_STORAGE, HALVES, ExpertsSpec, Layout, torch_dtype  # noqa: E402
from moe_compile.suite import GEOMETRIES, tokens_of, weights_of  # noqa: E402

GPU = torch.device("cuda", 0)
PROVIDERS = (TritonGrouped(), TritonDecode(), TritonHopper())
LIMIT = {"bf16": 6e-3, "f16": 1e-3, "f32": 3e-6}  # RMS, relative: one rounding of the activation and one of the output
OAI = "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))"


def spec_of(**changes) -> ExpertsSpec:
    fields = {"E": 8, "K": 2, "H": 264, "I": 200, "act": "swiglu", **changes}
    fields.setdefault("out", fields.get("x", "bf16"))
    fields["act"] = Activation.parse(fields["act"])
    return ExpertsSpec(**fields)


def draw(spec: ExpertsSpec, T: int):
    torch.manual_seed(T)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.empty(shape, device=GPU, dtype=torch_dtype(spec.x)).normal_(0, scale)

    *first, down = (normal(*s, scale=0.08) for s in spec.weight_shapes())
    rows = spec.I if spec.gate_up.halves == "separate" else spec.G
    bias = tuple(normal(spec.E, rows, scale=0.3) for _ in first) if spec.has_gate_up_bias else ()
    down_bias = normal(spec.E, spec.H, scale=0.3) if spec.has_down_bias else None
    ids = torch.rand((T, spec.E), device=GPU).argsort(1)[:, : spec.K]
    weights = torch.rand((T, spec.K), device=GPU).to(torch_dtype(spec.w))
    packed = ExpertWeights(gate_up=tuple(first), down=down, gate_up_bias=bias, down_bias=down_bias)
    return normal(T, spec.H, scale=1.0), ids, weights, packed


def exact(spec: ExpertsSpec, tokens: list[int], x, ids, weights, p: ExpertWeights) -> torch.Tensor:
    """The spec's meaning in fp64 for some tokens."""
    k_major, out = spec.gate_up.storage == "EGH", torch.zeros(len(tokens), spec.H, dtype=torch.float64, device=GPU)
    gate, up = gate_and_up(p.gate_up, spec.gate_up.halves, 1 if k_major else 2)
    gate_bias, up_bias = gate_and_up(p.gate_up_bias, spec.gate_up.halves, 1) if p.gate_up_bias else (None, None)

    def linear(a, w, b, e, rows_first):
        if w is None:
            return None
        y = (w[e].double() if rows_first else w[e].double().T) @ a
        return y if b is None else y + b[e].double()

    for i, t in enumerate(tokens):
        for k, e in enumerate(ids[t].tolist()):
            if 0 <= e < spec.E:
                a = x[t].double() * (weights[t, k].double() if spec.weight == "input" else 1)
                h = evaluate(spec.act.expr, linear(a, gate, gate_bias, e, k_major), linear(a, up, up_bias, e, k_major))
                y = linear(h, p.down, p.down_bias, e, spec.down == "EHI")
                y = y if p.post_scale is None else y * p.post_scale.double()
                y = y if spec.post == "none" else y / (y.square().mean() + spec.eps).sqrt()
                out[i] += y * (weights[t, k].double() if spec.weight == "output" else 1)
    return out


def gathered_and_sorted(spec: ExpertsSpec) -> list[Tactic]:
    """Both ways of triton_hopper to read x's rows, where their width allows, with tiles of each height."""
    n1 = 128 if spec.gated else 256
    ways = [(m, g) for m in VALID["M"] for g in ((0, 1) if spec.H % 64 == 0 else (0,))]
    return [Tactic.of(M=m, N1=n1, N2=256, GATHER=g) for m, g in ways]


def check(spec: ExpertsSpec, T: int, inputs=None, tactics: int = 1, tokens: list[int] | None = None) -> None:
    """Every provider's first tactics: RMS against fp64, and the same bits from a second call and from a CUDA graph.

    triton_hopper may reject the spec, and offers tactics for many rows an expert only; triton_decode rejects a norm.
    """
    inputs = inputs or draw(spec, T)
    tokens = tokens or sorted({0, T // 3, T - 1})
    want = exact(spec, tokens, *inputs)
    for provider in PROVIDERS:
        if not provider.supports(spec, facts(GPU)):
            assert provider.name == "triton_hopper" or (provider.name == "triton_decode" and spec.post != "none")
            continue
        offered = [t for t, _ in provider.tactics(spec, facts(GPU), T)[:tactics]]
        if provider.name == "triton_hopper" and offered:
            offered = gathered_and_sorted(spec)
        for tactic in offered:
            run = provider.build(tactic, spec, GPU)
            got = run(*inputs)
            assert got.isfinite().all()
            error = ((got[tokens].double() - want).norm() / want.norm()).item()
            assert error < LIMIT[spec.x], (provider.name, str(tactic), error)
            assert torch.equal(got, run(*inputs))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = run(*inputs)
            graph.replay()
            assert torch.equal(got, replayed)


@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("storage", GATE_UP_STORAGE)
def test_layouts_with_biases(storage, halves):
    layout = Layout(storage=storage, halves=halves)
    down = "EHI" if storage == "EGH" else "EIH"
    check(spec_of(gate_up=layout, down=down, bias="both", act="relu2" if halves == "up" else OAI), 21)


@pytest.mark.parametrize("T", [1, 60, 500])
@pytest.mark.parametrize("x", ["bf16", "f16", "f32"])
def test_dtypes_and_tile_heights(x, T):
    check(spec_of(x=x), T, tactics=4)


@pytest.mark.parametrize(
    "changes",
    [{"H": 263, "I": 199}, {"weight": "input", "act": "geglu"}, {"K": 1, "weight": "none"}, {"K": 5, "E": 5}],
    ids=str,
)
def test_variants(changes):
    check(spec_of(**changes), 90)


def test_a_thousand_experts_and_32_choices():
    check(spec_of(E=1024, K=32, H=64, I=64), 1600)  # 50 rows an expert


@pytest.mark.parametrize("post", ["rms", "scaled_rms"])
def test_a_norm_of_each_experts_output(post):
    spec = spec_of(post=post, eps=1e-5, bias="both", K=3)
    x, ids, weights, p = draw(spec, 300)
    if post == "scaled_rms":
        p = dataclasses.replace(p, post_scale=torch.rand(spec.H, device=GPU).to(x.dtype) + 0.5)
    ids[4, 1] = spec.E
    check(spec, 300, (x, ids, weights, p), tokens=[0, 4, 17, 299])


def test_sentinels_never_touch_poisoned_weights():
    spec = spec_of(bias="both", H=263, I=199)
    x, ids, weights, p = draw(spec, 300)
    ids[ids == 2] = spec.E
    ids[ids == 7] = -1
    ids[5] = -1
    for tensor in (*p.gate_up, p.down, *p.gate_up_bias, p.down_bias):
        tensor[2] = float("nan")
        tensor[7] = float("nan")
    check(spec, 300, (x, ids, weights, p), tokens=[0, 4, 17, 299])
    for provider in PROVIDERS[:2]:
        run = provider.build(provider.tactics(spec, facts(GPU), 300)[0][0], spec, GPU)
        assert not run(x, ids, weights, p)[5].any()


def test_one_expert_takes_every_row():
    spec = spec_of(K=1)
    x, ids, weights, p = draw(spec, 700)
    ids[:] = 6
    check(spec, 700, (x, ids, weights, p), tactics=3)


def test_weights_past_2_to_the_31():
    spec = spec_of(E=300, K=2, H=2048, I=2048, weight="output")  # gate_up has 2.5e9 numbers
    x, ids, weights, p = draw(spec, 40)
    ids[0] = torch.tensor([298, 299], device=GPU)
    check(spec, 40, (x, ids, weights, p))


def test_routes_past_2_to_the_31():
    spec = spec_of(E=8, K=8, H=2048, I=64)  # y_RH has 2.3e9 numbers
    T = 140_000
    inputs = draw(spec, T)
    tokens = [0, T // 2, T - 1]
    want = exact(spec, tokens, *inputs)
    runs = [(PROVIDERS[0], PROVIDERS[0].tactics(spec, facts(GPU), T)[0][0])]
    if PROVIDERS[2].supports(spec, facts(GPU)):
        heights = [t for t in gathered_and_sorted(spec) if dict(t.knobs)["M"] < 192 and not dict(t.knobs)["GATHER"]]
        runs += [(PROVIDERS[2], tactic) for tactic in heights]  # 192 is addressed as 128 is
    for provider, tactic in runs:
        got = provider.build(tactic, spec, GPU)(*inputs)[tokens]
        assert ((got.double() - want).norm() / want.norm()).item() < LIMIT["bf16"], (provider.name, str(tactic))


needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="not a Hopper GPU"
)
MANY = ("EGH:gate_up", "EGH:up_gate", "EGH:gate_up_interleaved", "EGH:separate", "EGH:up", "EHG:up_gate_interleaved",
        "EHG:up")  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("weight", ["output", "input"])
@pytest.mark.parametrize("layout", MANY)
def test_many_rows_an_expert(layout, weight):
    layout = Layout.parse(layout)
    spec = spec_of(
        gate_up=layout, down="EHI" if layout.storage == "EGH" else "EIH", bias="both", weight=weight, H=320, I=200,
        act="relu2" if layout.halves == "up" else OAI, x="f16" if weight == "input" else "bf16",
    )  # fmt: skip
    assert PROVIDERS[2].supports(spec, facts(GPU)) and PROVIDERS[2].tactics(spec, facts(GPU), 700)
    check(spec, 700, tactics=4)


@needs_hopper
@pytest.mark.parametrize("H", [256, 264, 384])  # 384: a tile of 256 columns ends in the middle
def test_many_rows_of_poison_and_of_odd_strides(H):
    spec, hopper = spec_of(H=H, I=136, bias="both"), PROVIDERS[2]
    x, ids, weights, p = draw(spec, 900)
    ids[ids == 2] = spec.E
    ids[5] = -1
    for tensor in (*p.gate_up, p.down, *p.gate_up_bias, p.down_bias):
        tensor[2] = float("nan")
    check(spec, 900, (x, ids, weights, p), tactics=4, tokens=[0, 4, 17, 899])
    odd = torch.empty(900, H + 3, dtype=x.dtype, device=GPU)[:, 1 : 1 + H].copy_(x)
    for tactic in gathered_and_sorted(spec):
        run = hopper.build(tactic, spec, GPU)
        out = run(x, ids, weights, p)
        assert not out[5].any() and torch.equal(out, run(odd, ids, weights, p))
        ids[:] = -1
        assert not run(x, ids, weights, p).any()
        assert run(x[:0], ids[:0], weights[:0], p).shape == (0, H)
        ids.copy_(torch.rand((900, spec.E), device=GPU).argsort(1)[:, : spec.K])
        ids[ids == 2], ids[5] = spec.E, -1


@needs_hopper
@pytest.mark.parametrize("H", [256, 264])  # 264: rows that are never gathered
def test_tiles_of_every_height(H):
    spec, counts = spec_of(K=1, H=H, bias="both"), torch.tensor([0, 1, 33, 64, 65, 97, 129, 161])
    x, ids, weights, p = draw(spec, int(counts.sum()))
    ids.copy_(torch.repeat_interleave(torch.arange(spec.E), counts)[:, None])
    ends = counts.cumsum(0)[1:] - 1
    check(spec, len(x), (x, ids, weights, p), tokens=[0, *(ends - 1)[1:].tolist(), *ends[1:].tolist()])


def cheapest(spec: ExpertsSpec, T: int, provider: str) -> list[Candidate]:
    """A provider's cheapest tactic of each height of tiles, or its three cheapest where tiles have none."""
    found: dict[object, Candidate] = {}
    for priced in shortlist(spec, facts(GPU), T, (provider,)):
        found.setdefault(dict(priced.candidate.tactic.knobs).get("M", priced.candidate), priced.candidate)
    return list(found.values())[:3]


@pytest.mark.parametrize("T", [3, 70, 700, 4096])
@pytest.mark.parametrize("name", ["qwen3_30b", "gpt_oss_20b"])
def test_no_more_error_than_torch(name, T):
    """RMS against fp64 at most 1.1 of what torch._grouped_mm with a bf16 activation has, for tiles of each height."""
    spec = GEOMETRIES[name]
    weights = weights_of(spec, GPU)
    x, ids, w = tokens_of(spec, T, GPU)
    tokens = sorted({0, T // 2, T - 1})
    want = exact(spec, tokens, x, ids, w, weights)

    def error(got: torch.Tensor) -> float:
        return ((got[tokens].double() - want).norm() / want.norm()).item()

    torch_error = error(PEERS["torch._grouped_mm"](spec, GPU)(x, ids, w, weights))
    for provider in PROVIDERS:
        for candidate in cheapest(spec, T, provider.name):
            run = launcher(candidate, spec, GPU)
            assert error(run(x, ids, w, weights)) <= 1.1 * torch_error, str(candidate)
