"""The aten provider against the fp64 oracle: every path, layout, dtype and shape of the load, forward and backward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from operand_cases import OAI, Case, assert_close, case_of, layout_id, layouts, spec_of

from moe_compile import cost
from moe_compile.hardware import facts, named
from moe_compile.providers import ExpertWeights, Tactic
from moe_compile.providers.aten import PATHS, Aten, grouped_mm_fits, path_of
from moe_compile.providers.aten_backward import backward
from moe_compile.providers.routes import Blocks, Routes
from moe_compile.providers.routes_host import Loop, Padded, _Order, on_host
from moe_compile.reference import experts
from moe_compile.spec import ExpertsSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded_on_one_thread():
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the operands are tiny
    yield
    torch.set_num_threads(threads)


def _padded(ids: torch.Tensor, spec: ExpertsSpec) -> Routes:
    order = _Order(ids, spec.E)
    return Padded(ids, spec.E, order) if order.valid else Loop(ids, spec.E, order)


@pytest.fixture(autouse=True)
def both_host_paths(monkeypatch):
    """`hit` is one of two by the load; here each can be asked for."""
    monkeypatch.setitem(
        PATHS, "loop", lambda ids, spec: Loop(ids, spec.E, _Order(ids, spec.E) if len(ids) > 1 else None)
    )
    monkeypatch.setitem(PATHS, "padded", _padded)


def run(c: Case, path: str | None = None) -> torch.Tensor:
    tactic = Tactic.of(path=path) if path else Tactic()
    out = Aten().build(tactic, c.spec, CPU)(c.hidden, c.ids, c.weights, c.p)
    assert out.is_contiguous()
    return out


def gradients(c: Case, dout: torch.Tensor, path: str | None = None) -> list[torch.Tensor]:
    needs = [True, c.weights is not None] + [True] * len(c.p.tensors())
    return backward(c.spec, dout, c.hidden, c.ids, c.weights, c.p, needs, path)


def oracle_gradients(c: Case, dout: torch.Tensor) -> list[torch.Tensor]:
    leaf = c.map(lambda t: t.detach().double().requires_grad_())
    out = leaf.oracle()
    if not out.requires_grad:  # no valid route
        return [torch.zeros_like(t) for t in leaf.leaves()]
    return list(torch.autograd.grad(out, leaf.leaves(), dout.double(), materialize_grads=True))


def paths(dtype: str, tensors: str = "stacked") -> list[str]:
    return ["loop", *(["padded"] if tensors == "stacked" else []), "blocks", *(["grouped"] if dtype == "bf16" else [])]


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("case", layouts(), ids=layout_id)
def test_every_layout_and_dtype(case, dtype):
    c = case_of(spec_of(dtype, **case), 12, seed=1)
    for path in paths(dtype, c.spec.tensors):
        assert_close(run(c, path), c.oracle(), dtype)
        for got, want in zip(
            gradients(c, torch.ones_like(c.hidden), path), oracle_gradients(c, torch.ones(12, 32)), strict=True
        ):
            assert_close(got, want, dtype, slack=4)


LOADS = {
    "one token": torch.tensor([[3, 1]]),
    "one token, one expert twice": torch.tensor([[3, 3]]),
    "one expert takes all": torch.full((9, 2), 2),
    "empty experts": torch.tensor([[0, 5]] * 7),
    "even": torch.arange(24).view(12, 2) % 6,
    "skewed": torch.tensor([[0, 1]] * 20 + [[2, 3], [4, 5]]),
    "invalid": torch.tensor([[0, 6], [-1, 5], [9, -7], [1, 2]]),
    "one token, invalid": torch.tensor([[6, 2]]),
    "one token, all invalid": torch.tensor([[6, -1]]),
    "all invalid": torch.full((5, 2), 6),
}


@pytest.mark.parametrize(("dtype", "ids_dtype"), [("f32", torch.int64), ("bf16", torch.int32)])
@pytest.mark.parametrize("load", LOADS)
def test_loads(load, dtype, ids_dtype):
    ids = LOADS[load]
    for weight in ("output", "input", "none"):
        c = case_of(spec_of(dtype, bias="both", weight=weight), len(ids), ids=ids.to(ids_dtype))
        dout = torch.randn(c.hidden.shape).to(c.hidden.dtype)
        want, want_grads = c.oracle(), oracle_gradients(c, dout)
        for path in paths(dtype):
            assert_close(run(c, path), want, dtype)
            for got, want_grad in zip(gradients(c, dout, path), want_grads, strict=True):
                assert_close(got, want_grad, dtype, slack=4)


def poisoned(spec, ids: torch.Tensor) -> tuple[Case, Case]:
    """A case, and it with NaN wherever only invalid routes or experts without a route could read it."""
    c = case_of(spec, len(ids), ids=ids)
    invalid = (ids < 0) | (ids >= spec.E)
    unused = ~torch.isin(torch.arange(spec.E), ids)

    def per_expert(t: torch.Tensor) -> torch.Tensor:
        return t.masked_fill(unused.view(-1, *[1] * (t.dim() - 1)), torch.nan)

    p = ExpertWeights(
        gate_up=tuple(map(per_expert, c.p.gate_up)), down=per_expert(c.p.down),
        gate_up_bias=tuple(map(per_expert, c.p.gate_up_bias)), down_bias=per_expert(c.p.down_bias),
    )  # fmt: skip
    weights = None if c.weights is None else c.weights.masked_fill(invalid, torch.nan)
    hidden = c.hidden.masked_fill(invalid.all(1, keepdim=True), torch.inf)
    return c, dataclasses.replace(c, hidden=hidden, weights=weights, p=p)


@pytest.mark.parametrize("weight", ["output", "input", "none"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "ids",
    [[[0, 1], [2, 3], [4, 0], [1, 2], [6, -1], [3, 9]], [[0, 1]] * 30 + [[6, -1], [0, 9]], [[2, 6]]],
    ids=["even", "skewed", "one token"],
)
def test_nothing_reaches_through_an_invalid_route(ids, dtype, weight):
    ids = torch.tensor(ids)
    spec = spec_of(dtype, bias="both", weight=weight)
    clean, poison = poisoned(spec, ids)
    dout = torch.randn(clean.hidden.shape).to(clean.hidden.dtype)
    lost = ((ids < 0) | (ids >= 6)).all(1)
    for path in paths(dtype):
        got = run(poison, path)
        assert torch.equal(got, run(clean, path))
        assert not got[lost].any()
        for a, b in zip(gradients(poison, dout, path), gradients(clean, dout, path), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("path", ["hit", "grouped", "blocks"])
def test_no_tokens(path):
    c = case_of(spec_of("bf16", bias="both"), 0)
    assert run(c, path).shape == (0, 32)
    for got, leaf in zip(gradients(c, c.hidden, path), c.leaves(), strict=True):
        assert torch.equal(got, torch.zeros_like(leaf))


def test_many_choices_and_one():
    for E, K in ((6, 1), (1, 1), (6, 6), (48, 8)):
        for T in (1, 2, 33):
            c = case_of(spec_of("f32", E=E, K=K), T)
            for path in paths("f32"):
                assert_close(run(c, path), c.oracle(), "f32")


def test_dtypes_of_weights_and_result_are_the_specs():
    for x, w, out in (("bf16", "f32", "bf16"), ("bf16", "bf16", "f32"), ("f16", "f32", "f32"), ("f32", "f64", "f64")):
        c = case_of(spec_of(x, w=w, out=out), 9)
        for path in paths(x):
            got = run(c, path)
            assert str(got.dtype) == str(experts(c.spec, c.hidden, c.ids, c.weights, c.p).dtype)
            assert_close(got, c.oracle(), x)
            grads = gradients(c, torch.ones_like(got), path)
            assert [g.dtype for g in grads] == [t.dtype for t in c.leaves()]


def test_strided_operands():
    """Views of larger tensors, and weights stored the other way round: read where they are."""
    c = case_of(spec_of("bf16"), 10)
    wide = torch.randn(10, 64).bfloat16()
    hidden, ids = wide[:, 1:33], torch.cat((c.ids, c.ids), 1)[:, :2]
    transposed = ExpertWeights(
        gate_up=(c.p.gate_up[0].mT.contiguous().mT,), down=torch.cat((c.p.down,) * 2, -1)[..., 16:]
    )
    for path in paths("bf16"):
        want = run(dataclasses.replace(c, hidden=hidden.contiguous()), path)
        assert_close(run(dataclasses.replace(c, hidden=hidden, ids=ids, p=transposed), path), want, "bf16", slack=0.5)
    odd = ExpertWeights(gate_up=c.p.gate_up, down=torch.cat((c.p.down,) * 2, -1)[..., 3:19])
    assert_close(run(dataclasses.replace(c, p=odd), "grouped"), dataclasses.replace(c, p=odd).oracle(), "bf16")


def eager(c: Case) -> torch.Tensor:
    """The block as models write it: a loop over experts, each step rounded to the operands' dtype."""
    out = torch.zeros_like(c.hidden)
    for e in range(c.spec.E):
        t, k = torch.where(c.ids == e)
        gate, up = torch.nn.functional.linear(c.hidden[t], c.p.gate_up[0][e]).chunk(2, -1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, c.p.down[e])
        out = out.index_add(0, t, y * c.weights[t, k, None])
    return out


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("T", [1, 4, 40])
def test_error_is_no_larger_than_the_models_own(dtype, T):
    """At most 1.1 times the eager graph's error against fp64, RMS over draws, forward and backward."""
    squares: dict[str, torch.Tensor] = {}
    for seed in range(24 if T < 40 else 4):
        c = case_of(spec_of(dtype, E=8, K=4, H=128, I=64), T, seed=seed).requires_grad()
        dout = torch.randn(c.hidden.shape).to(c.hidden.dtype)
        want = [c.oracle(), *oracle_gradients(c, dout)]
        out = eager(c)
        theirs = [out, *torch.autograd.grad(out, c.leaves(), dout)]
        for path in ("hit", *paths(dtype)[2:]):
            with torch.no_grad():
                ours = [run(c, path), *gradients(c, dout, path)]
            each = zip(("out", "hidden", "weights", "gate_up", "down"), ours, theirs, want, strict=True)
            for name, got, eager_got, exact in each:
                pair = torch.stack([(t.double() - exact).square().sum() for t in (got, eager_got)])
                squares[f"{path} {name}"] = squares.get(f"{path} {name}", 0) + pair
    ratios = {name: (ours / theirs).sqrt().item() for name, (ours, theirs) in squares.items()}
    assert max(ratios.values()) <= 1.1, ratios


