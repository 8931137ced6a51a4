"""Activation: the pointwise function between an expert's two linears, as an expression.

In: text such as `mul(silu(gate),up)` or a name such as `swiglu`. Out: a frozen, hashable expression tree that
evaluates on torch tensors, differentiates into another expression, and prints back to the same text. The kernels
generate their epilogues from the same tree, so an activation that has no name runs on the same path as SwiGLU.

The variables are `gate` and `up`; a non-gated expert has only `up`. Constants are Python floats. Evaluation is in
the dtype of the inputs: the caller upcasts (to fp32 at least) first.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

VARIABLES = ("gate", "up")


@dataclass(frozen=True)
class Expr:
    """A node: a variable (`op` in VARIABLES), a constant (`op == "const"`, `value`), or `op` applied to `args`."""

    op: str
    args: tuple[Expr, ...] = ()
    value: float = 0.0

    def __str__(self) -> str:
        if self.op == "const":
            return _number(self.value)
        if not self.args:
            return self.op
        return f"{self.op}({','.join(map(str, self.args))})"

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.args, self.value))

    def __hash__(self) -> int:
        return self._hash

    def variables(self) -> frozenset[str]:
        """The variables that occur."""
        if self.op in VARIABLES:
            return frozenset((self.op,))
        return frozenset().union(*(a.variables() for a in self.args)) if self.args else frozenset()


def _number(x: float) -> str:
    return str(int(x)) if math.isfinite(x) and x == int(x) and abs(x) < 1e15 else repr(float(x))


def const(value: float) -> Expr:
    return Expr("const", (), float(value))


GATE, UP = Expr("gate"), Expr("up")


@dataclass(frozen=True)
class Pointwise:
    """One pointwise function: how torch computes it and its partial derivatives as expressions of its arguments."""

    arity: int
    torch: Callable[..., Any]
    grad: Callable[..., tuple[Expr, ...]]
    commutes: bool = False


def _e(op: str, *args: Expr | float) -> Expr:
    return Expr(op, tuple(a if isinstance(a, Expr) else const(a) for a in args))


def _passes_at_a_bound() -> bool:
    """Whether torch.clamp passes the gradient of what lies on its bound: up to torch 2.13 it does."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), device="cpu", requires_grad=True)
        # by the node alone: torch's engine would ask for CUDA devices first, and a fork can't use CUDA after that
        backward: Any = x.clamp(max=0.0).grad_fn
        return bool(backward(torch.ones((), device="cpu")).item() == 1)


