"""Planning: which candidate serves which token counts of a spec on a device.

Every provider is asked; those that support the spec offer tactics with their work. For now each provider's first tactic
is priced by a simple rule (launches, and bytes over bandwidth), behind the interface that the cost model will fill: a
`Planning` lists all candidates with their verdicts, and its `plan` is text that the operator looks T up in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .options import one_of
from .providers import Candidate, Plan, Work, providers
from .spec import ExpertsSpec, RouterSpec
from .verdict import OK, Reject, Verdict

# Upper bounds of the token buckets that get a choice of their own; the plan merges neighbours that chose alike.
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, None)
# Who competes where; the others run only what these can't.
COMPETE = {"cuda": ("triton_decode", "triton_grouped"), "cpu": ("aten",)}
# Read off docs/measured/kernels_h200.json (H200, bf16, 2026-11-30): us a launch costs in a CUDA graph, and the share of
# the datasheet's 4.8 TB/s that a provider's weight reads reach. Decode reads an expert again for each of its routes;
# half of such repeats come from L2. Crossovers hardly move with the card: fixed costs and bandwidth both scale.
LAUNCH_US, SHARE = {"triton_decode": 2.5, "triton_grouped": 3.4}, {"triton_decode": 0.90, "triton_grouped": 0.945}
TRANSPOSED_DECODE_SHARE = 0.55  # gpt_oss stores hidden before rows, which decode's dot products read against the grain
BANDWIDTH = 4.8e6  # bytes per us


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The plan and how it came about: `candidates` has a line a provider ("triton_grouped: Reject reason")."""

    plan: Plan
    candidates: tuple[str, ...]


def plan_experts(spec: ExpertsSpec, device: torch.device, provider: str = "auto") -> Planning:
    """The plan for `spec` on `device`. `provider` forces one by name, for the specs that it supports."""
    verdicts: dict[str, Verdict] = {}
    for name, p in providers().items():
        verdicts[name] = p.available() and p.supports(spec, device)
    lines = tuple(f"{name}: {verdict}" for name, verdict in verdicts.items())
    check_provider(provider)
    if verdicts.get(provider):
        order: tuple[str, ...] = (provider,)
    else:
        able = tuple(n for n in COMPETE.get(device.type, ()) if verdicts.get(n))
        order = able or ("aten",)
    buckets: list[tuple[int | None, Candidate]] = []
    for bound in TOKEN_BUCKETS:
        chosen = _pick(order, spec, device, bound or 2 * 4096)
        if buckets and buckets[-1][1] == chosen:
            buckets.pop()
        buckets.append((bound, chosen))
    return Planning(plan=Plan(tuple(buckets)), candidates=lines)


def check_provider(name: str) -> None:
    """ValueError where `moe.provider` names none, with the valid names and the closest."""
    one_of("moe.provider", name, ("auto", *providers()))


def _pick(names: tuple[str, ...], spec: ExpertsSpec, device: torch.device, T: int) -> Candidate:
    offers = {name: offered[0] for name in names if (offered := providers()[name].tactics(spec, device, T))}
    if not offers:
        raise ValueError(f"no provider of {', '.join(names)} has a tactic for {T} tokens of {spec}")
    once = min(work.weight_bytes for _, work in offers.values())
    best = min(offers, key=lambda name: _price(name, offers[name][1], once, spec))
    return Candidate(provider=best, tactic=offers[best][0])


def _price(name: str, work: Work, once: float, spec: ExpertsSpec) -> float:
    """Predicted us of a call whose experts' weights are `once` bytes when each is read once."""
    share = SHARE.get(name, 1.0)
    if name == "triton_decode" and (spec.gate_up.storage, spec.down) != ("EGH", "EHI"):
        share = TRANSPOSED_DECODE_SHARE
    moved = once + 0.5 * (work.weight_bytes - once) + work.activation_bytes
    return work.launches * LAUNCH_US.get(name, 0.0) + moved / (share * BANDWIDTH)


def plan_route(spec: RouterSpec, device: torch.device, wish: str = "auto") -> Verdict:
    """Whether the router becomes `route`. auto: only where a provider has a fused kernel for it, and none has yet.

    Without one the operator is a handful of torch calls, which cost 10 to 30 us more a layer on a CPU (2 cores,
    2026-11-30) than the nodes that the inner backend fuses.
    """
    if wish == "nodes":
        return Reject("moe.route=nodes asks for the router's own nodes")
    return OK if wish == "op" else Reject(f"no provider fuses routing on {device.type} yet; its nodes are compiled")
