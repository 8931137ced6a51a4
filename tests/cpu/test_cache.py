"""The tuning cache: what is put is found again, by anyone; what can't be read is said, ignored and left alone."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import FORKS

from moe_compile import cache as caching
from moe_compile.cache import Cache, Entry, Key

KEY = Key(
    spec="experts(E=8 K=2)", tokens="16", device="NVIDIA H200", launch="graph", workload="tokens=varied:1",
    versions=(("aten", "2.13"), ("triton_grouped", "3.9+abc")),
)  # fmt: skip


def entry(tokens: int | str = "16", chosen: str = "aten", **changes: object) -> Entry:
    return Entry(key=dataclasses.replace(KEY, tokens=str(tokens)), chosen=chosen, facts={"us": 1.5}, **changes)


def test_an_entry_is_found_by_another_cache_of_the_folder(tmp_path: Path) -> None:
    Cache(tmp_path).put(entry())
    found = Cache(tmp_path).get(KEY)
    assert found == entry() and found.facts == {"us": 1.5}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Key)])
def test_every_field_of_the_key_counts(name: str, tmp_path: Path) -> None:
    Cache(tmp_path).put(entry())
    other = (("aten", "2.14"),) if name == "versions" else "another"
    assert Cache(tmp_path).get(dataclasses.replace(KEY, **{name: other})) is None


def test_the_last_entry_wins_but_not_a_partial_one(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(entry(chosen="first", complete=False))
    assert cache.get(KEY).chosen == "first"
    cache.put(entry(chosen="second"))
    cache.put(entry(chosen="partial", complete=False))
    assert Cache(tmp_path).get(KEY).chosen == "second"
    cache.put(entry(chosen="third"))
    assert Cache(tmp_path).get(KEY).chosen == "third"


def test_entries_of_another_process_appear_without_a_new_cache(tmp_path: Path) -> None:
    mine, theirs = Cache(tmp_path), Cache(tmp_path)
    assert mine.get(KEY) is None
    theirs.put(entry())
    assert mine.get(KEY) == entry()


BAD_LINES = {
    "cut short": (entry("cut").line()[:-20], "cut short"),
    "binary": ("\x00\xff\x00", "not JSON"),
    "foreign": ('{"name": "another program"}', "not an entry of moe_compile"),
    "a list": ("[1, 2]", "not an entry of moe_compile"),
    "the future": ('{"moe_compile": 99, "key": 7}', "format 99, and this version reads 1"),
    "missing": ('{"moe_compile": 1, "key": {}}', "missing"),
    "wrong types": (entry().line().replace('"chosen":"aten"', '"chosen":3'), "another type"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_said_once_and_left(bad: str, tmp_path: Path) -> None:
    line, why = BAD_LINES[bad]
    file = tmp_path / caching.FILE
    before = f"{entry(1).line()}\n{line}\n{entry(2).line()}\n"
    file.write_text(before)
    cache = Cache(tmp_path)
    assert {k.tokens for k in cache.entries()} == {"1", "2"}
    cache.put(entry(3))
    assert {k.tokens for k in cache.entries()} == {"1", "2", "3"}
    assert len(cache.problems) == 1 and why in cache.problems[0] and f"{file}:2" in cache.problems[0]
    assert file.read_text().startswith(before)


def test_an_entry_after_a_line_without_an_end_has_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / caching.FILE
    file.write_text(f"{entry(1).line()}\n{entry(2).line()[:40]}")
    Cache(tmp_path).put(entry(3))
    assert {k.tokens for k in Cache(tmp_path).entries()} == {"1", "3"}


def test_a_folder_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    cache.put(entry())
    assert cache.get(KEY) == entry(), "this process keeps its own results"
    assert any("this process only" in p for p in cache.problems)


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder with an entry that this process may read and not write; root first becomes somebody else."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Cache(folder).put(entry(1))
        user = os.geteuid()
        folder.chmod(0o555)
        (folder / caching.FILE).chmod(0o444)
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)
            folder.chmod(0o755)


def test_a_read_only_folder(read_only: Path) -> None:
    cache = Cache(read_only)
    cache.put(entry(2))
    assert {k.tokens for k in cache.entries()} == {"1", "2"}
    assert {k.tokens for k in Cache(read_only).entries()} == {"1"}
    (problem,) = cache.problems
    assert "Permission denied" in problem and "this process only" in problem


def test_a_full_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.put(entry(1))
    before = cache.path.read_bytes()
    write = os.write

    def full(fd: int, data: bytes) -> int:
        write(fd, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    for refuses in (full, lambda fd, data: write(fd, data[:10])):  # some file systems just write less
        monkeypatch.setattr(os, "write", refuses)
        cache.put(entry(2))
        monkeypatch.undo()
        assert cache.path.read_bytes() == before
    assert cache.get(entry(2).key) == entry(2)
    assert len(cache.problems) == 1 and "the disk is full" in cache.problems[0]
    cache.put(entry(3))
    assert {k.tokens for k in Cache(tmp_path).entries()} == {"1", "3"}


def _writer(folder: str, number: int, count: int) -> None:
    cache = Cache(folder)
    for i in range(count):
        cache.put(entry(f"{number}.{i}", chosen="x" * 3000))
        cache.get(KEY)


def test_eight_processes_lose_nothing(tmp_path: Path) -> None:
    writers = [FORKS.Process(target=_writer, args=(str(tmp_path), n, 25)) for n in range(8)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(timeout=60)
    assert [w.exitcode for w in writers] == [0] * 8
    cache = Cache(tmp_path)
    assert {k.tokens for k in cache.entries()} == {f"{n}.{i}" for n in range(8) for i in range(25)}
    assert cache.problems == []


def test_killed_writers_lose_nothing_that_was_there(tmp_path: Path) -> None:
    """Writers are killed at any moment; every entry that a survivor wrote stays, and the file stays usable."""
    Cache(tmp_path).put(entry("before"))
    for n in range(6):
        writer = FORKS.Process(target=_writer, args=(str(tmp_path), n, 100_000))
        writer.start()
        deadline = time.monotonic() + 30
        while not any(k.tokens.startswith(f"{n}.") for k in Cache(tmp_path).entries()):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(timeout=30)
    cache = Cache(tmp_path)
    cache.put(entry("after"))
    found = Cache(tmp_path)
    assert {"before", "after"} <= {k.tokens for k in found.entries()}
    for n in range(6):  # each one's entries from the first on, none missing in between
        mine = sorted(int(k.tokens[2:]) for k in found.entries() if k.tokens.startswith(f"{n}."))
        assert mine == list(range(len(mine)))


def test_export_and_import(tmp_path: Path) -> None:
    mine, file = Cache(tmp_path / "a"), tmp_path / "export.jsonl"
    mine.put(entry(1))
    mine.put(entry(2, complete=False))
    assert mine.export(file) == 2
    with pytest.raises(FileExistsError):
        mine.export(file)
    theirs = Cache(tmp_path / "b")
    assert theirs.import_from(file, KEY) == 2
    assert Cache(tmp_path / "b").entries() == mine.entries()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"device": "NVIDIA A100"}, ["device: 'NVIDIA H200' there, 'NVIDIA A100' here"]),
        (
            {"versions": (("aten", "2.13"), ("triton_grouped", "4.0"))},
            ["versions.triton_grouped: '3.9+abc' there, '4.0'"],
        ),
        ({"device": "cpu", "versions": ()}, ["device", "versions.aten: '2.13' there, None here", "versions.triton_gr"]),
    ],
)
def test_an_import_of_another_machine_names_what_differs(change: dict, names: list[str], tmp_path: Path) -> None:
    file = tmp_path / "export"
    Cache(tmp_path / "a").put(entry(1))
    Cache(tmp_path / "a").export(file)
    target = Cache(tmp_path / "b")
    with pytest.raises(ValueError, match="nothing was imported") as caught:
        target.import_from(file, dataclasses.replace(KEY, **change))
    assert all(name in str(caught.value) for name in names)
    assert target.entries() == {}


def test_an_import_of_a_damaged_file_takes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "export"
    file.write_text(f"{entry(1).line()}\n{BAD_LINES['the future'][0]}\n")
    with pytest.raises(ValueError, match=r":2: format 99.*nothing was imported"):
        Cache(tmp_path / "b").import_from(file, KEY)


def test_clear_keeps_what_is_not_ours(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(entry(1))
    other = tmp_path / "shipped.jsonl"
    other.write_text(entry(2).line())
    future = json.dumps({"moe_compile": 99})
    with cache.path.open("a") as file:
        file.write(f"{future}\n")
    assert cache.clear() == 1
    assert cache.path.read_text() == f"{future}\n"
    assert {k.tokens for k in cache.entries()} == {"2"}
    assert Cache(tmp_path / "nothing").clear() == 0
