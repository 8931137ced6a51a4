"""The operators through the dispatcher: opcheck, autograd, compilation, modes, and messages about bad operands."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools

import pytest
import torch
import torch._dynamo.testing
from operand_cases import OAI, TOLERANCE, Case, assert_close, case_of, layout_id, layouts, spec_of

from moe_compile import ops, reference
from moe_compile.operands import Listed
from moe_compile.spec import Layout, RouterSpec, torch_dtype

PLAN = "*:aten"
experts = torch.ops.moe_compile.experts
experts_backward = torch.ops.moe_compile.experts_backward
route = torch.ops.moe_compile.route
route_backward = torch.ops.moe_compile.route_backward


def call(c: Case, plan: str = PLAN) -> torch.Tensor:
    return experts(*c.args, plan)


ROUTERS = {
    "qwen3": RouterSpec(E=16, K=4, renorm="sum", logits="bf16", out="bf16"),
    "mixtral": RouterSpec(E=16, K=2, renorm="sum", logits="f32"),
    "deepseek v2": RouterSpec(E=16, K=3, groups=4, top_groups=2, group_score="max", scale=16.0, logits="f32"),
    "deepseek v3": RouterSpec(
        E=16, K=4, score="sigmoid", bias=True, groups=4, top_groups=2, group_score="top2_sum", group_fill=-torch.inf,
        renorm="sum_plus_eps", eps=1e-20, scale=2.5, logits="f32",
    ),
    "deepseek v4": RouterSpec(
        E=16, K=4, score="sqrtsoftplus", bias=True, renorm="sum", scale=1.5, logits="f64", score_dtype="f64", out="f64"
    ),
    "values of masked scores": RouterSpec(
        E=16, K=7, groups=4, top_groups=1, group_score="max", values="choice", scale=3.0, logits="f32"
    ),
    "gemma4": RouterSpec(E=16, K=4, renorm="sum", expert_scale=True, scale=1.5, logits="f32"),
    "ernie, whose floor bites": RouterSpec(E=16, K=2, renorm="sum_at_least_eps", eps=0.4, logits="f32"),
    "gpt-oss": RouterSpec(E=16, K=4, score="topk_softmax", score_dtype="bf16", logits="bf16", out="bf16"),
    "llama4": RouterSpec(E=16, K=1, score="topk_sigmoid", logits="bf16", out="bf16"),
}  # fmt: skip


def router_inputs(spec: RouterSpec, T: int = 9) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(logits, bias, expert_scale)."""
    torch.manual_seed(1)
    logits = torch.randn(T, spec.E).to(torch_dtype(spec.logits))
    return logits, torch.randn(spec.E) if spec.bias else None, torch.randn(spec.E) if spec.expert_scale else None


# --- torch.library's own checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", layouts()[::3], ids=layout_id)
def test_opcheck_experts(case):
    c = case_of(spec_of("f32", **case), 5).requires_grad()
    torch.library.opcheck(experts.default, (*c.args, PLAN))
    needs = [True, c.weights is not None] + [True] * len(c.p.tensors())
    detached = c.map(torch.Tensor.detach)
    torch.library.opcheck(experts_backward.default, (torch.randn(5, 32), *detached.args, needs))


@pytest.mark.parametrize("T", [0, 1, 7])
def test_opcheck_token_counts_and_dtypes(T):
    c = case_of(spec_of("bf16", w="f32", bias="both"), T).requires_grad()
    c = dataclasses.replace(c, ids=c.ids.int())
    torch.library.opcheck(experts.default, (*c.args, "4:aten;*:aten(path=blocks)"))


@pytest.mark.parametrize("name", ROUTERS)
def test_opcheck_route(name):
    spec = ROUTERS[name]
    logits, bias, scale = router_inputs(spec)
    torch.library.opcheck(route.default, (logits.requires_grad_(), bias, scale, str(spec)))
    weights, ids = route(logits, bias, scale, str(spec))
    args = (torch.ones_like(weights), logits.detach(), ids, scale, str(spec), [True, scale is not None])
    torch.library.opcheck(route_backward.default, args)


