"""The walk: interprets the graph once, in program order, giving every node a value; regions are found on the way.

In: a GraphModule as Dynamo (or export) made it. Out: a `Recognition`: proved regions with their specs and operands, and
for what looked like a block and was not proved, the reason, the node and its place. The graph is not changed.

A value may be wrong in no case, only vague: what no rule describes is a leaf of its own node. Mutation is a new version
of a storage; entries of older versions turn into leaves when they are next read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from .. import rules
from ..algebra.affine import Size, as_size
from ..algebra.layout import Ord, Val, new_axes
from ..algebra.terms import LeafKey, Term, Terms
from ..canonical import Call, Writes
from ..journal import Where
from ..nodes import fake, where
from ..rules.registry import positional
from ..spec import MoESpec
from ..verdict import Reject, Unproved
from .definitions import Definitions
from .gradients import Gradients
from .loops import ended
from .lowest import Lowest
from .match import Match, collected, combined, match
from .router import RouterMatch, match_router
from .versions import Versions


@dataclass(kw_only=True)
class Found:
    """A proved region. `root` is the node to replace; `match` and `router` have the operands' nodes."""

    root: torch.fx.Node
    match: Match
    router: RouterMatch | None
    router_why: str
    where: Where

    @property
    def device(self) -> torch.device:
        """Where the experts' weights are."""
        value: torch.Tensor = fake(self.match.down[0])
        return value.device

    @property
    def spec(self) -> MoESpec:
        return MoESpec(experts=self.match.spec, router=self.router.spec if self.router else None)


@dataclass(kw_only=True)
class Rejection:
    """The deepest partial proof of a block that stays as it was."""

    node: torch.fx.Node
    verdict: Reject
    where: Where
    progress: int


@dataclass(kw_only=True)
class Recognition:
    regions: list[Found] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)


