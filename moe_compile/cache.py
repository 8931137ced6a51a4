"""The tuning cache on disk: in, entries; out, entries, in this process, the next one and on another machine alike.

A folder of .jsonl files, one entry a line. Ours is tuning.jsonl; any other file in the folder is read too, so that one
can be shipped by copying it. What a line can't be read as (cut short, another program's, of a later version) is said
once and left where it is. Invariant: an entry is one write at the end of the file, under a lock, on a line of its own;
whatever kills a writer, the entries before and after it stay readable. A cache that can't be read or written costs
time, never an exception: `problems` says what happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: appends are whole there too, just not ordered by a lock
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
FILE = "tuning.jsonl"


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a result depends on, and nothing else: not the rank, not the model, not the rest of the package.

    spec: an ExpertsSpec's line. tokens: the bucket's upper bound, "*" for the last. device: its name. launch: "graph"
    or "eager". workload: kind and version of the tokens, such as "tokens=varied:1". versions: (provider, its version)
    of every contender, which holds library versions and the hash of the kernels' source.
    """

    spec: str
    tokens: str
    device: str
    launch: str
    workload: str
    versions: tuple[tuple[str, str], ...]

    def differences(self, other: Key, fields: Iterable[str]) -> list[str]:
        """ "device: 'A' there, 'B' here" for each of `fields` in which `other`, the one here, differs."""
        found = []
        for name in fields:
            there, here = getattr(self, name), getattr(other, name)
            if name == "versions":
                mine = dict(here)
                found += [f"versions.{p}: {v!r} there, {mine.get(p)!r} here" for p, v in there if mine.get(p) != v]
            elif there != here:
                found.append(f"{name}: {there!r} there, {here!r} here")
        return found


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A bucket's result. chosen: a Candidate's text. complete: every contender was measured, none cut by the budget.

    facts: what the report shows (trials with predicted and measured times, reach, seconds, date), plain JSON values.
    """

    key: Key
    chosen: str
    complete: bool = True
    facts: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def line(self) -> str:
        values = dataclasses.asdict(self)
        values["key"]["versions"] = dict(self.key.versions)
        return json.dumps({"moe_compile": FORMAT, **values}, separators=(",", ":"), allow_nan=False)

    @classmethod
    def parse(cls, line: str) -> Entry:
        """The entry that `line` printed; ValueError says why it is none."""
        try:
            values = json.loads(line)
        except ValueError:
            raise ValueError("not JSON: a write that was cut short, or another program's file") from None
        found = values.pop("moe_compile", None) if isinstance(values, dict) else None
        if not isinstance(found, int):
            raise ValueError("not an entry of moe_compile")
        if found != FORMAT:
            raise ValueError(f"format {found}, and this version reads {FORMAT}")
        try:
            key, chosen, complete, facts = (values[n] for n in ("key", "chosen", "complete", "facts"))
            versions = tuple(sorted((str(k), str(v)) for k, v in key.pop("versions").items()))
            if not (isinstance(chosen, str) and isinstance(complete, bool) and isinstance(facts, dict)):
                raise TypeError
            return cls(key=Key(**_texts(key), versions=versions), chosen=chosen, complete=complete, facts=facts)
        except (KeyError, TypeError, AttributeError):
            raise ValueError("fields are missing or of another type") from None


def _texts(values: Mapping[str, Any]) -> dict[str, Any]:
    if not all(isinstance(v, str) for v in values.values()):
        raise TypeError
    return dict(values)


class Cache:
    """The entries of a folder, and those that this process added, whether or not they could be written.

    Without a folder ("") they are this process's alone."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.in_memory = not os.fspath(folder)
        self.problems: list[str] = []
        self._added: dict[Key, Entry] = {}
        self._read: dict[Key, Entry] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    @property
    def path(self) -> Path:
        """The file that entries are added to."""
        return self.folder / FILE

    def entries(self) -> dict[Key, Entry]:
        """Every entry; of several for a key the last one, complete ones before others. Files are read when changed."""
        if not self.in_memory:
            self._refresh()
        return _merged((*self._read.values(), *self._added.values()))

    def get(self, key: Key) -> Entry | None:
        return self.entries().get(key)

    def put(self, entry: Entry) -> None:
        """Add an entry: to the file where that can be done, and in any case for this process."""
        self._added[entry.key] = entry
        if self.in_memory:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.path, "a+b") as file:
                _append(file, entry.line())
        except OSError as error:
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
            self._problem(f"{self.path}: {why}: results are kept for this process only")

    def clear(self) -> int:
        """Drop the entries of our file; how many. Lines that are not entries of this version stay. Raises OSError."""
        if not self.path.exists():
            return 0
        with _locked(self.path, "r+b") as file:
            lines = file.read().decode(errors="surrogateescape").split("\n")
            kept = [line for line in lines if line.strip() and isinstance(_parsed(line), str)]
            # In place: were another file put here, a writer that waits for the lock would write to the old one.
            file.seek(0)
            file.truncate()
            file.write("".join(f"{line}\n" for line in kept).encode(errors="surrogateescape"))
        self._added.clear()
        return sum(1 for line in lines if line.strip()) - len(kept)

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write all entries to a new file; how many. FileExistsError rather than overwrite."""
        entries = self.entries().values()
        with open(path, "x", encoding="utf-8") as file:
            file.writelines(f"{e.line()}\n" for e in entries)
        return len(entries)

    def import_from(self, path: str | os.PathLike[str], here: Key) -> int:
        """Add the entries of a file; how many. ValueError where any is of another device or version, naming the fields.

        here: a Key with this machine's device and versions; its other fields don't matter.
        """
        entries = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                found = _parsed(line)
                if isinstance(found, str):
                    raise ValueError(f"{path}:{number}: {found}; nothing was imported")
                entries.append(found)
        differing = [d for e in entries for d in e.key.differences(here, ("device", "versions"))]
        if differing:
            raise ValueError(
                f"{path} is not of this machine, nothing was imported: {'; '.join(dict.fromkeys(differing))}"
            )
        for entry in entries:
            self.put(entry)
        if self.problems:
            raise OSError(self.problems[-1])
        return len(entries)

    def _refresh(self) -> None:
        try:
            files = sorted(self.folder.glob("*.jsonl"), key=lambda p: (p.name == FILE, p.name))  # ours last: it wins
            seen = {p.name: (s.st_size, s.st_mtime_ns) for p in files for s in [p.stat()]}
        except OSError as error:
            return self._problem(f"{self.folder}: {error.strerror or error}")
        if seen == self._seen:
            return None
        entries: list[Entry] = []
        for path in files:
            try:
                with _locked(path, "rb") as file:
                    lines = file.read().decode(errors="replace").splitlines()
            except OSError as error:
                self._problem(f"{path}: {error.strerror or error}: ignored")
                continue
            for number, line in enumerate(lines, 1):
                found = _parsed(line) if line.strip() else None
                if isinstance(found, Entry):
                    entries.append(found)
                elif found:
                    self._problem(f"{path}:{number}: {found}: ignored")
        self._read, self._seen = _merged(entries), seen
        return None

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def _parsed(line: str) -> Entry | str:
    try:
        return Entry.parse(line)
    except ValueError as error:
        return str(error)


def _merged(entries: Iterable[Entry]) -> dict[Key, Entry]:
    found: dict[Key, Entry] = {}
    for e in entries:
        old = found.get(e.key)
        if old is None or e.complete or not old.complete:
            found[e.key] = e
    return found


def _append(file: Any, line: str) -> None:
    """One line at the end. A line that a killed writer left unfinished is closed first; ours is whole or not there."""
    size = file.seek(0, os.SEEK_END)
    open_line = b""
    if size:
        file.seek(size - 1)
        open_line = b"" if file.read(1) == b"\n" else b"\n"
    data = open_line + line.encode() + b"\n"
    try:
        written = os.write(file.fileno(), data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), size)
        raise


@contextlib.contextmanager
def _locked(path: Path, mode: str) -> Iterator[Any]:
    """The file, unbuffered, while no other process writes it; shared with other readers where `mode` only reads."""
    with open(path, mode, buffering=0) as file:
        if fcntl:
            with contextlib.suppress(OSError):  # a file system without locks: appends are still whole
                fcntl.flock(file, fcntl.LOCK_SH if mode == "rb" else fcntl.LOCK_EX)
        yield file
