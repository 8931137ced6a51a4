"""What a call costs: in, a Work, a Device, a Load and T; out, seconds and every quantity on the way there.

The model is a sheet of formulas for each kind of step, as text that sympy reads. Symbols are the step's fields, the
device's, the load's (active, tiles), fitted constants, and the rows above. The same sheet is evaluated (`estimate`),
printed with numbers put in (`Breakdown.lines`), fitted (calibrate.py) and solved for T (`changes`).
Invariant: no torch and no table of kernels: two tactics differ in price only by what their steps say.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import sympy

from .hardware import Device
from .spec import ELEMENT_BYTES, ExpertsSpec
from .work import Library, Passed, Sorted, Step, Streamed, Tiled, Work

# Name: formula; bytes, FLOP, seconds. `iteration` is what one pass over the K columns of a tile takes when `resident`
# programs share a processor: the largest of the processor's tensor units, its intake from L2, the latency that `stages`
# hide, and the program's own sequence, joined by a soft maximum. Memory and processors overlap: a soft maximum again.
SHEETS: dict[type[Any], dict[str, str]] = {
    Tiled: {
        "launches": "1",
        "column_tiles": "ceiling(columns / N)",
        "programs": "tiles * column_tiles",
        "iterations": "ceiling(depth / K)",
        "fill": "R / (tiles * M)",
        "flop": "2 * R * columns * matrices * depth",
        "weights": "active * columns * matrices * depth * weight_bytes",
        "rows": "R * (depth * x_bytes + columns * out_bytes)",
        "tile_bytes": "K * (Min(M, R / tiles) * x_bytes + N * matrices * weight_bytes)",
        "shared": "stages * K * (M * x_bytes + N * matrices * weight_bytes)",
        "thread_registers": "M * N * matrices / (32 * warps) + 60",
        "most": "Min(shared_per_processor / shared, registers / (thread_registers * 32 * warps))",
        "resident_most": "Max(1, floor(Min(most, threads_per_processor / (32 * warps))))",
        "resident": "Max(1, Min(resident_most, programs / processors))",
        "waves": "programs / (processors * resident_most)",
        "width": "N * matrices / products",
        "tall": "swap * width + (1 - swap) * M",
        "narrow": "swap * multiplied * M + (1 - swap) * width",
        "units": "Piecewise(((1 + narrow_cost / narrow) / tensor_share, tall >= 64), (1 / small_share, True))",
        "multiply": "multiplied * 2 * M * N * matrices * K * processors / flop_rate * units",
        "intake": "tile_bytes * processors / (l2_share * l2_bandwidth)",
        "latency": "load_latency / Max(stages - held_stages, 0.3)",
        "address": "(1 - tma) * address_cost * K * (M + N * matrices) / (256 * warps)",
        "alone": "multiply + address",
        "iteration": "((resident * multiply)**4 + (resident * intake)**4 + latency**4 + alone**4)**(1/4)",
        "program": "iterations * iteration + (1 - ahead) * prologue + store_cost * M * N",
        "whole_waves": "Max(1, waves) + wave_loss * Piecewise((ceiling(waves) - waves, waves > 1), (0, True))",
        "processor": "program * whole_waves",
        "stall": "Piecewise((1, tall >= 64), (1 + small_loss, True))",
        "deep_run": "K * Piecewise((2, R / tiles <= paired), (1, True))",
        "run": "(deep * deep_run + (1 - deep) * N * matrices / products) * weight_bytes",
        "memory": "stall * (1 + run_cost / run) * (weights + rows) / (grain * tiled_share * bandwidth)",
        "seconds": "launch + (memory**3 + processor**3)**(1/3)",
    },
    Streamed: {
        "launches": "1",
        "column_tiles": "ceiling(columns / N)",
        "programs": "Piecewise((R, Eq(slots, 0)), (T, True)) * column_tiles",
        "iterations": "ceiling(depth / K)",
        "flop": "2 * R * columns * matrices * depth",
        "weights": "active * columns * matrices * depth * weight_bytes",
        "rereads": "(R - active) * columns * matrices * depth * weight_bytes",
        "rows": "R * depth * x_bytes + Piecewise((R, Eq(slots, 0)), (T, True)) * columns * out_bytes",
        "held": "N * matrices * Max(slots, 1) * K * Piecewise((2, Eq(iterations, 2)), (1, True)) / (32 * warps)",
        "thread_registers": "Min(held_registers * held + 32, 255)",
        "most": "Min(registers / (thread_registers * 32 * warps), threads_per_processor / (32 * warps), 32)",
        "resident_most": "Max(1, floor(most))",
        "resident": "Max(1, Min(resident_most, programs / processors))",
        "waves": "Max(1, programs / (processors * resident_most))",
        "multiply": "fma_cost * N * matrices * Max(slots, 1) * K / (128 * clock)",
        "iteration": "stream_latency + resident * multiply",
        "processor": "(iterations * iteration + stream_prologue) * waves",
        "memory": "(weights + rows + l2_miss * rereads) / (grain * streamed_share * bandwidth)",
        "seconds": "launch + (memory**4 + processor**4)**(1/4)",
    },
    Library: {
        "launches": "1",
        "flop": "2 * R * columns * matrices * depth",
        "weights": "active * columns * matrices * depth * weight_bytes",
        "rows": "R * (depth * x_bytes + columns * out_bytes)",
        "memory": "(weights + rows) / (library_share * bandwidth)",
        "compute": "tiles * 128 / R * flop / (library_tensor_share * flop_rate)",
        "seconds": "launch + (memory**3 + compute**3)**(1/3)",
    },
    Sorted: {
        "launches": "1",
        "rounds": "Piecewise((1, R <= alone), (2, True))",
        "counted": "Piecewise((R, R <= alone), (0, True))",
        "seconds": "rounds * sort_launch + counted * E * sort_cost",
    },
    Passed: {
        "launches": "kernels + expert_launches * active",
        "bytes": "token_bytes * T + route_bytes * R + expert_bytes * active + call_bytes",
        "seconds": "launches * launch + bytes / (pass_share * bandwidth)",
    },
}
LIBRARY_M = 128  # rows that a library of unknown tiles is taken to pad to
FUNCTIONS = {"ceiling", "floor", "Max", "Min", "Piecewise", "Eq", "True"}


@dataclass(frozen=True)
class Load:
    """How tokens choose experts: ((experts, p), ...), each of `experts` experts chosen by a token with probability p.

    The probabilities sum to K. `uniform` is the bound of no skew; real routing reaches fewer experts.
    """

    classes: tuple[tuple[float, float], ...]

    @classmethod
    def uniform(cls, E: int, K: int) -> Load:
        return cls(((E, min(K, E) / E),))

    @classmethod
    def reaching(cls, active: float, T: int, E: int, K: int) -> Load:
        """Uniform over so many experts (at most twice E, not a whole number) that T tokens reach `active` of them."""
        low, high = float(K), 2.0 * E
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if middle * (1 - (1 - K / middle) ** T) > active else (middle, high)
        return cls(((low, K / low),))

    @classmethod
    def of_counts(cls, counts: list[int], tokens: int, classes: int = 16) -> Load:
        """The load of measured routes: how many of `tokens` tokens chose each expert, in at most `classes` classes."""
        shares = sorted((min(1.0, n / tokens) for n in counts), reverse=True)
        size = math.ceil(len(shares) / classes)
        parts = [shares[i : i + size] for i in range(0, len(shares), size)]
        return cls(tuple((len(p), sum(p) / len(p)) for p in parts))

    @property
    def K(self) -> float:
        """Routes a token."""
        return sum(n * p for n, p in self.classes)

    @property
    def E(self) -> float:
        return sum(n for n, _ in self.classes)

    def active(self, T: float) -> float:
        """Experts that T tokens reach: sum_e 1 - (1 - p_e)^T."""
        return sum(n * (1 - (1 - p) ** T) for n, p in self.classes)

    def tiles(self, T: float, M: int) -> float:
        """Tiles of M rows that their routes fill: sum_e E[ceil(n_e / M)], n_e binomial."""
        return sum(n * _tiles(T, p, M) for n, p in self.classes)


@lru_cache(1 << 16)
def _tiles(T: float, p: float, M: int) -> float:
    """E[ceil(n / M)] for n ~ Binomial(T, p): exact up to a mean of 40, by the normal distribution beyond."""
    mean, spread = T * p, math.sqrt(max(T * p * (1 - p), 1e-9))
    if mean > 40:  # the sum over j of P(n > j M)
        full = max(0, math.floor((mean - 7 * spread) / M))
        beyond = range(full, math.ceil((mean + 7 * spread) / M) + 1)
        return full + sum(0.5 * math.erfc((j * M + 0.5 - mean) / (spread * math.sqrt(2))) for j in beyond)
    if p >= 1:
        return math.ceil(T / M)
    total, mass = 0.0, (1 - p) ** T
    for n in range(1, min(math.ceil(T), math.ceil(mean + 10 * spread) + 10) + 1):
        mass *= max(T - n + 1, 0) / n * p / (1 - p)
        total += mass * math.ceil(n / M)
    return total


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """A priced call: seconds in all, and for each step its kind and the rows of its sheet with their inputs."""

    seconds: float
    steps: tuple[tuple[Step, dict[str, float]], ...]

    def total(self, row: str) -> float:
        """The sum of a row over the steps that have it."""
        return sum(rows.get(row, 0.0) for _, rows in self.steps)

    def lines(self) -> list[str]:
        """The sheet of each step with numbers put in: "programs = tiles * column_tiles = 96.3 * 24 = 2311"."""
        out = []
        for step, numbers in self.steps:
            out.append(f"{step.name}: {step}")
            for row, text in SHEETS[type(step)].items():
                put = _NAME.sub(lambda m: m[0] if m[0] in FUNCTIONS else _number(numbers[m[0]]), text)  # noqa: B023
                out.append(f"  {row} = {text} = {put} = {_number(numbers[row])}")
        return out


_NAME = re.compile(r"\b[A-Za-z_]\w*")


def _number(x: float) -> str:
    return f"{x:.4g}" if isinstance(x, int | float) else str(x)


@lru_cache(None)
def _calibrations() -> dict[str, Any]:
    devices: dict[str, Any] = json.loads((Path(__file__).parent / "calibration.json").read_text())["devices"]
    return devices


@lru_cache(None)
def calibrated(device: Device) -> str:
    """Whose constants price `device`: its own, else those of its architecture, else the first fitted device's."""
    fitted = _calibrations()
    same = [name for name, row in fitted.items() if row["arch"] == device.arch]
    return device.name if device.name in fitted else (same or list(fitted))[0]


