"""What a call costs: in, a Work, a Device, a Load and T; out, seconds and every quantity on the way there.

The model is a sheet of formulas for each kind of step, as text that sympy reads: symbols are the step's fields, the
device's, the load's (active, tiles) and fitted constants, and each row may use the rows above it. The same sheet is
evaluated (`estimate`), printed with numbers put in (`Breakdown`), fitted (calibrate.py) and solved for T (`crossover`).
Invariant: no torch, no tables of kernels: two tactics differ only by what their steps say.
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
from .work import Passed, Sorted, Step, Streamed, Tiled, Work

# Rows: name, formula. Units: bytes, FLOP, seconds. Constants are those of CONSTANTS.
SHEETS: dict[type[Any], dict[str, str]] = {
    Tiled: {
        "column_tiles": "ceiling(columns / N)",
        "programs": "tiles * column_tiles",
        "fill": "R / (tiles * M)",
        "flop": "2 * R * columns * matrices * depth",
        "weights": "active * columns * matrices * depth * weight_bytes",
        "rereads": "(tiles - active) * columns * matrices * depth * weight_bytes",
        "rows_read": "R * depth * x_bytes",
        "rows_written": "R * columns * out_bytes",
        "waves": "programs / processors",
        "memory": "(weights + rows_read + rows_written) / (tiled_share * bandwidth) + rereads / l2_bandwidth",
        "compute": "flop / fill / (tensor_share * flop_rate)",
        "launches": "1",
        "seconds": "launch + Max(memory, compute)",
    },
    Streamed: {
        "column_tiles": "ceiling(columns / N)",
        "programs": "Piecewise((R, Eq(slots, 0)), (T, True)) * column_tiles",
        "flop": "2 * R * columns * matrices * depth",
        "weights": "active * columns * matrices * depth * weight_bytes",
        "rereads": "(R - active) * columns * matrices * depth * weight_bytes",
        "rows_read": "R * depth * x_bytes",
        "rows_written": "Piecewise((R, Eq(slots, 0)), (T, True)) * columns * out_bytes",
        "memory": "(weights + rows_read + rows_written + l2_miss * rereads) / (streamed_share * grain * bandwidth)",
        "compute": "flop / f32_rate",
        "launches": "1",
        "seconds": "launch + Max(memory, compute)",
    },
    Sorted: {"launches": "Piecewise((1, R <= single), (3, True))", "seconds": "launches * launch"},
    Passed: {
        "launches": "kernels + expert_launches * active",
        "bytes": "token_bytes * T + route_bytes * R + expert_bytes * active",
        "seconds": "launches * launch + bytes / (tiled_share * bandwidth)",
    },
}


@dataclass(frozen=True)
class Load:
    """How tokens choose experts: ((experts, p), ...), each of `experts` experts chosen by a token with probability p.

    The probabilities sum to K. `uniform` is the bound of no skew; real routing reaches fewer experts.
    """

    classes: tuple[tuple[int, float], ...]

    @classmethod
    def uniform(cls, E: int, K: int) -> Load:
        return cls(((E, min(K, E) / E),))

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
    def E(self) -> int:
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
    if mean > 40:
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
    """A priced call: seconds in all, and for each step the rows of its sheet."""

    seconds: float
    steps: tuple[tuple[str, dict[str, float]], ...]

    def total(self, row: str) -> float:
        """The sum of a row over the steps that have it."""
        return sum(rows.get(row, 0.0) for _, rows in self.steps)


@lru_cache(None)
def constants(device: Device) -> dict[str, float]:
    """The fitted constants for a device: those of its name, of its architecture, else the nearest fitted device's."""
    data = json.loads((Path(__file__).parent / "calibration.json").read_text())["devices"]
    by_arch = {row["arch"]: name for name, row in data.items()}
    name = device.name if device.name in data else by_arch.get(device.arch, next(iter(data)))
    found: dict[str, float] = data[name]["constants"]
    return found


@lru_cache(None)
def _evaluator(kind: type[Any]) -> tuple[tuple[str, ...], tuple[str, ...], Callable[..., list[float]]]:
    """(inputs, rows, function of the inputs that returns the rows) of a kind of step."""
    rows: dict[str, Any] = {}
    for name, text in SHEETS[kind].items():
        symbols = {s: sympy.Symbol(s) for s in _names(text)}
        rows[name] = sympy.sympify(text, locals=symbols).subs({sympy.Symbol(n): e for n, e in rows.items()})
    inputs = sorted({str(s) for e in rows.values() for s in e.free_symbols})
    return tuple(inputs), tuple(rows), sympy.lambdify(inputs, list(rows.values()), modules="math", cse=True)


def _names(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text)) - {"ceiling", "Max", "Min", "Piecewise", "Eq", "True", "sqrt"}


def estimate(
    work: Work,
    device: Device,
    load: Load,
    T: int,
    *,
    mode: str = "graph",
    fitted: Mapping[str, float] | None = None,
) -> Breakdown:
    """The price of `work` for T tokens. mode: "graph", launches are replayed; "eager": the host makes them one by one,
    and where it is slower than the device it is the time. fitted: constants instead of the device's."""
    numbers = {
        **constants(device), **(fitted or {}), "T": T, "R": T * load.K, "active": load.active(T),
        "f32_rate": device.flop_rate("f32"),
        **{f: getattr(device, f) for f in ("processors", "clock", "bandwidth", "l2_bandwidth", "l2_bytes")},
    }  # fmt: skip
    steps = tuple((s.name, _rows(s, numbers, device, load, T)) for s in work.steps)
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


def _rows(step: Step, numbers: Mapping[str, float], device: Device, load: Load, T: int) -> dict[str, float]:
    kind: Any = type(step)
    inputs, names, function = _evaluator(kind)
    own: dict[str, Any] = {**numbers, **_fields(step)}
    if isinstance(step, Tiled):
        own |= {"tiles": load.tiles(T, step.M), "flop_rate": device.flop_rate(step.dtype)}
    own["grain"] = own["across"] if own.get("along") == "columns" else 1.0
    return dict(zip(names, function(*(own[i] for i in inputs))))


def _fields(step: Step) -> dict[str, Any]:
    return {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}
