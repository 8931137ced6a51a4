"""Planning: which candidate serves which token counts of a spec on a device.

Every provider is asked; those that support the spec offer tactics with their work. For now the pick is by a simple rule
(the first tactic of the preferred provider), behind the interface that the cost model will fill: a `Planning` lists all
candidates with their verdicts, and its `plan` is text that the operator looks T up in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .providers import Candidate, Plan, providers
from .spec import ExpertsSpec, RouterSpec
from .verdict import OK, Reject, Verdict

# Upper bounds of the token buckets that get a choice of their own; the plan merges neighbours that chose alike.
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, None)
# Best first. On CUDA own kernels, which read any native layout; elsewhere torch's.
PREFERENCE = {"cuda": ("triton_decode", "triton_grouped", "aten"), "cpu": ("aten",)}


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The plan and how it came about: `candidates` has a line a provider ("triton_grouped: Reject reason")."""

    plan: Plan
    candidates: tuple[str, ...]


def plan_experts(spec: ExpertsSpec, device: torch.device, provider: str = "auto") -> Planning:
    """The plan for `spec` on `device`. `provider` forces one by name; ValueError where it can't run the spec."""
    verdicts: dict[str, Verdict] = {}
    for name, p in providers().items():
        verdicts[name] = p.available() and p.supports(spec, device)
    lines = tuple(f"{name}: {verdict}" for name, verdict in verdicts.items())
    if provider != "auto":
        if provider not in verdicts:
            raise ValueError(f"moe.provider={provider!r} is not one of auto, {', '.join(verdicts)}")
        if not verdicts[provider]:
            raise ValueError(f"moe.provider={provider!r} can't run {spec} on {device}: {verdicts[provider]}")
        order: tuple[str, ...] = (provider,)
    else:
        order = tuple(n for n in PREFERENCE.get(device.type, ("aten",)) if verdicts.get(n))
    buckets: list[tuple[int | None, Candidate]] = []
    for bound in TOKEN_BUCKETS:
        chosen = _pick(order, spec, device, bound or 2 * 4096)
        if buckets and buckets[-1][1] == chosen:
            buckets.pop()
        buckets.append((bound, chosen))
    return Planning(plan=Plan(tuple(buckets)), candidates=lines)


def _pick(order: tuple[str, ...], spec: ExpertsSpec, device: torch.device, T: int) -> Candidate:
    for name in order:
        tactics = providers()[name].tactics(spec, device, T)
        if tactics:
            return Candidate(provider=name, tactic=tactics[0][0])
    raise ValueError(f"no provider of {', '.join(order)} has a tactic for {T} tokens of {spec}")


def plan_route(spec: RouterSpec, device: torch.device, wish: str = "auto") -> Verdict:
    """Whether the router becomes `route`. auto: yes on the CPU, where it is a handful of torch calls either way.

    On CUDA the graph's own nodes stay: Inductor fuses them, and there is no fused routing kernel yet.
    """
    if wish == "nodes":
        return Reject("moe.route=nodes asks for the router's own nodes")
    if wish == "op" or device.type == "cpu":
        return OK
    return Reject("no provider fuses routing on this device; Inductor compiles the router's own nodes")
