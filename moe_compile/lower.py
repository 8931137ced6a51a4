"""Lowering: swaps a proved region for one operator call, and drops what only the region needed.

In: a graph, a region and the plan of its operator. The graph is edited in place; the caller keeps a copy to go back to.
Nodes that others read stay computed, and a write goes only when everything in the memory it writes goes with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from . import ops  # noqa: F401  (registers the operators)
from .activation import torch_function
from .algebra.affine import as_size, memory_order
from .algebra.terms import Term
from .canonical import canonical
from .nodes import fake, storage
from .spec import ExpertsSpec, torch_dtype
from .writes import Writes, mutated_arguments


def lower(
    gm: torch.fx.GraphModule,
    regions: list[Any],
    plans: list[tuple[str, bool]],
    before_swap: Callable[[list[torch.fx.Node]], object] = lambda outs: None,
) -> None:
    """Replace each region's root by `moe_compile::experts` (and `route`), in program order.

    regions: recognize.Found, in program order. plans: for each a providers.Plan's text, and whether to emit `route`.
    before_swap: called with the operators' results while the original nodes still stand beside them.
    """
    stands_for: dict[torch.fx.Node, torch.fx.Node] = {}  # a later region may read an earlier one's root
    writes = Writes(gm.graph)
    outs = [_emit(gm.graph, writes, region, *plan) for region, plan in zip(regions, plans, strict=True)]
    before_swap(outs)
    for region, out in zip(regions, outs, strict=True):
        _swap(gm.graph, writes, region, out, stands_for)


def _swap(
    graph: torch.fx.Graph,
    writes: Writes,
    region: Any,
    out: torch.fx.Node,
    stands_for: dict[torch.fx.Node, torch.fx.Node],
) -> None:
    """Let `out` stand where the region's root stood, and drop what only the region needed."""
    root = region.root
    leaves = (leaf.attr.node for leaf in region.match.leaves)
    # its router's nodes too, but for those that went with another region's
    also = () if region.router is None else region.router.nodes
    interior = writes.interior(root, {stands_for.get(n, n) for n in leaves}, also)
    interior = [n for n in interior if not n._erased]
    stands_for[root] = out
    _retarget(writes, root, out)
    root.replace_all_uses_with(out)
    _sweep(graph, writes, interior)


def _emit(graph: torch.fx.Graph, writes: Writes, region: Any, plan: str, fuse_router: bool) -> torch.fx.Node:
    """The operator's result in the root's shape, computed just before the root, from the region's operands."""
    root, match, spec = region.root, region.match, region.spec

    def emit(target: Any, *args: Any) -> torch.fx.Node:
        if isinstance(target, str):
            node = graph.call_method(target, args)
        else:
            node = graph.call_function(target, args)
        node.meta.update({k: root.meta[k] for k in ("nn_module_stack", "stack_trace") if k in root.meta})
        return node

    def kept(node: torch.fx.Node, last: int) -> torch.fx.Node:
        """`node` as [T, last]; a copy where its memory is written later, since autograd keeps it for the backward."""
        later = any(writes.position[w] > writes.position[root] for w in writes.to.get(storage(node), ()))
        flat = _flattened(emit, node, last)
        return emit("clone", flat) if later else flat

    weights: torch.fx.Node | None
    with graph.inserting_before(root):
        hidden = kept(match.hidden, spec.experts.H)
        if region.router is not None and fuse_router:
            logits = kept(region.router.logits, spec.router.E)
            vectors = [
                v if v is None or fake(v).dim() == 1 else emit("reshape", v, -1)
                for v in (region.router.bias, region.router.expert_scale)
            ]
            routed = emit(torch.ops.moe_compile.route.default, logits, *vectors, str(spec.router))
            weights, ids = emit(operator.getitem, routed, 0), emit(operator.getitem, routed, 1)
        else:
            ids = kept(match.ids, spec.experts.K)
            weights = _routing_weights(emit, kept, match.weights, spec.experts.K)
        out = emit(
            torch.ops.moe_compile.experts.default, hidden, ids, weights, list(match.gate_up), list(match.down),
            list(match.gate_up_bias), list(match.down_bias), match.post_scale, str(spec.experts), plan,
        )  # fmt: skip
        if match.identities:
            out = _given_back(emit, out, hidden, ids, weights, spec.experts, match.identities)
        shown = root if isinstance(fake(root), torch.Tensor) else mutated_arguments(root)[0]  # setitem has no result
        shape = fake(shown).shape
        if len(shape) != 2:
            out = emit("reshape", out, *_sizes(emit, shape, (match.hidden, match.ids)))
        order = memory_order(tuple(shape), fake(shown).stride())
        assert order is not None
        if order != tuple(range(len(shape))):  # readers may know the strides: as_strided, or a view of the transpose
            out = emit("contiguous", emit("permute", out, *order))
            out = emit("permute", out, *(order.index(d) for d in range(len(shape))))
    out.meta.update({k: v for k, v in shown.meta.items() if k != "unbacked_bindings"})
    return out


