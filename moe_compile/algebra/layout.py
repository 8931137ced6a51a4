"""Layouts: where an element sits. A `Val` is (dims, term, dtype): a tensor as a function of its axes.

A dim is an ordered list of atoms, most significant first (none: size 1). An atom is a plain axis, or `Ord`: the routes
numbered by some digits, in the order of a sort. Reshapes regroup atoms, permutations move dims, slices and gathers
substitute indices into the term; nothing here guesses from sizes which role a dim plays, sizes only decide whether a
regrouping is exact. What can't be said exactly raises `Unproved`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..verdict import Unproved
from .affine import ZERO, Affine, Axis, Size, axis_index, divide, divmod_affine, flat, times
from .terms import Term, Terms


@dataclass(frozen=True, eq=False)
class Order:
    """A sort of a flat vector, or the pick of some of its rows. Identity is equality.

    key: the multiset of sorted values, as a term. hits: which rows were picked, as a term that binds their axes; `size`
    is then their number, unknown before the graph runs.
    """

    name: str
    key: Term
    sizes: tuple[Size, ...]
    hits: Term | None = None
    size: Size = None


@dataclass(frozen=True)
class Ord:
    """The routes numbered by `axes` (row-major), in sorted order; or some of them."""

    order: Order
    axes: tuple[Axis, ...]

    @property
    def size(self) -> Size:
        return self.order.size if self.order.hits is not None else times(*(a.size for a in self.axes))


Atom = Axis | Ord
Dim = tuple[Atom, ...]


@dataclass(frozen=True)
class Val:
    """A tensor: element at the axes in `dims` is `term`; `dtype` is the tensor's torch dtype."""

    dims: tuple[Dim, ...]
    term: Term
    dtype: Any

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(dim_size(d) for d in self.dims)

    @property
    def plain(self) -> bool:
        """Whether no dim is in a sorted order."""
        return not any(isinstance(a, Ord) for d in self.dims for a in d)

    def every(self) -> list[Axis]:
        """The axes over which the dims run in full."""
        if any(isinstance(a, Ord) and a.order.hits is not None for d in self.dims for a in d):
            raise Unproved("some of the routes where all are expected")
        return self.axes()

    def axes(self) -> list[Axis]:
        """Every axis of the dims, in order, those inside `Ord` included."""
        out: list[Axis] = []
        for d in self.dims:
            for a in d:
                out.extend(a.axes if isinstance(a, Ord) else (a,))
        return out


def dim_size(dim: Dim) -> Size:
    return dim[0].size if len(dim) == 1 else times(*(a.size for a in dim))


def replace_axes(dims: tuple[Dim, ...], new: dict[Axis, tuple[Axis, ...]]) -> tuple[Dim, ...]:
    """`dims` with each axis replaced by several."""

    def atom(a: Atom) -> Dim:
        if isinstance(a, Ord):
            return (Ord(a.order, tuple(y for x in a.axes for y in new.get(x, (x,)))),)
        return new.get(a, (a,))

    return tuple(tuple(y for a in d for y in atom(a)) for d in dims)


def refresh(terms: Terms, v: Val) -> Val:
    """`v` with all its axes renamed, so that it shares none with any other value."""
    new = {a: Axis(a.size) for a in v.axes()}
    return Val(
        replace_axes(v.dims, {a: (n,) for a, n in new.items()}),
        terms.substitute(v.term, {a: axis_index(n) for a, n in new.items()}),
        v.dtype,
    )


