"""Fitting the cost model: in, recorded measurements; out, constants with their residuals, and how well prices choose.

A measurement file (docs/measured) has `cells`: a geometry (of suite.py, or of the file's `specs`), T, limit_us, and the
us of each candidate by its text. Constants are positive, so their logarithms are fitted, by Levenberg-Marquardt on the
logarithms of predicted over measured time; candidates near the best of their cell count most, since a price is there to
choose among those. Each constant is held weakly to where it started, hence one that the data can't see stays there.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import cost
from .hardware import Device, named
from .providers import Candidate, Work, providers
from .spec import ELEMENT_BYTES, ExpertsSpec
from .suite import GEOMETRIES

SHORT_LIST = 6
NEAR = 0.2  # a candidate that takes 20 % more than the best of its cell counts half
HELD = 0.05  # residual of a constant that moved by a factor of e
CALIBRATION = Path(__file__).parent / "calibration.json"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A geometry's spec at T tokens: the candidates measured, their work, and seconds."""

    geometry: str
    spec: ExpertsSpec
    T: int
    load: cost.Load
    candidates: tuple[Candidate, ...]
    works: tuple[Work, ...]
    seconds: tuple[float, ...]


def read(paths: Iterable[str | Path], device: Device) -> list[Cell]:
    """The cells of measurement files. Keys of `us` that are no candidate of ours (peers) are skipped."""
    cells = []
    for path in paths:
        data = json.loads(Path(path).read_text())
        for row in data["cells"]:
            text = data.get("specs", {}).get(row["geometry"])
            spec = ExpertsSpec.parse(text) if text else GEOMETRIES[row["geometry"]]
            found = []
            for text, us in row["us"].items():
                if text.partition("(")[0] in providers():
                    candidate = Candidate.parse(text)
                    work = providers()[candidate.provider].work(candidate.tactic, spec, device)
                    found.append((candidate, work, 1e-6 * us))
            if found:
                candidates, works, seconds = zip(*found)
                cells.append(
                    Cell(
                        geometry=row["geometry"], spec=spec, T=row["T"], load=_load(row, spec, device),
                        candidates=candidates, works=works, seconds=seconds,
                    )
                )  # fmt: skip
    return cells


def _load(row: Mapping[str, Any], spec: ExpertsSpec, device: Device) -> cost.Load:
    """The load of a cell: uniform over as many experts as the measured tokens reached, which its limit tells where the
    limit is their weights' bytes. A handful of tokens reaches more or fewer of them than the mean."""
    limit = 1e-6 * row.get("limit_us", 0)
    per_expert = (spec.G + spec.I) * spec.H
    uniform, T = cost.Load.uniform(spec.E, spec.K), row["T"]
    if limit < 1.01 * 2 * T * spec.K * per_expert / device.flop_rate(spec.x):
        return uniform
    active = limit * device.bandwidth / (per_expert * ELEMENT_BYTES[spec.x])
    return cost.Load.reaching(active, T, spec.E, spec.K)


def priced(cells: Sequence[Cell], device: Device, constants: Mapping[str, float]) -> list[list[float]]:
    """Predicted seconds of each cell's candidates."""

    def price(cell: Cell, work: Work) -> float:
        return cost.estimate(work, device, cell.load, cell.T, fitted=constants).seconds

    return [[price(cell, work) for work in cell.works] for cell in cells]


