"""Who can run a spec: one file a provider, listed here in order of registration."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ..operands import ExpertWeights
from ..spec import ExpertsSpec
from ..work import Work
from .base import Candidate, Launcher, Plan, Priced, Provider, Tactic

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Candidate", "ExpertWeights", "Launcher", "Plan", "Priced", "Provider", "Tactic", "Work", "launcher", "providers",
]  # fmt: skip


@lru_cache(None)
def providers() -> dict[str, Provider]:
    """Every provider by name; `aten` is first, and runs any spec on any device."""
    from .aten import Aten
    from .triton_decode import TritonDecode
    from .triton_grouped import TritonGrouped

    return {p.name: p for p in (Aten(), TritonDecode(), TritonGrouped())}


@lru_cache(1024)
def launcher(candidate: Candidate, spec: ExpertsSpec, device: object) -> Launcher:
    """The candidate's launcher, built once. ValueError names an unknown provider; KeyError never escapes."""
    known = providers()
    if candidate.provider not in known:
        raise ValueError(f"provider {candidate.provider!r} is not one of {', '.join(known)}")
    provider = known[candidate.provider]
    launch = provider.build(candidate.tactic, spec, device)  # type: ignore[arg-type]
    if spec.gate_up.halves != "separate" or candidate.provider == "aten":
        return launch
    aten = known["aten"].build(Tactic(), spec, device)  # type: ignore[arg-type]

    def run(x: Tensor, ids: Tensor, w: Tensor | None, packed: ExpertWeights) -> Tensor:
        return (launch if provider.reads(packed) else aten)(x, ids, w, packed)

    return run