def reshape(terms: Terms, v: Val, sizes: Sequence[Size]) -> Val:
    """Row-major regrouping into dims of `sizes`; a plain axis may be split exactly, a sorted one may not."""
    atoms = [a for d in v.dims for a in d]
    split: dict[Axis, tuple[Axis, ...]] = {}
    mapping: dict[Axis, Affine] = {}
    dims: list[Dim] = []
    position = 0
    for n in sizes:
        dim: list[Atom] = []
        left = n
        while left != 1:
            if position == len(atoms):
                raise Unproved("reshape does not factor", f"{v.sizes} into {tuple(sizes)}")
            atom = atoms[position]
            rest = divide(left, atom.size)
            if rest is not None:
                dim.append(atom)
                position, left = position + 1, rest
                continue
            inner = divide(atom.size, left)
            if inner is None or isinstance(atom, Ord):
                raise Unproved(
                    "reshape splits routes in sorted order" if isinstance(atom, Ord) else "reshape does not factor",
                    f"{v.sizes} into {tuple(sizes)}",
                )
            high, low = Axis(left), Axis(inner)
            mapping[atom] = axis_index(high).scaled(inner) + axis_index(low)
            split[atom] = (high, low)
            dim.append(high)
            atoms[position], left = low, 1
        dims.append(tuple(dim))
    if position != len(atoms):
        raise Unproved("reshape does not factor", f"{v.sizes} into {tuple(sizes)}")
    if not mapping:
        return Val(tuple(dims), v.term, v.dtype)
    return Val(tuple(dims), terms.substitute(v.term, _chain(terms, mapping)), v.dtype)


def _chain(terms: Terms, mapping: dict[Axis, Affine]) -> dict[Axis, Affine]:
    """Close a mapping whose values mention axes that were split later."""
    out = dict(mapping)
    for a in reversed(list(mapping)):
        out[a] = terms.substitute_affine(out[a], {b: x for b, x in out.items() if b is not a})
    return out


def _unify_dim(terms: Terms, a: Dim, b: Dim, map_a: dict[Axis, Affine], map_b: dict[Axis, Affine]) -> Dim:
    """One dim that both `a` and `b` become, recording what their axes turn into."""
    if a == b:
        return a
    ord_a, ord_b = any(isinstance(x, Ord) for x in a), any(isinstance(x, Ord) for x in b)
    if ord_a or ord_b:
        if len(a) == len(b) == 1 and ord_a and ord_b:
            x, y = a[0], b[0]
            assert isinstance(x, Ord)
            assert isinstance(y, Ord)
            digits = _unify_dim(terms, x.axes, y.axes, map_a, map_b)
            tests = [_apply(terms, t, m) for r, m in ((x, map_a), (y, map_b)) if (t := picked_where(terms, r))]
            if x.order is not y.order and (len(tests) != 2 or tests[0] is not tests[1]):
                raise Unproved("rows in two different sorted orders", f"{x.order.name} and {y.order.name}")
            return (Ord(x.order, tuple(d for d in digits if isinstance(d, Axis))),)
        sorted_, plain, target = (a, b, map_b) if ord_a else (b, a, map_a)
        if len(sorted_) != 1 or len(plain) != 1 or isinstance(plain[0], Ord):
            raise Unproved("sorted rows against unsorted rows")
        o = sorted_[0]
        assert isinstance(o, Ord)
        if o.size != plain[0].size:
            raise Unproved("sizes differ", f"{o.size} and {plain[0].size}")
        target[plain[0]] = Affine(0, ((position(terms, o), 1),))
        return sorted_
    out: list[Atom] = []
    left, right = list(a), list(b)
    i = j = 0
    while i < len(left) and j < len(right):
        x, y = left[i], right[j]
        assert isinstance(x, Axis)
        assert isinstance(y, Axis)
        if x.size == y.size:
            map_b[y] = axis_index(x)
            out.append(x)
            i, j = i + 1, j + 1
            continue
        big_is_x = (inner := divide(x.size, y.size)) is not None
        if not big_is_x:
            inner = divide(y.size, x.size)
            if inner is None:
                raise Unproved("sizes do not factor", f"{x.size} and {y.size}")
        low = Axis(inner)
        if big_is_x:
            high = Axis(y.size)
            map_a[x] = axis_index(high).scaled(inner) + axis_index(low)
            map_b[y] = axis_index(high)
            left[i], j = low, j + 1
        else:
            high = Axis(x.size)
            map_b[y] = axis_index(high).scaled(inner) + axis_index(low)
            map_a[x] = axis_index(high)
            right[j], i = low, i + 1
        out.append(high)
    if i < len(left) or j < len(right):
        raise Unproved("sizes differ", f"{dim_size(a)} and {dim_size(b)}")
    return tuple(out)


