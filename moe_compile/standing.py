"""How a benchmark's record stands: in, its cells; out, geometric means by token counts and whether each goal is met.

A goal is a bound, on an H200, on the time over the hardware's limit, or on the time of the fastest peer, or of the
fastest of ours, over it. Peers are all columns but those that start with `moe`. A goal without a cell is not met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        return f"{self.what:54}{value:>8} {sign} {self.bound:<5g}{met:8}{self.cells:3} cells{worst}"


def goals(cells: Iterable[Row], column: str = "moe") -> list[Goal]:
    """Every goal, of the contender `column`."""
    rows = [c for c in cells if column in c["us"]]
    found = [_mean(f"over the limit, {name}", [c for c in rows if of(c)], _over_limit(column), bound, least=False)
             for name, of, bound in _GROUPS]  # fmt: skip
    beside = [c for c in rows if _peers(c)]
    found.append(_worst("fastest peer over it, every cell", beside, _peer_over(column), LEAST))
    found.append(_mean("fastest peer over it, geometric mean", beside, _peer_over(column), MEAN, least=True))
    found.append(_worst("fastest of ours over it, every cell", rows, _ours_over(column), LEAST))
    for T, bound in BATCHED.items():
        some = [c for c in rows if c["T"] == T and "hf_batched_mm" in c["us"]]
        found.append(
            _worst(f"hf_batched_mm over it, T = {T}", some, lambda c: c["us"]["hf_batched_mm"] / c["us"][column], bound)
        )
    return found


def table(cells: Sequence[Row]) -> str:
    """The goals of what the plan picks and of what tuning picks, and the peers that were the fastest, as text."""
    lines = []
    models = [c for c in cells if c["geometry"] != "tiny"]
    for column, what in (("moe", "the plan's pick"), ("moe_tuned", "the fastest of the short list")):
        if any(column in c["us"] for c in models):
            lines += [f"{column}: {what}", *(f"  {goal}" for goal in goals(models, column))]
    fastest: dict[str, int] = {}
    for cell in cells:
        if peers := _peers(cell):
            name = min(peers, key=peers.__getitem__)
            fastest[name] = fastest.get(name, 0) + 1
    if fastest:
        told = ", ".join(f"{n} in {k}" for n, k in sorted(fastest.items(), key=lambda pair: -pair[1]))
        lines.append(f"fastest peer: {told} cells")
    return "\n".join(lines)


def _peers(cell: Row) -> dict[str, float]:
    return {name: us for name, us in cell["us"].items() if not name.startswith("moe")}


def _over_limit(column: str) -> Callable[[Row], float]:
    return lambda c: float(c["us"][column] / c["limit_us"])


def _peer_over(column: str) -> Callable[[Row], float]:
    return lambda c: min(_peers(c).values()) / float(c["us"][column])


def _ours_over(column: str) -> Callable[[Row], float]:
    return lambda c: min(us for name, us in c["us"].items() if name.startswith("moe")) / float(c["us"][column])


def _mean(what: str, cells: Sequence[Row], of: Callable[[Row], float], bound: float, *, least: bool) -> Goal:
    values = [of(c) for c in cells]
    mean = math.exp(sum(map(math.log, values)) / len(values)) if values else None
    return Goal(what=what, value=mean, bound=bound, least=least, cells=len(cells), where=_where(cells, of, least))


def _worst(what: str, cells: Sequence[Row], of: Callable[[Row], float], bound: float) -> Goal:
    value = min(map(of, cells), default=None)
    return Goal(what=what, value=value, bound=bound, least=True, cells=len(cells), where=_where(cells, of, True))


def _where(cells: Sequence[Row], of: Callable[[Row], float], least: bool) -> str:
    if not cells:
        return ""
    cell = (min if least else max)(cells, key=of)
    return f"{cell['geometry']} T={cell['T']} {of(cell):.2f}"