def _table() -> dict[str, Pointwise]:
    import torch
    import torch.nn.functional as F

    def as_tensor(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(a: Any, b: Any) -> Any:
            like = a if isinstance(a, torch.Tensor) else b
            if not isinstance(a, torch.Tensor):
                a = torch.full((), a, dtype=like.dtype, device=like.device)
            if not isinstance(b, torch.Tensor):
                b = torch.full((), b, dtype=like.dtype, device=like.device)
            return f(a, b)

        return call

    tanh_c, tanh_k = math.sqrt(2 / math.pi), 0.044715

    def gelu_tanh_grad(x: Expr) -> tuple[Expr]:
        inner = _e("mul", tanh_c, _e("add", x, _e("mul", tanh_k, _e("mul", x, _e("mul", x, x)))))
        t = _e("tanh", inner)
        d_inner = _e("mul", tanh_c, _e("add", 1, _e("mul", 3 * tanh_k, _e("mul", x, x))))
        left = _e("mul", 0.5, _e("add", 1, t))
        right = _e("mul", _e("mul", 0.5, x), _e("mul", _e("sub", 1, _e("mul", t, t)), d_inner))
        return (_e("add", left, right),)

    def gelu_grad(x: Expr) -> tuple[Expr]:
        cdf = _e("mul", 0.5, _e("add", 1, _e("erf", _e("mul", x, math.sqrt(0.5)))))
        pdf = _e("mul", 1 / math.sqrt(2 * math.pi), _e("exp", _e("mul", -0.5, _e("mul", x, x))))
        return (_e("add", cdf, _e("mul", x, pdf)),)

    def silu_grad(x: Expr) -> tuple[Expr]:
        s = _e("sigmoid", x)
        return (_e("mul", s, _e("add", 1, _e("mul", x, _e("sub", 1, s)))),)

    # Where a = b, the gradient of min(a, b) by a is as torch.clamp's at its bound: torch.minimum splits it evenly, but
    # clamp is the only spelling met in models.
    below, above = ("le", "ge") if _passes_at_a_bound() else ("lt", "gt")
    return {
        "add": Pointwise(2, lambda a, b: a + b, lambda a, b: (const(1), const(1)), commutes=True),
        "sub": Pointwise(2, lambda a, b: a - b, lambda a, b: (const(1), const(-1))),
        "mul": Pointwise(2, lambda a, b: a * b, lambda a, b: (b, a), commutes=True),
        "div": Pointwise(
            2, lambda a, b: a / b, lambda a, b: (_e("div", 1, b), _e("neg", _e("div", a, _e("mul", b, b))))
        ),
        "pow": Pointwise(
            2,
            lambda a, b: a**b,
            lambda a, b: (_e("mul", b, _e("pow", a, _e("sub", b, 1))), _e("mul", _e("pow", a, b), _e("log", a))),
        ),
        "minimum": Pointwise(2, as_tensor(torch.minimum), lambda a, b: (_e(below, a, b), _e("lt", b, a))),
        "maximum": Pointwise(2, as_tensor(torch.maximum), lambda a, b: (_e(above, a, b), _e("gt", b, a))),
        "le": Pointwise(2, as_tensor(lambda a, b: (a <= b).to(a.dtype)), lambda a, b: (const(0), const(0))),
        "lt": Pointwise(2, as_tensor(lambda a, b: (a < b).to(a.dtype)), lambda a, b: (const(0), const(0))),
        "ge": Pointwise(2, as_tensor(lambda a, b: (a >= b).to(a.dtype)), lambda a, b: (const(0), const(0))),
        "gt": Pointwise(2, as_tensor(lambda a, b: (a > b).to(a.dtype)), lambda a, b: (const(0), const(0))),
        "neg": Pointwise(1, lambda a: -a, lambda a: (const(-1),)),
        "abs": Pointwise(1, torch.abs, lambda a: (_e("sub", _e("gt", a, 0), _e("lt", a, 0)),)),
        "exp": Pointwise(1, torch.exp, lambda a: (_e("exp", a),)),
        "log": Pointwise(1, torch.log, lambda a: (_e("div", 1, a),)),
        "log1p": Pointwise(1, torch.log1p, lambda a: (_e("div", 1, _e("add", 1, a)),)),
        "sqrt": Pointwise(1, torch.sqrt, lambda a: (_e("div", 0.5, _e("sqrt", a)),)),
        "rsqrt": Pointwise(1, torch.rsqrt, lambda a: (_e("mul", -0.5, _e("div", _e("rsqrt", a), a)),)),
        "erf": Pointwise(
            1, torch.erf, lambda a: (_e("mul", 2 / math.sqrt(math.pi), _e("exp", _e("neg", _e("mul", a, a)))),)
        ),
        "tanh": Pointwise(1, torch.tanh, lambda a: (_e("sub", 1, _e("mul", _e("tanh", a), _e("tanh", a))),)),
        "sigmoid": Pointwise(
            1, torch.sigmoid, lambda a: (_e("mul", _e("sigmoid", a), _e("sub", 1, _e("sigmoid", a))),)
        ),
        "softplus": Pointwise(1, F.softplus, lambda a: (_e("sigmoid", a),)),
        "silu": Pointwise(1, F.silu, silu_grad),
        "relu": Pointwise(1, F.relu, lambda a: (_e("gt", a, 0),)),
        "gelu": Pointwise(1, F.gelu, gelu_grad),
        "gelu_tanh": Pointwise(1, lambda a: F.gelu(a, approximate="tanh"), gelu_tanh_grad),
    }


@lru_cache(None)
def pointwise_table() -> Mapping[str, Pointwise]:
    """Every pointwise function an activation may use, by name."""
    return _table()


_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow,
    "neg": operator.neg, "abs": operator.abs,
}  # fmt: skip
_UNARY = ("exp", "log", "log1p", "sqrt", "rsqrt", "erf", "tanh", "sigmoid", "softplus", "silu", "relu")


