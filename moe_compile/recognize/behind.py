"""What stands behind a block's ids and weights: the short slice of the graph that makes them of logits.

In: nodes, and the root of the block that reads them. Out: the nodes that make them, back to linears and inputs, with
all that writes their memory before the root; or `Unproved`, where they are too many or a write is not understood.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx

from ..nodes import fake, storage
from ..verdict import Unproved
from ..writes import Writes
from .gradients import floats

_LIMIT = 200
_OPAQUE = {"linear", "matmul", "einsum", "grouped_mm", "baddbmm", "addmm"}


def behind(writes: Writes, root: torch.fx.Node, ends: tuple[torch.fx.Node, ...]) -> list[torch.fx.Node]:
    """The nodes that make `ends`, back to linears and inputs, with whatever writes their memory, in program order."""

    def writers(memory: int) -> list[torch.fx.Node]:
        return [w for w in writes.to.get(memory, ()) if writes.position[w] < writes.position[root]]

    chosen: set[torch.fx.Node] = set()
    memories: set[int] = set()
    todo = list(ends)
    while todo:
        n = todo.pop()
        if n in chosen:
            continue
        call = writes.calls.get(n)
        memories.add(storage(n))
        if call is None or call.op in _OPAQUE:
            continue
        chosen.add(n)
        if len(chosen) > _LIMIT:
            raise Unproved("the router is not a short function of logits", f"more than {_LIMIT} operations")
        todo.extend(n.all_input_nodes)
        todo.extend(w for w in writers(storage(n)) if w not in chosen)
    late = [w for m in memories for w in writers(m) if w not in chosen]
    if late:
        raise Unproved("the router's tensors are written by an operation that no rule knows", late[0].name)
    return writes.ordered(chosen)


def floats_behind(ends: Iterable[torch.fx.Node], nodes: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """The nodes of the slice that a gradient of `ends` goes through: the floats that they are computed from."""
    found: set[torch.fx.Node] = set()
    todo = list(ends)
    while todo:
        n = todo.pop()
        if n in nodes and n not in found and floats(fake(n)):
            found.add(n)
            todo.extend(n.all_input_nodes)
    return found
