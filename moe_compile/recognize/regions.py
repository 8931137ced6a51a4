"""Regions: the blocks of a graph, found while the walk goes through it.

In: a GraphModule as Dynamo (or export) made it. Out: a `Recognition`: proved regions with their specs and operands, and
for what looked like a block and was not proved, the reason, the node and its place. The graph is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.fx

from ..algebra.layout import Val
from ..journal import Where
from ..nodes import fake, spelling, where
from ..spec import MoESpec
from ..verdict import Reject
from ..writes import Writes
from .loops import ended
from .match import Match, collected, combined, match
from .router import RouterMatch, match_router
from .slots import in_slots
from .surroundings import objection, transformed
from .walk import Walk


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


def recognize(gm: torch.fx.GraphModule) -> Recognition:
    """Every region of the graph that is proved to be an MoE block, and every near miss with its reason."""
    writes = Writes(gm.graph)
    walk, out = Walk(writes), Recognition()
    misses: list[Rejection] = []
    open_roots: dict[torch.fx.Node, Found] = {}
    inside = transformed(gm.graph)

    def block(root: torch.fx.Node, value: Val) -> bool:
        """Whether the value that `root` made is a block's result: then it is a region."""
        proved = match(walk, value)
        if not isinstance(proved, Reject):
            against = objection(writes, inside, root, proved)
            proved = proved if against is None else against  # a Reject is falsy
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
        slots = in_slots(writes, node)
        if slots is not None:
            misses.append(Rejection(node=node, verdict=slots, where=where(node), progress=4))
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
        value = walk.held(node)
        if isinstance(value, Val) and collected(value.term):
            if combined(value.term):  # else one routed linear: experts of something else than an MLP
                block(node, value)
            walk.cut_at(node)
    out.regions.sort(key=lambda r: writes.position[r.root])
    out.rejections = _deepest(misses, out.regions)
    return out


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
    switch = walk.gradients.switch
    if switch is not None and walk.writes.position[switch] > walk.writes.position[found.root]:
        return None  # behind it the operator would have a gradient that the block has not, or none although it has one
    widened = found.match.with_out(value.dtype)
    if widened is None or not all(walk.current(leaf) for leaf in found.match.leaves):
        return None
    found.match, found.root = widened, node
    return found


def _loose_end(walk: Walk, node: torch.fx.Node) -> Reject | None:
    """Where an expert's output is read by something that leaves it without a combination over the choices."""
    if node.op == "output":
        if any(isinstance(v := walk.held(n), Val) and v.term.dots for n in node.all_input_nodes):
            return Reject("the experts' outputs leave the graph without being summed over the choices")
    elif (
        node.op in ("call_function", "call_method")
        and walk.held(node) is None
        and _progress(walk, node) == 2
        and isinstance(value := fake(node), torch.Tensor)
        and value.is_floating_point()
    ):
        return Reject("the experts' outputs are read by an operation that no rule follows", spelling(node))
    return None


def _progress(walk: Walk, node: torch.fx.Node) -> int:
    """How far a proof had come where it stopped: 2 past an expert linear, 1 at rows in expert order, 0 elsewhere.

    A grouped product is a block's, whatever its rows are.
    """
    call = walk.writes.calls.get(node)
    best = 1 if call is not None and call.op == "grouped_mm" else 0
    for n in node.all_input_nodes:
        v = walk.held(n)
        for x in v if isinstance(v, tuple) else (v,):
            if isinstance(x, Val) and best < 2:
                best = 2 if x.term.dots else best if x.plain else 1
    return best


def _because(walk: Walk, node: torch.fx.Node, complaint: Reject) -> Reject:
    """The complaint with what it comes from: the nearest node before it, a few steps back, that a rule refused."""
    near = list(node.all_input_nodes)
    for n in near:
        walk.known(n)  # one that waited has not complained yet
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
