"""Modules that look like an MoE, of which nothing in the graphs did: why they stay as they are.

In: a model, what its graphs held (an `Evidence` that saw each), the modules that a report speaks of already, where
Dynamo ended graphs. Out: an `Overlooked` for each other module that counts its experts. What a module looks like is
read off its attributes, and why it stays off the operations of its graph or the line that ended the graph; no class has
a name here.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from traceback import FrameSummary

import torch.fx
from torch import nn

from .breaks import Ending
from .canonical import canonical
from .nodes import where

_COUNT = re.compile(r"(moe_)?(n|num)_(local_|routed_|total_)?experts")
_CHOOSING = {"topk", "sort", "argsort", "argmax", "max"}
_GROUPED = {"grouped_mm", "bmm", "baddbmm", "einsum"}


@dataclass(frozen=True, kw_only=True)
class Overlooked:
    """A module's path, what makes it look like an MoE, why it stays, and what would change that ("" if nothing)."""

    module: str
    looks: str
    why: str
    remedy: str = ""


@dataclass
class Evidence:
    """How often each operation stands in a graph, by the module that ran it; of several graphs, the most."""

    operations: dict[str, Counter[str]] = field(default_factory=dict)

    def see(self, graph: torch.fx.Graph) -> None:
        """Count the operations of a graph, before anything in it is replaced."""
        found: dict[str, Counter[str]] = {}
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                call = canonical(node)
                name = call.op if call is not None else getattr(node.target, "__name__", str(node.target))
                found.setdefault(where(node).module, Counter())[name] += 1
        for module, counts in found.items():
            self.operations[module] = self.operations.get(module, Counter()) | counts

    def within(self, path: str) -> Counter[str]:
        """Of a module and its parts."""
        prefix = f"{path}." if path else ""
        return sum((c for p, c in self.operations.items() if p == path or p.startswith(prefix)), Counter())

    def why(self, path: str) -> str:
        """Why nothing that `path` ran is an MoE block, as far as its operations say."""
        mine = self.within(path)
        if not mine:
            return "no captured graph names it: it did not run, or not as a part of this model's graph"
        if not _CHOOSING & self.within(path.rpartition(".")[0]).keys():
            return f"nothing around it chooses experts by a top-k or a sort ({_counted(mine, 'linear')} in it)"
        if mine["embedding"] and not _GROUPED & mine.keys():
            return (
                f"its experts are rows of embeddings ({_counted(mine, 'embedding')}), no linears that expert ids choose"
            )
        return "its graph has no sum over the chosen experts of one linear behind another"


def _counted(operations: Counter[str], name: str) -> str:
    return f"{operations[name]} {name}{'s' * (operations[name] != 1)}"


def overlooked(
    model: nn.Module, evidence: Evidence, told: Collection[str], endings: Collection[Ending]
) -> Iterator[Overlooked]:
    """The modules of `model` that count experts, without those of which the modules in `told` are a part, or which are
    a part of them. endings: of this run."""
    modules = dict(model.named_modules())
    looks = {path: text for path, module in modules.items() if (text := _looks(module))}
    innermost = [p for p in looks if not any(q != p and q.startswith(f"{p}." if p else "") for q in looks)]
    parents = Counter(p.rpartition(".")[0] for p in innermost)
    for path in dict.fromkeys(_block(p, parents, modules) for p in innermost):
        if any(_near(path, t, looks) for t in told):
            continue
        here = [e for e in endings if any(_wrote(modules[path], frame) for frame in e.stack)]
        why = evidence.why(path)
        if here:
            why = f"Dynamo ends the graph in it, at {here[0].where.source}: {here[0].why or here[0].title}"
        flags = dict.fromkeys(flag for e in here for flag in e.flags)
        remedy = f"{'; '.join(flags)} before compiling lets Dynamo go on there" if flags else ""
        counts = next(text for p, text in looks.items() if p == path or p.rpartition(".")[0] == path)
        yield Overlooked(module=path, looks=counts, why=why, remedy=remedy)


def _looks(module: nn.Module) -> str:
    """The attribute that counts a module's experts, as text; "" where none does."""
    for name, value in vars(module).items():
        if _COUNT.fullmatch(name) and type(value) is int and value > 1:
            return f"{name}={value}"
    return ""


def _block(path: str, parents: Counter[str], modules: dict[str, nn.Module]) -> str:
    """The module around `path` where several parts of it count experts: router and experts are one block."""
    outer = path.rpartition(".")[0]
    return outer if parents[outer] > 1 and not isinstance(modules[outer], (nn.ModuleList, nn.ModuleDict)) else path


def _near(path: str, told: str, looks: Collection[str]) -> bool:
    """Whether a report on `told` speaks of `path`, or of a part of the same block.

    Dynamo names a module from the frame that it compiles, so what matches is the end of a path with the other's start.
    """
    if not any(_holds(told, p) for p in looks):
        told = told.rpartition(".")[0]  # a part of a block that another part counts the experts of
    parts = path.split(".")
    tails = (".".join(parts[i:]) for i in range(len(parts)))
    return not path or _holds(told, path) or _holds(path, told) or any(f"{told}.".startswith(f"{t}.") for t in tails)


def _holds(outer: str, inner: str) -> bool:
    return bool(outer) and f".{outer}." in f".{inner}."


def _wrote(module: nn.Module, frame: FrameSummary) -> bool:
    """Whether a frame of a stack is code of the module's class, or of a class inside of it."""
    for cls in {type(m) for m in module.modules()}:
        if cls.__module__.startswith("torch."):
            continue
        try:
            lines, first = inspect.getsourcelines(cls)
            file = inspect.getsourcefile(cls)
        except (OSError, TypeError):  # made in a console, or in C
            continue
        if file == frame.filename and first <= (frame.lineno or 0) < first + len(lines):
            return True
    return False
