"""What the compiler did with a model, and why: in, the journal's events; out, a Report that prints.

    print(moe_compile.explain(model, input_ids))

`explain` compiles and runs the model once; `Report.from_events` reads any capture of the journal. Nothing here decides
anything: the report holds only what was recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import journal
from .breaks import Break, Watch, breaks
from .journal import Where
from .overlooked import Evidence, Overlooked, overlooked
from .spec import ExpertsSpec, MoESpec
from .tables import bucket_rows, columns, count, places, plan_lines, trial_rows, verdicts


@dataclass(frozen=True, kw_only=True)
class Region:
    """A block that was proved. `chosen` is its plan's text; `router_why` says why its router kept its nodes, if it did.

    `device` is what it was planned for, `buckets` has what each token bucket was offered and what its choice costs.
    `candidates` are the verdicts on each provider; `training` says whose kernels train it. `skipped` names the option
    that left the block as it was, "" if none did; `replaced` is False there, and where a later stage failed. `tuned`:
    the buckets whose choice was measured; `beside`: the operator beside the block's own nodes, where they were timed.
    """

    graph: int
    region: int
    spec: MoESpec
    where: Where
    candidates: tuple[str, ...] = ()
    chosen: str = ""
    device: str = ""
    buckets: tuple[journal.Bucket, ...] = ()
    load: tuple[tuple[int, float], ...] = ()
    copied_bytes: int = 0
    training: str = ""
    router_why: str = ""
    skipped: str = ""
    replaced: bool = False
    tuned: tuple[journal.Tuned, ...] = ()
    beside: journal.Beside | None = None


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Something that looked like a block and was not proved: the reason, and the node and source line it stands on."""

    graph: int
    reason: str
    detail: str
    where: Where
    node: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A stage of ours that raised; the graph was compiled as it was."""

    graph: int
    stage: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """`graphs` counts the graphs that Dynamo handed over; the lists are in program order. `print(report)`."""

    graphs: int
    regions: tuple[Region, ...]
    rejections: tuple[Rejection, ...]
    failures: tuple[Failure, ...]
    breaks: tuple[Break, ...] = ()
    uncaptured: tuple[tuple[str, str], ...] = ()
    """MoE modules that Dynamo can't capture but `moe_compile.prepare` can change: (path, what breaks the graph)."""
    overlooked: tuple[Overlooked, ...] = ()
    """Modules that count experts, in whose graphs nothing looks like an MoE block, or that are in none."""

    @classmethod
    def from_events(cls, events: Iterable[journal.Event]) -> Report:
        """The report of what `journal.capture()` collected."""
        events = tuple(events)
        planned = {(e.graph, e.region): e for e in events if isinstance(e, journal.Planned)}
        tuned = [e for e in events if isinstance(e, journal.Tuned)]
        beside = [e for e in events if isinstance(e, journal.Beside)]
        lowered = {e.graph for e in events if isinstance(e, journal.Lowered)}
        lowered -= {e.graph for e in events if isinstance(e, journal.StageFailed)}
        skipped = {(e.graph, e.region): e.why for e in events if isinstance(e, journal.RegionSkipped)}
        regions = []
        for e in events:
            if isinstance(e, journal.RegionFound):
                plan = planned.get((e.graph, e.region))
                region = Region(
                    graph=e.graph,
                    region=e.region,
                    spec=MoESpec.parse(e.spec),
                    where=e.where,
                    candidates=plan.candidates if plan else (),
                    chosen=plan.plan if plan else "",
                    device=plan.device if plan else "",
                    buckets=plan.buckets if plan else (),
                    load=plan.load if plan else (),
                    copied_bytes=plan.copied_bytes if plan else 0,
                    training=plan.training if plan else "",
                    router_why=e.router_why,
                    skipped=skipped.get((e.graph, e.region), ""),
                    replaced=e.graph in lowered and (e.graph, e.region) not in skipped,
                    tuned=tuple(t for t in tuned if t.graph == e.graph and e.region in t.regions),
                    beside=next((b for b in beside if b.graph == e.graph and e.region in b.regions), None),
                )
                regions.append(region)
        return cls(
            graphs=len({e.graph for e in events if isinstance(e, journal.GraphSeen)}),
            regions=tuple(regions),
            rejections=tuple(
                Rejection(graph=e.graph, reason=e.reason, detail=e.detail, where=e.where, node=e.node)
                for e in events
                if isinstance(e, journal.RegionRejected)
            ),
            failures=tuple(
                Failure(graph=e.graph, stage=e.stage, error=e.error)
                for e in events
                if isinstance(e, journal.StageFailed)
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON; specs are their lines."""
        regions = [{**asdict(r), "spec": str(r.spec)} for r in self.regions]
        rest = {"rejections": [asdict(r) for r in self.rejections], "failures": [asdict(f) for f in self.failures]}
        rest["breaks"] = [asdict(b) for b in self.breaks]
        rest["overlooked"] = [asdict(o) for o in self.overlooked]
        return {"graphs": self.graphs, "regions": regions, **rest, "uncaptured": [list(u) for u in self.uncaptured]}

    def __str__(self) -> str:
        replaced = sum(r.replaced for r in self.regions)
        counts = [
            count(self.graphs, "graph"),
            f"{replaced} of {count(len(self.regions), 'MoE block')} replaced",
            f"{len(self.rejections)} not proved",
        ]
        lines = [f"moe_compile: {', '.join(counts)}"]
        for same in _groups(
            self.regions, lambda r: (r.spec, r.chosen, r.candidates, r.router_why, r.skipped, r.replaced)
        ):
            lines += ["", *_region_lines(same)]
        for refused in _groups(self.rejections, lambda r: (r.reason, r.detail, r.where.source)):
            lines += ["", *_rejection_lines(refused)]
        for failure in self.failures:
            lines += [
                "",
                f"stage {failure.stage} failed, graph {failure.graph} was compiled as it was: {failure.error}",
            ]
        for same_why in _groups(self.uncaptured, lambda u: u[1]):
            lines += [
                "",
                f"{places(path for path, _ in same_why)}: MoE that Dynamo can't capture",
                f"  because of  {same_why[0][1]}",
                "  remedy      moe_compile.prepare(model) gives it a form that can be captured",
            ]
        for alike in _groups(self.overlooked, lambda o: (o.looks, o.why, o.remedy)):
            lines += ["", *_overlooked_lines(alike)]
        for b in self.breaks:
            at = f"{b.where.source}  {b.where.code}".strip()
            lines += [
                "",
                f"graph break ({count(b.times, 'time')}): {b.reason}",
                f"  at          {at or 'source unknown'}",
            ]
        if not (self.regions or self.rejections or self.failures or self.uncaptured or self.overlooked):
            lines.append("nothing in the graphs looks like an MoE block" if self.graphs else "no graph was compiled")
        return "\n".join(lines)


def explain(model: Any, *args: Any, moe_options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """Run `model(*args, **kwargs)` once under the backend, and report what became of its MoE blocks.

    Where Dynamo broke the graph, the report says where, and which modules `moe_compile.prepare` could change.

    model: a module, a function, or either of them compiled: then what it wraps. It is left as it was: this compilation
    has its own cache entries. Gradient mode is the caller's. moe_options: as `options` of torch.compile, but
    `moe.inner` is "eager" unless given, since the inner backend changes nothing that is reported and takes most of the
    time, and `moe.tune` is "cost": what was measured before is shown, nothing is measured for the report. TypeError for
    what can't be called; raises what the model raises.
    """
    import torch

    from .backend import moe_backend
    from .prepare import breaking

    if not callable(model):
        raise TypeError(f"explain: model is a {type(model).__name__}, neither a module nor a function")
    options = {"moe.inner": "eager", "moe.tune": "cost", **(moe_options or {})}

    # A function of its own for each call: Dynamo reuses compiled code only for the same backend.
    evidence = Evidence()

    def moe(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        evidence.see(gm.graph)
        return moe_backend(gm, example_inputs, options=options)

    target = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model
    module = target if isinstance(target, torch.nn.Module) else None
    if module is not None:
        target = module._call_impl  # past `_compiled_call_impl`, which module.compile() sets
    own_cache: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        own_cache["isolate_recompiles"] = True  # else this compilation counts against the model's recompile limit
    compiled: Any = torch.compile(target, backend=moe, **own_cache)
    watch = Watch()
    with journal.capture() as events:
        compiled(*args, **kwargs)
    report = Report.from_events(events)
    endings = watch.endings()
    uncaptured = () if module is None else tuple(breaking(module))
    stays: tuple[Overlooked, ...] = ()
    if module is not None and not report.failures:
        found = [*(r.where for r in report.regions), *(r.where for r in report.rejections)]
        told = [*(where.module for where in found), *(path for path, _ in uncaptured)]
        stays = tuple(overlooked(module, evidence, told, endings))
    return replace(report, breaks=breaks(endings), uncaptured=uncaptured, overlooked=stays)


def _groups(items: Sequence[Any], key: Any) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _region_lines(same: list[Region]) -> list[str]:
    first = same[0]
    graphs = len({r.graph for r in same})
    spread = f" in {graphs} graphs" if graphs > 1 else ""
    lines = [f"{places(r.where.module for r in same)}: {count(len(same), 'block')}{spread}"]
    e = first.spec.experts
    lines.append(
        f"  computes    {e.K} of {e.E} experts a token, {e.H} -> {e.I} -> {e.H}, {e.act.name}, weights in {e.x}"
        + _kept(e)
    )
    lines.append(f"  spec        {e}")
    if first.spec.router:
        lines.append(f"              {first.spec.router}")
    if first.router_why:
        lines.append(f"  router      keeps its nodes: {first.router_why}")
    if first.where.source:
        lines.append(f"  source      {first.where.source}  {first.where.code}".rstrip())
    lines += [f"  {'considered' if i == 0 else '':10}  {c}" for i, c in enumerate(verdicts(first.candidates))]
    if not first.replaced:
        return [*lines, f"  chosen      not replaced: {first.skipped or 'a later stage failed'}"]
    lines += [f"  {'chosen' if i == 0 else '':10}  {c}" for i, c in enumerate(plan_lines(first.chosen))]
    lines.append(f"  weights     {_read(first)}")
    lines.append(f"  training    {first.training}")
    if first.buckets:
        lines.append(f"  predicted   on {first.device}, the limit by its datasheet")
        lines += [f"              {row}" for row in columns(bucket_rows(first.buckets))]
    if first.tuned:
        cached = sum(t.source == "cache" for t in first.tuned)
        kinds = ", ".join(dict.fromkeys(t.workload for t in first.tuned))
        why = next((f" ({t.why})" for t in first.tuned if t.why), "")
        lines.append(f"  measured    {len(first.tuned)} buckets, {cached} of them by an earlier run, on {kinds}{why}")
        lines += [f"              {row}" for row in columns(trial_rows(first.tuned))]
    if b := first.beside:
        lines.append(
            f"  beside      for {b.tokens} tokens its own nodes take {b.nodes_us:.1f} us, the operator "
            f"{b.operator_us:.1f} us"
        )
    return lines


def _read(r: Region) -> str:
    """How the weights are read."""
    if r.copied_bytes:
        return f"up to {r.copied_bytes} bytes a block copied into layouts of kernels"
    if r.spec.experts.tensors == "listed" and ("aten(path=grouped)" in r.chosen or "aten(path=blocks)" in r.chosen):
        return "aten copies all experts into one tensor for each product"
    return "read where they are, none copied"


def _kept(e: ExpertsSpec) -> str:
    """Where the weights are, and what happens to an expert's output, if either is not as usual."""
    listed = ", each expert in tensors of its own" if e.tensors == "listed" else ""
    return listed + (", its output normalized" if e.post != "none" else "")


def _rejection_lines(same: list[Rejection]) -> list[str]:
    first = same[0]
    lines = [f"{places(r.where.module for r in same)}: not proved, left as it was ({count(len(same), 'time')})"]
    lines.append(f"  reason      {first.reason}")
    if first.detail:
        lines.append(f"  detail      {first.detail}")
    at = f"{first.where.source}  {first.where.code}".strip()
    lines.append(f"  at          {at or 'source unknown'} [node {first.node}]")
    return lines


def _overlooked_lines(same: list[Overlooked]) -> list[str]:
    first, where = same[0], places(o.module or "(the model itself)" for o in same)
    lines = [f"{where}: {first.looks}, but no MoE block was found", f"  because     {first.why}"]
    return [*lines, f"  remedy      {first.remedy}"] if first.remedy else lines
