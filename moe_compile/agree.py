"""Every rank takes the same plan, or every rank fails, with all reasons by rank.

In: this rank's Proposal, or the error that kept it from one. Out: the candidate of each question, the same text on
every rank. Where torch.distributed is not initialized, or there is one rank, that is the proposal's own choice.

Ranks measure, and measurements differ, so a choice is not compared but made together: of the candidates that every
measuring rank measured, the one whose slowest rank is fastest, since ranks wait for one another. What must be equal to
begin with (specs, versions) is compared.

The exchange goes through the process group's store, not a collective: a collective that one rank does not enter hangs
the others or pairs with a collective of the model, and NCCL ends the process on a timeout without saying who was
missing. The outcome of an exchange is one atomic write, made by the first rank that has everything or gives up waiting;
every rank follows it, so no rank goes on where another failed, and a rank with all its answers in a cache just waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Disagreement(RuntimeError):
    """The ranks can't take the same plan; the message has each rank's reason."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a rank brings. terms: name -> text that must be equal on all ranks.

    times: question -> candidate's text -> measured time, any unit; None where it was chosen without measuring. The
    choice of a rank is its fastest, or the one without a time.
    """

    terms: Mapping[str, str]
    times: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)


@dataclass
class _Rounds:
    """How many exchanges this process has been through, in each process group's life."""

    store: Any = None
    count: int = 0


_rounds = _Rounds()


def ranks() -> int:
    """How many ranks there are to agree with; 1 without torch.distributed, or with its pretended ("fake") backend."""
    import torch

    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":
        return 1
    return dist.get_world_size()


def agree(proposal: Proposal | None, error: str = "", *, seconds: float) -> dict[str, str]:
    """question -> candidate, the same on every rank. Every rank calls it, in the same order, each with a proposal or an
    error. `seconds`: how long to wait for the last one. Disagreement names ranks and reasons, on every rank."""
    assert (proposal is None) == bool(error)
    if ranks() == 1:
        if proposal is None:
            raise Disagreement(error)
        return _choose({0: proposal})
    terms = {} if proposal is None else dict(proposal.terms)
    times = {} if proposal is None else {q: dict(t) for q, t in proposal.times.items()}
    said = _exchange({"error": error, "terms": terms, "times": times}, seconds)
    errors = {rank: s["error"] for rank, s in said.items() if s["error"]}
    if errors:
        raise Disagreement(_by_rank("another rank's error stops every rank", errors))
    return _choose({rank: Proposal(terms=s["terms"], times=s["times"]) for rank, s in said.items()})


def _choose(proposals: Mapping[int, Proposal]) -> dict[str, str]:
    for name in dict.fromkeys(n for p in proposals.values() for n in p.terms):
        values = {rank: p.terms.get(name, "nothing") for rank, p in proposals.items()}
        if len(set(values.values())) > 1:
            raise Disagreement(_by_rank(f"ranks differ in {name}", values))
    return {
        question: _fastest(question, {rank: dict(p.times.get(question, {})) for rank, p in proposals.items()})
        for question in dict.fromkeys(q for p in proposals.values() for q in p.times)
    }


def _fastest(question: str, times: dict[int, dict[str, float | None]]) -> str:
    measured = {rank: {c: s for c, s in t.items() if s is not None} for rank, t in times.items()}
    asked = [t for t in measured.values() if t]
    if asked:
        common = set.intersection(*map(set, asked))
        if common:
            return min(sorted(common), key=lambda c: max(t[c] for t in asked))
    elif len({tuple(t) for t in times.values()}) == 1:
        return next(iter(times[0]))
    raise Disagreement(
        _by_rank(f"ranks have no candidate in common for {question}", {r: ", ".join(t) for r, t in times.items()})
    )


def _exchange(mine: dict[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
    """rank -> what it said, once all have; Disagreement on every rank where one has not after `seconds`."""
    import torch

    dist = torch.distributed
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    if _rounds.store is not store:
        _rounds.store, _rounds.count = store, 0
    while True:
        name = f"moe_compile/agree/{_rounds.count}"
        _rounds.count += 1
        keys = [f"{name}/{r}" for r in range(world)]
        store.set(keys[rank], json.dumps(mine))
        missing = _wait(store, keys, f"{name}/outcome", time.monotonic() + seconds)
        # The first rank to write decides; an empty list: everyone came.
        missing = json.loads(store.compare_set(f"{name}/outcome", "", json.dumps(missing)))
        said = {r: json.loads(store.get(k)) for r, k in enumerate(keys) if store.check([k])}
        if not missing:
            return said
        # Late for a graph that this rank compiles too: it fails as the others did. Late for one that it does not
        # compile: they have gone on to the next exchange, and so does this rank.
        others = [s for r, s in said.items() if r not in missing]
        if rank not in missing or any(s["terms"] == mine["terms"] for s in others):
            absent = ", ".join(map(str, missing))
            raise Disagreement(
                f"of {world} ranks, {absent} did not come within {seconds:g} s (moe.agree=off: each rank for itself)"
            )


def _wait(store: Any, keys: list[str], outcome: str, deadline: float) -> list[int]:
    """The ranks whose key is not there at the deadline; nothing is waited for once there is an outcome."""
    pause = 0.001
    while True:
        missing = [r for r, k in enumerate(keys) if not store.check([k])]
        if not missing or store.check([outcome]) or time.monotonic() >= deadline:
            return missing
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(0.1, 2 * pause)


def _by_rank(what: str, reasons: Mapping[int, str]) -> str:
    return f"{what}: " + "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
