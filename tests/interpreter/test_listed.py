"""Experts in tensors of their own, in the interpreter: both Triton providers read them where they are, to the same bits
as from one tensor; and what is left to aten."""

import dataclasses

import pytest
import torch
from test_providers import CPU, GROUPED, OAI, check, draw, exact, spec_of

from moe_compile.hardware import facts
from moe_compile.kernels import decode, grouped, listed
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.sort import sort_routes
from moe_compile.operands import ExpertWeights, Listed
from moe_compile.providers import Candidate, launcher
from moe_compile.providers.base import Tactic
from moe_compile.providers.triton_decode import TritonDecode
from moe_compile.providers.triton_grouped import TritonGrouped
from moe_compile.spec import GATE_UP_STORAGE, HALVES, ExpertsSpec, Layout

LAYOUTS = [(s, h) for s in GATE_UP_STORAGE for h in HALVES]
BOTH = [(TritonGrouped(), GROUPED[1]), (TritonDecode(), Tactic.parse("N1=16,K1=32,W1=4,N2=32,K2=32,W2=4"))]
names = [p.name for p, _ in BOTH]


def apart(p: ExpertWeights, copy=torch.clone) -> ExpertWeights:
    """The same experts in tensors of their own."""

    def each(w):
        return Listed(tuple(map(copy, w)))

    return dataclasses.replace(
        p, gate_up=tuple(map(each, p.gate_up)), down=each(p.down), gate_up_bias=tuple(map(each, p.gate_up_bias)),
        down_bias=None if p.down_bias is None else each(p.down_bias),
    )  # fmt: skip


def run(provider, tactic, spec: ExpertsSpec, x, ids, w, p: ExpertWeights) -> torch.Tensor:
    spec = dataclasses.replace(spec, tensors="listed")
    return launcher(Candidate(provider=provider.name, tactic=tactic), spec, CPU)(x, ids, w, p)


def check_apart(provider, tactic, spec: ExpertsSpec, inputs) -> torch.Tensor:
    *routed, p = inputs
    together = check(provider, tactic, spec, inputs)
    p = apart(p)
    assert provider.reads(p)
    got = run(provider, tactic, spec, *routed, p)
    assert torch.equal(got, together)
    return got


@pytest.mark.parametrize(("storage", "halves"), LAYOUTS, ids=[f"{s}:{h}" for s, h in LAYOUTS])
@pytest.mark.parametrize(("provider", "tactic"), BOTH, ids=names)
def test_layouts_with_biases(provider, tactic, storage, halves):
    spec = spec_of(
        gate_up=Layout(storage=storage, halves=halves), down="EHI" if storage == "EGH" else "EIH", bias="both",
        act="silu" if halves == "up" else OAI,
    )  # fmt: skip
    check_apart(provider, tactic, spec, draw(spec, 3))


@pytest.mark.parametrize(("provider", "tactic"), BOTH, ids=names)
@pytest.mark.parametrize(
    "changes",
    [
        {"act": "mul(tanh(gate),pow(up,2))", "bias": "gate_up", "weight": "input"},
        {"weight": "none", "K": 1, "gate_up": Layout(halves="separate")},
        {"act": "relu2", "gate_up": Layout(halves="up"), "bias": "down"},
        {"H": 37, "I": 19, "gate_up": Layout(halves="separate")},
        {"E": 1, "K": 1, "H": 16, "I": 17},
        {"x": "f16", "w": "f16", "out": "f16", "H": 48, "I": 32},
        {"x": "f16", "out": "f32", "gate_up": Layout(halves="separate"), "bias": "both"},
    ],
    ids=str,
)
def test_variants(provider, tactic, changes):
    spec = spec_of(**changes)
    check_apart(provider, tactic, spec, draw(spec, 4, seed=3))


