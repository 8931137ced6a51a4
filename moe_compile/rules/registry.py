"""The table of rules and what a rule may ask of the walk: argument values, the node's own shape and dtype, leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.fx

from ..algebra.layout import Val
from ..algebra.terms import Affine, Size, Term, Terms, as_size
from ..canonical import Call
from ..verdict import Reject

Value = Any  # Val, a number (int, float, SymInt, SymFloat), None, or a tuple of values
Result = Any  # Val | tuple[Val | None, ...] | Reject | None


class Context(Protocol):
    """What the walk offers a rule about the node at hand."""

    terms: Terms
    node: torch.fx.Node
    cut: bool
    """Whether values that no route touches are leaves of their own node. The router is read with cut=False."""

    selections: dict[torch.fx.Node, Val]
    """With cut=False: what each top-k chose from, by the node of its ids."""

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


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of canonical operations."""

    def register(f: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, op
            RULES[op] = f
        return f

    return register


def val(c: Context, argument: Any) -> Val | Reject:
    """The argument's value where it is a tensor."""
    v = c.value(argument)
    return v if isinstance(v, Val) else Reject("not a tensor", str(argument))


def number(c: Context, argument: Any) -> Any:
    """An int (or symbolic size) or float; None for None. Reject where the argument is something else."""
    v = c.value(argument)
    if isinstance(v, torch.SymInt):
        return as_size(v)
    return v if v is None or isinstance(v, (int, float, bool)) or hasattr(v, "is_Integer") else Reject("not a number")


def static_int(c: Context, argument: Any, default: int | None = None) -> int | None:
    """A plain Python int, or the default where the argument is absent or symbolic."""
    v = default if argument is None else number(c, argument)
    return v if type(v) is int else default


def ordinary(v: Val) -> bool:
    """Whether no route touches the value: plain dims, and a leaf or a number that no data indexes."""
    return v.plain and not v.term.routed and v.term.op in ("leaf", "const", "scalar")


def cut_here(c: Context, *vals: Val) -> bool:
    """Whether the node's result is best described as a leaf of its own."""
    return c.cut and all(map(ordinary, vals))


def dim_of(d: int, rank: int) -> int:
    return d + rank if d < 0 else d


def is_zero(t: Term) -> bool:
    return t.op == "const" and t.attr[1] == 0


def integer(terms: Terms, t: Term) -> Affine | None:
    """The affine that an integer term is known to be; None for data."""
    return t.index[0] if t.op == "int" else None
