"""The cost model: counts that routing decides, formulas that print and evaluate alike, prices that follow physics."""

import dataclasses
import itertools
import json
import math
import random
import re
import statistics
from pathlib import Path

import pytest

from moe_compile import calibrate, cost
from moe_compile.activation import Activation
from moe_compile.cli import main
from moe_compile.cost import Load, estimate
from moe_compile.crossovers import _offered, crossovers, path
from moe_compile.hardware import DEVICES, named
from moe_compile.providers import Candidate
from moe_compile.providers.triton_grouped import FIRST, SECOND, _knobs
from moe_compile.providers.triton_work import decode_work, grouped_work
from moe_compile.spec import ExpertsSpec
from moe_compile.suite import GEOMETRIES
from moe_compile.work import Tiled, Work

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
H200 = named("H200")
WIDE = {"M": 128, "N1": 128, "K1": 64, "W1": 8, "S1": 4, "SWAP1": 0, "TMA1": 1,
        "N2": 256, "K2": 64, "W2": 8, "S2": 4, "SWAP2": 0, "TMA2": 1}  # fmt: skip
NARROW = {"M": 16, "N1": 32, "K1": 128, "W1": 4, "S1": 3, "SWAP1": 1, "TMA1": 0,
          "N2": 64, "K2": 128, "W2": 4, "S2": 4, "SWAP2": 1, "TMA2": 0}  # fmt: skip
FEW = {"N1": 1, "K1": 1024, "W1": 4, "N2": 4, "K2": 256, "W2": 4}


def spec_of(**changes) -> ExpertsSpec:
    return ExpertsSpec(**{"E": 128, "K": 8, "H": 2048, "I": 768, "act": Activation.parse("swiglu"), **changes})


@pytest.mark.parametrize(
    ("T", "p", "M"), [(40, 0.1, 16), (400, 0.05, 16), (3000, 0.06, 128), (64, 1.0, 48), (1, 0.2, 16)]
)
def test_tiles_and_active_experts_are_expectations(T, p, M):
    draw = random.Random(0)
    counts = [sum(draw.random() < p for _ in range(T)) for _ in range(2000)]
    load = Load(((1, p),))
    assert load.tiles(T, M) == pytest.approx(sum(math.ceil(n / M) for n in counts) / 2000, rel=0.03)
    assert load.active(T) == pytest.approx(sum(n > 0 for n in counts) / 2000, abs=0.03)


