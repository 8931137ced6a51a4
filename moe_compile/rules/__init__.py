"""Transfer functions: what each canonical operation does to (layout, term) values. One file per op family.

A rule takes the context and the bound call, and returns the value of the node's result, exactly; or raises `Unproved`
with the reason why it can't (the node then becomes a leaf of itself, which is always true); or returns None where a
leaf is simply the best description. Adding a spelling means adding a rule, and a near-miss test beside its test.
"""

from __future__ import annotations

from .registry import CASTS, CUTS, MOVES, RULES, Context, Result, Value, rule

__all__ = ["CASTS", "CUTS", "MOVES", "RULES", "Context", "Result", "Value", "load", "rule"]


def load() -> dict[str, object]:
    """Import every rule file (they register themselves) and return the table."""
    from . import combine, counts, create, gather, linear, masks, pointwise, select, sort, views  # noqa: F401

    return dict(RULES)