@pytest.mark.parametrize(("provider", "tactic"), BOTH, ids=names)
def test_sentinels_never_touch_poisoned_weights(provider, tactic):
    spec = spec_of(bias="both", H=41, I=23, E=9)
    x, ids, w, p = draw(spec, 6)
    ids[ids == 2] = -1
    ids[ids == 4] = spec.E
    ids[ids == 5] = spec.E + 1000
    ids[5] = -(1 << 40)
    w[(ids < 0) | (ids >= spec.E)] = float("nan")
    for tensor in (*p.gate_up, p.down, *p.gate_up_bias, p.down_bias):
        tensor[[2, 4, 5]] = float("nan")
    got = check_apart(provider, tactic, spec, (x, ids, w, p))
    assert (got[5] == 0).all()


def test_a_norm_of_each_experts_output():
    spec = spec_of(post="rms", eps=1e-5, gate_up=Layout(halves="separate"))
    x, ids, w, p = draw(spec, 6)
    provider, tactic = BOTH[0]
    together = provider.build(tactic, spec, CPU)(x, ids, w, p)
    assert torch.equal(run(provider, tactic, spec, x, ids, w, apart(p)), together)


@pytest.mark.parametrize(("provider", "tactic"), BOTH, ids=names)
def test_views_that_are_strided_alike(provider, tactic):
    """Padded rows, at odd addresses: the pads are poison."""
    spec = spec_of(gate_up=Layout(halves="separate"))

    def padded(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((t.shape[0] * 67 + 3,), float("nan"))
        view = wide[3:].view(t.shape[0], 67)[:, : t.shape[1]]
        return view.copy_(t)

    x, ids, w, p = draw(spec, 3)
    views = apart(p, padded)
    assert provider.reads(views)
    assert torch.equal(run(provider, tactic, spec, x, ids, w, views), check(provider, tactic, spec, (x, ids, w, p)))


def padded_one(w: Listed) -> Listed:
    first, *rest = w.tensors
    wide = first.new_full((*first.shape[:-1], first.shape[-1] * 2), float("nan"))
    view = wide[..., ::2] if first.dim() == 1 else wide[..., : first.shape[-1]]
    return Listed((view.copy_(first), *rest))


@pytest.mark.parametrize("operand", ["gate_up", "down", "gate_up_bias", "down_bias"])
@pytest.mark.parametrize(("provider", "tactic"), BOTH, ids=names)
def test_one_expert_strided_otherwise_is_left_to_aten(provider, tactic, operand):
    spec = spec_of(bias="both")
    x, ids, w, p = draw(spec, 2)
    odd = apart(p)
    value = getattr(odd, operand)
    odd = dataclasses.replace(odd, **{operand: (padded_one(value[0]),) if type(value) is tuple else padded_one(value)})
    assert provider.reads(odd).reason == "experts' tensors are strided differently"
    got = run(provider, tactic, spec, x, ids, w, odd)
    torch.testing.assert_close(got.double(), exact(spec, x, ids, w, p), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("provider", "tactic"), BOTH, ids=names)
def test_weights_that_turn_where_they_are(provider, tactic):
    """The same objects at the same addresses, but a square weight is transposed: seen, and left to aten."""
    spec = spec_of(E=3, H=16, I=16, gate_up=Layout(halves="separate"))
    x, ids, w, p = draw(spec, 3)
    own = apart(p)
    assert torch.equal(run(provider, tactic, spec, x, ids, w, own), check(provider, tactic, spec, (x, ids, w, p)))
    for e in range(spec.E):
        own.down.tensors[e].data = own.down.tensors[e].data.T
        turned = torch.stack([*(t.T for t in p.down[: e + 1]), *p.down[e + 1 :]])
        got = run(provider, tactic, spec, x, ids, w, own)
        want = exact(spec, x, ids, w, dataclasses.replace(p, down=turned))
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("provider", "tactic"), BOTH, ids=names)
def test_weights_that_move_are_read_where_they_are(provider, tactic):
    spec = spec_of(gate_up=Layout(halves="separate"))
    x, ids, w, p = draw(spec, 3)
    mine = apart(p)
    first = run(provider, tactic, spec, x, ids, w, mine)
    known = dict(listed._TABLES)
    assert torch.equal(run(provider, tactic, spec, x, ids, w, mine), first)
    assert listed._TABLES == known  # found, not made again
    for several in (*mine.gate_up, mine.down):
        for t in several.tensors:
            t.data = 2 * t  # to another place
    p = dataclasses.replace(p, gate_up=tuple(2 * t for t in p.gate_up), down=2 * p.down)
    assert torch.equal(run(provider, tactic, spec, x, ids, w, mine), check(provider, tactic, spec, (x, ids, w, p)))


