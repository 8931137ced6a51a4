"""A benchmark's record that grows: in, cells, or folders of processes with cells.json and memory.json; out, JSON files.

Invariant: what was timed is on disk after each cell or process, and a cell stands as it was timed last, whole: its
columns are of the same rounds. An earlier record is gone on with where it is of the same day, device and versions.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GEOMETRIES = ("qwen3_30b", "mixtral", "olmoe", "gpt_oss_20b", "qwen3next", "dsv3")
ORDER = (*GEOMETRIES, "tiny")
THEIRS = ("flashinfer", "cudnn")  # other libraries' providers
HEAD = ("date", "device", "versions")


def goes_on(earlier: dict[str, Any], head: dict[str, Any]) -> bool:
    """Whether an earlier record is of the same day, device and versions; says so where it isn't."""
    if all(earlier.get(k) == head[k] for k in HEAD):
        return True
    print("the earlier record is of another day, device or versions: left alone", flush=True)
    return False


class Cells:
    """The cells of a program that times them one by one, in the file `name` under $OUT or here; `into`: an earlier
    record to go on with."""

    def __init__(self, name: str, into: str) -> None:
        self.path = Path(os.environ.get("OUT", "."), name)
        self.record: dict[str, Any] = json.loads(Path(into).read_text()) if into else {}

    def begin(self, **head: Any) -> None:
        """What this run is, before its first cell. An earlier record of another day, device or versions is dropped."""
        goes_on_here = self.record and goes_on(self.record, head)
        self.record = {**self.record, **head} if goes_on_here else head

    def has(self, geometry: str, T: int, columns: Iterable[str]) -> bool:
        """Whether a cell was timed with these columns, or more."""
        return any(_at(c) == (geometry, T) and c["us"].keys() >= set(columns) for c in self.record.get("cells", ()))

    def add(self, cell: dict[str, Any], part: str = "cells") -> None:
        rows = [c for c in self.record.get(part, ()) if _at(c) != _at(cell)] + [cell]
        self.put(**{part: sorted(rows, key=lambda c: _place(_at(c)))})

    def put(self, **parts: Any) -> None:
        """Parts of the record other than cells, anew."""
        self.record |= parts
        write(self.path, json.dumps(self.record, indent=1))


def _at(cell: dict[str, Any]) -> tuple[str, int]:
    return cell["geometry"], cell["T"]


def _place(at: tuple[str, int]) -> tuple[int, int]:
    """In a record: a geometry may be cut, as its further words say."""
    return ORDER.index(at[0].split()[0]), at[1]


class Record:
    """What the processes timed, and what `earlier` has of the same day, device and versions; written as it grows."""

    def __init__(self, out: Path, name: str, what: str, earlier: dict[str, Any] | None) -> None:
        self.out, self.name, self.what, self.earlier = out, name, what, earlier
        self.parts: list[dict[str, Any]] = []
        self.memory: dict[str, Any] = {}
        self.lock = threading.Lock()

    def add(self, folder: Path) -> None:
        """What the process of `folder` said and timed."""
        from moe_compile.contest import as_json

        with self.lock:
            text = (folder / "log").read_text(errors="replace")
            print("".join(c for c in text if c == "\n" or " " <= c <= "~")[-6000:], flush=True)
            if (folder / "cells.json").exists():
                self.parts.append(json.loads((folder / "cells.json").read_text()))
                if self.earlier and not goes_on(self.earlier, self.parts[0]):
                    self.earlier = None
            if (folder / "memory.json").exists():
                self.memory[folder.name[:-2]] = json.loads((folder / "memory.json").read_text())
            if self.parts:
                found = self.found()
                write(self.out / self.name, as_json(found) + "\n")
                write(
                    self.out / self.name.replace("h200", "providers"),
                    as_json(providers_of(found, self.memory, self.what)) + "\n",
                )

    def found(self) -> dict[str, Any]:
        """One record. A cell stands as it was timed last, and so do the reasons of its gaps."""
        cells: dict[tuple[str, int], Any] = {}
        gaps: dict[tuple[str, int], dict[str, str]] = {}
        for part in filter(None, (self.earlier, *self.parts)):
            for cell in part["cells"]:
                cells[_at(cell)], gaps[_at(cell)] = cell, {}
            for name, why, geometry, T in (
                (name, why, geometry, T) for name, reasons in part["absent"].items() for why, where in reasons.items()
                for geometry, tokens in where.items() for T in tokens
            ):  # fmt: skip
                gaps[geometry, T][name] = why
        absent: dict[str, dict[str, dict[str, list[int]]]] = {}
        ordered = sorted(cells, key=_place)
        for geometry, T in ordered:
            for name, why in gaps[geometry, T].items():
                absent.setdefault(name, {}).setdefault(why, {}).setdefault(geometry, []).append(T)
        return {**self.parts[0], "what": self.what, "absent": absent, "cells": [cells[at] for at in ordered]}


def providers_of(found: dict[str, Any], kept: dict[str, Any], what: str) -> dict[str, Any]:
    """The record of providers alone. product: what tuning picks of ours; over_fastest: its time over the fastest's."""
    cells = []
    for c in found["cells"]:
        us = {n.replace("moe_", "triton_"): t for n, t in c["us"].items() if n.startswith(("moe_", *THEIRS))}
        if (product := us.pop("triton_tuned", None)) and us:
            fastest = min(us, key=us.__getitem__)
            cells.append({
                "geometry": c["geometry"], "T": c["T"], "us": us, "product": product, "fastest": fastest,
                "over_fastest": round(product / us[fastest], 3),
            })  # fmt: skip
    head = {k: found[k] for k in HEAD}
    absent = {n: why for n, why in found["absent"].items() if n.startswith(THEIRS)}
    return {**head, "what": what, "memory": kept, "absent": absent, "cells": cells}


def write(path: Path, text: str) -> None:
    """Whole, or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
