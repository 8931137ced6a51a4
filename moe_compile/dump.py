"""Writes what was compiled to a folder: in, the journal's events; out, files to read and to run.

    MOE_COMPILE_DUMP=folder python program.py        or        with moe_compile.debug("folder"): ...

    folder/rank0_pid4711/000_before.py      graph 0 as Dynamo gave it
                         000_after.py       graph 0 with its blocks replaced
                         specs.txt          a line for each block: graph, region, place, spec, plan
                         rejections.txt     what looked like a block and was not proved, and why
                         repro_000_1.py     runs region 1 of graph 0 alone, with random weights, against the reference

Each process has a folder of its own, and nothing is ever overwritten. A folder that can't be written is one warning,
never an exception.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from . import journal, options


class Dumper:
    """A journal listener that writes into a fresh folder below `folder`; `path` is it, None before the first event."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.path: Path | None = None
        self._found: dict[tuple[int, int], journal.RegionFound] = {}
        self._pid = 0
        self._broken = False

    def __call__(self, event: journal.Event) -> None:
        if self._broken:
            return
        try:
            self._write(event)
        except OSError as error:
            self._broken = True
            warnings.warn(f"moe_compile can't write its dump, and goes on without: {error}", stacklevel=2)

    def _write(self, event: journal.Event) -> None:
        number = f"{event.graph:03}"
        if isinstance(event, journal.GraphSeen):
            self._new(f"{number}_before.py", event.text)
        elif isinstance(event, journal.Lowered):
            self._new(f"{number}_after.py", event.text)
        elif isinstance(event, journal.RegionFound):
            self._found[event.graph, event.region] = event
            self._append("specs.txt", f"graph {event.graph} region {event.region} {event.where}: {event.spec}")
        elif isinstance(event, journal.Planned):
            self._append("specs.txt", f"graph {event.graph} region {event.region} plan {event.plan}")
            if found := self._found.pop((event.graph, event.region), None):
                self._new(f"repro_{number}_{event.region}.py", repro(found, event.plan))
        elif isinstance(event, journal.RegionRejected):
            detail = f": {event.detail}" if event.detail else ""
            line = f"graph {event.graph} node {event.node} {event.where} {event.where.code}\n    {event.reason}{detail}"
            self._append("rejections.txt", line)
        elif isinstance(event, journal.StageFailed):
            self._append("failures.txt", f"graph {event.graph} stage {event.stage}: {event.error}")

    def _new(self, name: str, text: str) -> None:
        with (self._home() / name).open("x", encoding="utf-8") as file:
            file.write(text.rstrip("\n") + "\n")

    def _append(self, name: str, line: str) -> None:
        with (self._home() / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _home(self) -> Path:
        """This process's folder, made on its first use: a fork makes another, and so does a later run."""
        if self.path is None or self._pid != os.getpid():
            self._pid = os.getpid()
            base = f"rank{_rank()}_pid{self._pid}"
            for name in (base, *(f"{base}_{i}" for i in range(2, 10_000))):
                with contextlib.suppress(FileExistsError):
                    (self.folder / name).mkdir(parents=True)
                    self.path = self.folder / name
                    break
            else:
                raise FileExistsError(f"{self.folder / base} and its successors all exist")
        return self.path


def _rank() -> int:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed.get_rank() if distributed and distributed.is_available() and distributed.is_initialized() else 0


@contextlib.contextmanager
def debug(folder: str | os.PathLike[str]) -> Iterator[Dumper]:
    """Dump what is compiled inside the `with` below `folder`; the Dumper's `path` says where."""
    dumper = Dumper(folder)
    stop = journal.subscribe(dumper, text=True)
    try:
        yield dumper
    finally:
        stop()


_following: tuple[str, Callable[[], None]] = ("", lambda: None)


def follow_environment() -> None:
    """Dump where MOE_COMPILE_DUMP says, from now until it says otherwise. Called at the start of each compilation."""
    global _following
    folder, stop = options.dump_folder(), _following[1]
    if folder != _following[0]:
        stop()
        _following = folder, journal.subscribe(Dumper(folder), text=True) if folder else lambda: None


def repro(found: journal.RegionFound, plan: str) -> str:
    """A program that runs the region's operator alone and compares it with the reference."""
    return _REPRO.format(graph=found.graph, region=found.region, where=found.where, spec=found.spec, plan=plan)


_REPRO = '''\
"""Region {region} of graph {graph}, {where}: the experts operator alone, with random weights.

Compares it with moe_compile.reference in fp64. Prints the largest error over the largest value (max) and the RMS error
over the RMS value (rms), and exits 1 where one is above its bound. Usage: python {{this file}} [tokens]
"""

import sys

import torch

import moe_compile.ops  # registers torch.ops.moe_compile
from moe_compile import reference
from moe_compile.operands import ExpertWeights
from moe_compile.spec import MoESpec, torch_dtype

SPEC = MoESpec.parse({spec!r}).experts
PLAN = {plan!r}
T = int(sys.argv[1]) if len(sys.argv) > 1 else 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

random = torch.Generator(DEVICE).manual_seed(0)


def normal(*shape, scale=1.0, dtype=torch_dtype(SPEC.x)):
    return (torch.randn(shape, generator=random, device=DEVICE) * scale).to(dtype)


arguments = []
for tensors, scale in zip(SPEC.operand_shapes(), (SPEC.H**-0.5, SPEC.I**-0.5, 1.0, 1.0), strict=True):
    arguments.append([normal(*shape, scale=scale) for shape in tensors])
arguments.append(normal(SPEC.H) if SPEC.post == "scaled_rms" else None)
w = ExpertWeights.of(SPEC, *arguments)
hidden_TH = normal(T, SPEC.H)
# Experts of unequal popularity, as in trained models: K distinct ones a token.
popularity_E = torch.linspace(0, -3, SPEC.E, device=DEVICE)
ids_TK = (popularity_E + normal(T, SPEC.E, dtype=torch.float32)).topk(SPEC.K).indices
weights_TK = normal(T, SPEC.K, dtype=torch.float32).softmax(-1).to(torch_dtype(SPEC.w))
if SPEC.weight == "none":
    weights_TK = None

got = torch.ops.moe_compile.experts(
    hidden_TH, ids_TK, weights_TK, *arguments, str(SPEC), PLAN
).double()
want = reference.experts(reference.exact(SPEC), hidden_TH, ids_TK, weights_TK, w).double()

bounds = dict(zip(("rms", "max"), reference.tolerance(SPEC)))
error = {{
    "max": float((got - want).abs().max() / want.abs().max()),
    "rms": float((got - want).square().mean().sqrt() / want.square().mean().sqrt()),
}}
print(SPEC, f"plan {{PLAN}} on {{DEVICE}}, {{T}} tokens", sep="\\n")
print("\\n".join(f"{{k}} error {{error[k]:.2e}}, bound {{bounds[k]:.2e}}" for k in error))
sys.exit(not all(error[k] <= bounds[k] for k in error))
'''