@pytest.mark.parametrize("act", [OAI, "mul(tanh(gate),up)", "geglu_tanh"])
def test_activations_without_a_kernel_of_their_own(act):
    c = case_of(spec_of("f64", act=act), 9)
    dout = torch.randn(c.hidden.shape, dtype=torch.float64)
    assert_close(run(c), c.oracle(), "f64")
    for got, want in zip(gradients(c, dout), oracle_gradients(c, dout), strict=True):
        assert_close(got, want, "f64", slack=4)


def test_only_needed_gradients_are_returned():
    c = case_of(spec_of("f64", bias="both", gate_up=spec_of().gate_up), 8)
    dout = torch.randn(c.hidden.shape, dtype=torch.float64)
    each = gradients(c, dout)
    for i in range(6):
        needs = [i == j for j in range(6)]
        (got,) = backward(c.spec, dout, c.hidden, c.ids, c.weights, c.p, needs)
        assert torch.equal(got, each[i])


def test_blocks_bound_the_gathered_weights(monkeypatch):
    c = case_of(spec_of("f32", bias="both"), 50)
    whole, grads = run(c, "blocks"), gradients(c, c.hidden, "blocks")
    monkeypatch.setattr("moe_compile.providers.routes.GATHERED_BYTES", 3 * 32 * 32 * 4)
    assert len(Blocks(c.ids, c.spec)._chunks(32 * 32 * 4)) > 2
    assert_close(run(c, "blocks"), whole, "f32")
    for got, want in zip(gradients(c, c.hidden, "blocks"), grads, strict=True):
        assert_close(got, want, "f32")