def fit(cells: Sequence[Cell], device: Device, start: Mapping[str, float], steps: int = 40) -> dict[str, float]:
    """The constants for `device` by the cells, from `start`."""
    names = list(start)
    measured = torch.tensor([s for c in cells for s in c.seconds], dtype=torch.float64).log()
    near = torch.tensor([1 / (1 + (s / min(c.seconds) - 1) / NEAR) for c in cells for s in c.seconds]).double()
    origin = torch.tensor([math.log(start[n]) for n in names], dtype=torch.float64)

    def residuals(x: torch.Tensor) -> torch.Tensor:
        constants = dict(zip(names, x.exp().tolist()))
        predicted = torch.tensor([s for cell in priced(cells, device, constants) for s in cell], dtype=torch.float64)
        return torch.cat((near * (predicted.log() - measured), HELD * (x - origin)))

    x, damping = origin.clone(), 1e-2
    r = residuals(x)
    for _ in range(steps):
        h = 1e-4
        jacobian = torch.stack([(residuals(x + h * e) - r) / h for e in torch.eye(len(x), dtype=torch.float64)], 1)
        normal, slope, before = jacobian.T @ jacobian, jacobian.T @ r, float(r @ r)
        while damping < 1e8:
            step = torch.linalg.solve(normal + damping * torch.diag(normal.diagonal() + 1e-9), -slope).clamp(-0.5, 0.5)
            tried = residuals(x + step)
            if float(tried @ tried) < before:
                x, r, damping = x + step, tried, max(damping / 4, 1e-6)
                break
            damping *= 4
        if before - float(r @ r) < 1e-5 * before:
            break
    return {n: float(f"{v:.4g}") for n, v in zip(names, x.exp().tolist())}


def residuals(cells: Sequence[Cell], prices: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far predictions are off, relative: RMS, median and 90th percentile over all candidates."""
    off = sorted(abs(p / s - 1) for c, row in zip(cells, prices) for p, s in zip(row, c.seconds))
    rms = math.sqrt(statistics.fmean(x * x for x in off))
    found = {"rms": rms, "median": statistics.median(off), "p90": off[int(0.9 * len(off))]}
    return {k: round(v, 4) for k, v in found.items()} | {"candidates": len(off), "cells": len(cells)}


def trial(cells: Sequence[Cell], prices: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What choosing by price alone costs: shares of cells whose pick is within 10 % of the best measured, and whose
    fastest candidate is in the short list; the median regret, and the worst."""
    regret, hits = [], 0
    for c, row in zip(cells, prices):
        order = sorted(range(len(row)), key=row.__getitem__)
        best = min(range(len(row)), key=c.seconds.__getitem__)
        regret.append(c.seconds[order[0]] / c.seconds[best] - 1)
        hits += best in order[:SHORT_LIST]
    n = len(cells)
    return {
        "within_10_percent": round(sum(r <= 0.1 for r in regret) / n, 4),
        "median_regret": round(statistics.median(regret), 4),
        "worst_regret": round(max(regret), 4),
        "short_list_hit": round(hits / n, 4),
        "cells": n,
    }


def calibrate(paths: Sequence[str | Path], held_out: Sequence[str | Path] = ()) -> dict[str, Any]:
    """A device's row of calibration.json, fitted to the cells of `paths`. ValueError where they are of several devices.

    trial: how prices choose in these cells; held_out: in the cells of those files, which the fit doesn't see.
    """
    read_in = {Path(p).name: json.loads(Path(p).read_text()) for p in paths}
    names = {data["device"] for data in read_in.values()}
    if len(names) != 1:
        raise ValueError(f"calibrate: measurements of {', '.join(sorted(names))}; one device is fitted at a time")
    device = named(names.pop())
    cells = read(paths, device)
    constants = fit(cells, device, cost.constants(device))
    prices = priced(cells, device, constants)
    row = {
        "device": device.name, "arch": device.arch, "date": max(data["date"] for data in read_in.values()),
        "from": list(read_in), "constants": constants, "residuals": residuals(cells, prices),
        "trial": trial(cells, prices),
    }  # fmt: skip
    if held_out:
        unseen = read(held_out, device)
        prices = priced(unseen, device, constants)
        row["held_out"] = trial(unseen, prices) | {"residuals": residuals(unseen, prices)}
    return row


def write(row: Mapping[str, Any]) -> None:
    """Put a device's row into the package's calibration.json."""
    data = json.loads(CALIBRATION.read_text())
    data["devices"][row["device"]] = {k: v for k, v in row.items() if k != "device"}
    CALIBRATION.write_text(json.dumps(data, indent=1) + "\n")
