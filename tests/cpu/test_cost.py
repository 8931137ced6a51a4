"""The cost model: counts that routing decides, formulas that print and evaluate alike, prices that follow physics."""

import itertools
import math
import random

import pytest

from moe_compile import cost
from moe_compile.activation import Activation
from moe_compile.cost import Load, estimate
from moe_compile.hardware import DEVICES, named
from moe_compile.providers.triton_work import decode_work, grouped_work
from moe_compile.spec import ExpertsSpec

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


def test_crossings_are_where_the_cheaper_one_changes():
    load = Load.uniform(128, 8)

    def price(work):
        return lambda T: estimate(work, H200, load, T).seconds

    narrow, wide = price(grouped_work(spec_of(), NARROW)), price(grouped_work(spec_of(), WIDE))
    (T,) = cost.crossings(narrow, wide, 64, 4096)
    assert narrow(T - 1) <= wide(T - 1)
    assert narrow(T) > wide(T)
    assert cost.crossings(narrow, narrow, 1, 4096) == []


def test_a_device_without_constants_takes_those_of_its_architecture():
    assert cost.calibrated(named("H100")) == "H200"
    assert cost.constants(named("H100")) == cost.constants(H200)
    assert cost.constants(named("A100"))