def constants(device: Device) -> dict[str, float]:
    """The fitted constants for a device."""
    found: dict[str, float] = _calibrations()[calibrated(device)]["constants"]
    return found


@lru_cache(None)
def _function(kind: type[Any]) -> tuple[tuple[str, ...], Callable[..., list[float]]]:
    """(inputs, the function of them that returns the rows) of a kind of step."""
    rows: list[tuple[Any, Any]] = []
    for name, text in SHEETS[kind].items():
        symbols = {s: sympy.Symbol(s) for s in set(_NAME.findall(text)) - FUNCTIONS}
        rows.append((sympy.Symbol(name), sympy.sympify(text, locals=symbols)))
    named = [name for name, _ in rows]

    def assignments(_: Any) -> tuple[Any, Any]:
        """The rows are their own common subexpressions: each is an assignment that later ones use."""
        return rows, named

    inputs = sorted({str(s) for _, e in rows for s in e.free_symbols if s not in named})
    return tuple(inputs), sympy.lambdify(inputs, named, modules="math", cse=assignments)


def estimate(
    work: Work,
    device: Device,
    load: Load,
    T: float,
    *,
    mode: str = "graph",
    fitted: Mapping[str, float] | None = None,
) -> Breakdown:
    """The price of `work` for T tokens. mode: "graph", launches are replayed; "eager": the host makes them one by one,
    and where it is slower than the device it is the time. fitted: constants instead of the device's."""
    numbers: dict[str, Any] = {
        **(constants(device) if fitted is None else fitted), **_fields(device),
        "T": T, "R": T * load.K, "E": load.E, "active": load.active(T),
    }  # fmt: skip
    steps = tuple((s, _rows(s, numbers, device, load, T)) for s in work.steps)
    seconds = sum(rows["seconds"] for _, rows in steps)
    if mode == "eager":
        seconds = max(seconds, device.launch_seconds * sum(rows["launches"] for _, rows in steps))
    return Breakdown(seconds=seconds, steps=steps)


