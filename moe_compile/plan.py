"""Planning: which candidate serves which token counts of a spec on a device.

In: a spec, the facts of a device, wishes of the user. Every provider that supports the spec offers tactics with their
work; the cost model prices them for each token bucket. Out: a `Planning`: ranked candidates per bucket, why others were
left out, and the plan of the cheapest, which tuning may replace (`Plan.of`). The device need not be there.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import cost
from .hardware import Device
from .options import OptionError, one_of
from .providers import Candidate, Plan, Priced, Tactic, Work, providers
from .spec import ExpertsSpec, RouterSpec
from .verdict import OK, Reject, Verdict

# Upper bounds of the token buckets that get a choice of their own; the plan merges neighbours that chose alike.
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, None)
OPEN_BUCKET = 8192  # tokens that stand for the bucket without a bound
SHORT_LIST = 6
COPIES = "copies more than moe.weight_copy_bytes"
# Who competes where; the others run only what these can't.
COMPETE = {"cuda": ("triton_decode", "triton_grouped"), "cpu": ("aten",)}


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The plan by price, and how it came about.

    lists: for each bucket (its bound, None for the last) the short list, cheapest first: what tuning measures.
    candidates: a line a provider ("triton_grouped: ok", "aten: Reject ...") and a line for each candidate left out.
    """

    plan: Plan
    lists: dict[int | None, tuple[Priced, ...]]
    candidates: tuple[str, ...]


def plan_experts(
    spec: ExpertsSpec,
    device: Device,
    provider: str = "auto",
    *,
    weight_copy_bytes: int = 0,
    mode: str = "graph",
    load: cost.Load | None = None,
    limit: int = SHORT_LIST,
) -> Planning:
    """The plan for `spec` on `device`.

    provider: "auto", or a wish, that wins over any price: a candidate's text, whole or in part ("triton_grouped",
    "triton_grouped(M=64)"), for the specs that it supports. mode: "graph" or "eager", how calls are launched. load:
    how tokens route, uniformly unless known. ValueError names knobs of a wish that don't go together.
    """
    wish = check_provider(provider)
    verdicts: dict[str, Verdict] = {n: p.available() and p.supports(spec, device) for n, p in providers().items()}
    lines = [f"{name}: {verdict}" for name, verdict in verdicts.items()]
    if wish is not None and verdicts[wish.provider]:
        names: tuple[str, ...] = (wish.provider,)
    else:
        wish, names = None, tuple(n for n in COMPETE.get(device.type, ()) if verdicts.get(n)) or ("aten",)
    lists: dict[int | None, tuple[Priced, ...]] = {}
    for bound in TOKEN_BUCKETS:
        ranked = shortlist(spec, device, bound or OPEN_BUCKET, names, wish=wish, mode=mode, load=load)
        fits = [p for p in ranked if p.work.copied_bytes <= weight_copy_bytes]
        for p in ranked:
            if p not in fits:
                verdict = Reject(COPIES, f"{p.work.copied_bytes} bytes, allowed are {weight_copy_bytes}")
                lines += [line] if (line := f"{p.candidate}: {verdict}") not in lines else []
        if not fits:
            raise OptionError(f"moe.weight_copy_bytes={weight_copy_bytes} leaves no candidate of {', '.join(names)}")
        lists[bound] = tuple(fits[:limit])
    plan = Plan.of((bound, ranked[0].candidate) for bound, ranked in lists.items())
    return Planning(plan=plan, lists=lists, candidates=tuple(lines))


def shortlist(
    spec: ExpertsSpec,
    device: Device,
    T: int,
    names: tuple[str, ...],
    *,
    wish: Candidate | None = None,
    mode: str = "graph",
    load: cost.Load | None = None,
) -> tuple[Priced, ...]:
    """All tactics that the named providers offer for T tokens, cheapest first by predicted seconds."""
    load = load or cost.Load.uniform(spec.E, spec.K)
    found: dict[Candidate, Priced] = {}
    for name in names:
        offers = providers()[name].tactics(spec, device, T)
        if wish is not None:
            offers = _forced(wish, [t for t, _ in offers], spec, device)
        for tactic, work in offers:
            candidate = Candidate(provider=name, tactic=tactic)
            seconds = cost.estimate(work, device, load, T, mode=mode).seconds
            found[candidate] = Priced(candidate=candidate, seconds=seconds, work=work)
    if not found:
        raise ValueError(f"no provider of {', '.join(names)} has a tactic for {T} tokens of {spec}")
    return tuple(sorted(found.values(), key=lambda p: p.seconds))


def _forced(wish: Candidate, offered: list[Tactic], spec: ExpertsSpec, device: Device) -> list[tuple[Tactic, Work]]:
    """The offered tactics with the wish's knobs put in; ValueError of the provider where none of them can be."""
    provider, named = providers()[wish.provider], dict(wish.tactic.knobs)
    found: dict[Tactic, Work] = {}
    failure: ValueError | None = None
    for tactic in offered:
        forced = Tactic(tuple({**dict(tactic.knobs), **named}.items()))
        try:
            found.setdefault(forced, provider.work(forced, spec, device))
        except ValueError as error:
            failure = error
    if failure and not found:
        raise OptionError(f"moe.provider={wish}: {failure}") from failure
    return list(found.items())


def check_provider(text: str) -> Candidate | None:
    """The wish of `moe.provider` (None for "auto"); ValueError where it names no provider, with the closest."""
    if text == "auto":
        return None
    wish = Candidate.parse(text)
    one_of("moe.provider", wish.provider, ("auto", *providers()))
    return wish


def plan_route(spec: RouterSpec, device: Device, wish: str = "auto") -> Verdict:
    """Whether the router becomes `route`. auto: only where a provider has a fused kernel for it, and none has yet.

    Without one the operator is a handful of torch calls, which cost 10 to 30 us more a layer on a CPU (2 cores,
    2026-11-30) than the nodes that the inner backend fuses.
    """
    if wish == "nodes":
        return Reject("moe.route=nodes asks for the router's own nodes")
    return OK if wish == "op" else Reject(f"no provider fuses routing on {device.type} yet; its nodes are compiled")
