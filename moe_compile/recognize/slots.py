"""Tokens put into slots, so many for each expert (GShard, Switch): not a block, since what finds no slot is dropped.

In: a node. Out: a reason where it multiplies [E, slots, H] by a stored [E, H, G] and its rows come of a one-hot tensor.
Nothing routed shows in such a graph; it is known by this only to say why it stays.
"""

from __future__ import annotations

import torch
import torch.fx

from ..nodes import fake
from ..verdict import Reject
from ..writes import Writes

_FAR = 40  # nodes between a product and the one-hot tensor behind its rows
_VIEWS = {"transpose", "permute", "reshape", "to", "type", "identity"}


def in_slots(writes: Writes, node: torch.fx.Node) -> Reject | None:
    """Why `node` stays, if it multiplies rows in slots by each expert's matrix."""
    call = writes.calls.get(node)
    if call is None or call.op not in ("einsum", "matmul") or len(node.all_input_nodes) != 2:
        return None
    shapes = [v.shape for n in node.all_input_nodes if isinstance(v := fake(n), torch.Tensor)]
    if [len(s) for s in shapes] != [3, 3] or shapes[0][0] != shapes[1][0]:
        return None
    rows = [n for n in node.all_input_nodes if not _stored(writes, n)]
    if len(rows) != 1:
        return None
    for n in rows:  # grows
        made = writes.calls.get(n)
        if made is not None and made.op == "one_hot":
            return Reject("rows of experts in slots, of which there may be too few: tokens without one are dropped")
        if len(rows) < _FAR:
            rows.extend(m for m in n.all_input_nodes if m not in rows)
    return None


def _stored(writes: Writes, n: torch.fx.Node) -> bool:
    """Whether a node is an input of the graph, or a view of one."""
    while (call := writes.calls.get(n)) is not None and call.op in _VIEWS:
        n = call.get("input")
    return n.op in ("placeholder", "get_attr")
