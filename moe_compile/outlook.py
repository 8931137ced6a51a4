"""What would be planned for a block of given sizes on a given device, without either: `moe-compile explain --thiek`.

In: T,H,I,E,K and the name of a device or architecture. Out: an `Outlook`: for each provider whether it could run the
block there, the bytes of weights that it would keep in a layout of its own, and the tactics it offers with predicted
times. `replanned` does it for the blocks of a report. Libraries are asked as installed here; what only the device could
tell (compiled modules, drivers) is not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from . import cost
from .activation import Activation
from .explain import Report
from .hardware import Device, named
from .plan import account, plan_experts, shortlist
from .providers import copied_bytes, providers
from .providers.triton_backward import in_words
from .spec import ExpertsSpec


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A provider's answer. verdict: "ok" or why not. tactics: (candidate, predicted us), the cheapest first; None us
    where the cost model wasn't fitted to its kernels."""

    provider: str
    verdict: str
    copied_bytes: int = 0
    tactics: tuple[tuple[str, float | None], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """`print(outlook)`, or `as_dict()` for JSON."""

    spec: str
    tokens: int
    device: str
    offers: tuple[Offer, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.tokens} tokens of {self.spec}", f"on {self.device}", ""]
        for offer in self.offers:
            lines.append(f"  {offer.provider:29}{offer.verdict}")
            if offer.copied_bytes and offer.verdict == "ok":
                lines.append(f"  {'':29}keeps {offer.copied_bytes} bytes of weights in its own layout")
            for tactic, us in offer.tactics[:3]:
                lines.append(f"  {'':29}{'not priced' if us is None else f'{us:7.1f} us'}  {tactic}")
        return "\n".join(lines)


def thiek(text: str) -> tuple[int, ExpertsSpec]:
    """T and the spec of "T,H,I,E,K": SwiGLU, bf16, in the layout of HuggingFace's Qwen3-MoE. ValueError otherwise."""
    parts = text.split(",")
    if len(parts) != 5 or not all(p.isdecimal() and int(p) for p in parts):
        raise ValueError(f"--thiek {text}: not T,H,I,E,K, five whole numbers of at least 1 such as 4,2048,768,128,8")
    T, H, I, E, K = map(int, parts)
    if K > E:
        raise ValueError(f"--thiek {text}: not T,H,I,E,K, whose K={K} choices are of E={E} experts")
    return T, ExpertsSpec(E=E, K=K, H=H, I=I, act=Activation.parse("swiglu"))


def outlook(spec: ExpertsSpec, T: int, device: str | Device, mode: str = "graph") -> Outlook:
    """The outlook of `spec` for T tokens on a device, its name ("H200") or architecture ("sm_107").

    mode: "graph" or "eager", how calls are launched. ValueError names the devices that are known.
    """
    where = named(device) if isinstance(device, str) else device
    load = cost.Load.uniform(spec.E, spec.K)
    offers = []
    for name, provider in providers().items():
        verdict = provider.available() and provider.supports(spec, where)
        ranked = shortlist(spec, where, T, (name,), mode=mode, load=load) if verdict else ()
        offers.append(
            Offer(
                provider=name,
                verdict=str(verdict) if ranked or not verdict else f"not for {T} tokens",
                copied_bytes=copied_bytes((name,), spec),
                tactics=tuple(
                    (str(p.candidate), round(1e6 * p.seconds, 1) if provider.priced else None) for p in ranked
                ),
            )
        )
    return Outlook(spec=str(spec), tokens=T, device=str(where), offers=tuple(offers))


def replanned(report: Report, device: str) -> Report:
    """The report with every block's plan made for another device, by name or architecture, which need not be there."""
    where = named(device)
    plans: dict[ExpertsSpec, dict[str, Any]] = {}
    regions = []
    for region in report.regions:
        spec = region.spec.experts
        if spec not in plans:
            planning = plan_experts(spec, where)
            plans[spec] = {
                "candidates": planning.candidates,
                "chosen": str(planning.plan),
                "device": str(where),
                "buckets": account(planning, spec, where),
                "training": in_words(spec, where, planning.plan),
            }
        regions.append(replace(region, **plans[spec]))
    return replace(report, regions=tuple(regions))
