"""`moe.verify`: each emitted operator is run once beside the nodes that it replaces, on the values of a real call.

In: the graph in which both stand (lowering emits the operators first and swaps them in afterwards). Out: a function of
the graph's inputs that runs it and compares. Blocks are compared one by one, each on the original's inputs, so an error
in one can't show in another. Nothing of the caller's is written: what the graph mutates is cloned first, and random
numbers are drawn from a copy of the generator's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from .nodes import copy_graph, fake, storage
from .reference import tolerance
from .spec import ExpertsSpec
from .writes import Writes


class VerificationError(RuntimeError):
    """A block's operator and its original nodes disagree by more than their roundings."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A block: its number in the graph, its experts, its place, the original's last node, and the operator's result."""

    region: int
    spec: ExpertsSpec
    place: str
    root: torch.fx.Node
    out: torch.fx.Node


@dataclass(frozen=True, kw_only=True)
class Compared:
    """How far a block's operator is from its nodes: relative RMS and largest difference, and the bounds on them."""

    region: int
    place: str
    rms: float
    max: float
    rms_bound: float
    max_bound: float

    @property
    def ok(self) -> bool:
        return self.rms <= self.rms_bound and self.max <= self.max_bound

    def __str__(self) -> str:
        verdict = "agrees" if self.ok else "DIFFERS"
        sizes = f"rms {self.rms:.2e} (bound {self.rms_bound:.2e}), max {self.max:.2e} (bound {self.max_bound:.2e})"
        return f"region {self.region} {self.place} {verdict}: {sizes}"


def comparison(gm: torch.fx.GraphModule, pairs: Sequence[Pair]) -> Callable[..., list[Compared]]:
    """A function of the graph's inputs: runs the graph as it is and compares the pairs. Made before the swap.

    ValueError where two inputs share memory that the graph writes: they could not be cloned apart.
    """
    graph, copies = copy_graph(gm.graph)
    writes = Writes(gm.graph)
    sources: dict[int, torch.fx.Node] = {}
    for n in gm.graph.nodes:
        if n.op in ("placeholder", "get_attr") and storage(n) in writes.to and isinstance(fake(n), torch.Tensor):
            if storage(n) in sources:
                shared = f"{n.name} and {sources[storage(n)].name}"
                raise ValueError(f"moe.verify: {shared} share memory that the graph writes")
            sources[storage(n)] = n
            users = list(copies[n].users)
            with graph.inserting_after(copies[n]):
                clone = graph.call_method("clone", (copies[n],))
            for user in users:
                user.replace_input_with(copies[n], clone)
    for index, pair in enumerate(pairs):
        with graph.inserting_after(copies[pair.root]):
            graph.call_function(_compare, (index, copies[pair.root], copies[pair.out]))
    check = torch.fx.GraphModule(gm, graph)

    def run(*inputs: Any) -> list[Compared]:
        found: list[Compared] = []
        devices = {t.device for t in inputs if isinstance(t, torch.Tensor) and t.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
            _Runner(check, pairs, found).run(*inputs)
        return found

    return run


def on_first_call(compiled: Callable[..., Any], compare: Callable[..., list[Compared]], tell: Any) -> Any:
    """`compiled`, but its first call compares before it runs. `tell` gets the comparisons; VerificationError after."""
    due = [True]

    def checked(*inputs: Any) -> Any:
        if due:
            due.clear()
            found = compare(*inputs)
            tell(found)
            if wrong := [str(c) for c in found if not c.ok]:
                raise VerificationError("moe.verify: " + "; ".join(wrong))
        return compiled(*inputs)

    return checked


def _compare(index: int, want: torch.Tensor, got: torch.Tensor) -> None:
    """A mark in the graph for the runner."""


class _Runner(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, pairs: Sequence[Pair], found: list[Compared]) -> None:
        super().__init__(module)
        self.pairs, self.found = pairs, found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not _compare:
            return super().call_function(target, args, kwargs)
        index, want, got = args
        self.found.append(_difference(self.pairs[index], want.double(), got.double()))
        return None


def _difference(pair: Pair, want: torch.Tensor, got: torch.Tensor) -> Compared:
    rms, largest = tolerance(pair.spec)
    finite = want.isfinite().all(-1)  # of a token whose numbers overflow there is nothing to compare
    got, want = got[finite], want[finite]
    d, tiny = got - want, torch.finfo(torch.float64).tiny
    no_tokens = not d.numel()
    return Compared(
        region=pair.region,
        place=pair.place,
        rms=0.0 if no_tokens else float(d.norm() / want.norm().clamp(min=tiny)),
        max=0.0 if no_tokens else float(d.abs().max() / want.abs().max().clamp(min=tiny)),
        rms_bound=2 * rms,  # either may be off by it
        max_bound=2 * largest,
    )