# --- meaning and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 11])
@pytest.mark.parametrize("case", layouts(), ids=layout_id)
def test_gradients_are_those_of_the_reference(case, T):
    spec = spec_of("f64", **case)
    ids = torch.randint(-1, spec.E + 1, (T, spec.K), generator=torch.Generator().manual_seed(3))
    ids[0, 0] = 2  # at least one valid route, so that autograd sees the operands
    c = case_of(spec, T, ids=ids).requires_grad()
    out, want = call(c), reference.experts(spec, c.hidden, c.ids, c.weights, c.p)
    assert_close(out, want, "f64")
    dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(4))
    got_grads = torch.autograd.grad(out, c.leaves(), dout)
    want_grads = torch.autograd.grad(want, c.leaves(), dout, materialize_grads=True)
    for got, want_grad in zip(got_grads, want_grads, strict=True):
        assert_close(got, want_grad, "f64", slack=4)


def test_gradcheck():
    for bias, weight, act in (("both", "output", OAI), ("none", "input", "swiglu")):
        c = case_of(spec_of("f64", E=3, K=2, H=4, I=3, bias=bias, weight=weight, act=act), 3).requires_grad()
        assert torch.autograd.gradcheck(lambda *_, c=c: call(c), c.leaves())


def test_partial_gradients():
    """A frozen operand costs and gets no gradient; the others' are unchanged."""
    c = case_of(spec_of("f64", bias="both"), 6)
    whole = c.requires_grad()
    every = torch.autograd.grad(call(whole).sum(), whole.leaves())
    for i in range(len(every)):
        counter = itertools.count()
        part = c.map(
            lambda t, i=i, counter=counter: t.clone().requires_grad_(next(counter) == (0, 4, 1, 2, 3, 5).index(i))
        )
        wanted = [t for t in part.leaves() if t.requires_grad]
        assert len(wanted) == 1
        (index,) = [j for j, t in enumerate(part.leaves()) if t.requires_grad]
        (got,) = torch.autograd.grad(call(part).sum(), wanted)
        assert torch.equal(got, every[index])


@pytest.mark.parametrize("name", ROUTERS)
def test_route_and_its_gradient(name):
    spec = ROUTERS[name]
    logits, bias, scale = router_inputs(spec, T=40)
    leaves = [logits.clone().requires_grad_(), *([] if scale is None else [scale.clone().requires_grad_()])]
    twins = [leaf.detach().double().requires_grad_() for leaf in leaves]
    weights, ids = route(leaves[0], bias, leaves[1] if scale is not None else None, str(spec))
    want_weights, want_ids = reference.route(spec, logits, bias, scale)
    assert torch.equal(ids, want_ids)
    assert torch.equal(weights, want_weights)
    dout = torch.randn(weights.shape).to(weights.dtype)
    got = torch.autograd.grad(weights, leaves, dout)
    exact = dataclasses.replace(spec, score_dtype="f64", logits="f64", out="f64")
    exact_weights, exact_ids = reference.route(exact, twins[0], bias, twins[1] if scale is not None else None)
    same = (exact_ids == ids).all(1)  # ties in bf16 may resolve otherwise; rows are independent
    assert same.float().mean() > 0.9
    want = torch.autograd.grad(exact_weights, twins, dout.double())
    assert_close(got[0][same], want[0][same], spec.logits)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert same.all()
        assert_close(mine, theirs, "f32")


