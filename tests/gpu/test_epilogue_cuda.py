"""Generated epilogues on a CUDA device against torch in fp64: every named activation and its derivatives, every
function of the table, as kernels for any device and as kernels for Hopper take them (`fast`)."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from moe_compile.activation import (  # noqa: E402
    GATE,
    UP,
    Activation,
    Expr,
    activation_names,
    derivative,
    evaluate,
    pointwise_table,
)
from moe_compile.kernels.epilogue import epilogue  # noqa: E402

GPU = torch.device("cuda", 0)
WITH_NUMBERS = (
    "mul(add(minimum(maximum(up,-7),7),1),mul(minimum(gate,7),sigmoid(mul(minimum(gate,7),1.702))))",  # OAI
    "mul(silu(minimum(gate,7)),minimum(maximum(up,-7),7))",  # clamped
    "mul(minimum(silu(gate),7),minimum(maximum(up,-7),7))",  # step
    "mul(mul(mul(4,tanh(div(gate,4))),sigmoid(gate)),mul(20,tanh(div(up,20))))",  # SiTU
)
TEXTS = [*activation_names(), *WITH_NUMBERS]
FAST = ("sigmoid", "silu")  # what fast epilogues compute otherwise


@triton.jit
def _map_kernel(gate_ptr, up_ptr, out_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(gate_ptr + i, mask=i < n, other=0.0), tl.load(up_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, ACT(gate, up), mask=i < n)


def value(expr: Expr, gate: torch.Tensor, up: torch.Tensor, fast: bool) -> torch.Tensor:
    out = torch.full_like(up, float("nan"))
    _map_kernel[(triton.cdiv(up.numel(), 256),)](gate, up, out, up.numel(), epilogue(expr, fast=fast), 256)
    return out


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        *((t, False) for t in TEXTS),
        *((t, True) for t in TEXTS if any(f in str(Activation.parse(t).expr) for f in FAST)),
    ],
)
def test_activations_and_their_derivatives(text, fast):
    expr = Activation.parse(text).expr
    torch.manual_seed(0)
    gate, up = (5 * torch.randn(20_000, device=GPU) for _ in range(2))
    for e in (expr, *(derivative(expr, v) for v in ("gate", "up"))):
        got, want = value(e, gate, up, fast).double(), evaluate(e, gate.double(), up.double())
        assert (got - want).abs().max() <= 2e-6 * want.abs().max().clamp(min=1), str(e)
        assert (got - want).norm() <= 1e-6 * want.norm(), str(e)


@pytest.mark.parametrize(
    ("op", "fast"), [*((op, False) for op in sorted(pointwise_table())), *((f, True) for f in FAST)]
)
def test_every_function_of_the_table(op, fast):
    points = [0.0, -0.0, 1e-6, -1e-4, 0.124, -0.2, 0.7, -1.0, 2.0, -3.0, 6.5, -7.0, 9.0, 21.0, -40.0, 88.0, -100.0]
    points = torch.tensor([*points, float("inf"), float("-inf"), float("nan")], device=GPU)
    a, b = (t.reshape(-1) for t in torch.meshgrid(points, points, indexing="ij"))
    if op == "pow":  # the sign of (-0) ** -1, and what is no number, differ
        a, b = (t[a.isfinite() & b.isfinite()] for t in (a + 0.0, b))
    expr = Expr(op, (GATE, UP)[: pointwise_table()[op].arity])
    got, want = value(expr, a, b, fast), evaluate(expr, a.double(), b.double()).float()
    far = 5e-5 if op == "pow" else 5e-6  # exp's argument is rounded: so many of its ulp
    torch.testing.assert_close(got, want, rtol=far, atol=2e-6 if "gelu" in op else 1e-12, equal_nan=True)
