"""Mutants: copies of a graph with one random edit. Whether an edit changes the function is not asked here.

`mutate` draws the kind of edit, the node and the particulars from one random.Random, so a seed names a mutant. Edits
that leave a graph that can't run are the caller's to notice: fake propagation raises.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import graphs
import torch
import torch.fx
import torch.nn.functional as F

Node, Graph, Random = torch.fx.Node, torch.fx.GraphModule, random.Random


class Nothing(Exception):
    """The drawn edit does not apply."""


def mutate(gm: Graph, seed: int) -> tuple[Graph, str]:
    """A copy of `gm` with one edit, and what it was. Raises Nothing where the drawn edit has no place."""
    draw = Random(seed)
    copy = graphs.clone(gm)
    kind = draw.choice(list(KINDS))
    said = KINDS[kind](copy, draw)
    copy.graph.lint()
    copy.recompile()
    return copy, f"{kind}: {said}"


def _calls(gm: Graph) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]


def _value(n: Any) -> Any:
    return n.meta.get("example_value") if isinstance(n, Node) else None


def _alike(a: Node, b: Node) -> bool:
    x, y = _value(a), _value(b)
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.dtype == y.dtype and x.shape == y.shape


def _pick(draw: Random, places: list[Any]) -> Any:
    if not places:
        raise Nothing
    return draw.choice(places)


def _swap_arguments(gm: Graph, draw: Random) -> str:
    n = _pick(draw, [n for n in _calls(gm) if sum(isinstance(a, Node) for a in n.args) >= 2])
    i, j = draw.sample([i for i, a in enumerate(n.args) if isinstance(a, Node)], 2)
    args = list(n.args)
    args[i], args[j] = args[j], args[i]
    n.args = tuple(args)
    return f"{n.name} {i}<->{j}"


def _constants(x: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to the numbers in nested arguments."""
    if isinstance(x, (tuple, list)):
        return [p for i, y in enumerate(x) for p in _constants(y, (*path, i))]
    if isinstance(x, dict):
        return [p for k, y in x.items() for p in _constants(y, (*path, k))]
    if isinstance(x, slice):
        return [p for k in ("start", "stop", "step") for p in _constants(getattr(x, k), (*path, k))]
    return [path] if isinstance(x, (bool, int, float)) else []


def _at(x: Any, path: tuple[Any, ...]) -> Any:
    for p in path:
        x = getattr(x, p) if isinstance(x, slice) else x[p]
    return x


