"""What stands behind a block's ids and weights: the short slice of the graph that makes them of logits.

In: nodes, and the root of the block that reads them. Out: the nodes that make them, back to linears and inputs, with
all that writes their memory before the root; or `Unproved`, where they are too many or a write is not understood. Of
ids that no top-k made, what made them instead.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx

from ..nodes import fake, storage
from ..verdict import Unproved
from ..writes import Writes
from .gradients import floats

_LIMIT = 200
_MOVED = {"reshape", "flatten", "squeeze", "unsqueeze", "identity", "detach", "to", "type", "type_as"}
_MADE_BY = {
    **dict.fromkeys(("getitem", "index", "gather", "embedding"), "the expert ids are looked up in a table"),
    **dict.fromkeys(("cat", "stack"), "the expert ids are several choices side by side, not the indices of one top-k"),
    **dict.fromkeys(("where", "masked_fill"), "the expert ids are masked by more than themselves"),
}
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


def no_top_k(writes: Writes, ids: torch.fx.Node) -> str:
    """Why ids that are not the indices of a top-k have no RouterSpec: by what made them."""
    node = ids
    while (call := writes.calls.get(node)) is not None and call.op in _MOVED:
        node = call.args["input"]
    name = call.op if call is not None else getattr(node.target, "__name__", str(node.target))
    return _MADE_BY.get(name, "the expert ids are not the indices of a top-k")


def counts_tokens(writes: Writes, ends: tuple[torch.fx.Node, ...]) -> torch.fx.Node | None:
    """A running sum over tokens behind `ends` (of those that an expert has already, say): with it, what a token is
    given is no function of its own logits."""
    seen: set[torch.fx.Node] = set()
    todo = list(ends)
    while todo and len(seen) < _LIMIT:
        n = todo.pop()
        call = writes.calls.get(n)
        if n in seen or (call is not None and call.op in _OPAQUE):
            continue
        seen.add(n)
        if call is not None and call.op == "cumsum" and call.args["dim"] % fake(n).dim() != fake(n).dim() - 1:
            return n
        todo.extend(n.all_input_nodes)
    return None