def test_a_load_of_counts_reaches_fewer_experts_than_a_uniform_one():
    uniform, skewed = Load.uniform(128, 8), Load.of_counts([1024 // (i + 1) for i in range(128)], 700)
    assert skewed.E == 128
    assert skewed.K == pytest.approx(sum(1024 // (i + 1) for i in range(128)) / 700, rel=0.2)
    assert skewed.active(16) < uniform.active(16)


@pytest.mark.parametrize(
    "work", [grouped_work(spec_of(), WIDE), decode_work(spec_of(), FEW)], ids=["grouped", "decode"]
)
def test_every_row_prints_its_formula_with_numbers_put_in(work):
    priced = estimate(work, H200, Load.uniform(128, 8), 64)
    lines = priced.lines()
    for step, rows in priced.steps:
        assert any(line.startswith(f"{step.name}: ") for line in lines)
        assert rows["seconds"] > 0
    assert priced.seconds == pytest.approx(priced.total("seconds"))
    flop = next(line for line in lines if line.startswith("  flop = "))
    name, formula, put, value = flop.strip().split(" = ")
    assert (name, formula) == ("flop", "2 * R * columns * matrices * depth")
    assert eval(put) == pytest.approx(float(value), rel=1e-3)


def test_flop_and_bytes_are_those_of_the_spec():
    spec = spec_of()
    for T in (1, 64, 4096):
        priced = estimate(grouped_work(spec, WIDE), H200, Load.uniform(128, 8), T)
        active = 128 * (1 - (1 - 8 / 128) ** T)
        assert priced.total("flop") == pytest.approx(2 * T * 8 * 3 * 2048 * 768)
        assert priced.total("weights") == pytest.approx(active * 3 * 2048 * 768 * 2)


def test_more_tokens_never_cost_less():
    load = Load.uniform(128, 8)
    for work in (grouped_work(spec_of(), NARROW), decode_work(spec_of(), FEW)):
        prices = [estimate(work, H200, load, T).seconds for T in (1, 2, 4, 8, 16, 64, 256, 1024, 4096)]
        assert all(b > a for a, b in itertools.pairwise(prices))


def test_no_price_beats_the_datasheet():
    load = Load.uniform(128, 8)
    for device in DEVICES:
        for T in (1, 16, 256, 4096):
            for work in (grouped_work(spec_of(), WIDE), grouped_work(spec_of(), NARROW), decode_work(spec_of(), FEW)):
                priced = estimate(work, device, load, T)
                limit = max(priced.total("weights") / device.bandwidth, priced.total("flop") / device.flop_rate("bf16"))
                assert priced.seconds > 0.97 * limit


def test_changes_are_where_the_cheaper_one_changes():
    load, works = (
        Load.uniform(128, 8),
        {"narrow": grouped_work(spec_of(), NARROW), "wide": grouped_work(spec_of(), WIDE)},
    )

    def price(name, T):
        return estimate(works[name], H200, load, T).seconds

    (T,) = cost.changes(lambda T: min(works, key=lambda name: price(name, T)), 64, 4096)
    assert price("narrow", T - 1) < price("wide", T - 1)
    assert price("narrow", T) > price("wide", T)
    assert cost.changes(lambda T: T // 100, 1, 1000) == list(range(100, 1001, 100))


def test_a_device_without_constants_takes_those_of_its_architecture():
    assert cost.calibrated(named("H100")) == "H200"
    assert cost.constants(named("H100")) == cost.constants(H200)
    assert cost.constants(named("A100"))


@pytest.mark.parametrize(
    "sizes", [(128, 4, 2880, 2880), (128, 8, 2048, 768), (256, 8, 7168, 2048), (8, 2, 4096, 14336)]
)
def test_with_mxfp4_bytes_the_narrow_token_tile_wins_under_about_64_rows_an_expert(sizes):
    """No threshold is in the formulas: it is where reading weights again costs less than multiplying padding."""
    E, K, H, I = sizes
    spec, b200, load = spec_of(E=E, K=K, H=H, I=I), named("B200"), Load.uniform(E, K)

    def cheapest(heights, rows):
        return min(
            estimate(_mxfp4(grouped_work(spec, _knobs(M, a, b))), b200, load, max(1, rows * E // K)).seconds
            for M in heights for a in FIRST[M] for b in SECOND[M]
        )  # fmt: skip

    def narrow_wins(rows):
        return cheapest((16, 32, 64), rows) < cheapest((128,), rows)

    assert narrow_wins(8)
    first, *_ = cost.changes(narrow_wins, 8, 512)
    assert 48 <= first <= 96
    assert cheapest((16, 32, 64), 8) < 0.6 * cheapest((128,), 8)


def _mxfp4(work):
    return Work(
        steps=tuple(dataclasses.replace(s, weight_bytes=17 / 32) if isinstance(s, Tiled) else s for s in work.steps)
    )


def test_the_fma_path_is_for_few_tokens_and_ends_where_experts_are_shared():
    """It reads an expert again for each of its routes: the more experts, the more tokens it serves."""
    ends = {}
    for E in (32, 128, 512):
        ends[E] = path(spec_of(E=E), H200)
    firsts = [found.changes[0].T for found in ends.values()]
    assert all(found.first.startswith("triton_decode") for found in ends.values())
    assert all(found.changes[0].candidate.startswith("triton_grouped") for found in ends.values())
    assert firsts == sorted(firsts)
    assert firsts[0] < firsts[-1] <= 32
    both = crossovers([spec_of(E=32), spec_of(E=512), spec_of(E=32)], "sm_90")
    assert [p.first for p in both.paths] == [ends[32].first, ends[512].first]
    assert "T = 1: triton_decode(" in str(both)
    assert both.as_dict()["paths"][0]["changes"][0]["T"] == firsts[0]


def test_a_path_goes_on_where_a_third_candidate_is_the_cheapest_for_a_while(monkeypatch):
    """Addresses that cost the tiles of 160 rows twice what they do: these and two others change hands often."""

    def works(spec, device, T):
        offered = _offered(spec, device, T)
        return {c: _addressed_by(w, 2) if "M=160" in str(c) and "GATHER=1" in str(c) else w for c, w in offered.items()}

    assert works(spec_of(E=16), H200, 256) != _offered(spec_of(E=16), H200, 256)
    monkeypatch.setattr("moe_compile.crossovers._offered", works)
    tokens = [change.T for change in path(spec_of(E=16), H200).changes]
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("geometry", ["mixtral", "qwen3_30b", "gpt_oss_20b"])
def test_a_path_names_only_what_is_offered(geometry):
    """Up to the next change. Of mixtral, tiles of 160 rows end at 2560 tokens, and those of Hopper begin at 192."""
    spec = GEOMETRIES[geometry]
    found = path(spec, H200)
    ends = [change.T for change in found.changes[1:]] + [8193]
    for change, end in zip(found.changes, ends, strict=True):
        for T in (change.T, end - 1):
            assert change.candidate in map(str, _offered(spec, H200, T)), (change.T, end)
        assert change.us <= change.before_us or not change.offered


def test_a_candidate_that_is_no_longer_offered_ends_there(monkeypatch):
    """Though it would be cheaper still; the text says why."""

    def until_3(spec, device, T):
        return {c: w for c, w in _offered(spec, device, T).items() if T < 4 or c.provider != "triton_decode"}

    monkeypatch.setattr("moe_compile.crossovers._offered", until_3)
    first, *_ = path(spec_of(), H200).changes
    assert (first.T, first.offered) == (4, False) and first.us > first.before_us
    assert re.search(r"was .* triton_decode\(.*\), not offered from here on\n", str(first))


def _addressed_by(work, warps):
    return Work(steps=tuple(dataclasses.replace(s, warps=warps) if s.name == "fc1" else s for s in work.steps))


def test_constants_are_found_again_from_prices_made_with_them():
    """Fitting from elsewhere returns to the constants that made the data, as far as choices can tell."""
    made = cost.constants(H200)
    spec, cells = spec_of(), []
    for T in (1, 8, 64, 512, 4096):
        works = [grouped_work(spec, WIDE), grouped_work(spec, NARROW), decode_work(spec, FEW)]
        load = Load.uniform(128, 8)
        cells.append(
            calibrate.Cell(
                geometry="made", spec=spec, T=T, load=load, works=tuple(works),
                candidates=(Candidate(provider="triton_grouped"),) * 3,
                seconds=tuple(estimate(w, H200, load, T).seconds for w in works),
            )
        )  # fmt: skip
    start = {**made, "tiled_share": 0.7, "launch": 6e-6}
    found = calibrate.fit(cells, H200, start)
    before, after = (calibrate.residuals(cells, calibrate.priced(cells, H200, c))["rms"] for c in (start, found))
    assert after < 0.1 * before
    assert found["tiled_share"] == pytest.approx(made["tiled_share"], rel=0.05)
    assert calibrate.trial(cells, calibrate.priced(cells, H200, found))["within_10_percent"] == 1


def test_the_packages_constants_choose_well_in_the_measurements_that_they_come_from():
    row = json.loads(calibrate.CALIBRATION.read_text())["devices"]["H200"]
    cells = calibrate.read([MEASURED / name for name in row["from"]], H200)
    again = calibrate.trial(cells, calibrate.priced(cells, H200, row["constants"]))
    assert again == row["trial"]
    assert again["within_10_percent"] >= 0.95
    assert again["median_regret"] < 0.03
    assert again["short_list_hit"] >= 0.97


def test_files_of_two_devices_are_not_fitted_together(tmp_path):
    for name in ("H200", "A100"):
        (tmp_path / name).write_text(json.dumps({"device": name, "date": "2026-11-30", "cells": []}))
    with pytest.raises(ValueError, match="A100, H200; one device"):
        calibrate.calibrate([tmp_path / "H200", tmp_path / "A100"])


def interleaved(work, load, T):
    """(price over that of fc1 and fc2 in turn, FC1 tiles for each cluster of two processors) of one launch for both.

    It takes both linears' programs as places come free, each claimed while the one before runs, keeps the activations
    in L2, and starts fc2 when a first round of fc1 is through; a place holds what the larger of both kinds needs.
    """
    first, second = (rows for step, rows in estimate(work, H200, load, T).steps if isinstance(step, Tiled))
    places = H200.processors * min(first["resident_most"], second["resident_most"])
    work_done = sum(rows["programs"] * rows["program"] for rows in (first, second)) / places
    kept = 2 * first["columns"] * first["R"] * first["out_bytes"] / (first["tiled_share"] * H200.bandwidth)
    memory = first["memory"] + second["memory"] - kept
    seconds = first["launch"] + (memory**3 + (work_done + first["program"]) ** 3) ** (1 / 3)
    return seconds / (first["seconds"] + second["seconds"]), first["programs"] / (H200.processors / 2)


@pytest.mark.parametrize(("H", "I"), [(2048, 768), (4096, 1536), (7168, 2048), (2048, 1408)])
def test_interleaving_the_phases_wants_several_fc1_tiles_a_cluster_and_many_rows_an_expert(H, I):
    """The first round of fc1, in which nothing else can run, weighs less the more rounds there are."""
    rows, few, many = 256, [], []
    for E in (4, 8, 16, 32, 64, 128):
        over, tiles = interleaved(grouped_work(spec_of(E=E, K=2, H=H, I=I), WIDE), Load.uniform(E, 2), rows * E // 2)
        if 1.5 < tiles < 7:
            few.append(over)
        elif tiles > 14:
            many.append(over)
    assert max(few) > 1.08
    assert max(many) < 1.05
    assert statistics.fmean(few) > statistics.fmean(many) + 0.03
    narrow = interleaved(grouped_work(spec_of(E=128, K=8, H=H, I=I), NARROW), Load.uniform(128, 8), 16 * 128 // 8)
    wide = interleaved(grouped_work(spec_of(E=128, K=8, H=H, I=I), WIDE), Load.uniform(128, 8), 128 * 128 // 8)
    assert narrow[0] > 1.03 > wide[0]  # 16 rows an expert, 128 rows


def test_the_document_is_printed_from_the_model():
    text = (MEASURED.parent / "cost_model.md").read_text()
    assert text == calibrate.markdown(), "python -m moe_compile.calibrate > docs/cost_model.md"
    fitted = set(cost.constants(H200))
    assert fitted == set(calibrate.CONSTANTS)
    assert all(re.search(rf"\b{name}\b", str(cost.SHEETS)) or name.endswith("_grain") for name in fitted)


def test_the_command_line_solves_crossovers_for_a_device_that_is_not_here(capsys):
    arguments = ["explain", "--thiek", "1,2048,768,128,8", "--arch", "sm_90", "--crossovers", "--json"]
    assert main(arguments) == 0
    (found,) = json.loads(capsys.readouterr().out)["paths"]
    assert found["first"].startswith("triton_decode(")
    tokens = [change["T"] for change in found["changes"]]
    assert tokens == sorted(tokens)
    assert all(c["us"] <= c["before_us"] or not c["offered"] for c in found["changes"])


def test_the_command_line_fits_and_tries_and_writes_only_when_told(capsys, tmp_path, monkeypatch):
    data = json.loads((MEASURED / "offers_h200.json").read_text())
    data["cells"] = [c for c in data["cells"] if c["geometry"] == "qwen3_30b" and c["T"] in (1, 64, 8192)]
    (tmp_path / "few.json").write_text(json.dumps(data))
    monkeypatch.setattr(calibrate, "CALIBRATION", tmp_path / "calibration.json")
    (tmp_path / "calibration.json").write_text(json.dumps({"devices": {"A100": {"arch": "sm_80"}}}))
    few = str(tmp_path / "few.json")
    assert main(["calibrate", few, "--held-out", few]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["device"], row["trial"]["cells"], row["from"]) == ("H200", 3, ["few.json"])
    assert {k: row["held_out"][k] for k in row["trial"]} == row["trial"]
    assert list(json.loads(calibrate.CALIBRATION.read_text())["devices"]) == ["A100"]
    assert main(["calibrate", few, "--write"]) == 0
    written = json.loads(calibrate.CALIBRATION.read_text())["devices"]
    assert written["H200"]["constants"] == row["constants"]
    assert written["A100"] == {"arch": "sm_80"}


def test_the_command_line_shows_how_a_price_is_computed(capsys):
    assert main(["explain", "--thiek", "64,2048,768,128,8", "--arch", "H200", "--formulas"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"triton_\w+\(.*\): \d+\.\d us for 64 tokens on H200 .*", first)
    assert any(
        line.startswith("  flop = 2 * R * columns * matrices * depth = 2 * 512 * 768 * 2 * 2048 =") for line in lines
    )
