"""Each kernel against its torch twin, and generated epilogues against torch, in Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_compile.activation import Activation, Expr, activation_names, evaluate, parse_expr, pointwise_table
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.hopper import permute
from moe_compile.kernels.sort import sort_routes, sort_routes_reference
from moe_compile.kernels.zeroed import zeroed


@triton.jit
def _map_kernel(gate_ptr, up_ptr, out_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = ACT(tl.load(gate_ptr + i, mask=i < n, other=0.0), tl.load(up_ptr + i, mask=i < n, other=0.0))
    tl.store(out_ptr + i, value, mask=i < n)


def run_epilogue(expr: Expr, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(up, float("nan"))
    _map_kernel[(1,)](gate, up, out, up.numel(), epilogue(expr), triton.next_power_of_2(up.numel()))
    return out


POINTS = torch.tensor([0.0, -0.0, 1e-6, -1e-4, 0.124, -0.2, 0.7, -1.0, 2.0, -3.0, 6.5, -7.0, 9.0, 21.0, -40.0])


@pytest.mark.parametrize("op", sorted(pointwise_table()))
def test_every_op_of_the_table(op):
    a, b = (t.reshape(-1) for t in torch.meshgrid(POINTS, POINTS, indexing="ij"))
    if op == "pow":  # the sign of (-0) ** -1 is the one thing that differs
        a = a + 0.0
    arity = pointwise_table()[op].arity
    expr = Expr(op, (Expr("gate"), Expr("up"))[:arity])
    got, want = run_epilogue(expr, a, b), evaluate(expr, a.double(), b.double())
    far = 2e-5 if op == "pow" else 5e-7  # some ulp; of exp(b log|a|), as many times b log|a|
    torch.testing.assert_close(got, want.float(), rtol=far, atol=1e-6 if "gelu" in op else 1e-9, equal_nan=True)


@pytest.mark.parametrize("op", ["minimum", "maximum", "relu", "silu", "tanh", "sigmoid", "softplus", "gelu", "log1p"])
def test_nan_propagates(op):
    nan, one = torch.full((4,), float("nan")), torch.ones(4)
    args = (Expr("gate"), Expr("up"))[: pointwise_table()[op].arity]
    assert run_epilogue(Expr(op, args), nan, one).isnan().all()
    if len(args) == 2:
        assert run_epilogue(Expr(op, args), one, nan).isnan().all()


@pytest.mark.parametrize(
    "text",
    [
        *activation_names(),
        "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))",  # OAI
        "mul(silu(minimum(gate,7)),minimum(maximum(up,-7),7))",  # clamped
        "mul(minimum(silu(gate),7),minimum(maximum(up,-7),7))",  # step
        "mul(mul(mul(4,tanh(div(gate,4))),sigmoid(gate)),mul(20,tanh(div(up,20))))",  # SiTU
        "mul(tanh(mul(0.5,gate)),pow(up,2))",
        "pow(abs(up),1.5)",
        "maximum(up,-inf)",
    ],
)
def test_expressions(text):
    act = Activation.parse(text)
    torch.manual_seed(0)
    gate, up = 4 * torch.randn(64), 4 * torch.randn(64)
    want = evaluate(act.expr, gate.double(), up.double()).float()
    torch.testing.assert_close(run_epilogue(act.expr, gate, up), want, rtol=2e-5, atol=1e-6)


def test_epilogue_is_cached_by_expression():
    assert epilogue(parse_expr("mul(silu(gate),up)")) is epilogue(parse_expr("mul(up,silu(gate))"))


def groups_of(tiles: list[list[int]]) -> list[tuple[int, int]]:
    """(expert, tiles) of each group: as many tiles that follow each other, of one expert, as its first says."""
    found, m = [], 0
    while m < len(tiles):
        expert, height = tiles[m][0], tiles[m][3] >> 16
        assert [(e, group) for e, _, _, group in tiles[m : m + height]] == [
            (expert, height << 16 | i) for i in range(height)
        ]
        found.append((expert, height))
        m += height
    return found


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 32), st.sampled_from([1, 2, 5, 31, 33, 128, 200, 1024])),
    ids=st.sampled_from(["any", "dropped", "one", "none"]),
    rows=st.sampled_from([(16, 0), (64, 0), (48, 16), (160, 32), (192, 64)]),
    chunks=st.sampled_from([0, 1, 3, 128]),
    inverse=st.booleans(),
    narrow=st.booleans(),
    seed=st.integers(0, 9),
)
@example(sizes=(1, 1, 1), ids="any", rows=(16, 0), chunks=0, inverse=True, narrow=True, seed=0)
@example(sizes=(1, 1, 1), ids="any", rows=(16, 0), chunks=3, inverse=False, narrow=False, seed=0)
@example(sizes=(700, 2, 5), ids="dropped", rows=(48, 16), chunks=3, inverse=True, narrow=True, seed=0)
@example(sizes=(300, 4, 1024), ids="any", rows=(16, 0), chunks=4, inverse=True, narrow=True, seed=0)
@example(sizes=(900, 2, 8), ids="one", rows=(64, 0), chunks=0, inverse=False, narrow=False, seed=0)
def test_sort(sizes, ids, rows, chunks, inverse, narrow, seed):
    """chunks: the most of them, where the programs count together; 0: each counts alone."""
    T, K, E = sizes
    draw = torch.Generator().manual_seed(seed)
    given_TK = torch.randint(0, E, (T, K), generator=draw, dtype=torch.int32 if seed % 2 else torch.int64)
    if ids == "dropped":
        given_TK[torch.rand(T, K, generator=draw) < 0.3] = E
        given_TK[torch.rand(T, K, generator=draw) < 0.2] = -1
    elif ids != "any":
        given_TK[:] = E if ids == "none" else E // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_compile.kernels.sort.counts_alone", lambda R, E: not chunks)
        patch.setattr("moe_compile.kernels.sort._CHUNKS", max(1, chunks))
        patch.setattr("moe_compile.kernels.sort._PATIENCE", 2)
        patch.setattr("moe_compile.kernels.sort._NARROW", 1 << 16 if narrow else 0)
        got, want = sort_routes(given_TK, E, *rows, inverse=inverse), sort_routes_reference(given_TK, E, *rows)
    assert got.bound == want.bound >= len(want.tiles()) and not got.plan[1]  # which hopper.py counts in
    assert got.tiles().tolist() == want.tiles().tolist()
    groups = groups_of(got.tiles().tolist())
    for e in {e for e, _ in groups}:
        heights = [height for at, height in groups if at == e]
        assert max(heights) <= 16 and len(heights) == -(-sum(heights) // 16)
    placed = int(((given_TK >= 0) & (given_TK < E)).sum())
    assert got.routes()[:placed].tolist() == want.routes()[:placed].tolist()
    if inverse:
        assert got.ends(E).tolist() == want.ends(E).tolist()
        here = got.routes()[:placed].long()
        assert got.positions()[here].tolist() == list(range(placed)) == want.positions()[here].tolist()
    assert not zeroed(given_TK.device)().any()


@pytest.mark.parametrize("H", [72, 256, 1152])
def test_rows_are_copied_into_sorted_order(H):
    torch.manual_seed(H)
    ids, x = torch.randint(-1, 6, (19, 3)), torch.randn(19, H)
    schedule = sort_routes(ids, 5, 16)
    placed = int(((ids >= 0) & (ids < 5)).sum())
    routes = schedule.routes()[:placed].long()
    assert torch.equal(permute(x, schedule, 3)[:placed], x[routes // 3])
