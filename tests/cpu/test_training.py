"""Training without a GPU: what a plan says of it, what is said of a plan, and that the kernels for Hopper compile."""

import dataclasses

import pytest
from absent import printed

from moe_compile.hardware import named
from moe_compile.providers import Plan
from moe_compile.spec import Layout
from moe_compile.suite import GEOMETRIES

pytest.importorskip("triton")
from moe_compile.providers import triton_backward
from moe_compile.providers.triton_hopper import TritonHopper
from moe_compile.verdict import OK

QWEN = GEOMETRIES["qwen3_30b"]


def test_a_plan_says_who_trains_and_what_is_kept():
    for text in ("*:aten", "train=aten;*:aten", "keep=half;16:aten;*:triton_grouped", "train=grouped;keep=none;*:aten"):
        assert str(Plan.parse(text)) == text
    plan = Plan.parse("train=grouped;keep=none;16:aten;*:triton_grouped")
    assert (plan.train, plan.keep, plan.at(5).provider) == ("grouped", "none", "aten")
    for text, said in (("keep=some;*:aten", "all, half, none"), ("train=me;*:aten", "auto, grouped, aten")):
        with pytest.raises(ValueError, match=said):
            Plan.parse(text)


@pytest.mark.parametrize(
    ("plan", "device", "said"),
    [
        ("*:triton_grouped", "H200", "triton_grouped up to 768 tokens, then triton_hopper; keeps 24576 bytes a token"),
        ("train=grouped;*:triton_grouped", "H200", "by triton_grouped; keeps 24576 bytes"),
        ("keep=half;*:triton_grouped", "H200", "keeps 12288 bytes"),
        ("keep=none;*:triton_grouped", "A100", "by triton_grouped; keeps 0 bytes"),
        ("train=aten;*:triton_grouped", "H200", "by aten, which computes all again"),
        ("*:aten", "H200", "no kernel of ours"),
    ],
)
def test_what_is_said_of_a_plan(plan, device, said, monkeypatch):
    monkeypatch.setattr(triton_backward, "triton_available", lambda: OK)
    monkeypatch.setattr(TritonHopper, "available", lambda self: OK)
    assert said in triton_backward.in_words(QWEN, named(device), Plan.parse(plan))


def test_halves_that_alternate_are_kept_whole():
    spec = dataclasses.replace(QWEN, gate_up=Layout(halves="gate_up_interleaved"))
    assert [triton_backward.kept_columns(spec, keep) for keep in ("all", "half", "none")] == [1536, 1536, 0]


COMPILE = """
from moe_compile.hardware import named
from moe_compile.operands import ExpertWeights
from moe_compile.providers import triton_backward
from moe_compile.spec import Activation, ExpertsSpec, Layout
def compile_only(bound, key, grid, arguments, free):
    if "hopper" not in bound.kernel.fn.__module__:  # the others run in the interpreter's tests
        return
    kernel = bound.kernel.warmup(*arguments, *free, *bound.constants, grid=grid, **bound.options)
    ptx = kernel.asm["ptx"]
    made.append([bound.kernel.fn.__module__.split(".")[-1] + bound.kernel.fn.__name__, ptx.count("wgmma.mma_async"),
                 ptx.count("cp.async.cg"), ptx.count("bulk.tensor"), kernel.metadata.shared])
launch.Bound._compile = compile_only
swiglu = {"E": 4, "K": 2, "H": 256, "I": 136, "act": Activation.parse("swiglu")}
gpt = {"gate_up": Layout(storage="EHG", halves="gate_up_interleaved"), "down": "EIH", "bias": "both", "I": 2880}
for keep, changes in (("half", {}), ("all", gpt)):
    spec, T = ExpertsSpec(**{**swiglu, **changes}), 512
    *first, down = (bf16(*s) for s in spec.weight_shapes())
    bias = tuple(bf16(spec.E, spec.G) for _ in first) if spec.has_gate_up_bias else ()
    p = ExpertWeights(gate_up=tuple(first), down=down, gate_up_bias=bias,
                      down_bias=bf16(spec.E, spec.H) if spec.has_down_bias else None)
    operands = bf16(T, spec.H), torch.zeros(T, spec.K, dtype=torch.int64), torch.ones(T, spec.K), p
    tiles = triton_backward.tiles_of(spec, T, named("H200"))
    assert tiles.hopper
    _, kept, order = triton_backward.forward(spec, *operands, tiles, keep)
    triton_backward.backward(spec, bf16(T, spec.H), *operands, kept, [True] * (2 + len(p.tensors())), tiles, order)
print(json.dumps(made))
"""


def test_kernels_for_hopper_compile():
    made = printed(COMPILE)
    products = [m for m in made if "permute" not in m[0]]
    # the first linear, the second, of what was kept the other half, at the activation, down, tokens, gate_up
    names = [*3 * ["hopper_kernel"], "hopper_act_act_backward_kernel", "hopper_outer_outer_kernel", "hopper_kernel",
             "hopper_outer_outer_kernel"]  # fmt: skip
    assert [m[0] for m in products] == [*names, *names[:2], *names[3:]]
    assert all(wgmma and tensors and shared <= 227 << 10 for _, wgmma, _, tensors, shared in products)
    # with a small I, the first linear gathers x
    assert [bool(m[2]) for m in products] == [True, False, True, *10 * [False]]
