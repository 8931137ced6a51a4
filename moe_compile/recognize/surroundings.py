"""What else must hold where a proved block stands: facts about memory, devices and autograd that its term doesn't say.

In: the root and its match. Out: why an operator can't stand there, if so. The operator returns a new tensor, takes
plain tensors of one device, and knows no transform of functions.
"""

from __future__ import annotations

import torch
import torch.fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..algebra.affine import memory_order
from ..nodes import fake, spelling
from ..verdict import Reject
from ..writes import Writes
from .match import Match
from .place import Computed


def objection(
    writes: Writes, transformed: frozenset[torch.fx.Node], root: torch.fx.Node, match: Match
) -> Reject | None:
    """Why the block at `root` stays; None where nothing speaks against an operator."""
    if root in transformed:
        return Reject("the block is inside of a transform of functions (vmap, grad, jvp)")
    if _seen_elsewhere(writes, root):
        return Reject("the combined value lives in memory that is read under another name")
    result = shown(writes, root)
    if memory_order(tuple(result.shape), result.stride()) is None:
        return Reject("the combined value lives in a part of its memory", f"strides {result.stride()}")
    operands = [fake(n) for n in _operands(match)]
    wrapped = next((t for t in operands if is_traceable_wrapper_subclass(t)), None)
    if wrapped is not None:
        return Reject("an operand is not a plain tensor", type(wrapped).__name__)
    devices = {str(t.device) for t in (*operands, result)}
    if len(devices) > 1:
        return Reject("the operands are on several devices", ", ".join(sorted(devices)))
    return None


def shown(writes: Writes, root: torch.fx.Node) -> torch.Tensor:
    """The root's result; of a write without one (setitem), what it wrote into."""
    value = fake(root)
    result: torch.Tensor = value if isinstance(value, torch.Tensor) else fake(writes.targets[root][0])
    return result


def transformed(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    """The nodes inside of vmap, grad or jvp, whose tensors are not what they seem."""
    inside: set[torch.fx.Node] = set()
    depth = 0
    for n in graph.nodes:
        if n.op == "call_function":
            name = spelling(n)
            depth += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        if depth:
            inside.add(n)
    return frozenset(inside)


def _operands(match: Match) -> list[torch.fx.Node]:
    weights = match.weights.nodes.values() if isinstance(match.weights, Computed) else (match.weights,)
    nodes = (match.hidden, match.ids, *weights, *match.gate_up, *match.down, *match.gate_up_bias, *match.down_bias)
    return [n for n in (*nodes, match.post_scale) if n is not None]


def _seen_elsewhere(writes: Writes, root: torch.fx.Node) -> bool:
    """Whether a root that writes into a tensor (index_add_) writes memory that is read later by a view made before."""
    targets = writes.targets.get(root, [])
    sharing = (n for memory in writes.of.get(root, ()) for n in writes.shared[memory] if n not in targets)
    at = writes.position[root]
    return any(writes.position[n] < at and any(writes.position.get(u, -1) > at for u in n.users) for n in sharing)
