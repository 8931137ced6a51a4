"""Terms: what one element of a tensor is, as a function of axes. Pure values, hash-consed, no torch.

An `Axis` is a binder with a size. An `Affine` is an integer: const + sum of coefficient * (axis or integer term).
A `Term` is a node; two equal terms are one object (per `Terms` table), so equality is identity. Bound axes are pooled
by nesting depth, which makes alpha-equal terms identical.

    leaf(node, version)[i, j]     an element of a graph node's tensor, as it was at that version of its storage
    int(affine)                   an integer known exactly
    const(value), scalar(node)    a number; a Python float that the graph takes as an input
    pw(name, dtype)(args)         a pointwise function; its value is rounded to dtype
    cast(dtype)(x)
    dot(dtype)[axes](a, b)        sum over the bound axes of a * b
    sum(dtype)[axes](x)
    softmax(dtype)[axis](x)@at    softmax over the bound axis, read at an index
    count[axes](ids)@e            how many of the bound axes' values have ids == e;   offsets: its running sum
    pos(order)[digits]            the row at which a sorted order puts a route
    scat[axes](ids, value, base)@at   value where some bound axes' ids == at, else base
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
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
        total = total * s
    return total if type(total) is int else as_size(total)


def divide(a: Size, b: Size) -> Size | None:
    """a / b where that is exactly an integer (or a polynomial with no denominator), else None."""
    if type(a) is int and type(b) is int:
        return a // b if b and a % b == 0 else None
    if b == 1:
        return a
    if a == b:
        return 1
    quotient = a / b
    return as_size(quotient) if quotient.as_numer_denom()[1] == 1 else None


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

    __slots__ = ("_hash", "const", "items")

    def __init__(self, const: Size, items: tuple[tuple[Any, Size], ...]) -> None:
        self.const, self.items = const, items
        self._hash = hash((const, items))

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
        items = dict(self.items)
        for b, c in other.items:
            items[b] = items.get(b, 0) + c
        return Affine.of(self.const + other.const, items)

    def scaled(self, k: Size) -> Affine:
        return Affine.of(self.const * k, {b: as_size(c * k) for b, c in self.items})

    def __repr__(self) -> str:
        parts = [f"{c}*{b}" if c != 1 else f"{b}" for b, c in self.items]
        return "+".join(parts + ([str(self.const)] if self.const != 0 or not parts else []))

    @property
    def single(self) -> Any:
        """The base where the affine is exactly that base, else None."""
        return self.items[0][0] if len(self.items) == 1 and self.const == 0 and self.items[0][1] == 1 else None

    def free(self) -> frozenset[Axis]:
        out: set[Axis] = set()
        for b, _ in self.items:
            out |= {b} if isinstance(b, Axis) else b.free
        return frozenset(out)

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
        if any(type(c) is not int or type(b.size) is not int for b, c in rest) or type(n) is not int:
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


class Term:
    """A hash-consed node; make them through `Terms`.

    `free`: free axes. `depth`: nesting of binders. `size`: nodes below, counted with repetition.
    `routed`: whether it depends on a data-dependent index (expert ids). `dots`: whether a routed dot is inside.
    """

    __slots__ = ("args", "attr", "bound", "depth", "dots", "dtype", "free", "id", "index", "op", "routed", "size")

    id: int
    op: str
    args: tuple[Term, ...]
    index: tuple[Affine, ...]
    bound: tuple[Axis, ...]
    attr: Any
    dtype: Any
    free: frozenset[Axis]
    depth: int
    size: int
    routed: bool
    dots: bool

    def __repr__(self) -> str:
        attr = getattr(self.attr, "name", self.attr)
        at = f"[{', '.join(map(repr, self.index))}]" if self.index else ""
        bound = f"<{', '.join(map(repr, self.bound))}>" if self.bound else ""
        args = f"({', '.join(map(repr, self.args))})" if self.args else ""
        return f"{self.op}{'' if attr is None else ':' + str(attr)}{bound}{args}{at}"


class Terms:
    """The table of one recognition: interns terms, pools bound axes, substitutes."""

    def __init__(self) -> None:
        self._table: dict[Any, Term] = {}
        self._pool: dict[tuple[int, int, Size], Axis] = {}
        self._ids = itertools.count(1)

    def make(
        self,
        op: str,
        args: tuple[Term, ...] = (),
        index: tuple[Affine, ...] = (),
        bound: tuple[Axis, ...] = (),
        attr: Any = None,
        dtype: Any = None,
    ) -> Term:
        key = (op, tuple(a.id for a in args), index, bound, attr, dtype)
        found = self._table.get(key)
        if found is not None:
            return found
        t = Term()
        t.op, t.args, t.index, t.bound, t.attr, t.dtype = op, args, index, bound, attr, dtype
        t.id = -next(self._ids)  # never an axis' id: affine bases are sorted by id
        free: set[Axis] = set()
        for a in args:
            free |= a.free
        data = False
        for i in index:
            free |= i.free()
            data = data or i.has_data()
        t.free = frozenset(free.difference(bound))
        t.depth = max((a.depth for a in args), default=0) + (1 if bound else 0)
        for i in index:
            for b, _ in i.items:
                if isinstance(b, Term):
                    t.depth = max(t.depth, b.depth)
        t.size = 1 + sum(a.size for a in args)
        t.routed = data or any(a.routed for a in args)
        t.dots = any(a.dots for a in args) or (op == "dot" and t.routed)
        self._table[key] = t
        return t

    def pooled(self, level: int, slot: int, size: Size) -> Axis:
        key = (level, slot, size)
        if key not in self._pool:
            self._pool[key] = Axis(size, level)
        return self._pool[key]

    def bind(
        self,
        op: str,
        axes: tuple[Axis, ...],
        args: tuple[Term, ...],
        index: tuple[Affine, ...] = (),
        attr: Any = None,
        dtype: Any = None,
    ) -> Term:
        """`op` with `axes` bound in `args` (not in `index`), renamed to pooled axes."""
        level = max((a.depth for a in args), default=0) + 1
        new = tuple(self.pooled(level, slot, a.size) for slot, a in enumerate(axes))
        mapping = {a: axis_index(n) for a, n in zip(axes, new)}
        return self.make(op, tuple(self.substitute(a, mapping) for a in args), index, new, attr, dtype)

    def open(self, t: Term) -> tuple[tuple[Axis, ...], tuple[Term, ...]]:
        """The bound axes of `t` made fresh and free, and its arguments over them."""
        fresh = tuple(Axis(b.size) for b in t.bound)
        mapping = {b: axis_index(f) for b, f in zip(t.bound, fresh)}
        return fresh, tuple(self.substitute(a, mapping) for a in t.args)

    def substitute(self, t: Term, mapping: Mapping[Axis, Affine]) -> Term:
        """`t` with free axes replaced."""
        if not mapping or t.free.isdisjoint(mapping):
            return t
        return self._substitute(t, mapping, {})

    def _substitute(self, t: Term, mapping: Mapping[Axis, Affine], memo: dict[int, Term]) -> Term:
        if t.free.isdisjoint(mapping):
            return t
        found = memo.get(t.id)
        if found is not None:
            return found
        index = tuple(self.substitute_affine(i, mapping) for i in t.index)
        inner: Mapping[Axis, Affine] = mapping
        if t.bound and any(b in mapping for b in t.bound):
            inner = {a: v for a, v in mapping.items() if a not in t.bound}
            args = tuple(self.substitute(a, inner) for a in t.args)
        else:
            args = tuple(self._substitute(a, mapping, memo) for a in t.args)
        out = self.int(index[0]) if t.op == "int" else self.make(t.op, args, index, t.bound, t.attr, t.dtype)
        memo[t.id] = out
        return out

    def substitute_affine(self, a: Affine, mapping: Mapping[Axis, Affine]) -> Affine:
        out: Affine | None = None
        for n, (b, c) in enumerate(a.items):
            new = None
            if isinstance(b, Axis):
                new = mapping.get(b)
            elif not b.free.isdisjoint(mapping):
                new = self.value(self.substitute(b, mapping))
            if new is not None and out is None:
                out = Affine(a.const, a.items[:n])
            if out is not None:
                out = out + (new.scaled(c) if new is not None else Affine(0, ((b, c),)))
        return a if out is None else out

    # integers

    def int(self, a: Affine) -> Term:
        """The integer `a`; a lone term stays itself."""
        base = a.single
        return base if isinstance(base, Term) else self.make("int", index=(a,), dtype="int")

    def value(self, t: Term) -> Affine:
        """The affine of an integer-valued term."""
        return t.index[0] if t.op == "int" else Affine(0, ((t, 1),))

    # common makers

    def const(self, value: Any) -> Term:
        return self.make("const", attr=(type(value).__name__, value))

    def leaf(self, node: Any, version: int, index: tuple[Affine, ...], dtype: Any) -> Term:
        return self.make("leaf", index=index, attr=LeafKey(node, version), dtype=dtype)


class LeafKey(tuple):
    """(node, version) of a leaf."""

    __slots__ = ()

    def __new__(cls, node: Any, version: int) -> LeafKey:
        return super().__new__(cls, (node, version))

    @property
    def node(self) -> Any:
        return self[0]

    @property
    def version(self) -> Any:
        return self[1]

    @property
    def name(self) -> str:
        return f"{self[0].name}@{self[1]}" if self[1] else str(self[0].name)


def leaves(t: Term) -> Iterator[Term]:
    """Every leaf in `t`, those inside indices included, each once."""
    seen: set[int] = set()
    stack = [t]
    while stack:
        x = stack.pop()
        if x.id in seen:
            continue
        seen.add(x.id)
        if x.op == "leaf":
            yield x
        stack.extend(x.args)
        for i in x.index:
            stack.extend(b for b, _ in i.items if isinstance(b, Term))


def find(t: Term, test: Callable[[Term], bool]) -> Term | None:
    """Some subterm that passes `test`, else None."""
    seen: set[int] = set()
    stack = [t]
    while stack:
        x = stack.pop()
        if x.id in seen:
            continue
        seen.add(x.id)
        if test(x):
            return x
        stack.extend(x.args)
    return None
