"""Facts about fx nodes: the value Dynamo traced, the memory it lives in, the place it comes from."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import torch
import torch.fx

from .journal import Where


def fake(node: torch.fx.Node) -> Any:
    """The node's value as traced: a fake tensor, a number, a tuple; None where it is unknown."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def storage(node: torch.fx.Node) -> int:
    """A number that tensors sharing memory share; the node's own where its value is unknown.

    The storages are those of the fake tensors, so every alias (view, slice, no-op cast, item of a chunk) is known
    without a table of aliasing operations.
    """
    value = fake(node)
    found = memory(value) if isinstance(value, torch.Tensor) else None
    return -id(node) if found is None else found


def memory(value: torch.Tensor) -> int | None:
    """The storage of a tensor; None where it has none (sparse): it has no aliases that we follow."""
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def spelling(node: torch.fx.Node) -> str:
    """What the graph calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def where(node: torch.fx.Node) -> Where:
    """The module path and source line that a node comes from."""
    module = ""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        module = clean_path(path)
    trace = node.meta.get("stack_trace")
    source, code = _last_frame(trace) if isinstance(trace, str) else ("", "")
    return Where(module=module, source=source, code=code)


@lru_cache(4096)
def _last_frame(trace: str) -> tuple[str, str]:
    """The place and the code of a stack trace's last frame."""
    frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', trace)
    if not frames:
        return "", ""
    file, line, code = frames[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}", code.strip()


@lru_cache(4096)
def clean_path(path: str) -> str:
    """`model.layers.0.mlp` of Dynamo's spelling of a module path."""
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"L\[['\"]\w+['\"]\]\.?", "", path)
    path = re.sub(r"\bforward\.__self__\.?", "", path)  # a forward that was set on the instance, as prepare does
    path = re.sub(r"slice\([^)]*\)", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", path)
    return re.sub(r"\.+", ".", path).strip(".")


def checkpointed(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The bodies of the graph's checkpoints (torch.utils.checkpoint), those within others behind them."""
    found: list[torch.fx.GraphModule] = []
    for n in gm.graph.nodes:
        if n.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = gm.get_submodule(str(n.args[0].target))
            if isinstance(body, torch.fx.GraphModule) and body not in found:
                found += [body, *checkpointed(body)]
    return found


def copy_graph(graph: torch.fx.Graph) -> tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node]]:
    """(the graph with nodes of its own, old node -> new). Values, metadata, what Dynamo hangs on nodes: shared."""
    new = torch.fx.Graph()
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    output = new.graph_copy(graph, val_map=nodes, return_output_node=True)
    if isinstance(output, tuple):
        value, node = output
        nodes[node] = new.output(value)
        nodes[node].meta.update(node.meta)
    for old, copy in nodes.items():
        for name in vars(old).keys() - vars(copy).keys():  # _dynamo_source: where an input comes from
            setattr(copy, name, getattr(old, name))
    return new, nodes
