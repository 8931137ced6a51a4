"""The output side of a block: body = weight * norm(y), read off the term under the sum over k.

In: the body at (t, k, h). Out: the routing weight, the norm of y where there is one, and y, one expert's output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..algebra.affine import axis_index
from ..algebra.terms import Term
from ..verdict import Unproved
from .place import Place
from .reading import factors_of, integral, scalar_value, sizes_of, strip


@dataclass(frozen=True, kw_only=True)
class Combination:
    """`weight`: the factor of (t, k), if there is one. `guard`: (ids, the number from which they contribute 0).
    `post`, `eps` and `scale` (a leaf at [h]) as in ExpertsSpec."""

    weight: Term | None
    y: Term
    guard: tuple[Term, int] | None = None
    post: str = "none"
    eps: float = 0.0
    scale: Term | None = None


def read_combination(place: Place, product: Iterable[Term]) -> Combination:
    """The parts of a product; Unproved where it is not one expert's output times at most one weight."""
    guard, factors = None, []
    for f in (f for t in product for f in factors_of(t)):
        if f.dots:
            guard_of_f, f = _guarded(place, f)
            guard = guard_of_f or guard
            factors += factors_of(f)
        else:
            factors.append(f)
    of_h = [f for f in factors if place.h_out in f.free]
    others = [f for f in factors if place.h_out not in f.free]
    norms = [(f, z) for f in others if (z := _root_mean_square(place, f)) is not None]
    post: dict[str, Term | str | float] = {}
    if norms:
        ((norm, (eps, inside)),) = norms[:1]
        scales = [f for f in inside if f.op == "leaf" and f.index == (axis_index(place.h_out),)]
        if sorted(f.id for f in inside) != sorted(f.id for f in of_h) or len(scales) > 1 or len(norms) > 1:
            raise Unproved("a norm of something else than the expert's output", repr(norm)[:200])
        others = [f for f in others if f is not norm]
        of_h = [f for f in of_h if f not in scales]
        post = {"post": "scaled_rms" if scales else "rms", "eps": eps}
        if scales:
            if sizes_of(scales[0]) != [place.h_out.size]:
                raise Unproved("the norm's scale is only partly used", repr(scales[0]))
            post["scale"] = scales[0]
    if len(of_h) != 1:
        raise Unproved("the combined value is not one expert output times a weight", f"{len(of_h)} expert outputs")
    if len(others) > 1:
        raise Unproved("the routing weight is applied more than once, or is an expression", f"{len(others)} factors")
    return Combination(weight=others[0] if others else None, y=of_h[0], guard=guard, **post)  # type: ignore[arg-type]


def _root_mean_square(place: Place, f: Term) -> tuple[float, list[Term]] | None:
    """Of 1 / sqrt(mean_h(z * z) + eps): eps, and the factors of z at h_out."""
    if f.op != "pw":
        return None
    power = strip(f.args[1]).attr[1] if f.attr == "pow" and strip(f.args[1]).op == "const" else None
    if f.attr != "rsqrt" and power != -0.5:
        return None
    shifted, eps = strip(f.args[0]), 0.0
    if shifted.op == "pw" and shifted.attr == "add":
        mean, number = sorted(map(strip, shifted.args), key=lambda t: t.op in ("const", "scalar"))
        if number.op not in ("const", "scalar"):
            return None
        shifted, eps = mean, float(number.attr[1]) if number.op == "const" else scalar_value(number)
    if shifted.op != "mean" or len(shifted.bound) != 1 or eps < 0:
        return None
    (h,), (square,) = place.terms.open(shifted)
    square = strip(place.terms.substitute(square, {h: axis_index(place.h_out)}))
    if h.size != place.h_out.size or square.op != "pw" or square.attr != "mul" or square.args[0] is not square.args[1]:
        return None
    return eps, factors_of(square.args[0])


def _guarded(place: Place, y: Term) -> tuple[tuple[Term, int] | None, Term]:
    """Of where(ids >= n, 0, y): (ids, n), and y as it is where ids < n. The operator gives other routes 0 itself."""
    if y.op != "pw" or y.attr != "where":
        return None, y
    outside, zero, inner = y.args
    if outside.op != "pw" or outside.attr != "ge" or zero.op != "const" or zero.attr[1] != 0:
        return None, y
    ids, bound = outside.args
    if bound.op != "const" or not integral(ids):
        return None, y
    n: int = bound.attr[1]

    def assume(t: Term) -> Term | None:
        if t.op == "pw" and t.attr == "where" and t.args[0] is outside:
            return t.args[2]
        if t.op == "pw" and t.attr == "minimum" and t.args[0] is ids and t.args[1].op == "const":
            return ids if t.args[1].attr[1] >= n - 1 else None
        return None

    return (ids, n), place.terms.rewrite(inner, assume)