def test_a_table_goes_with_its_first_expert():
    tensors = [torch.randn(4, 8) for _ in range(3)]
    table = listed._table(Listed(tuple(tensors)))
    assert table.addresses.tolist() == [t.data_ptr() for t in tensors]
    assert table.shape == (3, 4, 8)
    assert table.stride() == (0, 8, 1)
    assert table.multiple == 16
    assert listed._table(Listed(tuple(tensors))) is table
    odd = [torch.randn(33)[1:].view(4, 8), *tensors]
    other = listed._table(Listed(tuple(odd)))
    assert other.multiple == 4
    del tensors[0], odd[0]
    held = set(listed._TABLES.values())
    assert other not in held
    assert table in held  # whose first is the second of the others
    del odd
    assert table not in listed._TABLES.values()


def test_experts_on_several_devices_have_no_table():
    elsewhere = torch.empty(4, 8, device="meta")
    with pytest.raises(listed.NoTable, match="experts on cpu, meta"):
        listed._table(Listed((torch.randn(4, 8), elsewhere)))


def test_what_needs_one_tensor_says_so():
    spec = spec_of(tensors="listed")
    for tactic in GROUPED:
        if "TMA1=1" in str(tactic):
            with pytest.raises(ValueError, match="one tensor of all experts"):
                TritonGrouped().build(tactic, spec, CPU)
    for provider in (TritonGrouped(), TritonDecode()):
        assert provider.supports(spec, facts(CPU))


def test_kernels_against_their_twins():
    spec = spec_of(bias="both", gate_up=Layout(halves="separate"))
    x, ids, w, p = draw(spec, 8)
    ids[3, 1] = -1
    act, here = epilogue(spec.act.expr), ids.reshape(-1) >= 0
    own = apart(p)  # the tables hold their addresses
    t = listed.tables(own)
    rows = decode.Rows(UP_N=4, UP_K=32, DOWN_N=4, DOWN_K=32)
    twin_act = lambda g, u: torch.nn.functional.silu(g) * u
    how = {"halves": "separate", "k_major": True}
    a = decode.up(x, ids, w, t.gate_up, t.gate_up_bias, act, E=5, sizes=(40, 24), gated=True, rows=rows, **how)
    twin = decode.up_reference(x, ids, w, p.gate_up, p.gate_up_bias, twin_act, **how)
    torch.testing.assert_close(a[here], twin[here])
    y = decode.down(twin, ids, w, t.down, t.down_bias, torch.float32, E=5, k_major=True, rows=rows)
    want = decode.down_reference(twin, ids, w, p.down, p.down_bias, torch.float32, k_major=True)
    torch.testing.assert_close(y, want)
    # a tile that asks for tensor descriptors reads a table by addresses
    tile = grouped.Tile(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, TMA=1)
    schedule = sort_routes(ids, spec.E, 16)
    first = grouped.fc1(
        x, t.gate_up, t.gate_up_bias, None, schedule, act, choices=2, sizes=(40, 24), gated=True, tile=tile, **how
    )
    twin = grouped.fc1_reference(x, p.gate_up, p.gate_up_bias, None, schedule, twin_act, choices=2, **how)
    placed = int(here.sum())
    torch.testing.assert_close(first[:placed], twin[:placed])
    y = grouped.fc2(twin, t.down, t.down_bias, schedule, k_major=True, tile=tile)
    want = grouped.fc2_reference(twin, p.down, p.down_bias, schedule, k_major=True)
    torch.testing.assert_close(y[here], want[here])