def _given_back(
    emit: Any, out: torch.fx.Node, hidden: torch.fx.Node, ids: Any, weights: Any, spec: ExpertsSpec, identities: int
) -> torch.fx.Node:
    """The experts' result with the hidden states, as often as identity experts (ids from E on) weigh them."""
    chosen = emit(operator.and_, emit(operator.ge, ids, spec.E), emit(operator.lt, ids, spec.E + identities))
    share = emit("sum", emit("masked_fill", weights, emit(operator.invert, chosen), 0.0), -1, True)
    kept = emit("to", emit(operator.mul, hidden, share), torch_dtype(spec.out))
    node: torch.fx.Node = emit(operator.add, out, kept)
    return node


def _retarget(writes: Writes, root: torch.fx.Node, out: torch.fx.Node) -> None:
    """Where the root wrote into a tensor (index_add_), what later reads that tensor by its own name reads `out`."""
    for target in mutated_arguments(root):
        if isinstance(target, torch.fx.Node):
            for user in [u for u in target.users if writes.position.get(u, -1) > writes.position[root]]:
                user.replace_input_with(target, out)


def _routing_weights(emit: Any, kept: Any, weights: Any, K: int) -> torch.fx.Node | None:
    """The weights as [T, K]: a node of the graph, or computed as the block would, cast for cast."""
    if weights is None or isinstance(weights, torch.fx.Node):
        return None if weights is None else kept(weights, K)
    made: dict[Term, Any] = {leaf: _flattened(emit, node, K) for leaf, node in weights.nodes.items()}

    def value(t: Term) -> Any:
        if t not in made:
            args = list(map(value, t.args))
            if t.op == "const":
                made[t] = t.attr[1]
            else:
                made[t] = emit("to", *args, t.dtype) if t.op == "cast" else emit(torch_function(t.attr), *args)
        return made[t]

    node: torch.fx.Node = value(weights.term)
    return node


def _flattened(emit: Any, node: torch.fx.Node, last: int) -> torch.fx.Node:
    """`node` as [T, last]: itself where it is."""
    shape = fake(node).shape
    return node if len(shape) == 2 and as_size(shape[1]) == last else emit("reshape", node, -1, last)


def _sizes(emit: Any, shape: Any, sources: tuple[torch.fx.Node, ...]) -> list[Any]:
    """The sizes of a shape as arguments of a reshape: numbers, sizes of tensors at hand, and at most one -1."""
    out: list[Any] = []
    for n in shape:
        size = as_size(n)
        if type(size) is int:
            out.append(size)
            continue
        found = ((s, i) for s in sources for i, m in enumerate(fake(s).shape) if as_size(m) == size)
        source = next(found, None)
        out.append(-1 if source is None else emit("size", *source))
    if out.count(-1) > 1:
        raise ValueError(f"lower: the result's shape {tuple(shape)} is not made of the operands' sizes")
    return out


def _sweep(graph: torch.fx.Graph, writes: Writes, interior: list[torch.fx.Node]) -> None:
    """Erase the interior nodes that nothing outside needs, then whatever only they read."""
    inside = set(interior)

    def seen_outside(memory: int) -> bool:
        return any(n not in inside and not n._erased for n in writes.shared[memory])

    kept: set[torch.fx.Node] = set()
    todo = [
        n
        for n in interior
        if any(u not in inside for u in n.users) or any(map(seen_outside, writes.of.get(n, ()))) or _impure(n)
    ]
    while todo:
        n = todo.pop()
        if n in kept:
            continue
        kept.add(n)
        todo.extend(m for m in n.all_input_nodes if m in inside)
        memory = {storage(n), *(storage(m) for m in n.all_input_nodes)}
        todo.extend(w for m in memory for w in writes.to.get(m, ()) if w in inside)
    fed: list[torch.fx.Node] = []
    for n in reversed(interior):
        if n not in kept:
            fed.extend(n.all_input_nodes)
            graph.erase_node(n)
            inside.discard(n)
    erased: set[torch.fx.Node] = set()
    while fed:
        n = fed.pop()
        if n in erased or n._erased or n.op not in ("call_function", "call_method"):
            continue
        if n.users and _only_checked(n):
            _erase_users(graph, n)
        if n.users:
            continue
        if canonical(n) is None and fake(n) is not None and isinstance(fake(n), torch.Tensor):
            continue
        if mutated_arguments(n) or _impure(n):
            continue
        fed.extend(n.all_input_nodes)
        erased.add(n)
        graph.erase_node(n)


_CHECKS = ("_assert_scalar", "_check", "_check_is_size", "sym_constrain_range", "sym_constrain_range_for_size")


def _only_checked(n: torch.fx.Node) -> bool:
    """Whether all that reads `n` are assertions about how many rows a mask picked, and the sizes they are of."""
    for u in n.users:
        name = getattr(u.target, "__name__", str(u.target)).split(".")[0]
        number = isinstance(fake(u), (int, torch.SymInt, torch.SymBool, bool))
        item = u.target is operator.getitem and canonical(n) is not None and isinstance(fake(n), (tuple, list))
        if name not in _CHECKS and not ((number or item or name == "sym_size") and u.users and _only_checked(u)):
            return False
    return True


def _erase_users(graph: torch.fx.Graph, n: torch.fx.Node) -> None:
    for u in list(n.users):
        _erase_users(graph, u)
        graph.erase_node(u)


def _impure(n: torch.fx.Node) -> bool:
    """Whether a node does more than compute: it draws random numbers, say."""
    call = canonical(n)
    if call is None or call.op != "dropout":
        return False
    return bool(call.get("training", True)) and call.get("p", 0.5) != 0