def torch_function(name: str) -> Callable[..., Any] | None:
    """How a graph spells a pointwise function of tensors and numbers; None where it has no single spelling."""
    import torch
    import torch.nn.functional as F

    found: Any = _OPERATORS.get(name)
    return found or (getattr(torch, name, None) or getattr(F, name) if name in _UNARY else None)


def apply(op: str, *args: Expr) -> Expr:
    """`op(*args)` in normal form: constants folded, operands of commutative functions ordered, x*1 and x+0 dropped.

    Folding is exact: it only touches constants and identities that hold for every float.
    """
    entry = pointwise_table()[op]
    if all(a.op == "const" for a in args):
        import torch

        return const(float(entry.torch(*(torch.tensor(a.value, dtype=torch.float64) for a in args))))
    if op == "mul":
        keep = [a for a in args if a != const(1)]
        if len(keep) == 1:
            return keep[0]
    if op == "add":
        keep = [a for a in args if a != const(0)]
        if len(keep) == 1:
            return keep[0]
    if entry.commutes:
        args = tuple(sorted(args, key=_order))
    return Expr(op, args)


def _order(e: Expr) -> tuple[int, str]:
    return (0 if e.op == "const" else 1 if e.args else 2, str(e))


def evaluate(expr: Expr, gate: Any, up: Any, *, reuse: bool = False) -> Any:
    """The expression's value for tensors `gate` and `up` of one shape and floating dtype (`gate` may be None).

    Common subexpressions are computed once. The result has the inputs' shape and dtype. reuse: write sums and products
    into an intermediate that nothing else reads; autograd can't see through that. The inputs are never written.
    """
    import torch

    constants, steps = _program(expr, reuse)
    values = [gate, up, *constants]
    for function, slots in steps:
        values.append(function(*[values[s] for s in slots]))
    value = values[-1] if steps or constants else gate if expr.op == "gate" else up
    return value if isinstance(value, torch.Tensor) else torch.full_like(up, value)


_Step = tuple[Callable[..., Any], tuple[int, ...]]


@lru_cache(1024)
def _program(expr: Expr, reuse: bool) -> tuple[tuple[float, ...], tuple[_Step, ...]]:
    """(constants, steps): each step's function and its arguments' slots; slots are gate, up, constants, results."""
    import torch

    in_place = {"add": torch.Tensor.add_, "sub": torch.Tensor.sub_, "mul": torch.Tensor.mul_, "div": torch.Tensor.div_}
    order: list[Expr] = []
    reads: dict[Expr, int] = {}

    def visit(e: Expr) -> None:
        if e not in order:
            for a in e.args:
                visit(a)
                reads[a] = reads.get(a, 0) + 1
            order.append(e)

    visit(expr)
    numbers = [e for e in order if e.op == "const"]
    slot = {GATE: 0, UP: 1, **{e: 2 + n for n, e in enumerate(numbers)}}
    steps: list[_Step] = []
    for e in order:
        if not e.args:
            continue
        first = e.args[0]
        free = reuse and e.op in in_place and first.args and reads[first] == 1 and first.variables()
        step: Any = in_place[e.op] if free else pointwise_table()[e.op].torch
        steps.append((step, tuple(slot[a] for a in e.args)))
        slot[e] = 2 + len(numbers) + len(steps) - 1
    return tuple(e.value for e in numbers), tuple(steps)


@lru_cache(1024)
def derivative(expr: Expr, variable: str) -> Expr:
    """d expr / d variable, in normal form (the chain rule over the table; at a clamp's bound as torch has it)."""
    if expr.op in VARIABLES or expr.op == "const":
        return const(1.0 if expr.op == variable else 0.0)
    total = const(0)
    for arg, partial in zip(expr.args, pointwise_table()[expr.op].grad(*expr.args)):
        inner = derivative(arg, variable)
        if inner != const(0):
            total = apply("add", total, apply("mul", _normal(partial), inner))
    return total


def _normal(e: Expr) -> Expr:
    return apply(e.op, *map(_normal, e.args)) if e.args else e


