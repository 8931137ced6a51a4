"""What a mutant may do to one value: functions from a node to what is read in its place, and writes into its memory.

Some keep the value (a copy, two transposes), most don't; nothing here knows which. An edit that the value can't have (a
transpose of a vector) leaves a graph that can't run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

Node, Graph = torch.fx.Node, torch.fx.GraphModule


def _method(name: str, *args: Any, **kwargs: Any) -> Callable[[Graph, Node], Node]:
    return lambda gm, n: gm.graph.call_method(name, (n, *args), kwargs)


def _function(f: Any, *args: Any) -> Callable[[Graph, Node], Node]:
    return lambda gm, n: gm.graph.call_function(f, (n, *args))


def _chain(*edits: Callable[[Graph, Node], Node]) -> Callable[[Graph, Node], Node]:
    def edit(gm: Graph, n: Node) -> Node:
        for one in edits:
            n = one(gm, n)
        return n

    return edit


def _reversed(gm: Graph, n: Node) -> Node:
    size = gm.graph.call_method("size", (n, 0))
    up = gm.graph.call_function(torch.arange, (size,))
    last = gm.graph.call_function(operator.sub, (size, 1))
    return gm.graph.call_function(operator.sub, (last, up))


def _own_shape(edit: Callable[[Graph, Node], Node]) -> Callable[[Graph, Node], Node]:
    """The edit, and then the shape that the value had."""
    return lambda gm, n: gm.graph.call_method("reshape", (edit(gm, n), *_value(n).shape))


def _value(n: Node) -> torch.Tensor:
    value: torch.Tensor = n.meta["example_value"]
    return value


def _strided(gm: Graph, n: Node) -> Node:
    """The value's memory read row by row, whatever its strides are."""
    strides, step = [], 1
    for size in reversed(_value(n).shape):
        strides.insert(0, step)
        step *= size
    return gm.graph.call_method("as_strided", (n, tuple(_value(n).shape), tuple(strides)))


def _rotated(gm: Graph, n: Node) -> Node:
    """Slices off by one: all rows but the first, then the first."""
    parts = [gm.graph.call_function(operator.getitem, (n, s)) for s in (slice(1, None), slice(None, 1))]
    return gm.graph.call_function(torch.cat, (parts, 0))


def _doubled_row(gm: Graph, n: Node) -> Node:
    """Slices off by one: the first row, then all but the last."""
    parts = [gm.graph.call_function(operator.getitem, (n, s)) for s in (slice(None, 1), slice(None, -1))]
    return gm.graph.call_function(torch.cat, (parts, 0))


EDITS: dict[str, Callable[[Graph, Node], Node]] = {
    "+ 1": _function(operator.add, 1),
    "- 1": _function(operator.sub, 1),
    "* 2": _function(operator.mul, 2),
    "* -1": _function(operator.mul, -1),
    "* 0": _function(operator.mul, 0),
    "* itself": lambda gm, n: gm.graph.call_function(operator.mul, (n, n)),
    "% 3": _function(operator.mod, 3),
    "// 2": _function(operator.floordiv, 2),
    "> 0": _function(operator.gt, 0),
    "== 1": _function(operator.eq, 1),
    ".roll": _method("roll", 1, 0),
    ".flip": _method("flip", -1),
    ".flip(0)": _method("flip", 0),
    ".abs": _method("abs"),
    ".relu": _method("relu"),
    ".clamp": _method("clamp", max=2),
    ".clamp(min)": _method("clamp", min=1),
    ".nan_to_num": _method("nan_to_num"),
    ".clone": _method("clone"),
    ".contiguous": _method("contiguous"),
    ".detach": _method("detach"),
    ".float.double": _chain(_method("float"), _method("double")),
    ".float": _method("float"),
    ".long": _method("long"),
    ".int": _method("int"),
    ".t": _method("transpose", 0, -1),
    ".t.t": _chain(_method("transpose", 0, -1), _method("transpose", 0, -1)),
    ".t in its shape": _own_shape(_method("transpose", 0, -1)),
    ".flatten in its shape": _own_shape(_method("flatten")),
    ".mT in its shape": _own_shape(_method("transpose", -1, -2)),
    ".expand": lambda gm, n: gm.graph.call_method("expand", (n, *_value(n).shape)),
    "[0] everywhere": lambda gm, n: gm.graph.call_method(
        "expand_as", (gm.graph.call_function(operator.getitem, (n, slice(0, 1))), n)
    ),
    ".softmax": _method("softmax", -1),
    ".cumsum": _method("cumsum", 0),
    "[arange]": lambda gm, n: gm.graph.call_method("index_select", (n, 0, _reversed(gm, n))),
    ".mean": lambda gm, n: gm.graph.call_function(operator.sub, (n, gm.graph.call_method("mean", (n,)))),
    ".sort": lambda gm, n: gm.graph.call_function(operator.getitem, (gm.graph.call_function(torch.sort, (n, 0)), 0)),
    "strided": _strided,
    "rotated": _rotated,
    "a row doubled": _doubled_row,
    "[None][0]": _chain(_function(operator.getitem, None), _function(operator.getitem, 0)),
    "[::1]": _function(operator.getitem, slice(None, None, 1)),
    "where > 0": lambda gm, n: gm.graph.call_function(torch.where, (gm.graph.call_function(operator.gt, (n, 0)), n, 0)),
    "masked at 1": lambda gm, n: gm.graph.call_method(
        "masked_fill", (n, gm.graph.call_function(operator.eq, (n, 1)), 0)
    ),
}

EFFECTS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("add_", (1,)), ("mul_", (2,)), ("zero_", ()), ("fill_", (1,)), ("neg_", ()), ("clamp_", (0, 1)), ("abs_", ()),
    ("sub_", (1,)), ("relu_", ()), ("remainder_", (3,)), ("t_", ()), ("squeeze_", ()), ("detach_", ()),
    ("unsqueeze_", (0,)), ("transpose_", (0, -1)), ("cumsum_", (0,)), ("triu_", ()), ("__setitem__", (0, 1)),
    ("__setitem__", (slice(1, None), 0)), ("nan_to_num_", ()), ("swapaxes_", (0, -1)),
)  # fmt: skip
