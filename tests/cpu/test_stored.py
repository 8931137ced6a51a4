"""Layouts of other libraries: what is copied and how large, what is shared, and what becomes of a copy."""

import gc
from dataclasses import replace

import pytest
import torch

from moe_compile.activation import Activation
from moe_compile.operands import Canonical, ExpertWeights, canonical, stacked
from moe_compile.providers.stored import Stored, held_bytes, readable, stored_weights
from moe_compile.spec import ExpertsSpec, Layout, torch_dtype

E, H, I = 3, 16, 64
HALVES = ("gate_up", "up_gate", "gate_up_interleaved", "up_gate_interleaved", "separate")
NATIVE = [Layout(storage=s, halves=h) for s in ("EGH", "EHG") for h in HALVES]
WANTED = {
    "canonical": Stored(), "padded": Stored(multiple=48), "blocks": Stored(block=32),
    "transposed": Stored(storage="EHG", halves="gate_up", down="EIH"),
}  # fmt: skip


def make_spec(layout: Layout = NATIVE[0], down: str = "EHI", act: str = "swiglu", bias: str = "both") -> ExpertsSpec:
    return ExpertsSpec(E=E, K=2, H=H, I=I, act=Activation.parse(act), gate_up=layout, down=down, bias=bias)


def random_weights(spec: ExpertsSpec) -> ExpertWeights:
    g = torch.Generator().manual_seed(0)
    lists = [[torch.randn(s, generator=g).to(torch_dtype(spec.x)) for s in shapes] for shapes in spec.operand_shapes()]
    return ExpertWeights.of(spec, *lists)