def test_host_pads_where_that_is_cheap(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    even = torch.arange(256 * 4).view(256, 4) % 32
    one = torch.zeros(256, 4, dtype=torch.int64)
    small = {"E": 32, "K": 4, "H": 256, "I": 64}
    for dtype, changes, ids, kind in (
        ("bf16", {}, even, Padded),
        ("bf16", {}, even[:1], Loop),
        ("bf16", {}, one, Loop),  # 31 of 32 rows would be padding
        ("bf16", {"H": 4096, "I": 2048}, even[:2], Loop),  # the weights of 24 experts would be read for nothing
        ("f32", {}, even, Padded),
        ("f32", {}, even[:64], Padded),
        ("f32", {}, torch.cat((even[:32], one[:32])), Loop),  # a popular expert: most rows would be padding
    ):
        assert type(on_host(ids, spec_of(dtype, **small | changes))) is kind
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert type(on_host(even, spec_of("f32", **small))) is Loop


def test_contract():
    aten, spec = Aten(), spec_of("bf16", E=64, K=8)
    assert aten.available()
    assert aten.supports(spec, CPU)
    device = facts(CPU)
    ((tactic, work),) = aten.tactics(spec, device, 16)
    assert str(tactic) == "path=hit"
    assert work == aten.work(tactic, spec, device)
    one, some, many = (cost.estimate(work, device, cost.Load.uniform(64, 8), T) for T in (1, 16, 4096))
    assert some.total("flop") == 2 * 16 * 8 * 3 * 32 * 16
    assert one.total("weights") < some.total("weights") < many.total("weights") <= 64 * 3 * 32 * 16 * 2
    assert torch.__version__ in aten.version()


def test_a_copy_of_listed_experts_is_priced_whole():
    aten, h200 = Aten(), named("H200")
    spec = spec_of("bf16", E=64, K=2)
    alone = dataclasses.replace(spec, tensors="listed")
    one = cost.Load.uniform(64, 2)
    for path in ("grouped", "blocks"):
        together, copied = (
            cost.estimate(aten.work(Tactic.of(path=path), s, h200), h200, one, 1).total("bytes") for s in (spec, alone)
        )
        assert copied - together == 2 * 64 * 3 * 32 * 16 * 2  # read and written, whatever one token reaches
    on_cpu = facts(CPU)
    assert aten.work(Tactic.of(path="hit"), spec, on_cpu) == aten.work(Tactic.of(path="hit"), alone, on_cpu)


def test_paths_by_device():
    cuda = torch.device("meta")  # stands for a device that reads no counts
    assert path_of(spec_of("bf16"), CPU) == "hit"
    assert path_of(spec_of("f32"), cuda) == "blocks"
    assert grouped_mm_fits(spec_of("bf16"), CPU)
    assert not grouped_mm_fits(spec_of("bf16", H=36), CPU)
    with pytest.raises(ValueError, match="path=hit reads counts on the host"):
        Aten().build(Tactic.of(path="hit"), spec_of(), cuda)
    with pytest.raises(ValueError, match="path=grouped needs bf16"):
        Aten().build(Tactic.of(path="grouped"), spec_of("f32"), CPU)
    for tactic in (Tactic.of(path="fast"), Tactic.of(BLOCK_M=16)):
        with pytest.raises(ValueError, match="is not path=hit, path=grouped or path=blocks"):
            Aten().build(tactic, spec_of(), CPU)
