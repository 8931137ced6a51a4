"""Where the plan by price changes with T, and what tips it: `moe-compile explain --crossovers`.

In: a spec and the facts of a device, which need not be there. Out: `Crossovers`: the token counts from which another
candidate is cheaper, solved on the cost model's formulas, with both prices and the terms they are made of. A change
that never gains 2 % is none: ceilings make near ties change hands often. Invariant: from its T on until the next change
each candidate named is one that its provider offers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Any

from . import cost
from .hardware import Device, facts, named
from .plan import COMPETE, OPEN_BUCKET
from .providers import Candidate, Work, providers
from .spec import ExpertsSpec

if TYPE_CHECKING:
    import torch

# the terms of a price: rows of the steps' sheets, summed over the steps
TERMS = ("launches", "weights", "rereads", "memory", "processor")
WORTH = 1.02


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """From T tokens on `candidate` is cheaper than `before`, or that is no longer `offered`. us: of both at T. terms:
    totals of the former and of it."""

    T: int
    candidate: str
    us: float
    before: str
    before_us: float
    offered: bool
    terms: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        changed = {k: v for k, v in self.terms.items() if abs(v[1] - v[0]) > 0.01 * max(v)}
        why = ", ".join(f"{k} {_short(k, a)} -> {_short(k, b)}" for k, (a, b) in changed.items())
        was = f"was {self.before_us:.1f} us {self.before}" + ("" if self.offered else ", not offered from here on")
        return "\n  ".join(filter(None, (f"T = {self.T}: {self.us:.1f} us {self.candidate}", was, why)))


def _short(term: str, x: float) -> str:
    if term in ("memory", "processor"):
        return f"{1e6 * x:.1f} us"
    return f"{x:.0f}" if term == "launches" else f"{x / 1e6:.1f} MB"


@dataclass(frozen=True, kw_only=True)
class Path:
    """The changes for one spec. first: what is cheapest for one token."""

    spec: str
    first: str
    changes: tuple[Crossover, ...]

    def __str__(self) -> str:
        return "\n".join((self.spec, f"T = 1: {self.first}", *map(str, self.changes)))


@dataclass(frozen=True, kw_only=True)
class Crossovers:
    """`print(crossovers)`, or `as_dict()` for JSON."""

    device: str
    paths: tuple[Path, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n\n".join((f"on {self.device}", *map(str, self.paths)))


def crossovers(specs: Iterable[ExpertsSpec], where: str | torch.device | Device) -> Crossovers:
    """The path of each distinct spec on a device, or on the one of a name or architecture."""
    device = named(where) if isinstance(where, str) else facts(where)
    return Crossovers(device=str(device), paths=tuple(path(spec, device) for spec in dict.fromkeys(specs)))


def path(spec: ExpertsSpec, device: Device, *, mode: str = "graph", most: int = OPEN_BUCKET) -> Path:
    """The changes of the cheapest candidate from 1 to `most` tokens, under uniform routing."""
    load = cost.Load.uniform(spec.E, spec.K)
    works: dict[Candidate, Work] = {}

    @lru_cache(None)
    def offered(T: int) -> tuple[Candidate, ...]:
        found = _offered(spec, device, T)
        works.update(found)
        return tuple(found)

    @lru_cache(None)
    def priced(candidate: Candidate, T: int) -> cost.Breakdown:
        return cost.estimate(works[candidate], device, load, T, mode=mode)

    @lru_cache(None)
    def cheapest(T: int) -> Candidate:
        return min(offered(T), key=lambda c: priced(c, T).seconds)

    def seconds(candidate: Candidate, T: int) -> float:
        return priced(candidate, T).seconds if candidate in offered(T) else inf

    first = before = cheapest(1)
    found, T = [], 1
    while T < most:
        beaten = cost.changes(lambda t: seconds(before, t) > WORTH * seconds(cheapest(t), t), T, most)  # noqa: B023
        if not beaten:
            break
        now = cheapest(beaten[0])
        *_, T = T, *cost.changes(lambda t: seconds(now, t) < seconds(before, t), T, beaten[0])  # noqa: B023
        if seconds(now, T) > WORTH * seconds(cheapest(T), T):  # where `before` ends a third is cheaper
            T = beaten[0]
        sides = priced(before, T), priced(now, T)
        found.append(
            Crossover(
                T=T, candidate=str(now), us=1e6 * sides[1].seconds, before=str(before),
                before_us=1e6 * sides[0].seconds, offered=before in offered(T),
                terms={t: (sides[0].total(t), sides[1].total(t)) for t in TERMS},
            )
        )  # fmt: skip
        before = now
    return Path(spec=str(spec), first=str(first), changes=tuple(found))


def formulas(spec: ExpertsSpec, T: int, where: str) -> list[str]:
    """The cost model's formulas with their numbers put in, for what is cheapest at T on the device of that name."""
    device, load = named(where), cost.Load.uniform(spec.E, spec.K)
    priced = {c: cost.estimate(work, device, load, T) for c, work in _offered(spec, device, T).items()}
    best = min(priced, key=lambda c: priced[c].seconds)
    return [f"{best}: {1e6 * priced[best].seconds:.1f} us for {T} tokens on {device}", *priced[best].lines()]


def _offered(spec: ExpertsSpec, device: Device, T: int) -> Mapping[Candidate, Work]:
    """Every candidate that competes for T tokens."""
    competing = {n: providers()[n] for n in COMPETE.get(device.type, ())}
    able = [n for n, p in competing.items() if p.available() and p.supports(spec, device)]
    return {
        Candidate(provider=name, tactic=tactic): work
        for name in able or ["aten"]
        for tactic, work in providers()[name].tactics(spec, device, T)
    }
