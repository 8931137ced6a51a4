"""Who writes which memory of a graph: the arguments that a node may write, and an index of a graph's writes.

In: nodes. Out: for a node, the tensor arguments whose memory it may write, all of them where that can't be known; for a
graph, `Writes`. Memory is the fake tensors' (nodes.storage), so whoever shares it is known.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from .canonical import Call, canonical, dunder
from .nodes import storage


def mutated_arguments(node: torch.fx.Node) -> tuple[Any, ...]:
    """The argument nodes whose memory `node` may write; every tensor argument where we can't know.

    Known operations say so themselves; ATen and custom operators by their schema; other callables are assumed to
    write everything they are given, except functions of torch whose name doesn't end in "_".
    """
    return _mutated(node, canonical(node))


def _mutated(node: torch.fx.Node, call: Call | None) -> tuple[Any, ...]:
    if call is not None:
        return (call.get(call.mutates),) if call.mutates else ()
    if node.op not in ("call_function", "call_method", "call_module"):
        return ()
    out = node.kwargs.get("out")
    written: list[Any] = (
        [out] if isinstance(out, torch.fx.Node) else list(out) if isinstance(out, (tuple, list)) else []
    )
    target: Any = node.target
    if _asked_to_write(target, node.args, node.kwargs):
        written.append(node.args[0] if node.args else node.kwargs.get("input"))
    written += _side_effects(target, node.args, node.kwargs)
    if node.op == "call_method":
        in_place = target in _WRITING_METHODS or (target.endswith("_") and not target.endswith("__"))
        return (node.args[0], *written) if in_place else tuple(written)
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default if hasattr(target, "default") else None
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
                written.extend(value if isinstance(value, (tuple, list)) else [value])
        return tuple(written)
    if node.op == "call_function" and is_torch_function(target):
        name = getattr(target, "__name__", "")
        if name.startswith("_") and name.endswith("_") and not name.endswith("__"):
            return tuple(node.all_input_nodes)  # torch._foreach_add_ writes a list
        return (node.args[0], *written) if name.endswith("_") and node.args else tuple(written)
    return tuple(node.all_input_nodes)


# in-place operators that the table doesn't name
_WRITING = (operator.ixor, operator.ilshift, operator.irshift, operator.iconcat, operator.delitem)
_WRITING_METHODS = frozenset(map(dunder, _WRITING))


# What functions write beside computing their result, where a flag says so: (flag's position and name, whether it is set
# where it is left out, the positions and names of what is written). Statistics, and rows scaled to a largest norm.
_STATISTICS = ("running_mean", "running_var")
_SIDE_EFFECTS: dict[Any, tuple[int, str, bool, tuple[tuple[int, str], ...]]] = {
    F.batch_norm: (5, "training", False, tuple(zip((1, 2), _STATISTICS))),
    torch.batch_norm: (5, "training", False, tuple(zip((3, 4), _STATISTICS))),
    F.instance_norm: (5, "use_input_stats", True, tuple(zip((1, 2), _STATISTICS))),
    torch.instance_norm: (5, "use_input_stats", True, tuple(zip((3, 4), _STATISTICS))),
    **dict.fromkeys((F.embedding, F.embedding_bag), (3, "max_norm", False, ((1, "weight"),))),
}


def _side_effects(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a function writes beside computing its result."""
    if not isinstance(target, (FunctionType, BuiltinFunctionType)) or target not in _SIDE_EFFECTS:
        return []

    def argument(position: int, name: str, default: Any = None) -> Any:
        return args[position] if position < len(args) else kwargs.get(name, default)

    position, flag, default, written = _SIDE_EFFECTS[target]
    return [argument(*w) for w in written] if argument(position, flag, default) else []


def _asked_to_write(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function writes its first argument: by what it is, or because an argument says so."""
    if target in _WRITING or kwargs.get("inplace") is True:
        return True
    at = _place_of_inplace(target) if isinstance(target, FunctionType) else None
    return at is not None and at < len(args) and args[at] is True


@lru_cache(None)
def _place_of_inplace(target: FunctionType) -> int | None:
    """The position of a parameter `inplace`, if there is one."""
    names = list(inspect.signature(target).parameters)
    return names.index("inplace") if "inplace" in names else None


def is_torch_function(target: Callable[..., Any]) -> bool:
    """Plain functions of torch, which write nothing unless their name says so; not higher-order operators."""
    module = getattr(target, "__module__", None) or ""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    builtin = getattr(torch, getattr(target, "__name__", ""), None) is target
    return builtin or module in (
        "torch",
        "torch._C._nn",
        "torch.nn.functional",
        "torch.functional",
        "math",
        "_operator",
        "builtins",
        "torch._C",
        "torch.special",
        "torch._C._linalg",
        "torch._C._fft",
    )


class Writes:
    """Who writes which memory of a graph, indexed once: the questions of every region cost what the region costs.

    `position`: each node's place in program order. `of`: the memories a node writes, for nodes that write. `to`: the
    nodes that write a memory, in program order. `shared`: the nodes whose value lives in a memory. `calls`: the
    canonical call of each node that has one. `targets`: the tensor arguments that a node writes.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.position: dict[torch.fx.Node, int] = {}
        self.of: dict[torch.fx.Node, tuple[int, ...]] = {}
        self.to: dict[int, list[torch.fx.Node]] = {}
        self.shared: dict[int, list[torch.fx.Node]] = {}
        self.calls: dict[torch.fx.Node, Call] = {}
        self.targets: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for n in graph.nodes:
            self.position[n] = len(self.position)
            self.shared.setdefault(storage(n), []).append(n)
            call = canonical(n)
            if call is not None:
                self.calls[n] = call
            targets = [a for a in _mutated(n, call) if isinstance(a, torch.fx.Node)]
            if targets:
                self.targets[n] = targets
                written = tuple(map(storage, targets))
                self.of[n] = written
                for memory in written:
                    self.to.setdefault(memory, []).append(n)

    def ordered(self, nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
        """The nodes in program order."""
        return sorted(nodes, key=self.position.__getitem__)

    def interior(
        self, root: torch.fx.Node, leaves: Collection[torch.fx.Node], also: Iterable[torch.fx.Node] = ()
    ) -> list[torch.fx.Node]:
        """`also`, and the nodes from `root` back to `leaves`, with the writes into their memory; in program order."""
        inside: set[torch.fx.Node] = set(also)
        todo, last = [root], self.position[root]
        while todo:
            while todo:
                n = todo.pop()
                computed = n in self.position and n.op not in ("placeholder", "get_attr")
                if computed and n not in inside and n not in leaves:
                    inside.add(n)
                    todo.extend(n.all_input_nodes)
            memory = {storage(n) for n in inside}
            written = [w for m in memory for w in self.to.get(m, ()) if w not in inside]
            for w in written:
                if self.position[w] <= last and memory.issuperset(self.of[w]):
                    inside.add(w)
                    todo.extend(w.all_input_nodes)
        return self.ordered(inside)
