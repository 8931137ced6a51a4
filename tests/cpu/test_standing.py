"""Goals of a benchmark's record, on cells made for the purpose: each is met and missed by what its words say."""

import json

import pytest

from moe_compile.standing import goals, others, read, table


def cell(geometry, T, moe, peer, batched=None, limit=100.0):
    us = {"moe": moe, "moe_decode": 1.0, "torch._grouped_mm": peer, "hf_grouped_mm": peer + 1}
    return {"geometry": geometry, "T": T, "limit_us": limit, "us": us | ({"hf_batched_mm": batched} if batched else {})}


CELLS = [
    cell("olmoe", 1, 110, 220, 300), cell("olmoe", 8, 150, 300), cell("dsv3", 4, 112, 224),
    cell("olmoe", 16, 120, 130, 600), cell("olmoe", 512, 150, 300), cell("olmoe", 8192, 200, 400),
]  # fmt: skip


def test_each_goal_counts_its_cells_and_names_the_worst():
    found = {g.what: g for g in goals(CELLS)}
    few = found["over the limit, T <= 8"]
    assert few.value == pytest.approx((1.1 * 1.5) ** 0.5) and few.cells == 2 and few.met
    assert few.where == "olmoe T=8 1.50"
    assert found["over the limit, T <= 8, mixtral and dsv3"].met
    assert not found["over the limit, T = 2048 ... 8192"].met
    every = found["fastest peer over it, every cell"]
    assert every.value == pytest.approx(130 / 120) and every.where.startswith("olmoe T=16") and every.met
    mean = found["fastest peer over it, geometric mean"]
    assert mean.value == pytest.approx((2**5 * 130 / 120) ** (1 / 6)) and mean.met
    assert found["hf_batched_mm over it, T = 1"].value == pytest.approx(300 / 110)
    assert found["hf_batched_mm over it, T = 16"].met


def test_a_peer_that_is_faster_in_one_cell_fails_the_goal_of_every_cell():
    slow = {g.what: g for g in goals([*CELLS, cell("olmoe", 32, 120, 110)])}
    assert not slow["fastest peer over it, every cell"].met
    assert slow["fastest peer over it, geometric mean"].met


def test_a_goal_without_cells_is_not_met():
    found = {g.what: g for g in goals(CELLS[:1])}
    assert found["over the limit, T = 512 ... 1024"].value is None
    assert not found["over the limit, T = 512 ... 1024"].met


def test_the_table_has_both_choices_and_leaves_machines_without_a_gpu_alone():
    tuned = [{**c, "us": {**c["us"], "moe_tuned": c["us"]["moe"]}} for c in CELLS]
    text = table(tuned)
    assert text.count("fastest peer over it, every cell") == 2 and "torch._grouped_mm in 6" in text
    assert "over the limit" not in table([cell("tiny", 1, 5, 6)])


def test_a_peer_timed_apart_counts_by_ours_of_its_own_run():
    apart = [cell("olmoe", 16, 240, 220)]  # 0.92 there, though slower than ours of the other run
    found = {g.what: g for g in goals(CELLS, apart=apart)}
    every = found["fastest peer over it, every cell"]
    assert every.value == pytest.approx(220 / 240) and every.cells == len(CELLS) and not every.met
    assert found["over the limit, T = 16 ... 256"].value == pytest.approx(1.2)


def test_errors_are_held_against_those_of_torch():
    off = {**CELLS[0], "error": {"moe": 2.3e-3, "torch._grouped_mm": 2e-3}}
    found = {g.what: g for g in goals([off, *CELLS[1:]])}["error over torch._grouped_mm's, every cell"]
    assert found.value == pytest.approx(1.15) and found.cells == 1 and not found.met


def trained(geometry, T, moe, theirs, kept):
    us = {"moe": moe, "HF grouped_mm, Inductor": theirs}
    memory = {"moe": [kept, 9.0], "HF grouped_mm, Inductor": [90.0, 99.0]}
    return {"geometry": geometry, "T": T, "us": us, "memory_MB": memory}


RECORDS = {
    "training": {
        "cells": [trained("qwen3_30b", 4096, 10.0, 19.0, 27.0), trained("mixtral", 4096, 10.0, 11.0, 45.0)],
        "sonicmoe_us": {"qwen3_30b": {"4096": 9.0}},
    },
    "route": {"times": [
        {"spec": "qwen3_30b", "E": 128, "K": 8, "T": 64, "us": {"route and sort": 7.0}},
        {"spec": "qwen3_30b", "E": 128, "K": 8, "T": 4096, "us": {"route and sort": 21.0}},
        {"spec": "mixtral", "E": 8, "K": 2, "T": 64, "us": {"route and sort": 99.0}},
    ]},
    "host": {"geometries": {"qwen3_30b": {"calls": [
        {"T": 1, "candidate": "triton_decode(N1=1)", "us": {"operator": 30.0}},
        {"T": 16, "candidate": "triton_grouped(M=16)", "us": {"operator": 41.0}},
    ]}}},
}  # fmt: skip


def test_the_records_beside_a_benchmark_have_goals_of_their_own(tmp_path):
    values = {g.what: (g.value, g.met) for g in others(RECORDS)}
    assert values == {
        "training, HuggingFace's time over it, qwen3_30b": (pytest.approx(1.9), True),
        "training, HuggingFace's time over it, mixtral": (pytest.approx(1.1), False),
        "training, memory kept over HuggingFace's": (pytest.approx(0.5), False),
        "training, SonicMoE's time over it": (pytest.approx(0.9), False),
        "routing and sorting, us, T <= 64": (7.0, True),
        "routing and sorting, us, T = 4096": (21.0, False),
        "host's time for a call, us": (41.0, False),
    }
    assert not any(g.met for g in others({})) and len(others({})) == len(values)
    for kind, record in (("", {"cells": CELLS}), *((f"{kind}_", r) for kind, r in RECORDS.items())):
        (tmp_path / f"{kind}h200.json").write_text(json.dumps(record))
    said = read(tmp_path / "h200.json")
    assert "beside it" in said and "worst qwen3_30b triton_grouped T=16 41.00" in said
    (tmp_path / "alone.json").write_text(json.dumps({"cells": CELLS}))
    assert "beside it" not in read(tmp_path / "alone.json")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "\xff", '{"cells": 1}', '{"cells": [1]}', '{"cells": [{}]}',
        json.dumps({"cells": [{"geometry": "olmoe", "T": 1, "us": {"moe": 5.0}}]}),
        json.dumps({"cells": [{**cell("olmoe", 1, 5, 6), "limit_us": 0}]}),
        json.dumps({"cells": [cell("olmoe", "1", 5, 6)]}),
        json.dumps({"cells": [cell("olmoe", 1, None, 6)]}),
    ],
)  # fmt: skip
def test_what_is_no_record_is_said_so(tmp_path, text):
    (tmp_path / "h200.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"h200.json is not what `moe-compile bench --json` prints"):
        read(tmp_path / "h200.json")


def test_a_record_without_our_columns_says_so(tmp_path):
    (tmp_path / "h200.json").write_text(json.dumps({"cells": [{**CELLS[0], "us": {"vllm": 5.0}}]}))
    (tmp_path / "training_h200.json").write_text("cut sho")
    assert "no cell that a goal counts" in read(tmp_path / "h200.json")
