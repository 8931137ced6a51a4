"""A benchmark's record that goes on: cells timed anew take the place of earlier ones, with what their gaps say."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "record.py"
HEAD = {"date": "2026-12-01", "device": "NVIDIA H200", "versions": {"torch": "2.11.0"}}


@pytest.fixture
def module():
    spec = importlib.util.spec_from_file_location("record_of_benchmarks", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def record(module, tmp_path):
    return lambda earlier: module.Record(tmp_path, "h200.json", "made for a test", earlier)


def cell(geometry, T, us):
    return {"geometry": geometry, "T": T, "limit_us": 1.0, "us": us}


def part(folder, cells, absent):
    folder.mkdir()
    (folder / "log").write_text("timed\n")
    (folder / "cells.json").write_text(json.dumps({**HEAD, "absent": absent, "cells": cells}))
    return folder


EARLIER = {
    **HEAD,
    "absent": {"vllm": {"not installed": {"olmoe": [1, 4]}}},
    "cells": [cell("olmoe", 1, {"moe": 9.0}), cell("olmoe", 4, {"moe": 8.0})],
}


def test_cells_timed_anew_replace_earlier_ones_and_their_gaps(record, tmp_path):
    made = record(EARLIER)
    made.add(part(tmp_path / "olmoe_0", [cell("olmoe", 4, {"moe": 7.0, "vllm": 9.0})], {}))
    made.add(
        part(tmp_path / "qwen3_30b_0", [cell("qwen3_30b", 2, {"moe": 5.0})], {"vllm": {"slow": {"qwen3_30b": [2]}}})
    )
    found = json.loads((tmp_path / "h200.json").read_text())
    assert [(c["geometry"], c["T"], c["us"]["moe"]) for c in found["cells"]] == [
        ("qwen3_30b", 2, 5.0), ("olmoe", 1, 9.0), ("olmoe", 4, 7.0),
    ]  # fmt: skip
    assert found["absent"] == {"vllm": {"slow": {"qwen3_30b": [2]}, "not installed": {"olmoe": [1]}}}


def test_a_record_of_another_day_is_left_alone(record, tmp_path):
    made = record({**EARLIER, "date": "2026-11-30"})
    made.add(part(tmp_path / "olmoe_0", [cell("olmoe", 4, {"moe": 7.0})], {}))
    assert [c["T"] for c in json.loads((tmp_path / "h200.json").read_text())["cells"]] == [4]


def test_cells_go_on_with_a_record_of_the_same_day_and_keep_the_rest_of_it(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    first = module.Cells("training.json", "")
    first.begin(**HEAD)
    first.put(check=[{"rms": 1e-3}])
    first.add(cell("mixtral", 16, {"moe": 9.0, "hf": 9.5}))
    first.add(cell("qwen3_30b x 4 layers", 1, {"moe": 5.0}))
    file = tmp_path / "training.json"
    again = module.Cells("training.json", str(file))
    again.begin(**HEAD, what="words")
    assert again.has("mixtral", 16, ["moe"]) and again.has("mixtral", 16, ["moe", "hf"])
    assert not again.has("mixtral", 16, ["vllm"]) and not again.has("mixtral", 1, ["moe"])
    again.add(cell("mixtral", 16, {"moe": 8.0}))
    again.add(cell("mixtral", 4, {"moe": 7.0}), "stages")
    found = json.loads(file.read_text())
    assert [(c["geometry"], c["T"], c["us"]) for c in found["cells"]] == [
        ("qwen3_30b x 4 layers", 1, {"moe": 5.0}), ("mixtral", 16, {"moe": 8.0}),
    ]  # fmt: skip
    assert (found["check"], found["what"], len(found["stages"])) == ([{"rms": 1e-3}], "words", 1)
    assert capsys.readouterr().out == ""
    other = module.Cells("training.json", str(file))
    assert other.has("mixtral", 16, ["moe"])
    other.begin(**{**HEAD, "device": "NVIDIA B200"})
    assert not other.has("mixtral", 16, ["moe"]) and "left alone" in capsys.readouterr().out
