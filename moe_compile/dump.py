"""Writes what was compiled to a folder: in, the journal's events; out, files to read and to run.

    MOE_COMPILE_DUMP=folder python program.py        or        with moe_compile.debug("folder"): ...

    folder/rank0_pid4711/000_before.py      graph 0 as Dynamo gave it
                         000_after.py       graph 0 with its blocks replaced, and what that changed
                         000_1_costs.txt    region 1 of graph 0: the cost model's formulas with their numbers
                         000_1_repro.py     runs it alone, with random weights, against the reference
                         candidates.csv     every candidate of every token bucket: what was predicted, what was measured
                         journal.jsonl      every event, as it came
                         report.md, report.html     the whole, to read; written when the `with` or the process ends

Each process has a folder of its own, and nothing is ever overwritten. A folder that can't be written is one warning,
never an exception.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import journal, options
from .explain import Report
from .report import html


class Dumper:
    """A journal listener that writes into a fresh folder below `folder`; `path` is it, None before the first event."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.path: Path | None = None
        self._events: list[journal.Event] = []
        self._found: dict[tuple[int, int], journal.RegionFound] = {}
        self._ops: dict[int, tuple[tuple[str, int], ...]] = {}
        self._pid = 0
        self._broken = False

    def __call__(self, event: journal.Event) -> None:
        self._events.append(event)
        self._guarded(self._write, event)

    def close(self) -> None:
        """Write the reports of what was seen; once nothing more is to come."""
        if self.path is not None and self._pid == os.getpid():
            self._guarded(self._reports)

    def _guarded(self, write: Callable[..., None], *args: Any) -> None:
        if self._broken:
            return
        try:
            write(*args)
        except OSError as error:
            self._broken = True
            warnings.warn(f"moe_compile can't write its dump, and goes on without: {error}", stacklevel=2)

    def _write(self, event: journal.Event) -> None:
        plain = {k: v for k, v in asdict(event).items() if k not in ("text", "ops")}
        self._append("journal.jsonl", json.dumps({"event": type(event).__name__, **plain}))
        number = f"{event.graph:03}"
        if isinstance(event, journal.GraphSeen):
            self._ops[event.graph] = event.ops
            self._new(f"{number}_before.py", event.text)
        elif isinstance(event, journal.Lowered):
            self._new(f"{number}_after.py", _difference(self._ops.get(event.graph, ()), event) + event.text)
        elif isinstance(event, journal.RegionFound):
            self._found[event.graph, event.region] = event
        elif isinstance(event, journal.Planned):
            self._append_candidates(event)
            self._new(f"{number}_{event.region}_costs.txt", costs(event))
            if found := self._found.pop((event.graph, event.region), None):
                self._new(f"{number}_{event.region}_repro.py", repro(found, event.plan))

    def _append_candidates(self, event: journal.Planned) -> None:
        for row in _candidates(event):
            line = io.StringIO()
            csv.writer(line, lineterminator="").writerow(row)
            self._append("candidates.csv", line.getvalue(), head=_CANDIDATES)

    def _reports(self) -> None:
        self._new("report.md", f"# moe_compile\n\n```\n{Report.from_events(self._events)}\n```")
        self._new("report.html", html(self._events))

    def _new(self, name: str, text: str) -> None:
        with (self._home() / name).open("x", encoding="utf-8") as file:
            file.write(text.rstrip("\n") + "\n")

    def _append(self, name: str, line: str, head: str = "") -> None:
        with (self._home() / name).open("a", encoding="utf-8") as file:
            if head and not file.tell():
                file.write(head + "\n")
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
        dumper.close()


_following: tuple[str, Callable[[], None]] = ("", lambda: None)


def follow_environment() -> None:
    """Dump where MOE_COMPILE_DUMP says, from now until it says otherwise. Called at the start of each compilation."""
    global _following
    folder, stop = options.dump_folder(), _following[1]
    if folder == _following[0]:
        return
    stop()
    _following = folder, lambda: None
    if folder:
        dumper = Dumper(folder)
        unsubscribe = journal.subscribe(dumper, text=True)
        atexit.register(dumper.close)

        def stop_following() -> None:
            unsubscribe()
            atexit.unregister(dumper.close)
            dumper.close()

        _following = folder, stop_following


_CANDIDATES = "graph,region,up_to_tokens,at_tokens,candidate,predicted_us,measured_us,limit_us,chosen"


def _candidates(event: journal.Planned) -> Iterator[list[Any]]:
    """Rows of candidates.csv."""
    for bucket in event.buckets:
        bound = "*" if bucket.bound is None else bucket.bound
        for offer in bucket.offers:
            measured = "" if offer.measured is None else f"{1e6 * offer.measured:.3f}"
            times = [f"{1e6 * offer.predicted:.3f}", measured, f"{1e6 * bucket.limit:.3f}"]
            chosen = int(offer.candidate == bucket.chosen)
            yield [event.graph, event.region, bound, bucket.tokens, offer.candidate, *times, chosen]


def _difference(before: tuple[tuple[str, int], ...], lowered: journal.Lowered) -> str:
    """A comment: which operations the graph has more or fewer of."""
    counts = dict(lowered.ops)
    counts.update((op, counts.get(op, 0) - n) for op, n in before)
    changed = sorted((n, op) for op, n in counts.items() if n)
    lines = [f"# {lowered.nodes_before} nodes before, {lowered.nodes_after} after: {lowered.regions} blocks replaced"]
    return "\n".join((*lines, *(f"#   {n:+} {op}" for n, op in changed))) + "\n"


def costs(event: journal.Planned) -> str:
    """The cost model's rows for each bucket's choice: each formula, and the number that it came to."""
    from .cost import SHEETS

    formulas = {tuple(sheet): sheet for sheet in SHEETS.values()}
    lines = [f"planned for {event.device}"]
    for bucket in event.buckets:
        lines += ["", f"{bucket.tokens} tokens: {bucket.chosen}"]
        for name, rows in bucket.steps:
            sheet = formulas.get(tuple(row for row, _ in rows), {})
            lines += [f"  {name}", *(f"    {row:13} {value:<12.6g} = {sheet.get(row, '?')}" for row, value in rows)]
    return "\n".join(lines)


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
