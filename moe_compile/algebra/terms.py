"""Terms: what one element of a tensor is, as a function of axes. Pure values, hash-consed, no torch.

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
    any[axes](x), hits[axes](x)   whether some place is true; the places that are
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .affine import Affine, Axis, Size, axis_index


class Term:
    """A hash-consed node; make them through `Terms`.

    `free`: free axes. `depth`: nesting of binders. `size`: nodes below, counted with repetition.
    `routed`: whether it depends on a data-dependent index (expert ids). `dots`: whether a routed dot is inside.
    `guarded`: whether a test of expert ids is inside, or what was scattered to one expert. `chosen`: the axes over
    which such an index or test varies, and those of the experts that values were scattered over.
    """

    __slots__ = (
        "args", "attr", "bound", "chosen", "depth", "dots", "dtype", "free", "guarded", "id", "index", "op", "routed",
        "size",
    )  # fmt: skip

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
    guarded: bool
    chosen: frozenset[Axis]

    def __repr__(self) -> str:
        attr = getattr(self.attr, "name", self.attr)
        at = f"[{', '.join(map(repr, self.index))}]" if self.index else ""
        bound = f"<{', '.join(map(repr, self.bound))}>" if self.bound else ""
        args = f"({', '.join(map(repr, self.args))})" if self.args else ""
        return f"{self.op}{'' if attr is None else ':' + str(attr)}{bound}{args}{at}"


class Terms:
    """The table of one recognition: interns terms, pools bound axes, substitutes. `tested`: any term is guarded."""

    def __init__(self) -> None:
        self.tested = False
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
        chosen: set[Axis] = set()
        for a in args:
            free |= a.free
            chosen |= a.chosen
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
                    chosen |= b.free
        if op == "scat":
            chosen.update(*(i.free() for i in index))
        test = op == "pw" and attr == "eq" and args[0].op == "leaf"
        if test:
            chosen |= args[0].free
        one = op == "scat" and not any(i.items for i in index)
        t.guarded = test or one or any(a.guarded for a in args)
        self.tested = self.tested or t.guarded
        t.chosen = frozenset(chosen)
        # a sum of many experts' outputs grows by one addend at a time
        t.size = 1 + (max if attr == "add" else sum)(a.size for a in args) if args else 1
        t.routed = data or any(a.routed for a in args)
        t.dots = any(a.dots for a in args) or (op == "dot" and (t.routed or bool(t.chosen)))
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
        out = self.integer(index[0]) if t.op == "int" else self.make(t.op, args, index, t.bound, t.attr, t.dtype)
        memo[t.id] = out
        return out

    def substitute_affine(self, a: Affine, mapping: Mapping[Axis, Affine]) -> Affine:
        const, items, changed = a.const, dict[Any, Size](), False
        for b, c in a.items:
            new = None
            if isinstance(b, Axis):
                new = mapping.get(b)
            elif not b.free.isdisjoint(mapping):
                new = self.value(self.substitute(b, mapping))
            if new is None:
                items[b] = items.get(b, 0) + c
                continue
            if a.single is b:
                return new
            changed, new = True, new.scaled(c)
            const = const + new.const
            for base, k in new.items:
                items[base] = items.get(base, 0) + k
        return Affine.of(const, items) if changed else a

    def rewrite(self, t: Term, rule: Callable[[Term], Term | None]) -> Term:
        """`t` with every subterm, those inside indices included, replaced bottom-up where `rule` gives another."""
        memo: dict[int, Term] = {}

        def affine(a: Affine) -> Affine:
            if not a.has_data():
                return a
            total = Affine(a.const, ())
            for base, coefficient in a.items:
                value = axis_index(base) if isinstance(base, Axis) else self.value(visit(base))
                total = total + value.scaled(coefficient)
            return total

        def visit(x: Term) -> Term:
            if x.id not in memo:
                args, index = tuple(map(visit, x.args)), tuple(map(affine, x.index))
                same = args == x.args and index == x.index
                y = x if same else self.make(x.op, args, index, x.bound, x.attr, x.dtype)
                memo[x.id] = rule(y) or y
            return memo[x.id]

        return visit(t)

    # integers

    def integer(self, a: Affine) -> Term:
        """The integer `a`; a lone term stays itself."""
        base = a.single
        return base if isinstance(base, Term) else self.make("int", index=(a,), dtype="int")

    def value(self, t: Term) -> Affine:
        """The affine of an integer-valued term."""
        return t.index[0] if t.op == "int" else Affine(0, ((t, 1),))

    # common makers

    def const(self, value: Any) -> Term:
        return self.make("const", attr=(type(value).__name__, value))

    def equal(self, t: Term, n: Affine, dtype: Any) -> Term:
        """t == n, as a number or a truth value of `dtype`."""
        return self.make("pw", (t, self.make("int", index=(n,), dtype="int")), attr="eq", dtype=dtype)

    def leaf(self, node: Any, version: int, index: tuple[Affine, ...], dtype: Any) -> Term:
        return self.make("leaf", index=index, attr=LeafKey(node, version), dtype=dtype)


class LeafKey(tuple[Any, int]):
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


def subterms(t: Term) -> Iterator[Term]:
    """`t` and every term below it, those inside indices included, each once."""
    seen: set[int] = set()
    stack = [t]
    while stack:
        x = stack.pop()
        if x.id in seen:
            continue
        seen.add(x.id)
        yield x
        stack.extend(x.args)
        for i in x.index:
            stack.extend(b for b, _ in i.items if isinstance(b, Term))


def leaves(t: Term) -> Iterator[Term]:
    """Every leaf in `t`, each once."""
    return (x for x in subterms(t) if x.op == "leaf")


def find(t: Term, test: Callable[[Term], bool]) -> Term | None:
    """Some subterm that passes `test`, else None."""
    return next((x for x in subterms(t) if test(x)), None)