_NAMED = {
    "swiglu": "mul(silu(gate),up)",
    "geglu": "mul(gelu(gate),up)",
    "geglu_tanh": "mul(gelu_tanh(gate),up)",
    "reglu": "mul(relu(gate),up)",
    "silu": "silu(up)",
    "gelu": "gelu(up)",
    "gelu_tanh": "gelu_tanh(up)",
    "relu": "relu(up)",
    "relu2": "mul(relu(up),relu(up))",
    "identity": "up",
}


def activation_names() -> tuple[str, ...]:
    return tuple(_NAMED)


@lru_cache(None)
def _by_expr() -> dict[Expr, str]:
    return {parse_expr(text): name for name, text in _NAMED.items()}


@dataclass(frozen=True)
class Activation:
    """An expression with a name where it has one. `str()` gives text that `Activation.parse` takes back."""

    expr: Expr

    @classmethod
    def parse(cls, text: str) -> Activation:
        """Of a name (`swiglu`) or an expression (`mul(tanh(gate),up)`); ValueError otherwise."""
        return cls(parse_expr(_NAMED.get(text, text)))

    @property
    def name(self) -> str:
        """The field's name (`swiglu`, `swiglu_oai(alpha=1.702,limit=7)`), or "expression"."""
        return _by_expr().get(self.expr) or _clamped_name(self.expr) or "expression"

    @property
    def gated(self) -> bool:
        return "gate" in self.expr.variables()

    def __str__(self) -> str:
        return _by_expr().get(self.expr) or str(self.expr)


def _clamped_name(expr: Expr) -> str | None:
    """Names with parameters: the expression is rebuilt from the constants found in it and compared."""
    numbers = sorted({c for c in _constants(expr) if c > 0 and math.isfinite(c)})
    for limit in numbers:
        up = f"minimum(maximum(up,{_number(-limit)}),{_number(limit)})"
        if expr == parse_expr(f"mul(minimum(silu(gate),{_number(limit)}),{up})"):
            return f"swiglu_step(limit={_number(limit)})"
        gate = f"minimum(gate,{_number(limit)})"
        if expr == parse_expr(f"mul(silu({gate}),{up})"):
            return f"swiglu_clamped(limit={_number(limit)})"
        for alpha in numbers:
            text = f"mul(add({up},1),mul({gate},sigmoid(mul({gate},{_number(alpha)}))))"
            if expr == parse_expr(text):
                return f"swiglu_oai(alpha={_number(alpha)},limit={_number(limit)})"
    return None


def _constants(expr: Expr) -> set[float]:
    if expr.op == "const":
        return {expr.value}
    return set().union(*map(_constants, expr.args)) if expr.args else set()


_TOKEN = re.compile(r"[A-Za-z_]\w*|[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)|[(),]")


@lru_cache(1024)
def parse_expr(text: str) -> Expr:
    """The expression that `str` printed as `text`, in normal form. ValueError names what can't be read."""
    tokens: list[str] = _TOKEN.findall(text)
    if "".join(tokens) != text:
        raise ValueError(f"activation {text!r}: not an expression of {', '.join(pointwise_table())}")
    position = 0

    def take() -> str:
        nonlocal position
        if position == len(tokens):
            raise ValueError(f"activation {text!r}: ends too early")
        position += 1
        return tokens[position - 1]

    def expression() -> Expr:
        token = take()
        if token in VARIABLES:
            return Expr(token)
        if token in pointwise_table():
            args = []
            if take() != "(":
                raise ValueError(f"activation {text!r}: {token} needs arguments")
            while True:
                args.append(expression())
                if (end := take()) == ")":
                    break
                if end != ",":
                    raise ValueError(f"activation {text!r}: {end!r} where ',' or ')' belongs")
            if len(args) != pointwise_table()[token].arity:
                raise ValueError(f"activation {text!r}: {token} takes {pointwise_table()[token].arity} arguments")
            return apply(token, *args)
        try:
            return const(float(token))
        except ValueError:
            known = ", ".join((*VARIABLES, *_NAMED, *pointwise_table()))
            raise ValueError(f"activation {text!r}: unknown {token!r}; known are {known}") from None

    expr = expression()
    if position != len(tokens):
        raise ValueError(f"activation {text!r}: {tokens[position]!r} left over")
    return expr
