"""Training in Triton's interpreter: gradients through the operator against the fp64 reference, and kernels against
their twins. fp32 and fp16 only: the interpreter's tl.dot is wrong in bf16 (triton 3.9)."""

import dataclasses

import pytest
import torch
from test_providers import OAI, draw, spec_of

from moe_compile import ops, reference
from moe_compile.activation import derivative, evaluate
from moe_compile.kernels import backward, outer, spread
from moe_compile.kernels import kept as kept_rows
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.grouped import Tile
from moe_compile.kernels.sort import plan_size, sort_routes
from moe_compile.operands import ExpertWeights
from moe_compile.providers import triton_backward
from moe_compile.spec import GATE_UP_STORAGE, HALVES, Layout, torch_dtype

PLAN = "*:triton_grouped(M=16,N1=16,K1=32,W1=4,S1=2,SWAP1=0,TMA1=0,N2=32,K2=16,W2=4,S2=2,SWAP2=0,TMA2=0)"
experts = torch.ops.moe_compile.experts
TILES = [
    Tile(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, stages=2),
    Tile(BLOCK_M=32, BLOCK_N=128, BLOCK_K=16, stages=2, TMA=1),  # columns in pieces
    Tile(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16, stages=2, SWAP=1),
]


def leaves_of(x, w, p: ExpertWeights) -> list[torch.Tensor]:
    return [t for t in (x, w, *p.tensors()) if t is not None]


def put(leaves: list[torch.Tensor], spec, w, p: ExpertWeights):
    """(x, w, p) with the leaves in their places."""
    x, *rest = leaves
    w = None if w is None else rest.pop(0)
    return x, w, ExpertWeights.of(spec, *ops._split(rest, [len(several) for several in p.arguments()[:-1]]), None)


def gradients(spec, x, ids, w, p: ExpertWeights, dout: torch.Tensor):
    """(out, gradients) through the operator, and both of the reference in fp64."""
    mine = [t.detach().clone().requires_grad_() for t in leaves_of(x, w, p)]
    twin = [t.detach().double().requires_grad_() for t in leaves_of(x, w, p)]
    a, b, q = put(mine, spec, w, p)
    out = experts(a, ids, b, *q.arguments(), str(spec), PLAN)
    got = torch.autograd.grad(out, mine, dout.to(out.dtype))
    a, b, q = put(twin, spec, w, p)
    want = reference.experts(reference.exact(spec), a, ids, b, q)
    return (out, *got), (want, *torch.autograd.grad(want, twin, dout.double(), materialize_grads=True))


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert got.shape == want.shape
    assert got.isfinite().all()
    off = (got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1e-9)
    assert off.item() < bound


