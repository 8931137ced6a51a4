"""Goals of a benchmark's record, on cells made for the purpose: each is met and missed by what its words say."""

import pytest

from moe_compile.standing import goals, table


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
