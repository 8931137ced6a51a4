"""How a benchmark's record stands: in, its cells and the records beside it; out, whether each goal is met.

A goal is a bound, on an H200: on the time over the hardware's limit, on the time of the fastest peer, or of the fastest
of ours, over it, on the error over that of torch's own products; and, from the records of other kinds, on training,
routing and the host's time. Peers are all columns but those that start with `moe`; a peer that was timed apart counts
by its time over ours of that record, never over another's. A goal without a cell is not met.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
WIDE = ("mixtral", "dsv3")  # experts so large that the limit is near for few tokens too
_GROUPS: tuple[tuple[str, Callable[[Row], bool], float], ...] = (
    ("T <= 8", lambda c: c["T"] <= 8 and c["geometry"] not in WIDE, 1.30),
    (f"T <= 8, {' and '.join(WIDE)}", lambda c: c["T"] <= 8 and c["geometry"] in WIDE, 1.15),
    ("T = 16 ... 256", lambda c: 16 <= c["T"] <= 256, 1.25),
    ("T = 512 ... 1024", lambda c: 512 <= c["T"] <= 1024, 1.6),
    ("T = 2048 ... 8192", lambda c: 2048 <= c["T"], 1.7),
)
LEAST, MEAN = 0.97, 1.2  # of the fastest peer's time over ours: in every cell, and in the geometric mean
BATCHED = {1: 2.5, 16: 4.0}  # of hf_batched_mm's time over ours, in every cell of so many tokens
ERROR = 1.1  # of ours over that of torch._grouped_mm, in every cell
TRAINING = {"qwen3_30b": 1.8, "mixtral": 1.15}  # of HuggingFace's time over ours, forward and backward
KEPT = 1 / 3  # of the memory that HuggingFace's keeps between them
ROUTING = ((1, 64, 8.0), (4096, 4096, 20.0))  # from so many tokens to so many, us of routing and sorting, E128 K8
HOST = 40.0  # us of the host for a call
HF = "HF grouped_mm, Inductor"  # a column of the record of training


@dataclass(frozen=True, kw_only=True)
class Goal:
    """value: None where no cell has both numbers. cells: so many counted. where: the cell that is worst."""

    what: str
    value: float | None
    bound: float
    least: bool  # whether the bound is the least that value may be, and not the most
    cells: int
    where: str

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.least else self.value <= self.bound

    def __str__(self) -> str:
        sign, value = ">=" if self.least else "<=", "-" if self.value is None else f"{self.value:.3f}"
        met = "met" if self.met else "not met"
        worst = f"  worst {self.where}" if self.where else ""
        return f"{self.what:54}{value:>8} {sign} {self.bound:<6.3g}{met:8}{self.cells:3} cells{worst}"


def goals(cells: Iterable[Row], column: str = "moe", apart: Iterable[Row] = ()) -> list[Goal]:
    """Every goal of a benchmark, of the contender `column`. apart: cells of further runs, with other peers."""
    rows = [c for c in cells if column in c["us"]]
    found = [_mean(f"over the limit, {name}", [c for c in rows if of(c)], _over_limit(column), bound, least=False)
             for name, of, bound in _GROUPS]  # fmt: skip
    beside = _hardest([*rows, *apart], column)
    found.append(_worst("fastest peer over it, every cell", beside, _peer_over(column), LEAST))
    found.append(_mean("fastest peer over it, geometric mean", beside, _peer_over(column), MEAN, least=True))
    found.append(_worst("fastest of ours over it, every cell", rows, _ours_over(column), LEAST))
    for T, bound in BATCHED.items():
        some = [c for c in rows if c["T"] == T and "hf_batched_mm" in c["us"]]
        found.append(
            _worst(f"hf_batched_mm over it, T = {T}", some, lambda c: c["us"]["hf_batched_mm"] / c["us"][column], bound)
        )
    exact = [c for c in rows if {column, "torch._grouped_mm"} <= c.get("error", {}).keys()]
    found.append(_most("error over torch._grouped_mm's, every cell", exact, _error_over(column), ERROR))
    return found


def others(records: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """The goals of other kinds, by the kind of their records: training, route, host."""
    record = records.get("training", {})
    trained = [c for c in record.get("cells", ()) if {"moe", HF} <= c["us"].keys()]
    found = []
    for geometry, bound in TRAINING.items():
        some = [c for c in trained if c["geometry"] == geometry]
        found.append(_worst(f"training, HuggingFace's time over it, {geometry}", some, _trained_over(HF), bound))
    found.append(_most("training, memory kept over HuggingFace's", trained, _kept_over, KEPT))
    sonic = record.get("sonicmoe_us", {})
    beside = [
        {**c, "us": {**c["us"], "sonicmoe": sonic[c["geometry"]][str(c["T"])]}}
        for c in trained if str(c["T"]) in sonic.get(c["geometry"], ())
    ]  # fmt: skip
    found.append(_worst("training, SonicMoE's time over it", beside, _trained_over("sonicmoe"), 1.0))
    routed = [
        {"geometry": c["spec"], **c} for c in records.get("route", {}).get("times", ()) if (c["E"], c["K"]) == (128, 8)
    ]
    for least, most, bound in ROUTING:
        some = [c for c in routed if least <= c["T"] <= most]
        span = f"T <= {most}" if least < most else f"T = {most}"
        found.append(_most(f"routing and sorting, us, {span}", some, lambda c: float(c["us"]["route and sort"]), bound))
    host = [
        {"geometry": f"{geometry} {call['candidate'].partition('(')[0]}", **call}
        for geometry, timed in records.get("host", {}).get("geometries", {}).items()
        for call in timed["calls"] if "operator" in call["us"]
    ]  # fmt: skip
    found.append(_most("host's time for a call, us", host, lambda c: float(c["us"]["operator"]), HOST))
    return found


def loaded(path: Path) -> dict[str, Any]:
    """The record of a benchmark on disk; ValueError where the file is none."""
    record = _parsed(path)
    cells = record.get("cells")
    if not isinstance(cells, list) or not all(map(_is_cell, cells)):
        raise ValueError(f"{path} is not what `moe-compile bench --json` prints")
    return record


def _parsed(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty where it has none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # UnicodeDecodeError and JSONDecodeError too
        return {}
    return record if isinstance(record, dict) else {}


def _is_cell(cell: Any) -> bool:
    if not isinstance(cell, dict) or not isinstance(cell.get("us"), dict):
        return False
    numbers = [cell.get("T"), cell.get("limit_us"), *cell["us"].values()]
    return isinstance(cell.get("geometry"), str) and all(isinstance(n, int | float) and n > 0 for n in numbers)


def read(path: Path) -> str:
    """How a record on disk stands, with those beside it: h200.json with sonic_h200.json, training_h200.json and so."""
    beside = {kind: path.with_name(f"{kind}_{path.name}") for kind in ("sonic", "training", "route", "host")}
    found = {k: loaded(p) if k == "sonic" else _parsed(p) for k, p in beside.items() if p.exists()}
    cells = loaded(path)["cells"]
    counted = table(cells, found.get("sonic", {}).get("cells", ()))
    text = [counted or f"{path}: no cell that a goal counts (a column moe or moe_tuned, of a geometry but tiny)"]
    if found.keys() - {"sonic"}:
        text += ["beside it", *(f"  {goal}" for goal in others(found))]
    return "\n".join(text)


def table(cells: Sequence[Row], apart: Sequence[Row] = ()) -> str:
    """The goals of what the plan picks and of what tuning picks, and the peers that were the fastest, as text."""
    lines = []
    models = [c for c in cells if c["geometry"] != "tiny"]
    for column, what in (("moe", "the plan's pick"), ("moe_tuned", "the fastest of the short list")):
        if any(column in c["us"] for c in models):
            lines += [f"{column}: {what}", *(f"  {goal}" for goal in goals(models, column, apart))]
    fastest: dict[str, int] = {}
    for cell in _hardest([*cells, *apart], "moe"):
        peers = _peers(cell)
        name = min(peers, key=peers.__getitem__)
        fastest[name] = fastest.get(name, 0) + 1
    if fastest:
        told = ", ".join(f"{n} in {k}" for n, k in sorted(fastest.items(), key=lambda pair: -pair[1]))
        lines.append(f"fastest peer: {told} cells")
    return "\n".join(lines)


def _peers(cell: Row) -> dict[str, float]:
    return {name: us for name, us in cell["us"].items() if not name.startswith("moe")}


def _hardest(runs: Iterable[Row], column: str) -> list[Row]:
    """Of the runs of a cell, the one where the fastest peer is furthest ahead."""
    found: dict[tuple[str, int], Row] = {}
    for c in runs:
        if column in c["us"] and _peers(c):
            at = c["geometry"], c["T"]
            found[at] = min(found.get(at, c), c, key=_peer_over(column))
    return list(found.values())


def _over_limit(column: str) -> Callable[[Row], float]:
    return lambda c: float(c["us"][column] / c["limit_us"])


def _peer_over(column: str) -> Callable[[Row], float]:
    return lambda c: min(_peers(c).values()) / float(c["us"][column])


def _error_over(column: str) -> Callable[[Row], float]:
    return lambda c: float(c["error"][column] / c["error"]["torch._grouped_mm"])


def _trained_over(peer: str) -> Callable[[Row], float]:
    return lambda c: float(c["us"][peer] / c["us"]["moe"])


def _kept_over(cell: Row) -> float:
    return float(cell["memory_MB"]["moe"][0] / cell["memory_MB"][HF][0])


def _ours_over(column: str) -> Callable[[Row], float]:
    return lambda c: min(us for name, us in c["us"].items() if name.startswith("moe")) / float(c["us"][column])


def _mean(what: str, cells: Sequence[Row], of: Callable[[Row], float], bound: float, *, least: bool) -> Goal:
    values = [of(c) for c in cells]
    mean = math.exp(sum(map(math.log, values)) / len(values)) if values else None
    return Goal(what=what, value=mean, bound=bound, least=least, cells=len(cells), where=_where(cells, of, least))


def _worst(what: str, cells: Sequence[Row], of: Callable[[Row], float], bound: float) -> Goal:
    value = min(map(of, cells), default=None)
    return Goal(what=what, value=value, bound=bound, least=True, cells=len(cells), where=_where(cells, of, True))


def _most(what: str, cells: Sequence[Row], of: Callable[[Row], float], bound: float) -> Goal:
    value = max(map(of, cells), default=None)
    return Goal(what=what, value=value, bound=bound, least=False, cells=len(cells), where=_where(cells, of, False))


def _where(cells: Sequence[Row], of: Callable[[Row], float], least: bool) -> str:
    if not cells:
        return ""
    cell = (min if least else max)(cells, key=of)
    return f"{cell['geometry']} T={cell['T']} {of(cell):.2f}"