CASES = [
    {"gate_up": Layout(storage=s, halves=h), "down": d, "bias": b, "weight": w, "act": "relu2" if h == "up" else a}
    for (s, h), d, b, w, a in zip(
        [(s, h) for h in HALVES for s in GATE_UP_STORAGE],
        6 * ["EHI", "EIH"], 4 * ["both", "none", "down"], 4 * ["output", "input", "output"],
        4 * [OAI, "swiglu", "geglu_tanh"],
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [*CASES, {"K": 1, "weight": "none", "H": 36, "I": 40}, {"x": "f16", "out": "f32", "w": "f16"}], ids=str
)
def test_gradients_are_those_of_the_reference(case):
    spec = spec_of(**{"E": 3, "H": 20, "I": 12, **case})
    x, ids, w, p = draw(spec, 5)
    ids[1, 0], ids[2] = spec.E, -1  # a dropped route, and a token without any
    ids[ids == 2] = 1  # an expert without routes
    got, want = gradients(spec, x, ids, w, p, torch.randn(5, spec.H, generator=torch.Generator().manual_seed(1)))
    for a, b in zip(got, want, strict=True):
        close(a, b, 4e-3 if spec.x == "f16" else 1e-5)


def test_gate_up_and_the_order_are_kept_and_their_recomputation_is_bitwise():
    spec = spec_of(bias="both")
    x, ids, w, p = draw(spec, 5)
    (x, *leaves) = [t.requires_grad_() for t in leaves_of(x, w, p)]
    out = experts(x, ids, w, *p.arguments(), str(spec), PLAN)
    owned = {t.untyped_storage().data_ptr() for t in (x, ids, *leaves)}
    kept = [t for t in out.grad_fn.saved_tensors if t is not None and t.untyped_storage().data_ptr() not in owned]
    assert [t.shape for t in kept] == [(5 * spec.K, spec.G), (plan_size(5 * spec.K, spec.E),)]
    dout = torch.randn_like(out)
    needs = [True] * (1 + len(leaves))
    first, second = (
        triton_backward.backward(spec, dout, x.detach(), ids, w.detach(), p, k, needs, order=o)
        for k, o in (kept, (None, None))
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_each_gradient_alone():
    spec = spec_of(E=2, H=16, I=16, bias="both", gate_up=Layout(halves="separate"))
    x, ids, w, p = draw(spec, 3)
    out, kept, order = triton_backward.forward(spec, x, ids, w, p)
    n = len(leaves_of(x, w, p))
    every = triton_backward.backward(spec, out, x, ids, w, p, kept, [True] * n, order=order)
    for i in (0, 1, 3, 6):
        (got,) = triton_backward.backward(spec, out, x, ids, w, p, kept, [j == i for j in range(n)])
        assert torch.equal(got, every[i])


@pytest.mark.parametrize(("halves", "keep", "columns"), [("gate_up", "none", 0), ("separate", "half", 12)])
def test_gradients_are_the_same_whatever_is_kept(halves, keep, columns):
    spec = spec_of(I=12, bias="both", gate_up=Layout(halves=halves))
    x, ids, w, p = draw(spec, 5)
    found = []
    for plan in (PLAN, f"keep={keep};{PLAN}"):
        operands = [t.detach().requires_grad_() for t in leaves_of(x, w, p)]
        a, b, q = put(operands, spec, w, p)
        out = experts(a, ids, b, *q.arguments(), str(spec), plan)
        kept = [t for t in out.grad_fn.saved_tensors if t is not None and t.dim() == 2 and len(t) == 5 * spec.K]
        found.append((out, *torch.autograd.grad(out, operands, torch.ones_like(out))))
    assert [t.shape[1] for t in kept] == [columns]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("weight", ["output", "input"])
def test_weights_of_dropped_routes_and_of_experts_without_any_are_not_read(weight):
    spec = spec_of(E=6, bias="both", weight=weight)
    x, ids, w, p = draw(spec, 5)
    ids[ids >= 3], ids[2] = -1, spec.E
    w[(ids < 0) | (ids == spec.E)] = float("nan")
    for t in p.tensors():
        t[3:] = float("nan")
    out, kept, order = triton_backward.forward(spec, x, ids, w, p)
    grads = triton_backward.backward(spec, out, x, ids, w, p, kept, [True] * len(leaves_of(x, w, p)), order=order)
    assert all(g.isfinite().all() for g in (out, *grads))
    assert not out[2].any() and not grads[0][2].any() and not grads[1][w.isnan()].any()
    assert all(not g[3:].any() for g in grads[2:])


@pytest.mark.parametrize("T", [0, 2])
def test_opcheck(T):
    spec = spec_of(E=2, K=1, H=16, I=16)
    x, ids, w, p = draw(spec, T)
    operands = [t.requires_grad_() for t in leaves_of(x, w, p)]
    x, w, p = put(operands, spec, w, p)
    arguments = (x, ids, w, *p.arguments(), str(spec), PLAN)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(experts.default, arguments, test_utils=checks)
    out, kept, order = torch.ops.moe_compile.experts_training(*arguments)
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    of_p = [[t.detach() for t in several] for several in p.arguments()[:-1]]
    of_down = triton_backward.of_down(spec, p)
    saved = (*detached[:3], *of_p, None, str(spec), PLAN)
    halves = torch.ops.moe_compile.experts_backward_down.default, torch.ops.moe_compile.experts_backward_gate_up.default
    for half, first, more, needs in (
        (halves[0], out, (kept.detach(), order), of_down),
        (halves[1], kept, (order,), [not d for d in of_down]),
    ):
        torch.library.opcheck(half, (first.detach(), *saved, *more, needs), test_utils=checks[:3])


def test_what_it_cannot_train_is_left_to_aten():
    spec = spec_of(gate_up=Layout(halves="separate"))
    call = ops._call(str(spec), PLAN, torch.device("cpu"))
    *_, p = draw(spec, 3)
    assert call.trains(p)
    strided = dataclasses.replace(p, gate_up=(p.gate_up[0], p.gate_up[1].mT.contiguous().mT))
    assert not call.trains(strided)
    assert not ops._call(str(spec), "*:aten", torch.device("cpu")).trains(p)
    for changes in ({"post": "rms", "eps": 1e-6}, {"tensors": "listed"}):
        assert not ops._call(str(spec_of(**changes)), PLAN, torch.device("cpu")).trainable


# --- kernels against their twins --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("halves", "k_major"), [("gate_up", True), ("up_gate_interleaved", False), ("up", True)])
def test_products(halves, k_major, tile):
    layout = Layout(storage="EGH" if k_major else "EHG", halves=halves)
    spec = spec_of(
        act="silu" if halves == "up" else "swiglu",
        gate_up=layout,
        I=72 if tile.TMA else 20,
        down="EHI" if k_major else "EIH",
    )
    x, ids, w, p = draw(spec, 9)
    ids[3] = spec.E
    schedule, n = sort_routes(ids, spec.E, tile.BLOCK_M), 16
    expr = spec.act.expr
    exprs = [expr, derivative(expr, "gate"), derivative(expr, "up")]
    functions = [lambda gate, up, e=e: evaluate(e, gate, up) for e in exprs]
    where = {"choices": spec.K, "halves": halves, "k_major": k_major}
    kept, act = kept_rows.fc1_kept(
        x, p.gate_up, (), w, schedule, epilogue(expr), sizes=(spec.H, spec.I), tile=tile, **where
    )
    want_kept, want_act = kept_rows.fc1_kept_reference(x, p.gate_up, (), w, schedule, functions[0], **where)
    close(kept[:n], want_kept[:n], 1e-5)
    close(act[:n], want_act[:n], 1e-5)
    acts = tuple(map(epilogue, exprs))
    dkept, s_act, parts = backward.act_backward(x, p.down, want_kept, w, schedule, acts, parts=True, tile=tile, **where)
    want_dkept, want_s_act, dots = backward.act_backward_reference(
        x, p.down, want_kept, w, schedule, tuple(functions), **where
    )
    close(dkept[:n], want_dkept[:n], 1e-5)
    close(s_act[:n], want_s_act[:n], 1e-5)
    got = outer.route_dots(parts, ids, None, None, spec.E, torch.float32, a_experts=False)
    close(got, dots.view(9, -1), 1e-5)
    dx = backward.dx_routes(want_dkept, p.gate_up, schedule, k_major=k_major, tile=tile)
    want_dx = backward.dx_routes_reference(want_dkept, p.gate_up, schedule, k_major=k_major)
    rows = (ids < spec.E).reshape(-1)
    close(dx[rows], want_dx[rows], 1e-5)


@pytest.mark.parametrize("tile", TILES[:2], ids=str)
def test_sums(tile):
    g = torch.Generator().manual_seed(0)
    ids, E = torch.randint(-1, 5, (40, 3), generator=g), 4
    ids[ids == 1] = 2
    schedule, w = sort_routes(ids, E, 16, inverse=True), torch.rand(40, 3, generator=g)
    spans = schedule.ends(E)
    counts = [(ids == e).sum().item() for e in range(E)]
    assert (spans[:, 1] - spans[:, 0]).tolist() == counts
    tokens, positions = torch.randn(40, 24, generator=g), torch.randn(120, 40, generator=g)
    positions[sum(counts) :] = float("nan")  # never written, in use, but for the next
    positions[sum(counts) :][: tile.BLOCK_K] = 0.0
    a, b = outer.Rows(of=tokens, tokens=True, weights_TK=w), outer.Rows(of=positions[:, 8:])
    for x, y in ((a, b), (b, a), (b, outer.Rows(of=tokens, tokens=True))):
        for whole in (False, True):
            got = outer.outer(x, y, schedule, spans, choices=3, tile=tile, whole=whole)
            close(got, outer.outer_reference(x, y, schedule, spans, choices=3), 1e-5)
    for x in (a, b):
        got = outer.row_sum(x, schedule, spans, choices=3)
        close(got, outer.row_sum_reference(x, schedule, spans, choices=3), 1e-5)
    for rows, of_experts in ((torch.randn(E, 24, generator=g), True), (torch.randn(120, 24, generator=g), False)):
        for parts in (None, torch.randn(3, 120, generator=g)):
            arguments = (parts, ids, rows, tokens, E, torch.float32)
            got = outer.route_dots(*arguments, a_experts=of_experts)
            close(got, outer.route_dots_reference(*arguments, a_experts=of_experts), 1e-5)


@pytest.mark.parametrize(("drop", "T", "H"), [(False, 700, 20), (True, 700, 20), (False, 9, 2100)])
def test_rows_in_sorted_order(drop, T, H):
    ids = torch.randint(-1, 5, (T, 2), generator=torch.Generator().manual_seed(0))
    ids = ids.fill_(-1) if drop else ids
    x = torch.randn(T, H + 4)[:, :H]
    schedule = sort_routes(ids, 4, 16, inverse=True)
    last = 0 if drop else int(((ids >= 0) & (ids < 4)).sum())
    got = spread.spread(x, ids, schedule, 4)
    assert torch.equal(got[:last], spread.spread_reference(x, schedule, 2)[:last])


def test_products_of_fp16():
    spec = spec_of(x="f16", out="f16", w="f16")
    x, ids, w, p = draw(spec, 5)
    out, kept, _ = triton_backward.forward(spec, x, ids, w, p)
    assert (out.dtype, kept.dtype) == (torch_dtype("f16"),) * 2
