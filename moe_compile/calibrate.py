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
from .options import one_of
from .providers import Candidate, Work, providers
from .spec import ELEMENT_BYTES, ExpertsSpec
from .standing import loaded
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
    """The cells of measurement files. Keys of `us` that are no candidate with a price (peers) are skipped; ValueError
    where a file has no other, or a geometry without a spec."""
    cells: list[Cell] = []
    for path in paths:
        data, before = loaded(Path(path)), len(cells)
        for row in data["cells"]:
            text = data.get("specs", {}).get(row["geometry"])
            if not text:
                one_of(f"{path}: geometry", row["geometry"], tuple(GEOMETRIES))
            spec = ExpertsSpec.parse(text) if text else GEOMETRIES[row["geometry"]]
            found = []
            for text, us in row["us"].items():
                name = text.partition("(")[0]
                if name in providers() and providers()[name].priced:
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
        if len(cells) == before:
            raise ValueError(f"{path}: no times of tactics, as `moe-compile bench --tactics N --json` prints them")
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
    read_in = {Path(p).name: loaded(Path(p)) for p in paths}
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


CONSTANTS = {
    "launch": "seconds that one launch in a CUDA graph adds",
    "sort_launch": "the same for the sort, and that again where its programs wait for each other",
    "sort_cost": "seconds a route and expert of the sort in which every program counts all ids",
    "pass_share": "share of the bandwidth that a pass over rows reaches (above 1: L2 has the rows)",
    "tiled_share": "share of the datasheet's bandwidth that tiled linears reach",
    "tiled_grain": "the same, where weights are contiguous along columns instead of depth, over `tiled_share`",
    "run_cost": "bytes whose time memory loses beside each contiguous piece of a tile's weights",
    "small_loss": "more time for memory where the product isn't 64 rows tall",
    "l2_share": "share of 64 bytes a clock that a processor takes in from L2",
    "tensor_share": "share of the datasheet's FLOP/s that an infinitely wide product reaches",
    "narrow_cost": "columns whose time a product of 64 rows takes beside its own",
    "small_share": "share of the FLOP/s where the product isn't 64 rows tall",
    "load_latency": "seconds from a load to its data, with one stage in flight",
    "held_stages": "stages that hold data in use instead of loads in flight",
    "address_cost": "seconds a 16-byte load of a thread takes to address, without tensor descriptors",
    "prologue": "seconds a program takes before and after its loop",
    "store_cost": "seconds a program takes to store one element",
    "wave_loss": "share of the last wave's empty places that is lost",
    "streamed_share": "share of the bandwidth that streamed linears reach",
    "streamed_grain": "as `tiled_grain`",
    "l2_miss": "share of repeated reads of an expert that L2 doesn't have",
    "held_registers": "registers a thread needs for each element it holds",
    "fma_cost": "cycles of a lane for each element",
    "stream_latency": "seconds from a load to its data that other programs don't hide",
    "stream_prologue": "as `prologue`",
    "library_share": "share of the bandwidth that a library's linears reach (not fitted)",
    "library_tensor_share": "share of the FLOP/s, the same (not fitted)",
}


_HEAD = """\
# The cost model

Printed by `python -m moe_compile.calibrate > docs/cost_model.md`: formulas from moe_compile/cost.py, constants from
moe_compile/calibration.json.

A provider states what a tactic launches (`work.py`: sizes and tiles, free of T), `hardware.py` what a device can do, a
`Load` how tokens choose experts. A price is the sum over the steps of `seconds` in their sheets below; with eager
launches it is at least the host's time for them. Rows use rows above them. Times are seconds, sizes bytes.

* p_e: the probability that a token chooses expert e; K/E each unless the routing is known.
* `active` = sum over e of 1 - (1 - p_e)^T; `tiles` = sum over e of E[ceil(n_e / M)], n_e binomial in T and p_e.
  `multiplied`: the share of the tiles' M rows that is, where a tile rests in parts of `part` rows (work.py).
* Soft maxima, (a^n + b^n)^(1/n), join what overlaps: memory with the processors; within a pass over K columns the
  tensor units, the intake from L2, the latency that stages hide, and a program's own sequence.
* Crossovers are solved on these formulas: `moe-compile explain --thiek 1,2048,768,128,8 --arch H200 --crossovers`;
  `--formulas` instead prints them with their numbers put in.
"""


def markdown() -> str:
    """docs/cost_model.md."""
    parts = [_HEAD, "## Formulas\n"]
    for kind, rows in cost.SHEETS.items():
        meaning = (kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        parts += [f"`{kind.__name__}`: {meaning}\n", *(f"    {name} = {text}" for name, text in rows.items()), ""]
    for device, row in json.loads(CALIBRATION.read_text())["devices"].items():
        head = f"## Constants: {device}, {row['date']}, from {', '.join(row['from'])}\n"
        table = [f"| `{name}` | {value:.4g} | {CONSTANTS[name]} |" for name, value in row["constants"].items()]
        parts += [head, "| constant | value | meaning |", "| --- | --- | --- |", *table, ""]
        off, tried = row["residuals"], row["trial"]
        parts.append(
            f"Off by {off['median']:.1%} (median), {off['p90']:.1%} (90th percentile), {off['rms']:.1%} (RMS) over "
            f"{off['candidates']} candidates in {off['cells']} cells. {_said(tried)}\n"
        )
        if unseen := row.get("held_out"):
            off = unseen["residuals"]
            parts.append(
                f"In cells that the fit didn't see: off by {off['median']:.1%} (median), {off['p90']:.1%} (90th "
                f"percentile) over {off['candidates']} candidates. {_said(unseen)}\n"
            )
    parts += [_TAIL]
    return "\n".join(parts)


def _said(tried: Mapping[str, Any]) -> str:
    return (
        f"Choosing by price alone is within 10 % of the fastest measured in {tried['within_10_percent']:.1%} of "
        f"{tried['cells']} cells, {tried['median_regret']:.1%} slower in the median and {tried['worst_regret']:.1%} at "
        f"worst; the fastest is among the {SHORT_LIST} cheapest in {tried['short_list_hit']:.1%}."
    )


_TAIL = """\
## Fitting again

    moe-compile bench --tactics 32 --json > tactics.json
    moe-compile calibrate tactics.json --write

A device without constants of its own takes those of its architecture, else the first device's: shares and latencies
carry over roughly, and tuning measures what the price only ranks.
"""

if __name__ == "__main__":
    print(markdown(), end="")
