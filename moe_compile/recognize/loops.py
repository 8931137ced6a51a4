"""Where a sum of experts written out one by one ends: at the first reader that neither adds to it nor only views it.

In: a node about to be visited. Out: the accumulated values among its inputs that it ends, each with the node that made
it: the last write into its memory, or the node itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.fx

from ..algebra.layout import Val
from ..canonical import Call
from ..nodes import storage
from ..rules.registry import is_zero
from .unrolled import accumulated

if TYPE_CHECKING:
    from .walk import Walk

_VIEWS = {
    "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "identity", "to", "type", "type_as", "convert",
}  # fmt: skip
_WRITES = {"index_add", "scatter_add", "setitem", "index_put"}


def ended(walk: Walk, node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, Val]]:
    """(the node that made it, its value) of each accumulated input that `node` ends."""
    if not walk.terms.tested:
        return
    call = walk.writes.calls.get(node)
    for n in node.all_input_nodes:
        value = walk.held(n)
        if isinstance(value, Val) and accumulated(value) and not _goes_on(walk, call, n):
            position = walk.writes.position
            writers = [w for w in walk.writes.to.get(storage(n), ()) if position[w] < position[node]]
            yield max((n, *writers), key=position.__getitem__), value


def _goes_on(walk: Walk, call: Call | None, n: torch.fx.Node) -> bool:
    if call is None:
        return False
    if call.op in _VIEWS:
        return True
    if call.op == "add":
        return all(_belongs(walk.value(call.get(x))) for x in ("input", "other") if call.get(x) is not n)
    if call.op in _WRITES:
        value = call.get("source", call.get("src", call.get("value", call.get("values"))))
        return call.get("input") is n and _belongs(walk.value(value))
    index = call.get("index")
    return call.op == "getitem" and isinstance(index, torch.fx.Node) and _belongs(walk.value(index))


def _belongs(value: Any) -> bool:
    """Whether a value is of an expert's routes, or nothing yet."""
    if not isinstance(value, Val):
        return isinstance(value, (int, float)) and value == 0
    return value.term.guarded or not value.plain or is_zero(value.term)