def limit(spec: ExpertsSpec, device: Device, load: Load, T: int) -> tuple[float, str]:
    """(seconds that no kernel can be below, what sets them: "memory" or "compute"), by the device's datasheet.

    memory: each weight of the experts that T tokens reach is read once. compute: two FLOP a weight and route.
    """
    weights = (spec.G + spec.I) * spec.H
    memory = load.active(T) * weights * ELEMENT_BYTES[spec.x] / device.bandwidth
    compute = 2 * T * load.K * weights / device.flop_rate(spec.x)
    return max((memory, "memory"), (compute, "compute"))


def _rows(step: Step, numbers: Mapping[str, Any], device: Device, load: Load, T: float) -> dict[str, float]:
    kind: Any = type(step)
    inputs, function = _function(kind)
    own = {**numbers, **_fields(step)}
    if isinstance(step, Tiled | Library):
        M = step.M if isinstance(step, Tiled) else LIBRARY_M
        own |= {"tiles": load.tiles(T, M), "flop_rate": device.flop_rate(step.dtype)}
        if isinstance(step, Tiled):
            part = step.part or M  # `multiplied`: the share of the tiles' rows that are
            own["multiplied"] = load.tiles(T, part) * part / (own["tiles"] * M)
    if isinstance(step, Tiled | Streamed):
        against = f"{kind.__name__.lower()}_grain"
        own["deep"] = int(step.along == "depth")
        own["grain"] = 1.0 if own["deep"] else own[against]
    rows = function(*(own[i] for i in inputs))
    return {**{i: own[i] for i in inputs}, **dict(zip(SHEETS[kind], rows))}


@lru_cache(1 << 12)
def _fields(of: Any) -> dict[str, Any]:
    values = ((f.name, getattr(of, f.name)) for f in dataclasses.fields(of))
    return {name: int(v) if isinstance(v, bool) else v for name, v in values}


def changes(choice: Callable[[int], Any], low: int, high: int) -> list[int]:
    """Each T in (low, high] whose choice differs from that of T - 1: looked for in steps of a fifth, then halved."""
    found, T = [], low
    while T < high:
        until = min(high, max(T + 1, T + T // 5))
        while choice(T) != choice(until):
            below, above = T, until
            while above - below > 1:
                middle = (below + above) // 2
                below, above = (middle, above) if choice(middle) == choice(T) else (below, middle)
            found.append(above)
            T = above
        T = until
    return found
