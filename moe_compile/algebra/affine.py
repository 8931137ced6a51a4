"""Sizes and integers: axes, and affine combinations of axes and integer terms with exact division. No torch.

An `Axis` is a binder with a size. An `Affine` is an integer: const + sum of coefficient * (axis or integer term). Sizes
are ints, or sympy expressions where a dimension is symbolic; a question that can't be answered exactly is answered no.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

Size = Any  # int, or a sympy expression where the dimension is symbolic


def as_size(x: Any) -> Size:
    """int of an int, torch.SymInt or sympy number; a sympy expression of what is symbolic."""
    if type(x) is int:
        return x
    node = getattr(x, "node", None)
    expr = node.expr if node is not None else x
    if isinstance(expr, int):
        return int(expr)
    return int(expr) if expr.is_Integer else expr


def times(*sizes: Size) -> Size:
    """The product of sizes."""
    total: Size = 1
    for s in sizes:
        if type(s) is not int:
            return _product(sizes)
        total *= s
    return total


@lru_cache(4096)
def _product(sizes: tuple[Size, ...]) -> Size:
    total = math.prod(sizes)
    return total if type(total) is int else as_size(total)


def divide(a: Size, b: Size) -> Size | None:
    """a / b where that is exactly an integer (or a polynomial with no denominator), else None."""
    if type(a) is int and type(b) is int:
        return a // b if b and a % b == 0 else None
    return _quotient(a, b)


@lru_cache(4096)
def _quotient(a: Size, b: Size) -> Size | None:
    if b == 1:
        return a
    if a == b:
        return 1
    quotient = a / b
    return as_size(quotient) if quotient.as_numer_denom()[1] == 1 else None


def memory_order(sizes: tuple[Any, ...], strides: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The dims from the slowest to the fastest where memory holds the elements one next to the other; else None."""
    left = [d for d in range(len(sizes)) if as_size(sizes[d]) != 1]
    order: list[int] = []
    if any(as_size(n) == 0 for n in sizes):
        return tuple(range(len(sizes)))
    step: Size = 1
    while left:
        d = next((d for d in reversed(left) if as_size(strides[d]) == step), None)
        if d is None:
            return None
        left.remove(d)
        order.insert(0, d)
        step = times(step, as_size(sizes[d]))
    ones = [d for d in range(len(sizes)) if d not in order]
    return (*ones, *order) if order != sorted(order) else tuple(range(len(sizes)))


class Axis:
    """A binder. Identity is equality; `level` > 0 marks the pooled axes that terms bind."""

    __slots__ = ("id", "level", "size")
    _ids = itertools.count(1)

    def __init__(self, size: Size, level: int = 0) -> None:
        self.size, self.level, self.id = size, level, next(Axis._ids)

    def __repr__(self) -> str:
        return f"{'b' if self.level else 'a'}{self.id}:{self.size}"


class Affine:
    """const + sum(coefficient * base). Bases are axes or integer-valued terms, coefficients and const are sizes."""

    __slots__ = ("_free", "_hash", "const", "items")

    def __init__(self, const: Size, items: tuple[tuple[Any, Size], ...]) -> None:
        self.const, self.items = const, items
        self._hash = hash((const, items))
        self._free: frozenset[Axis] | None = None

    @staticmethod
    def of(const: Size = 0, items: Mapping[Any, Size] | None = None) -> Affine:
        kept = [(b, c) for b, c in (items or {}).items() if c != 0]
        kept.sort(key=lambda bc: bc[0].id)
        return Affine(as_size(const), tuple(kept))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Affine) and self.const == other.const and self.items == other.items)

    def __add__(self, other: Affine) -> Affine:
        if self is ZERO or other is ZERO:
            return other if self is ZERO else self
        items = dict(self.items)
        for b, c in other.items:
            items[b] = items.get(b, 0) + c
        return Affine.of(self.const + other.const, items)

    def scaled(self, k: Size) -> Affine:
        if (type(k) is int and k == 1) or self is ZERO:
            return self
        return Affine.of(self.const * k, {b: as_size(c * k) for b, c in self.items})

    def __repr__(self) -> str:
        parts = [f"{c}*{b}" if c != 1 else f"{b}" for b, c in self.items]
        return "+".join(parts + ([str(self.const)] if self.const != 0 or not parts else []))

    @property
    def single(self) -> Any:
        """The base where the affine is exactly that base, else None."""
        return self.items[0][0] if len(self.items) == 1 and self.const == 0 and self.items[0][1] == 1 else None

    def free(self) -> frozenset[Axis]:
        if self._free is None:
            sets = [frozenset((b,)) if isinstance(b, Axis) else b.free for b, _ in self.items]
            self._free = sets[0] if len(sets) == 1 else frozenset().union(*sets)
        return self._free

    def has_data(self) -> bool:
        """Whether it depends on tensor data."""
        return any(not isinstance(b, Axis) for b, _ in self.items)


ZERO = Affine.of(0)


def axis_index(axis: Axis) -> Affine:
    return Affine(0, ((axis, 1),))


def flat(digits: tuple[Affine, ...], sizes: tuple[Size, ...]) -> Affine:
    """The row-major number of an index tuple."""
    total = ZERO
    for d, n in zip(digits, sizes):
        total = total.scaled(n) + d
    return total


def below(a: Affine, n: Size) -> bool:
    """Whether 0 <= a < n is certain: constants are non-negative and the axes form a mixed radix that n covers."""
    if a.has_data():
        return False
    span: Size = 1
    rest = sorted(a.items, key=lambda bc: (0, bc[1]) if type(bc[1]) is int else (1, 0))
    if a.const != 0:
        if type(a.const) is not int or a.const < 0:
            return False
        if any(type(c) is not int or c < 0 or type(b.size) is not int for b, c in rest) or type(n) is not int:
            return False
        return a.const + sum(c * (b.size - 1) for b, c in rest) < n
    for b, c in rest:
        if c == span or (type(c) is int and type(span) is int and c > span):
            span = times(c, b.size)
        else:
            return False
    if span == n:
        return True
    if type(span) is int and type(n) is int:
        return bool(span <= n)
    return divide(n, span) is not None


def divmod_affine(a: Affine, n: Size) -> tuple[Affine, Affine] | None:
    """(a // n, a % n) where both are affine: terms whose coefficient n divides go up, the rest must be below n."""
    if n == 1:
        return a, ZERO
    if n == 0:
        return None
    high: dict[Any, Size] = {}
    low: dict[Any, Size] = {}
    for b, c in a.items:
        q = divide(c, n)
        if q is not None:
            high[b] = q
        else:
            low[b] = c
    const_high: Size = 0
    const_low = a.const
    if type(a.const) is int and type(n) is int:
        const_high, const_low = divmod(a.const, n)
    rest = Affine.of(const_low, low)
    return (Affine.of(const_high, high), rest) if below(rest, n) else None
