"""From an activation's expression to the device function that a kernel calls as its epilogue.

In: an `Expr` over activation.pointwise_table. Out: `epilogue(expr)`, a triton.jit function (gate, up) -> value, to be
passed to a kernel as a constexpr; all arguments and results are fp32 tiles of one shape, and where the expression has
no gate the argument is ignored. The source is generated, registered in linecache (triton reads a function's source to
compile it) and cached, so one expression is one function and one entry of Triton's cache.
Invariant: the value is torch's fp32 value to a few ulp, NaN propagates as in torch, and every op of the table is here.
"""

from __future__ import annotations

import hashlib
import linecache
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from ..activation import Expr, pointwise_table

_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=_NAN)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _silu(x):
    return x * _sigmoid(x)  # by the sigmoid that its derivative takes too


@triton.jit
def _fast_sigmoid(x):
    """By PTX: a reciprocal that is not scaled, an exponential that flushes denormals, both to 2 ulp where 1 + e^-x is
    finite. A fifth of the instructions of a SwiGLU's gradients are guards of the plain ones."""
    return tl.inline_asm_elementwise(
        """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _fast_silu(x):
    return x * _fast_sigmoid(x)


@triton.jit
def _tanh(x):
    """(1 - e^-2|x|) / (1 + e^-2|x|) with x's sign; where that would cancel, the odd series to x^7 (off by < 2e-9)."""
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    x2 = x * x
    near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 - x2 * (17.0 / 315))))
    return tl.where(tl.abs(x) < 0.125, near, tl.where(x < 0, -far, far))


@triton.jit
def _log1p(x):
    """log(u) * x / (u - 1) with u = 1 + x: the rounding of u cancels (Kahan)."""
    u = 1.0 + x
    one = u == 1.0
    return tl.where(one, x, tl.where(u == float("inf"), u, tl.log(u) * (x / tl.where(one, 1.0, u - 1.0))))


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, _log1p(tl.exp(x)))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):
    return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def _pow(a, b):
    """a ** b as exp(b log|a|); a negative base has a value for whole exponents only, x ** 0 = 1."""
    b = a * 0.0 + b
    whole = tl.floor(b) == b
    odd = whole & (tl.abs(b * 0.5 - tl.floor(b * 0.5)) == 0.5)
    size = tl.exp(b * tl.log(tl.abs(a)))
    size = tl.where(a < 0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    return tl.where(b == 0, 1.0, size)


# op -> Triton source; {0}, {1} are the names or literals of its arguments.
SOURCE = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "pow": "_pow({0}, {1})",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=_NAN)",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=_NAN)",
    "le": "({0} <= {1}).to(tl.float32)",
    "lt": "({0} < {1}).to(tl.float32)",
    "ge": "({0} >= {1}).to(tl.float32)",
    "gt": "({0} > {1}).to(tl.float32)",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "log1p": "_log1p({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "erf": "tl.erf({0})",
    "tanh": "_tanh({0})",
    "sigmoid": "_sigmoid({0})",
    "softplus": "_softplus({0})",
    "silu": "_silu({0})",
    "relu": "_relu({0})",
    "gelu": "_gelu({0})",
    "gelu_tanh": "_gelu_tanh({0})",
}


def source(expr: Expr) -> str:
    """The device function's text: one assignment for each distinct subexpression, in evaluation order."""
    assert set(SOURCE) == set(pointwise_table()), set(SOURCE) ^ set(pointwise_table())
    names: dict[Expr, str] = {}
    lines = ["@triton.jit", f"def {_name(expr)}(gate, up):"]

    def visit(e: Expr) -> str:
        if e.op in ("gate", "up"):
            return e.op
        if e.op == "const":
            return f"({e.value!r})" if abs(e.value) < float("inf") else f"float('{e.value}')"
        if e not in names:
            if e.op == "pow" and e.args[1].op == "const" and e.args[1].value in (2.0, 3.0, 4.0):
                text = " * ".join([visit(e.args[0])] * int(e.args[1].value))
            else:
                text = SOURCE[e.op].format(*map(visit, e.args))
            names[e] = f"v{len(names)}"
            lines.append(f"    {names[e]} = {text}")
        return names[e]

    result = visit(expr)
    lines.append(f"    return {result}" if expr.op != "const" else f"    return tl.zeros_like(up) + {result}")
    return "\n".join(lines) + "\n"


def _name(expr: Expr) -> str:
    """A name of the expression's own: a kernel that calls two functions of one name calls the first one twice."""
    return "act_" + hashlib.sha256(str(expr).encode()).hexdigest()[:12]


@lru_cache(None)
def epilogue(expr: Expr, fast: bool = False) -> Any:
    """The triton.jit function (gate, up) of the expression; the same object for the same expression.

    fast: for NVIDIA devices only, by PTX where that is shorter.
    """
    text, path = source(expr), f"<moe_compile {'fast ' if fast else ''}epilogue {expr}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    scope = dict(globals())
    if fast:
        scope |= {"_sigmoid": _fast_sigmoid, "_silu": _fast_silu}
    exec(compile(text, path, "exec"), scope)
    return scope[_name(expr)]
