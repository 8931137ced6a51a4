"""The table of rules and what a rule may ask of the walk: argument values, the node's own shape and dtype, leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.fx

from ..algebra.affine import Affine, Size, as_size
from ..algebra.layout import Val
from ..algebra.terms import LeafKey, Term, Terms, subterms
from ..canonical import Call
from ..verdict import Unproved

Value = Any  # Val, a number (int, float, SymInt, SymFloat), None, or a tuple of values
Result = Any  # Val | tuple[Val | None, ...] | None


class Context(Protocol):
    """What the walk offers a rule about the node at hand."""

    terms: Terms
    node: torch.fx.Node
    cut: bool
    """Whether values that no route touches are leaves of their own node. The router is read with cut=False."""

    follow: bool
    """Whether products that no route touches are followed too: where a leaf is opened."""

    selections: dict[torch.fx.Node, Val]
    """With cut=False: what each top-k chose from, by the node of its ids."""

    distinct: dict[LeafKey, int]
    """Along which of their dims the integers of a leaf are all different: that of a top-k."""

    ranges: dict[LeafKey, int]
    """Leaves whose integers are known to lie in [0, n): the indices of a top-k over n."""

    def value(self, argument: Any) -> Value: ...

    def leaf(self, node: torch.fx.Node) -> Val: ...

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The result's sizes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The result's dtype."""
        ...


Rule = Callable[[Any, Call], Result]
RULES: dict[str, Rule] = {}
CUTS: set[str] = set()
CASTS = {"to", "type", "type_as", "convert"}
MOVES = set(CASTS)


def rule(*ops: str, cuts: bool = False, moves: bool = False) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of canonical operations.

    cuts: floats that these make of tensors without a description are leaves of their own, so that the rule needn't run.
    moves: of elements that no route touches, these make a view, a copy or a cast: the rule waits until somebody asks.
    """

    def register(f: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, op
            RULES[op] = f
            if cuts:
                CUTS.add(op)
            if moves:
                MOVES.add(op)
        return f

    return register


def val(c: Context, argument: Any) -> Val:
    """The argument's value, which must be a tensor."""
    v = c.value(argument)
    if not isinstance(v, Val):
        raise Unproved("not a tensor", str(argument))
    return v


def number(c: Context, argument: Any) -> Any:
    """An int, a symbolic size or a float; None for None."""
    v = c.value(argument)
    if isinstance(v, torch.SymInt):
        return as_size(v)
    if v is not None and not isinstance(v, (int, float)):
        raise Unproved("not a number", str(argument))
    return v


def static_int(c: Context, argument: Any, default: int | None = None) -> int:
    """A plain Python int; the default where the argument is absent."""
    v = default if argument is None else number(c, argument)
    if type(v) is not int:
        raise Unproved("not a number known at compile time", str(argument))
    return v


def dim(c: Context, argument: Any, rank: int, default: int | None = None) -> int:
    """A dim in [0, rank)."""
    d = static_int(c, argument, default)
    if not -rank <= d < rank:
        raise Unproved("a dim that the tensor doesn't have", f"{d} of {rank}")
    return d + rank if d < 0 else d


def dims(c: Context, argument: Any, rank: int) -> tuple[int, ...]:
    """One dim or several."""
    several = argument if isinstance(argument, (tuple, list)) else (argument,)
    return tuple(dim(c, d, rank) for d in several)


def ordinary(v: Val) -> bool:
    """Whether no route touches the value: plain dims, and a leaf or a number that no data indexes."""
    return v.plain and not v.term.routed and v.term.op in ("leaf", "const", "scalar")


def positional(v: Val) -> bool:
    """Whether floats are an elementwise function of positions and whole tensors (an attention mask): no block's."""
    t = v.term
    if not v.dtype.is_floating_point or not v.plain or t.routed or t.guarded or t.op not in ("pw", "cast"):
        return False
    return all(x.op in ("pw", "cast", "int", "const", "leaf", "scalar") for x in subterms(t))


def parameter(v: Val) -> bool:
    """Whether the value is a float input of the graph, whole: a weight, whose views are weights of their own."""
    plain = ordinary(v) and v.term.op == "leaf" and all(not i.items or i.single is not None for i in v.term.index)
    return plain and v.dtype.is_floating_point and v.term.attr.node.op in ("placeholder", "get_attr")


def cut_here(c: Context, *vals: Val) -> bool:
    """Whether the node's result is best described as a leaf of its own."""
    return c.cut and all(map(ordinary, vals))


def stored(number: Any, dtype: torch.dtype) -> float | None:
    """What a tensor of `dtype` holds where it is filled with a number: 2.7 as an integer is 2. None where it can't be
    (an infinity as an integer): what the graph then does is not ours to say."""
    try:
        return float(torch.full((), number, dtype=dtype, device="cpu").item())
    except RuntimeError:
        return None


def is_zero(t: Term) -> bool:
    return t.op == "const" and t.attr[1] == 0


def integer(terms: Terms, t: Term) -> Affine | None:
    """The affine that an integer term is known to be; None for data."""
    return t.index[0] if t.op == "int" else None