class Walk:
    """The state of the walk; also the context that rules see."""

    follow = False

    def __init__(self, writes: Writes, cut: bool = True, terms: Terms | None = None) -> None:
        self.writes = writes
        self.terms = terms or Terms()
        self.cut = cut
        self.versions = Versions()
        self.lowest = Lowest()
        self.definitions = Definitions()
        self.gradients = Gradients()
        self.selections: dict[torch.fx.Node, Val] = {}
        self.ranges: dict[LeafKey, int] = {}
        self.distinct: dict[LeafKey, int] = {}
        self.complaints: dict[torch.fx.Node, Reject] = {}
        self.node: torch.fx.Node = None  # type: ignore[assignment]
        self._env: dict[torch.fx.Node, tuple[Any, int]] = {}
        self._table = rules.load()

    # what rules ask

    def value(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            known = self._env.get(argument)
            if known is not None and known[1] == self.versions.of(argument):
                return known[0]
            return self._default(argument)
        if isinstance(argument, (tuple, list)):
            return tuple(self.value(a) for a in argument)
        return argument

    def leaf(self, node: torch.fx.Node) -> Val:
        """`node` itself, at its present version."""
        value = fake(node)
        dims, index = new_axes([as_size(n) for n in value.shape])
        return Val(dims, self.terms.leaf(node, self.versions.of(node), index, value.dtype), value.dtype)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(as_size(n) for n in self._result().shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._result().dtype

    def _result(self) -> Any:
        value = fake(self.node)
        return value if isinstance(value, torch.Tensor) else value[0]

    def _default(self, node: torch.fx.Node) -> Any:
        value = fake(node)
        out = self.leaf(node) if isinstance(value, torch.Tensor) else None if isinstance(value, tuple) else value
        self._env[node] = (out, self.versions.of(node))
        return out

    # the walk

    def visit(self, node: torch.fx.Node) -> Reject | None:
        """Gives `node` its value; a Reject says why it is only a leaf."""
        value, call = fake(node), self.writes.calls.get(node)
        tensors = isinstance(value, (torch.Tensor, tuple, list)) or (call is not None and call.mutates)
        if node.op not in ("call_function", "call_method") or not tensors:
            self._written(node)
            for constant in self.gradients.switched(node):
                self._env.pop(constant, None)
            return None
        self.gradients.computed(node, call)
        self.node = node
        self.lowest.visit(node, call)
        result = self._apply(node, call)
        if call is not None and call.mutates:
            target = call.args[call.mutates]
            if not isinstance(target, torch.fx.Node):
                return None
            self.versions.write(target)
            if isinstance(result, Val):
                wanted = fake(target)
                if result.dtype != wanted.dtype:
                    result = Val(result.dims, self.terms.make("cast", (result.term,), dtype=wanted.dtype), wanted.dtype)
            for n in (target, node):
                if isinstance(result, Val):
                    self._env[n] = (result, self.versions.of(n))
                else:
                    self._env.pop(n, None)
        else:
            self._written(node)
            if isinstance(result, (tuple, Val)):
                self._env[node] = (result, self.versions.of(node))
            elif result is None and self.cut:
                self.definitions.record(self, node, call)
        if not isinstance(result, Reject):
            return None
        self.complaints[node] = result
        return result

    def _apply(self, node: torch.fx.Node, call: Call | None) -> Any:
        if call is None:
            return Reject("no rule knows this operation", _target(node))
        transfer: Any = self._table.get(call.op)
        if transfer is None:
            return Reject("no rule knows this operation", call.op)
        if self.cut and call.op in rules.CUTS and not any(map(self.known, node.all_input_nodes)) and _floats(node):
            return None
        target = call.args.get(call.mutates) if call.mutates else None
        if isinstance(target, torch.fx.Node) and isinstance(fake(target), torch.Tensor):
            self.node = target  # an in-place result has its target's shape and dtype
        try:
            result = transfer(self, call)
        except Unproved as stop:
            return stop.verdict
        if isinstance(result, Val) and result.sizes != self.sizes:
            return Reject("a rule's result has another shape than the graph's", f"{result.sizes}, not {self.sizes}")
        if isinstance(result, Val) and result.dtype != self.dtype:
            return Reject("a rule's result has another dtype than the graph's", f"{result.dtype}, not {self.dtype}")
        if isinstance(result, Val) and self.cut and not self.follow and call.op in rules.CUTS and positional(result):
            return None
        return result

    def _written(self, node: torch.fx.Node) -> None:
        for argument in self.writes.targets.get(node, ()):
            if isinstance(fake(argument), torch.Tensor):
                self.versions.write(argument)

    def values(self) -> Iterator[tuple[torch.fx.Node, Val]]:
        """The nodes whose elements, in no sorted order, are known."""
        for node, (value, version) in self._env.items():
            if isinstance(value, Val) and value.plain and version == self.versions.of(node):
                yield node, value

    def holders(self, leaf: Term) -> Iterator[tuple[torch.fx.Node, Val]]:
        """The nodes whose elements are, in some order, those of the tensor that `leaf` reads."""
        return ((n, v) for n, v in self.values() if v.term.op == "leaf" and v.term.attr == leaf.attr)

    def known(self, node: torch.fx.Node) -> Any:
        """The node's value where a rule gave it one; None where it is a leaf of itself."""
        known = self._env.get(node)
        return known[0] if known is not None and known[1] == self.versions.of(node) else None

    def definition(self, leaf: Term) -> Term | None:
        """The term of a leaf's element by the operation that made its node, where a rule can tell."""
        return None if leaf.attr.node in self.gradients.constants else self.definitions.of(self, leaf)

    def cut_at(self, node: torch.fx.Node) -> None:
        """From here on, `node` and what it wrote into are leaves of themselves."""
        for n in (node, *self.writes.targets.get(node, ())):
            if isinstance(fake(n), torch.Tensor):
                self._env[n] = (self.leaf(n), self.versions.of(n))

    def current(self, leaf: Term) -> bool:
        """Whether a leaf still reads what it read."""
        return bool(self.versions.of(leaf.attr.node) == leaf.attr.version)


def recognize(gm: torch.fx.GraphModule) -> Recognition:
    """Every region of the graph that is proved to be an MoE block, and every near miss with its reason."""
    writes = Writes(gm.graph)
    walk, out = Walk(writes), Recognition()
    misses: list[Rejection] = []
    open_roots: dict[torch.fx.Node, Found] = {}

    def block(root: torch.fx.Node, value: Val) -> bool:
        """Whether the value that `root` made is a block's result: then it is a region."""
        proved = match(walk, value)
        if not isinstance(proved, Reject) and _seen_elsewhere(writes, root):
            proved = Reject("the combined value lives in memory that is read under another name")
        if isinstance(proved, Reject):
            misses.append(Rejection(node=root, verdict=proved, where=where(root), progress=3))
            return False
        router = match_router(writes, walk, root, proved)
        found = Found(
            root=root,
            match=proved,
            router=router if isinstance(router, RouterMatch) else None,
            router_why="" if isinstance(router, RouterMatch) else str(router),
            where=where(root),
        )
        out.regions.append(found)
        open_roots[root] = found
        return True

    ends: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        for root, value in ended(walk, node):
            if root not in ends and block(root, value):
                walk.cut_at(root)
            ends.add(root)
        complaint = walk.visit(node)
        if complaint is None:  # a Reject is falsy
            complaint = _loose_end(walk, node)
        if complaint is not None:
            progress = _progress(walk, node)
            if progress:
                verdict = _because(walk, node, complaint)
                misses.append(Rejection(node=node, verdict=verdict, where=where(node), progress=progress))
            continue
        grown = _extends(walk, node, open_roots)
        if grown is not None:
            open_roots[node] = grown
            walk.cut_at(node)
            continue
        value = walk.known(node)
        if isinstance(value, Val) and collected(value.term):
            if combined(value.term):  # else one routed linear: experts of something else than an MLP
                block(node, value)
            walk.cut_at(node)
    out.regions.sort(key=lambda r: writes.position[r.root])
    out.rejections = _deepest(misses, out.regions)
    return out


def _seen_elsewhere(writes: Writes, root: torch.fx.Node) -> bool:
    """Whether a root that writes into a tensor (index_add_) writes memory that is read later by a view made before."""
    targets = writes.targets.get(root, [])
    sharing = (n for memory in writes.of.get(root, ()) for n in writes.shared[memory] if n not in targets)
    at = writes.position[root]
    return any(writes.position[n] < at and any(writes.position.get(u, -1) > at for u in n.users) for n in sharing)


def _extends(walk: Walk, node: torch.fx.Node, roots: dict[torch.fx.Node, Found]) -> Found | None:
    """A cast of a region's result that nobody else reads becomes the region's root."""
    call = walk.writes.calls.get(node) if roots else None
    if call is None or call.op not in ("to", "type", "type_as") or call.mutates:
        return None
    source = call.get("input")
    found = roots.get(source)
    value = fake(node)
    if found is None or found.root is not source or len(source.users) != 1 or not value.dtype.is_floating_point:
        return None
    widened = found.match.with_out(value.dtype)
    if widened is None or not all(walk.current(leaf) for leaf in found.match.leaves):
        return None
    found.match, found.root = widened, node
    return found


def _loose_end(walk: Walk, node: torch.fx.Node) -> Reject | None:
    """Where an expert's output is read by something that leaves it without a combination over the choices."""
    if node.op == "output":
        if any(isinstance(v := walk.known(n), Val) and v.term.dots for n in node.all_input_nodes):
            return Reject("the experts' outputs leave the graph without being summed over the choices")
    elif (
        node.op in ("call_function", "call_method")
        and walk.known(node) is None
        and isinstance(value := fake(node), torch.Tensor)
        and value.is_floating_point()
        and _progress(walk, node) == 2
    ):
        return Reject("the experts' outputs are read by an operation that no rule follows", _target(node))
    return None


def _progress(walk: Walk, node: torch.fx.Node) -> int:
    """How far a proof had come where it stopped: 2 past an expert linear, 1 at rows in expert order, 0 elsewhere.

    A grouped product is a block's, whatever its rows are.
    """
    call = walk.writes.calls.get(node)
    best = 1 if call is not None and call.op == "grouped_mm" else 0
    for n in node.all_input_nodes:
        v = walk.known(n)
        for x in v if isinstance(v, tuple) else (v,):
            if isinstance(x, Val):
                sorted_rows = any(isinstance(a, Ord) for d in x.dims for a in d)
                best = max(best, 2 if x.term.dots else 1 if sorted_rows else 0)
    return best


def _because(walk: Walk, node: torch.fx.Node, complaint: Reject) -> Reject:
    """The complaint with what it comes from: the nearest node before it, a few steps back, that a rule refused."""
    near = list(node.all_input_nodes)
    for n in near:
        cause = walk.complaints.get(n)
        if cause is not None:
            detail = f"{complaint.detail}; " if complaint.detail else ""
            return Reject(complaint.reason, f"{detail}because of {n.name}: {cause}")
        if len(near) < _NEAR:
            near.extend(m for m in n.all_input_nodes if m not in near)
    return complaint


_NEAR = 12


def _deepest(misses: list[Rejection], regions: list[Found]) -> list[Rejection]:
    """One rejection a module: the one whose proof came furthest, the first of equals; none inside a proved region."""
    proved = {f.where.module for f in regions}
    best: dict[str, Rejection] = {}
    for miss in misses:
        module = miss.where.module
        if module in proved:
            continue
        if module not in best or miss.progress > best[module].progress:
            best[module] = miss
    return list(best.values())


def _floats(node: torch.fx.Node) -> bool:
    value = fake(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _target(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