def _apply(terms: Terms, term: Term, mapping: dict[Axis, Affine]) -> Term:
    return terms.substitute(term, _chain(terms, mapping)) if mapping else term


def broadcast(terms: Terms, vals: Sequence[Val]) -> tuple[tuple[Dim, ...], list[Term]]:
    """The common dims of `vals` under broadcasting, and each one's term over them."""
    dims, done = vals[0].dims, [vals[0].term]
    for v in vals[1:]:
        if v.dims == dims:
            done.append(v.term)
            continue
        mine = {x for d in dims for x in _dim_axes(d)}
        if not mine.isdisjoint(v.axes()):
            v = refresh(terms, v)
        map_a: dict[Axis, Affine] = {}
        map_b: dict[Axis, Affine] = {}
        out: list[Dim] = []
        rank = max(len(dims), len(v.dims))
        a_dims = ((),) * (rank - len(dims)) + dims
        b_dims = ((),) * (rank - len(v.dims)) + v.dims
        for a, b in zip(a_dims, b_dims):
            if not a or not b:
                out.append(a or b)
                continue
            got = _unify_dim(terms, a, b, map_a, map_b)
            out.append(got)
        done = [_apply(terms, t, map_a) for t in done]
        done.append(_apply(terms, v.term, map_b))
        dims = tuple(out)
    return dims, done


def _dim_axes(d: Dim) -> list[Axis]:
    return [x for a in d for x in (a.axes if isinstance(a, Ord) else (a,))]


def match_dims(terms: Terms, v: Val, dims: Sequence[Dim]) -> tuple[tuple[Dim, ...], Term, dict[Axis, Affine]]:
    """Rename `v` (which shares no axis with `dims`) so that its dims are `dims`; also what to substitute in `dims`."""
    map_a: dict[Axis, Affine] = {}
    map_b: dict[Axis, Affine] = {}
    out: list[Dim] = []
    for a, b in zip(dims, v.dims):
        if not a and not b:
            out.append(())
            continue
        if not a or not b:
            raise Unproved("sizes differ", f"{dim_size(a)} and {dim_size(b)}")
        got = _unify_dim(terms, a, b, map_a, map_b)
        out.append(got)
    return tuple(out), _apply(terms, v.term, map_b), _chain(terms, map_a)


def number_of(axes: Sequence[Axis]) -> Affine:
    """The row-major number that the axes spell."""
    return flat(tuple(map(axis_index, axes)), tuple(a.size for a in axes))


def position(terms: Terms, rows: Ord) -> Term:
    """The row at which the order of `rows` puts the route that their axes number."""
    return terms.make("pos", index=(number_of(rows.axes),), attr=rows.order, dtype="int")


def decode(terms: Terms, index: Affine, dim: Dim) -> dict[Axis, Affine]:
    """What a dim's axes are where it is read at `index`.

    A lone plain axis takes any index, data included. Several are decoded as a mixed radix. A sorted dim is read only at
    a route's own position, which undoes the sort.
    """
    if not dim:
        return {}
    if len(dim) == 1 and isinstance(dim[0], Ord):
        base = index.single
        if not isinstance(base, Term) or base.op != "pos":
            raise Unproved("sorted rows are read at an index that is not a route's position", repr(index))
        if base.attr is not dim[0].order or base.attr.hits is not None:
            raise Unproved("a different permutation on the way back", f"{base.attr.name} and {dim[0].order.name}")
        return decode(terms, base.index[0], dim[0].axes)
    out: dict[Axis, Affine] = {}
    rest = index
    for a in reversed(dim[1:]):
        if isinstance(a, Ord):
            raise Unproved("an index into a dim that is only partly sorted")
        parts = divmod_affine(rest, a.size)
        if parts is None:
            raise Unproved("an index that can't be split into digits", f"{index} by {a.size}")
        rest, out[a] = parts
    if isinstance(dim[0], Ord):
        raise Unproved("an index into a dim that is only partly sorted")
    out[dim[0]] = rest
    return out


