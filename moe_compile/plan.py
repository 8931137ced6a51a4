"""Planning: which candidate serves which token counts of a spec on a device.

In: a spec, the facts of a device, wishes of the user. Every provider that supports the spec offers tactics with their
work; the cost model prices them for each token bucket. Out: a `Planning`: ranked candidates per bucket, why others were
left out, and the plan of the cheapest, which tuning may replace (`Plan.of`). The device need not be there.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import cost
from .hardware import Device
from .journal import Bucket, Offer
from .options import OptionError, one_of
from .providers import Candidate, Plan, Priced, Tactic, Work, copied_bytes, providers, triton_route
from .spec import ExpertsSpec, RouterSpec
from .verdict import OK, Reject, Verdict

# Upper bounds of the token buckets that get a choice of their own; the plan merges neighbours that chose alike.
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, None)
OPEN_BUCKET = 8192  # tokens that stand for the bucket without a bound
SHORT_LIST = 6
COPIES = "copies more than moe.weight_copy_bytes"
# Who competes where by price; the others run only what these can't, or what they win when tuning measures them.
COMPETE = {"cuda": ("triton_decode", "triton_grouped", "triton_hopper"), "cpu": ("aten",)}


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The plan by price, and how it came about.

    lists: for each bucket (its bound, None for the last) the short list, cheapest first, then those without a price
    that can be relied on: what tuning measures.
    candidates: a line a provider: "triton_grouped: ok", or why not.
    copied_bytes: of weights that `within`, the plan's providers and those that tuning may choose instead, keep in
    layouts of their own.
    """

    plan: Plan
    lists: dict[int | None, tuple[Priced, ...]]
    candidates: tuple[str, ...]
    copied_bytes: int = 0
    within: frozenset[str] = frozenset()


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
    verdicts: dict[str, Verdict] = {
        n: p.available()
        and (OK if device.type == "cuda" else p.supports(spec, device))  # no library is imported to say no to a CPU
        and _copies(copied_bytes((n,), spec), weight_copy_bytes)
        and p.supports(spec, device)
        for n, p in providers().items()
    }
    lines = tuple(f"{name}: {verdict}" for name, verdict in verdicts.items())
    able = tuple(n for n in COMPETE.get(device.type, ()) if verdicts.get(n)) or ("aten",)
    wish = wish if wish is not None and verdicts[wish.provider] else None
    measured: tuple[str, ...] = ()
    for name in (n for n, p in providers().items() if not p.priced and verdicts[n] and not wish):
        if copied_bytes((*measured, name), spec) <= weight_copy_bytes:  # all of them may end up in one plan
            measured += (name,)
    lists: dict[int | None, tuple[Priced, ...]] = {}
    for bound in TOKEN_BUCKETS:
        T, forced = bound or OPEN_BUCKET, (wish.provider,) if wish else ()
        ranked = shortlist(spec, device, T, forced, wish=wish, mode=mode, load=load)
        ranked = ranked or shortlist(spec, device, T, able, mode=mode, load=load)
        if not ranked:
            raise ValueError(f"no provider of {', '.join(able)} has a tactic for {T} tokens of {spec}")
        unpriced = shortlist(spec, device, T, measured, mode=mode, load=load)
        lists[bound] = (*ranked[:limit], *unpriced)
    plan = Plan.of((bound, ranked[0].candidate) for bound, ranked in lists.items())
    within = frozenset((*measured, *(candidate.provider for _, candidate in plan.buckets)))
    return Planning(plan=plan, lists=lists, candidates=lines, copied_bytes=copied_bytes(within, spec), within=within)


def _copies(needed: int, allowed: int) -> Verdict:
    return OK if needed <= allowed else Reject(COPIES, f"{needed} bytes, allowed are {allowed}")


def account(
    planning: Planning, spec: ExpertsSpec, device: Device, *, mode: str = "graph", load: cost.Load | None = None
) -> tuple[Bucket, ...]:
    """What each token bucket was offered and what its plan's choice costs, for the journal."""
    if device.type not in ("cuda", "cpu"):  # a model on the meta device: no hardware, no times
        return ()
    load = load or cost.Load.uniform(spec.E, spec.K)
    found = []
    for bound, offers in planning.lists.items():
        T = bound or OPEN_BUCKET
        chosen = planning.plan.at(T)
        limit, bound_by = cost.limit(spec, device, load, T)
        work = next((p.work for p in offers if p.candidate == chosen), None)
        steps = cost.estimate(work, device, load, T, mode=mode).steps if work else ()
        found.append(
            Bucket(
                bound=bound,
                tokens=T,
                limit=limit,
                bound_by=bound_by,
                active=load.active(T),
                chosen=str(chosen),
                offers=tuple(Offer(candidate=str(p.candidate), predicted=p.seconds) for p in offers),
                steps=tuple((step.name, tuple((n, rows[n]) for n in cost.SHEETS[type(step)])) for step, rows in steps),
            )
        )
    return tuple(found)


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
    """All tactics that the named providers offer for T tokens, cheapest first by predicted seconds; may be empty."""
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
    try:
        wish = Candidate.parse(text)
    except ValueError as error:
        raise ValueError(f"moe.provider: {error}") from None
    one_of("moe.provider", wish.provider, ("auto", *providers()))
    return wish


def plan_route(spec: RouterSpec, device: Device, wish: str = "auto") -> Verdict:
    """Whether the router becomes `route`. auto: where one kernel does all of it.

    Elsewhere the operator is a handful of torch calls, which cost 10 to 30 us more a layer on a CPU (2 cores,
    2026-11-30) than the nodes that the inner backend fuses.
    """
    if wish == "nodes":
        return Reject("moe.route=nodes asks for the router's own nodes")
    return OK if wish == "op" else triton_route.supports(spec, device)
