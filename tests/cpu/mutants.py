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
from edits import EDITS, EFFECTS

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


def _insert_effect(gm: Graph, draw: Random) -> str:
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    at = draw.randrange(1, len(nodes))
    n = _pick(draw, [n for n in nodes[:at] if isinstance(_value(n), torch.Tensor)])
    name, args = draw.choice(EFFECTS)
    with gm.graph.inserting_after(nodes[at - 1]):
        if draw.random() < 0.25 and _value(n).dim():
            part = gm.graph.call_function(operator.getitem, (n, 0))
            with gm.graph.inserting_after(part):
                _write(gm, name, part, args)
        else:
            _write(gm, name, n, args)
    return f"{n.name}.{name}{args} after {nodes[at - 1].name}"


def _write(gm: Graph, name: str, n: Node, args: tuple[Any, ...]) -> None:
    if name == "__setitem__":
        gm.graph.call_function(operator.setitem, (n, *args))
    else:
        gm.graph.call_method(name, (n, *args))


def _copy_over(gm: Graph, draw: Random) -> str:
    """One value written into the memory of another of its kind."""
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    at = draw.randrange(2, len(nodes))
    before = [n for n in nodes[:at] if isinstance(_value(n), torch.Tensor)]
    n, source = _pick(draw, [(a, b) for a in before for b in before if a is not b and _alike(a, b)])
    with gm.graph.inserting_after(nodes[at - 1]):
        gm.graph.call_method("copy_", (n, source))
    return f"{n.name}.copy_({source.name}) after {nodes[at - 1].name}"


def _insert(gm: Graph, draw: Random) -> str:
    places = [(n, a) for n in gm.graph.nodes for a in n.all_input_nodes if isinstance(_value(a), torch.Tensor)]
    user, source = _pick(draw, places)
    name = draw.choice(list(EDITS))
    with gm.graph.inserting_before(user):
        new = EDITS[name](gm, source)
    user.replace_input_with(source, new)
    return f"{source.name} {name} into {user.name}"


def _expose(gm: Graph, draw: Random) -> str:
    """One more result of the graph: a value, or a view of one."""
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    n = _pick(draw, [n for n in gm.graph.nodes if isinstance(_value(n), torch.Tensor)])
    shown = n
    if draw.random() < 0.5:
        with gm.graph.inserting_before(output):
            shown = gm.graph.call_method(draw.choice(["detach", "flatten", "t", "contiguous", "clone"]), (n,))
    given = output.args[0] if isinstance(output.args[0], tuple) else (output.args[0],)
    output.args = ((*given, shown),)
    return f"{n.name} as {shown.target}"


def _move(gm: Graph, draw: Random) -> str:
    """An operation runs earlier or later, between what it reads and what reads it."""
    nodes = list(gm.graph.nodes)
    n = _pick(draw, _calls(gm))
    at = nodes.index(n)
    first = max((nodes.index(a) for a in n.all_input_nodes), default=-1) + 1
    first = max(first, sum(x.op in ("placeholder", "get_attr") for x in nodes))
    last = min((nodes.index(u) for u in n.users), default=len(nodes) - 1)
    places = [i for i in range(first, last + 1) if i not in (at, at + 1)]
    before = nodes[_pick(draw, places)]
    before.prepend(n)
    return f"{n.name} before {before.name}"


def _again(gm: Graph, draw: Random) -> str:
    """One reader of a value computes it again."""
    n, user = _pick(draw, [(n, u) for n in _calls(gm) for u in n.users])
    with gm.graph.inserting_before(user):
        new = gm.graph.node_copy(n, lambda x: x)
    user.replace_input_with(n, new)
    return f"{n.name} for {user.name}"


def _without_gradients(gm: Graph, draw: Random) -> str:
    nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    first, last = sorted(draw.sample(range(len(nodes)), 2))
    with gm.graph.inserting_before(nodes[first]):
        gm.graph.call_function(torch._C._set_grad_enabled, (False,))
    with gm.graph.inserting_after(nodes[last]):
        gm.graph.call_function(torch._C._set_grad_enabled, (True,))
    return f"{nodes[first].name} to {nodes[last].name}"


KINDS: dict[str, Callable[[Graph, Random], str]] = {
    "swapped arguments": _swap_arguments,
    "shifted constant": _shift_constant,
    "sibling": _sibling,
    "keyword": _keyword,
    "dropped": _drop,
    "dropped effect": _drop_effect,
    "redirected": _redirect,
    "written in place": _insert_effect,
    "copied over": _copy_over,
    "inserted": _insert,
    "exposed": _expose,
    "moved": _move,
    "computed again": _again,
    "without gradients": _without_gradients,
}