def picked_where(terms: Terms, rows: Ord) -> Term | None:
    """Which of the routes that `rows` numbers it holds: a mask's term over its axes; None where it holds them all."""
    hits = rows.order.hits
    if hits is None:
        return None
    return terms.substitute(hits.args[0], decode(terms, number_of(rows.axes), hits.bound))


def sliced(terms: Terms, v: Val, d: int, start: int, length: Size, step: int = 1) -> Val:
    """v[..., start : start + length * step : step] along dim d."""
    if start == 0 and step == 1 and length == dim_size(v.dims[d]):
        return v
    axis = Axis(length)
    index = axis_index(axis).scaled(step) + Affine.of(start) if length != 1 else Affine.of(start)
    got = decode(terms, index, v.dims[d])
    dim: Dim = (axis,) if length != 1 else ()
    return Val((*v.dims[:d], dim, *v.dims[d + 1 :]), terms.substitute(v.term, got), v.dtype)


def taken(terms: Terms, v: Val, d: int, index: Val) -> Val:
    """v indexed along dim d by a tensor: the index's dims stand where dim d stood."""
    if not set(index.axes()).isdisjoint(v.axes()):
        index = refresh(terms, index)
    dim = v.dims[d]
    index = _split_for(terms, index, dim[0].axes if len(dim) == 1 and isinstance(dim[0], Ord) else dim)
    got = decode(terms, terms.value(index.term), v.dims[d])
    return Val((*v.dims[:d], *index.dims, *v.dims[d + 1 :]), terms.substitute(v.term, got), v.dtype)


def _number(terms: Terms, index: Val) -> Affine:
    """The number an index reads; of a position in a sorted order, the route's."""
    value = terms.value(index.term)
    base = value.single
    return base.index[0] if isinstance(base, Term) and base.op == "pos" else value


def _split_for(terms: Terms, index: Val, dim: Dim) -> Val:
    """The index with its axes split where a digit of `dim` ends inside one: t of [b * s] into (b, s)."""
    radix: Size = 1
    for atom in reversed(dim[1:]):
        radix = times(radix, atom.size)
        index = split_inside(terms, index, _number(terms, index), radix)
    return index


def taken_at(terms: Terms, v: Val, d: int, indices: Sequence[Val]) -> Val:
    """v indexed along dims d, d + 1, ... by tensors that go together: their common dims stand where those stood."""
    v = refresh(terms, v)
    dims, found = broadcast(terms, indices)
    at: dict[Axis, Affine] = {}
    for n, t in enumerate(found):
        at.update(decode(terms, terms.value(t), v.dims[d + n]))
    return Val((*v.dims[:d], *dims, *v.dims[d + len(found) :]), terms.substitute(v.term, at), v.dtype)


def split_inside(terms: Terms, v: Val, number: Affine, radix: Size) -> Val:
    """`v` with that axis split inside which a digit of `number` by `radix` ends: n of [t * k], by k, into (t, k)."""
    for base, coefficient in number.items:
        if not isinstance(base, Axis) or divide(coefficient, radix) is not None:
            continue
        inner = divide(radix, coefficient)
        outer = None if inner is None else divide(base.size, inner)
        if outer is None or outer == 1:
            continue
        high, low = Axis(outer), Axis(inner)
        value = axis_index(high).scaled(inner) + axis_index(low)
        return Val(replace_axes(v.dims, {base: (high, low)}), terms.substitute(v.term, {base: value}), v.dtype)
    return v


def new_axes(sizes: Sequence[Size]) -> tuple[tuple[Dim, ...], tuple[Affine, ...]]:
    """Fresh plain dims of these sizes, and the index of each (0 where the size is 1)."""
    dims: list[Dim] = []
    index: list[Affine] = []
    for n in sizes:
        axis = Axis(n)
        dims.append(() if n == 1 else (axis,))
        index.append(ZERO if n == 1 else axis_index(axis))
    return tuple(dims), tuple(index)