def directly(fill):
    with torch.no_grad():
        return fill()


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("tensors", ["stacked", "listed"])
@pytest.mark.parametrize("layout", NATIVE, ids=str)
def test_every_layout_means_the_same_in_every_other(layout, tensors, wanted):
    spec, to = replace(make_spec(layout, "EIH"), tensors=tensors), WANTED[wanted]
    weights = random_weights(spec)
    got, native = stored_weights(to, spec, weights, directly), canonical(spec, weights)
    expected = Canonical(**{f: stacked(v) for f, v in vars(native).items()})
    P = to.rows(spec)
    rows = got.gate_up[0] if to.storage == "EGH" else got.gate_up[0].mT
    assert rows.shape == (E, 2 * P, H)
    if to.block:
        blocks = rows.view(E, I // to.block, 2, to.block, H)
        up, gate = blocks[:, :, 0].reshape(E, I, H), blocks[:, :, 1].reshape(E, I, H)
    else:
        halves = (rows[:, :P], rows[:, P:])
        up, gate = halves if to.halves == "up_gate" else halves[::-1]
        assert not up[:, I:].any() and not gate[:, I:].any()
        bias = got.gate_up_bias[0].view(E, 2, P)
        at = ("up_gate", "gate_up").index(to.halves)
        assert torch.equal(bias[:, at, :I], expected.up_bias_EI)
        assert torch.equal(bias[:, 1 - at, :I], expected.gate_bias_EI)
    assert torch.equal(up[:, :I], expected.up_EIH)
    assert torch.equal(gate[:, :I], expected.gate_EIH)
    down = got.down if to.down == "EHI" else got.down.mT
    assert torch.equal(down[..., :I], expected.down_EHI)
    assert torch.equal(got.down_bias, expected.down_bias_EH)
    assert not down[..., I:].any()


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("act", ["swiglu", "relu2"])
def test_the_declared_bytes_are_the_allocated_ones(act, wanted):
    layout = Layout(halves="gate_up" if act == "swiglu" else "up")
    spec = make_spec(layout, act=act)
    weights = random_weights(spec)
    before = held_bytes()
    stored_weights(WANTED[wanted], spec, weights, directly)
    assert held_bytes() - before == sum(WANTED[wanted].bytes_of(spec).values())


def test_the_layout_itself_is_read_in_place():
    spec = make_spec(Layout(halves="up_gate"))
    weights = random_weights(spec)
    assert Stored().bytes_of(spec) == {}
    read = stored_weights(Stored(), spec, weights, directly)
    assert all(
        a is b for ours, theirs in zip(read.arguments()[:-1], weights.arguments()[:-1]) for a, b in zip(ours, theirs)
    )
    up = make_spec(Layout(halves="up"), act="relu2")
    assert Stored().bytes_of(up) == {}
    assert {part[:2] for part in Stored(multiple=128).bytes_of(up)} == {
        ("gate_up", 128), ("down", 128), ("gate_up_bias", 128),
    }  # fmt: skip


def test_layouts_that_agree_share_a_copy_and_the_rest_is_the_models():
    spec = make_spec(bias="none")
    weights = random_weights(spec)
    one = stored_weights(Stored(), spec, weights, directly)
    two = stored_weights(Stored(multiple=32), spec, weights, directly)  # I is one
    assert one.gate_up[0] is two.gate_up[0]
    assert one.down is weights.down
    assert stored_weights(Stored(block=32), spec, weights, directly).gate_up[0] is not one.gate_up[0]


def test_a_change_of_the_weights_is_copied_again_to_the_same_place():
    spec = make_spec(bias="none")
    weights = random_weights(spec)
    first = stored_weights(Stored(), spec, weights, directly).gate_up[0]
    address, old = first.data_ptr(), first.clone()
    weights.gate_up[0].mul_(2)
    again = stored_weights(Stored(), spec, weights, directly).gate_up[0]
    assert again.data_ptr() == address
    assert torch.equal(again, 2 * old)
    calls = []
    stored_weights(Stored(), spec, weights, lambda fill: calls.append(fill))
    assert not calls


def test_a_copy_goes_when_its_weights_go():
    spec = make_spec()
    gc.collect()
    before = held_bytes()
    weights = random_weights(spec)
    alias = weights.gate_up[0].detach()
    stored_weights(Stored(), spec, weights, directly)
    aliased = ExpertWeights(gate_up=(alias,), down=weights.down, gate_up_bias=weights.gate_up_bias)
    stored_weights(Stored(), spec, aliased, directly)
    del aliased
    assert held_bytes() - before == sum(Stored().bytes_of(spec).values())  # an alias is the same tensor
    del weights
    gc.collect()
    assert held_bytes() > before
    del alias
    gc.collect()
    assert held_bytes() == before


def test_other_weights_at_the_same_address_are_not_taken_for_the_old_ones():
    spec = make_spec(bias="none")
    for seed in range(8):  # the allocator gives the same block again
        gate_up = torch.full((E, 2 * I, H), float(seed), dtype=torch.bfloat16)
        weights = ExpertWeights(gate_up=(gate_up,), down=torch.zeros(E, H, I, dtype=torch.bfloat16))
        assert stored_weights(Stored(), spec, weights, directly).gate_up[0].eq(seed).all()
        del gate_up, weights
        gc.collect()


def test_what_cannot_be_read_is_refused():
    spec = make_spec(bias="none")
    weights = random_weights(spec)
    assert readable(Stored(), spec, weights)
    strided = ExpertWeights(gate_up=weights.gate_up, down=weights.down.mT.contiguous().mT)
    assert readable(Stored(), spec, strided).reason == "weights are not contiguous from a multiple of 16 bytes"
    shifted = torch.empty(E * H * I + 1, dtype=torch.bfloat16)[1:].view(E, H, I)
    assert not readable(Stored(), spec, ExpertWeights(gate_up=weights.gate_up, down=shifted))
    with torch.inference_mode():
        made = random_weights(spec)
    assert readable(Stored(), spec, made).reason == "weights made in inference mode can't be copied"
    assert readable(Stored(), make_spec(Layout(halves="up_gate"), bias="none"), made)


def test_nothing_is_kept_when_filling_fails():
    spec = make_spec(bias="none")
    weights, before = random_weights(spec), held_bytes()

    def fails(fill):
        raise MemoryError

    with pytest.raises(MemoryError):
        stored_weights(Stored(), spec, weights, fails)
    assert held_bytes() == before


def test_libraries_see_no_gradients():
    spec = make_spec()
    weights = random_weights(spec)
    for t in (*weights.gate_up, weights.down, *weights.gate_up_bias):
        t.requires_grad_()
    for layout in (Stored(), Stored(halves="gate_up")):
        with torch.no_grad():
            out = stored_weights(layout, spec, weights, directly)
        assert not any(t.requires_grad for t in (*out.gate_up, out.down, *out.gate_up_bias))
    assert out.gate_up[0].data_ptr() == weights.gate_up[0].data_ptr()