def _with(x: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    head, rest = path[0], path[1:]
    if isinstance(x, dict):
        return {k: _with(v, rest, new) if k == head else v for k, v in x.items()}
    if isinstance(x, slice):
        return slice(
            *(_with(getattr(x, k), rest, new) if k == head else getattr(x, k) for k in ("start", "stop", "step"))
        )
    return type(x)(_with(v, rest, new) if i == head else v for i, v in enumerate(x))


def _shift_constant(gm: Graph, draw: Random) -> str:
    places = [(n, p) for n in _calls(gm) for p in _constants({"args": n.args, "kwargs": n.kwargs})]
    n, path = _pick(draw, places)
    old = _at({"args": n.args, "kwargs": n.kwargs}, path)
    if isinstance(old, bool):
        new: Any = not old
    elif isinstance(old, int):
        new = draw.choice([old + 1, old - 1, -old, 0, 1, old * 2, old // 2])
    else:
        new = draw.choice([old * 1.5, -old, 0.0, old + 1.0])
    if new == old:
        raise Nothing
    both = _with({"args": n.args, "kwargs": dict(n.kwargs)}, path, new)
    n.args, n.kwargs = both["args"], both["kwargs"]
    return f"{n.name} {old} -> {new}"


_SIBLINGS: dict[Any, tuple[Any, ...]] = {
    "sum": ("mean", "amax", "prod", "cumsum", "logsumexp"),
    "mean": ("sum",),
    "view": ("t", "contiguous"),
    "repeat_interleave": ("repeat",),
    "unsqueeze": ("squeeze",),
    "float": ("half", "bool", "int", "bfloat16"),
    "sigmoid": ("tanh", "exp"),
    "index_add": ("index_copy",),
    "index_add_": ("index_copy_",),
    operator.mul: (operator.add, operator.sub, torch.maximum, operator.truediv),
    operator.add: (operator.sub, operator.mul, torch.minimum),
    operator.truediv: (operator.mul, operator.sub),
    operator.floordiv: (operator.mod, operator.mul, operator.add),
    operator.mod: (operator.floordiv,),
    operator.ge: (operator.gt, operator.lt, operator.eq),
    operator.gt: (operator.ge, operator.lt),
    F.silu: (F.gelu, F.relu, torch.tanh, torch.neg, torch.erf, F.softplus, F.mish),
    F.softmax: (F.log_softmax, F.softmin),
    torch.cumsum: (torch.cumprod,),
    torch.sort: (torch.topk,),
    torch.argsort: (torch.sort,),
    torch.bmm: (torch.matmul,),
    torch.cat: (torch.stack,),
    torch.zeros: (torch.ones, torch.empty),
    torch.where: (torch.lerp,),
}


def _sibling(gm: Graph, draw: Random) -> str:
    n = _pick(draw, [n for n in _calls(gm) if n.target in _SIBLINGS])
    old, n.target = n.target, draw.choice(_SIBLINGS[n.target])
    return f"{n.name} {_named(old)} -> {_named(n.target)}"


def _named(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


_KEYWORDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.sort, {"descending": True}), (torch.argsort, {"descending": True}), (torch.sort, {"stable": True}),
    (torch.topk, {"largest": False}), (torch.topk, {"sorted": False}), ("sum", {"keepdim": True}),
    ("index_add_", {"alpha": 2}), ("index_add", {"alpha": 2}), (F.softmax, {"dtype": torch.float64}),
    (torch.cumsum, {"dtype": torch.int8}), (torch.histc, {"max": 3}), (torch.gather, {"sparse_grad": True}),
    ("view", {"dtype": torch.int32}), (F.gelu, {"approximate": "tanh"}), (F.silu, {"inplace": True}),
    ("index_put_", {"accumulate": True}), (torch.bincount, {"minlength": 9}), ("clamp", {"min": 1}),
)  # fmt: skip


def _keyword(gm: Graph, draw: Random) -> str:
    n, more = _pick(draw, [(n, more) for n in _calls(gm) for target, more in _KEYWORDS if n.target == target])
    n.kwargs = {**n.kwargs, **more}
    return f"{n.name} {more}"


def _drop(gm: Graph, draw: Random) -> str:
    n, source = _pick(draw, [(n, a) for n in _calls(gm) for a in n.all_input_nodes if _alike(n, a)])
    n.replace_all_uses_with(source)
    gm.graph.erase_node(n)
    return f"{n.name} is {source.name}"


def _drop_effect(gm: Graph, draw: Random) -> str:
    n = _pick(draw, [n for n in _calls(gm) if not n.users])
    gm.graph.erase_node(n)
    return n.name


def _redirect(gm: Graph, draw: Random) -> str:
    places: list[tuple[Node, Node, Node]] = []
    before: list[Node] = []
    for n in gm.graph.nodes:
        for a in n.all_input_nodes:
            places.extend((n, a, b) for b in before if b is not a and _alike(a, b))
        before.append(n)
    n, old, new = _pick(draw, places)
    n.replace_input_with(old, new)
    return f"{n.name}: {old.name} -> {new.name}"


_EFFECTS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("add_", (1,)), ("mul_", (2,)), ("zero_", ()), ("fill_", (1,)), ("neg_", ()), ("clamp_", (0, 1)), ("abs_", ()),
    ("sub_", (1,)), ("relu_", ()), ("remainder_", (3,)), ("t_", ()), ("squeeze_", ()), ("detach_", ()),
)  # fmt: skip


def _insert_effect(gm: Graph, draw: Random) -> str:
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    at = draw.randrange(1, len(nodes))
    n = _pick(draw, [n for n in nodes[:at] if isinstance(_value(n), torch.Tensor)])
    name, args = draw.choice(_EFFECTS)
    with gm.graph.inserting_after(nodes[at - 1]):
        if draw.random() < 0.25 and _value(n).dim():
            part = gm.graph.call_function(operator.getitem, (n, 0))
            with gm.graph.inserting_after(part):
                gm.graph.call_method(name, (part, *args))
        else:
            gm.graph.call_method(name, (n, *args))
    return f"{n.name}.{name}{args} after {nodes[at - 1].name}"


_EDITS: tuple[tuple[str, Callable[[Graph, Node], Node]], ...] = (
    ("+ 1", lambda gm, n: gm.graph.call_function(operator.add, (n, 1))),
    ("- 1", lambda gm, n: gm.graph.call_function(operator.sub, (n, 1))),
    ("* 2", lambda gm, n: gm.graph.call_function(operator.mul, (n, 2))),
    ("* -1", lambda gm, n: gm.graph.call_function(operator.mul, (n, -1))),
    ("* itself", lambda gm, n: gm.graph.call_function(operator.mul, (n, n))),
    ("% 3", lambda gm, n: gm.graph.call_function(operator.mod, (n, 3))),
    ("// 2", lambda gm, n: gm.graph.call_function(operator.floordiv, (n, 2))),
    (".roll", lambda gm, n: gm.graph.call_method("roll", (n, 1, 0))),
    (".flip", lambda gm, n: gm.graph.call_method("flip", (n, -1))),
    (".abs", lambda gm, n: gm.graph.call_method("abs", (n,))),
    (".clamp", lambda gm, n: gm.graph.call_method("clamp", (n,), {"max": 2})),
    (".clone", lambda gm, n: gm.graph.call_method("clone", (n,))),
    (".contiguous", lambda gm, n: gm.graph.call_method("contiguous", (n,))),
    (".t", lambda gm, n: gm.graph.call_method("transpose", (n, 0, -1))),
    (".softmax", lambda gm, n: gm.graph.call_method("softmax", (n, -1))),
    (".cumsum", lambda gm, n: gm.graph.call_method("cumsum", (n, 0))),
    ("[arange]", lambda gm, n: gm.graph.call_method("index_select", (n, 0, _reversed(gm, n)))),
    (".mean", lambda gm, n: gm.graph.call_function(operator.sub, (n, gm.graph.call_method("mean", (n,))))),
    (".sort", lambda gm, n: gm.graph.call_function(operator.getitem, (gm.graph.call_function(torch.sort, (n, 0)), 0))),
    ("> 0", lambda gm, n: gm.graph.call_function(operator.gt, (n, 0))),
)


def _reversed(gm: Graph, n: Node) -> Node:
    size = gm.graph.call_method("size", (n, 0))
    up = gm.graph.call_function(torch.arange, (size,))
    last = gm.graph.call_function(operator.sub, (size, 1))
    return gm.graph.call_function(operator.sub, (last, up))


def _insert(gm: Graph, draw: Random) -> str:
    places = [(n, a) for n in gm.graph.nodes for a in n.all_input_nodes if isinstance(_value(a), torch.Tensor)]
    user, source = _pick(draw, places)
    name, edit = draw.choice(_EDITS)
    with gm.graph.inserting_before(user):
        new = edit(gm, source)
    user.replace_input_with(source, new)
    return f"{source.name}{name} into {user.name}"


KINDS: dict[str, Callable[[Graph, Random], str]] = {
    "swapped arguments": _swap_arguments,
    "shifted constant": _shift_constant,
    "sibling": _sibling,
    "keyword": _keyword,
    "dropped": _drop,
    "dropped effect": _drop_effect,
    "redirected": _redirect,
    "written in place": _insert_effect,
    "inserted": _insert,
}