def test_a_gradient_that_nobody_asked_for_is_not_computed():
    spec = ROUTERS["gemma4"]
    logits, _, scale = router_inputs(spec)
    both = torch.autograd.grad(
        route(logits.requires_grad_(), None, scale.requires_grad_(), str(spec))[0].sum(), (logits, scale)
    )
    for leaves, want in (((logits, scale.detach()), both[0]), ((logits.detach(), scale), both[1])):
        wanted = next(t for t in leaves if t.requires_grad)
        (got,) = torch.autograd.grad(route(leaves[0], None, leaves[1], str(spec))[0].sum(), wanted)
        assert torch.equal(got, want)


def test_the_selection_bias_gets_no_gradient():
    spec = ROUTERS["deepseek v3"]
    logits, bias, _ = router_inputs(spec)
    weights, _ = route(logits.requires_grad_(), bias.requires_grad_(), None, str(spec))
    assert torch.autograd.grad(weights.sum(), bias, allow_unused=True) == (None,)


def test_double_backward_is_refused():
    c = case_of(spec_of("f64"), 4).requires_grad()
    (grad,) = torch.autograd.grad(call(c).sum(), c.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_compile::experts has no gradient of its gradient"):
        grad.sum().backward()
    logits = torch.randn(4, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(
        route(logits, None, None, str(ROUTERS["mixtral"]))[0].sum(), logits, create_graph=True
    )
    with pytest.raises(RuntimeError, match="moe_compile::route has no gradient of its gradient"):
        grad.sum().backward()


def test_modes_see_the_operator():
    """Also where no gradient is wanted, and its kernel is called without a second pass through the dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    c = case_of(spec_of("f32"), 5)
    with torch.no_grad():
        plain = call(c)
        with Noting():
            assert torch.equal(call(c), plain)
    assert seen[0] == "moe_compile.experts.default"


def test_result_is_fresh_and_inputs_are_only_read():
    c = case_of(spec_of("f32", K=1, weight="none", act="swiglu"), 5)
    before = c.map(torch.clone)
    out = call(c)
    out.fill_(7)
    for a, b in zip(c.leaves(), before.leaves(), strict=True):
        assert torch.equal(a, b)
    assert {out.untyped_storage().data_ptr()}.isdisjoint(t.untyped_storage().data_ptr() for t in c.leaves())


def test_nothing_is_saved_but_the_inputs():
    c = case_of(spec_of("f32", bias="both"), 5).requires_grad()
    out = call(c)
    gc.collect()
    owned = {t.untyped_storage().data_ptr() for t in (*c.leaves(), c.ids)}
    assert {t.untyped_storage().data_ptr() for t in out.grad_fn.saved_tensors if t is not None} <= owned


def test_plan_chooses_by_token_count(monkeypatch):
    chosen = []
    real = ops.launcher
    monkeypatch.setattr(
        ops, "launcher", lambda candidate, *rest: (chosen.append(str(candidate)), real(candidate, *rest))[1]
    )
    ops._call.cache_clear()
    plan = "8:aten(path=hit);*:aten(path=blocks)"
    for T in (8, 3, 9, 100):
        c = case_of(spec_of("f32"), T)
        assert_close(call(c, plan), c.oracle(), "f32")
    assert chosen == ["aten(path=hit)", "aten(path=blocks)"]  # each built once


# --- modes ------------------------------------------------------------------------------------------------------------


def test_modes_do_not_change_the_result():
    c = case_of(spec_of("f32", bias="both"), 9)
    want = call(c)
    with torch.no_grad():
        assert torch.equal(call(c.requires_grad()), want)
    with torch.inference_mode():
        assert torch.equal(call(c), want)
        assert torch.equal(call(c.map(torch.clone)), want)
    assert call(c.requires_grad()).requires_grad


def test_autocast_changes_no_dtype():
    c = case_of(spec_of("f32"), 9).requires_grad()
    spec = ROUTERS["mixtral"]
    logits, *_ = router_inputs(spec)
    want, want_grads = call(c), torch.autograd.grad(call(c).sum(), c.leaves())
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = call(c), route(logits, None, None, str(spec))[0]
        grads = torch.autograd.grad(out.sum(), c.leaves())
    assert torch.equal(out, want)
    assert torch.equal(weights, route(logits, None, None, str(spec))[0])
    for got, want_grad in zip(grads, want_grads, strict=True):
        assert torch.equal(got, want_grad)


# --- compilation ------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Router, experts, and something pointwise around them for the compiler to fuse."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        spec = spec_of(dtype, E=16, K=4)
        self.spec, self.router = str(spec), str(RouterSpec(E=16, K=4, renorm="sum", logits=dtype, out=dtype))
        c = case_of(spec, 1)
        self.gate = torch.nn.Parameter(torch.randn(16, 32).to(torch_dtype(dtype)))
        self.gate_up, self.down = torch.nn.Parameter(c.p.gate_up[0]), torch.nn.Parameter(c.p.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        weights, ids = route(torch.nn.functional.linear(h, self.gate), None, None, self.router)
        return x + experts(h, ids, weights, [self.gate_up], [self.down], [], [], None, self.spec, PLAN)


@pytest.mark.parametrize(("backend", "dtype"), [("aot_eager", "f32"), ("aot_eager", "bf16"), ("inductor", "f32")])
# a cached graph would call the operators with the arguments of the version that cached it
@torch.compiler.config.patch(force_disable_caches=True)
def test_compiles_once_for_every_token_count(backend, dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(dtype)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    for T in (5, 12, 33):
        x = torch.randn(T, 32).to(torch_dtype(dtype))
        results = []
        for f in (block, compiled):
            leaf = x.clone().requires_grad_()
            block.zero_grad()
            out = f(leaf)
            out.float().square().sum().backward()
            results.append([out, leaf.grad, *(p.grad for p in block.parameters())])
        for got, want in zip(*reversed(results), strict=True):
            assert_close(got, want, dtype)
    assert counter.frame_count == 1
    with torch.no_grad():
        assert_close(compiled(x), block(x), dtype)


def test_static_shapes_and_inference_mode_compile():
    torch._dynamo.reset()
    block = Block("f32")
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=False)
    for T in (0, 1, 3):
        x = torch.randn(T, 32)
        with torch.inference_mode():
            assert_close(compiled(x), block(x), "f32")


# --- messages ---------------------------------------------------------------------------------------------------------

SPEC = spec_of("f32", bias="both")
GOOD = case_of(SPEC, 3)


@pytest.mark.parametrize(
    ("operand", "value", "message"),
    [
        ("hidden", torch.randn(3, 31), r"hidden is torch.float32 \[3, 31\], expected torch.float32 \[T, 32\]"),
        ("hidden", torch.randn(1, 3, 32), "hidden is"),
        ("hidden", torch.randn(3, 32).double(), "hidden is torch.float64"),
        ("ids", torch.zeros(3, 3, dtype=torch.int64), r"ids is torch.int64 \[3, 3\], expected int64 or int32 \[3, 2\]"),
        ("ids", torch.zeros(3, 2), "ids is torch.float32"),
        ("weights", torch.zeros(2, 2), r"weights is torch.float32 \[2, 2\], expected torch.float32 \[3, 2\]"),
        ("weights", None, "weights is None, expected a tensor"),
        (
            "gate_up",
            [torch.randn(6, 32, 16)],
            r"gate_up is torch.float32 \[6, 32, 16\], expected torch.float32 \[6, 32, 32\]",
        ),
        ("gate_up", [], r"gate_up is 0 tensor\(s\), expected 1"),
        (
            "down",
            [torch.randn(6, 16, 32)],
            r"down is torch.float32 \[6, 16, 32\], expected torch.float32 \[6, 32, 16\]",
        ),
        ("gate_up_bias", [], r"gate_up_bias is 0 tensor\(s\), expected 1"),
        ("gate_up_bias", [torch.randn(6, 16)], r"gate_up_bias is torch.float32 \[6, 16\]"),
        ("down_bias", [], r"down_bias is 0 tensor\(s\), expected 1"),
        ("post_scale", torch.randn(32), r"post_scale is \[32\], expected None"),
        ("down_bias", [torch.randn(5, 32)], r"down_bias is torch.float32 \[5, 32\]"),
    ],
)
def test_bad_operands_are_named(operand, value, message):
    names = ("hidden", "ids", "weights", "gate_up", "down", "gate_up_bias", "down_bias", "post_scale")
    args = dict(zip(names, GOOD.args[:-1], strict=True)) | {operand: value}
    with pytest.raises(ValueError, match=f"moe_compile::experts: {message}"):
        experts(*args.values(), str(SPEC), PLAN)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=message):
        experts(*args.values(), str(SPEC), PLAN)


def test_bad_text_and_providers():
    for spec, plan, message in (
        ("experts(E=1)", PLAN, "missing in"),
        (str(SPEC), "4:aten", "must ascend"),
        (str(SPEC), "*:best", "provider 'best' is not one of aten"),
        (str(SPEC), "*:aten(path=grouped)", "path=grouped needs bf16"),
    ):
        with pytest.raises(ValueError, match=message):
            experts(*GOOD.args[:-1], spec, plan)


def test_bad_router_operands():
    spec = ROUTERS["deepseek v3"]
    logits, bias, _ = router_inputs(spec)
    for args, message in (
        ((logits[:, :3], bias, None), r"logits is torch.float32 \[9, 3\], expected torch.float32 \[T, 16\]"),
        ((logits.bfloat16(), bias, None), "logits is torch.bfloat16"),
        ((logits, None, None), r"bias is None, expected \[16\]"),
        ((logits, bias[:3], None), r"bias is \[3\], expected \[16\]"),
        ((logits, bias, bias), r"expert_scale is \[16\], expected None"),
    ):
        with pytest.raises(ValueError, match=f"moe_compile::route: {message}"):
            route(*args, str(spec))


def test_listed_experts_are_looked_at_again_when_they_change():
    spec = spec_of("f32", tensors="listed", H=16, I=16)
    c = case_of(spec, 3)
    call = functools.partial(torch.ops.moe_compile.experts, c.hidden, c.ids, c.weights)
    want = call(*c.p.arguments(), str(spec), "*:aten")
    down = c.p.down.tensors[4]
    assert torch.equal(call(*c.p.arguments(), str(spec), "*:aten"), want)
    for wrong in (torch.zeros(16, 17), torch.zeros(16, 16, dtype=torch.float16)):
        kept, down.data = down.data, wrong  # the same objects, which look different
        with pytest.raises(ValueError, match="down is"):
            call(*c.p.arguments(), str(spec), "*:aten")
        down.data = kept
        assert torch.equal(call(*c.p.arguments(), str(spec), "*:aten"), want)
    few = dataclasses.replace(c.p, down=Listed(c.p.down.tensors[:-1]))
    with pytest.raises(ValueError, match=r"down is 5 tensor\(s\)"):
        call(*few.arguments(), str(spec), "*:aten")


def test_listed_experts_are_counted():
    spec = spec_of("f32", tensors="listed", gate_up=Layout(halves="separate"))
    c = case_of(spec, 4)
    with pytest.raises(ValueError, match=r"gate_up is 6 tensor\(s\), expected 12"):
        experts(c.hidden, c.ids, c.weights, c.args[3][:6], *c.args[4:], PLAN)


def test_separate_tensors_and_tolerances_exist_for_every_dtype():
    assert set(TOLERANCE) == {"f64", "f32", "bf16", "f16"}
    spec = spec_of("f32", gate_up=Layout(halves="separate"), bias="gate_up")
    c = case_of(spec, 4)
    with pytest.raises(ValueError, match=r"gate_up is 1 tensor\(s\), expected 2"):
        experts(c.hidden, c.ids, c.weights, [c.p.gate_up[0]], *c.args[4:], PLAN)
