"""The backend: `torch.compile(model, backend="moe")`. The stages in order, and what happens when one fails.

In: Dynamo's graph. Out: a callable, from the inner backend (Inductor unless `moe.inner` says otherwise), of the same
graph with every proved MoE block replaced. An exception in a stage of ours leaves the graph as it was and warns once;
`moe.strict` raises instead.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from . import dump, journal, trace
from .journal import (
    Compiled,
    GraphAbandoned,
    GraphSeen,
    Lowered,
    Planned,
    RegionFound,
    RegionRejected,
    RegionSkipped,
    StageFailed,
    Verified,
)
from .nodes import checkpointed, copy_graph
from .options import OptionError, Options

_WARNED: set[str] = set()


def moe_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph with its MoE blocks replaced.

    mode: any mode of Inductor ("reduce-overhead", "max-autotune", ...). options: keys that start with `moe.` are ours
    (docs/options.md), the others go to Inductor. ValueError for an unknown or bad `moe.` option.
    """
    ours, inner_options = Options.parse(options)
    if ours.provider != "auto":
        _check_provider(ours.provider)
    dump.follow_environment()
    # what a checkpoint computes again in the backward is a graph of its own; there are no inputs to measure it on
    unseen = dataclasses.replace(ours, verify=False, tune="off" if ours.tune == "off" else "cost")
    graphs = {gm: journal.next_graph(), **{body: journal.next_graph() for body in checkpointed(gm)}}
    originals = {g: copy_graph(g.graph)[0] for g in graphs}
    finishes: list[Callable[[Any], Any]] = []
    for g, number in graphs.items():
        given = (example_inputs, number, ours) if g is gm else ((), number, unseen)
        with journal.capture() as events:
            try:
                finish = _transform(g, *given, _launch_mode(ours, mode, inner_options))
            except _StageError as failure:
                _give_up(failure, ours)
                _restore(g, originals[g])
                finish = None
        trace.artifacts([e for e in events if e.graph == number])
        finishes += [] if finish is None else [finish]
    compile_inner = _inner(ours.inner, mode, inner_options)
    try:
        compiled = compile_inner(gm, example_inputs)
        for finish in finishes:
            compiled = finish(compiled)
        return compiled
    except torch._dynamo.exc.TorchDynamoException:  # Dynamo's own signals: restarts and skips
        for number in graphs.values():
            journal.record(GraphAbandoned(graph=number))
        raise
    except Exception as error:
        if ours.strict or not finishes:
            raise
        # The inner backend refused the lowered graph. Where it takes the original one, the fault is ours.
        for g, original in originals.items():
            _restore(g, original)
        compiled = compile_inner(gm, example_inputs)
        _give_up(_StageError("inner", error, graphs[gm]), ours)
        return compiled


class _StageError(Exception):
    def __init__(self, stage: str, error: Exception, graph: int) -> None:
        super().__init__(f"{stage}: {type(error).__name__}: {error}")
        self.stage, self.error, self.graph = stage, error, graph


def _transform(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], graph: int, options: Options, launch_mode: str
) -> Callable[[Any], Any] | None:
    """Recognize, plan, tune and lower, in place. A _StageError names the stage that failed.

    None where nothing was replaced, else what is left to do with the compiled graph (moe.verify wraps its first call).
    launch_mode: "graph" where Inductor will replay kernels from CUDA graphs, else "eager": plans differ.
    """
    seconds: dict[str, float] = {}

    def stage(name: str, work: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return work(*args)
        except (OptionError, _StageError):
            raise
        except Exception as error:
            raise _StageError(name, error, graph) from error
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    nodes = len(gm.graph.nodes)
    journal.record(GraphSeen(graph=graph, nodes=nodes, text=_text(gm), ops=_ops(gm)))
    found = stage("recognize", _recognize, gm)
    for r in found.rejections:
        journal.record(
            RegionRejected(
                graph=graph, where=r.where, node=r.node.name, reason=r.verdict.reason, detail=r.verdict.detail
            )
        )
    wanted: dict[int, Any] = {}
    fused: dict[int, bool] = {}
    for number, region in enumerate(found.regions):
        fused[number], why = False, region.router_why
        if region.router is not None:
            verdict = stage("plan", _plan_route, region.spec.router, region.device, options.route)
            fused[number], why = bool(verdict), "" if verdict else str(verdict)
        journal.record(
            RegionFound(
                graph=graph, region=number, spec=str(region.spec), where=region.where, root=region.root.name,
                nodes=nodes, router_why=why,
            )
        )  # fmt: skip
        if skip := _skipped(region, len(wanted), options):
            journal.record(RegionSkipped(graph=graph, region=number, why=skip))
            continue
        wanted[number] = region
    chosen: dict[int, Any] = {}
    plans: list[tuple[str, bool]] = []
    if wanted:
        plan = functools.partial(stage, "plan", _plan, options, launch_mode)
        accounts: dict[int, tuple[Any, Any, str]] = {}  # regions of a spec share a choice
        for number, choice in stage("tune", _choose, gm, inputs, graph, wanted, plan, options, launch_mode).items():
            region, best = wanted[number], choice.plan or choice.planning.plan
            best = dataclasses.replace(best, train=options.train, keep=options.keep)
            if id(choice) not in accounts:
                accounts[id(choice)] = stage("plan", _account, choice, best, region, launch_mode)
            device, buckets, training = accounts[id(choice)]
            journal.record(
                Planned(
                    graph=graph, region=number, candidates=choice.planning.candidates, plan=str(best),
                    device=str(device), buckets=buckets, load=() if choice.load is None else choice.load.classes,
                    copied_bytes=choice.planning.copied_bytes, training=training,
                )
            )  # fmt: skip
            if not choice.plan:
                journal.record(RegionSkipped(graph=graph, region=number, why=str(choice.plan)))
                continue
            chosen[number] = region
            plans.append((str(best), fused[number]))
    finish: Callable[[Any], Any] | None = None
    if chosen:
        finish = stage("lower", _lower, gm, graph, chosen, plans, options.verify)
        journal.record(
            Lowered(
                graph=graph, regions=len(chosen), nodes_before=nodes, nodes_after=len(gm.graph.nodes),
                text=_text(gm), ops=_ops(gm),
            )
        )  # fmt: skip
    journal.record(Compiled(graph=graph, inner=options.inner, seconds=seconds))
    return finish


def _skipped(region: Any, taken: int, options: Options) -> str:
    """Why the user's options leave a proved block alone; "" where they don't."""
    if not fnmatch.fnmatchcase(region.where.module, options.only):
        return f"moe.only={options.only} does not match {region.where.module or 'a block of unknown place'}"
    return f"moe.fuel={options.fuel} is spent" if 0 <= options.fuel <= taken else ""


# The stages. Imported when first used: `import moe_compile` and compiling models without MoE stay light.


def _recognize(gm: torch.fx.GraphModule) -> Any:
    from .recognize import recognize

    return recognize(gm)


def _plan(
    options: Options, launch_mode: str, spec: Any, device: torch.device, copies_left: int, load: Any = None
) -> Any:
    from .hardware import facts
    from .plan import plan_experts

    return plan_experts(
        spec, facts(device), options.provider, weight_copy_bytes=copies_left, mode=launch_mode, load=load
    )


def _account(choice: Any, best: Any, region: Any, launch_mode: str) -> tuple[Any, Any, str]:
    from .hardware import facts
    from .plan import account
    from .providers.triton_backward import in_words

    on, planning = facts(region.device), dataclasses.replace(choice.planning, plan=best)
    buckets = account(planning, region.spec.experts, on, mode=launch_mode, load=choice.load)
    timed = tuple(_with_times(b, choice.trials[b.bound]) if b.bound in choice.trials else b for b in buckets)
    return on, timed, in_words(region.spec.experts, on, best)


def _with_times(bucket: journal.Bucket, trials: tuple[journal.Trial, ...]) -> journal.Bucket:
    """The bucket with what was measured as its offers."""
    offers = [
        journal.Offer(
            candidate=t.candidate, predicted=1e-6 * t.predicted_us, measured=None if t.us is None else 1e-6 * t.us
        )
        for t in trials
    ]
    return dataclasses.replace(bucket, offers=tuple(sorted(offers, key=lambda o: o.predicted)))


def _choose(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    graph: int,
    regions: dict[int, Any],
    plan: Callable[..., Any],
    options: Options,
    launch_mode: str,
) -> Any:
    from .choose import Setting, choose
    from .hardware import facts

    return choose(gm, inputs, graph, regions, plan, Setting(options=options, facts=facts, launch=launch_mode))


def _check_provider(name: str) -> None:
    from .plan import check_provider

    check_provider(name)


def _plan_route(spec: Any, device: torch.device, wish: str) -> Any:
    from .hardware import facts
    from .plan import plan_route

    return plan_route(spec, facts(device), wish)


def _lower(
    gm: torch.fx.GraphModule, graph: int, regions: dict[int, Any], plans: list[tuple[str, bool]], verify: bool
) -> Callable[[Any], Any]:
    from .lower import lower

    compare: Any = None

    def before_swap(outs: list[torch.fx.Node]) -> None:
        nonlocal compare
        if verify:
            from .verify import Pair, comparison

            pairs = [
                Pair(region=n, spec=r.spec.experts, place=str(r.where), root=r.root, out=out)
                for (n, r), out in zip(regions.items(), outs, strict=True)
            ]
            compare = comparison(gm, pairs)

    lower(gm, list(regions.values()), plans, before_swap)
    gm.graph.lint()
    gm.recompile()

    def finish(compiled: Any) -> Any:
        if compare is None:
            return compiled
        from .verify import on_first_call

        return on_first_call(compiled, compare, functools.partial(_tell, graph))

    return finish


def _tell(graph: int, found: list[Any]) -> None:
    for c in found:
        journal.record(
            Verified(
                graph=graph, region=c.region, ok=c.ok, rms=c.rms, max=c.max, rms_bound=c.rms_bound,
                max_bound=c.max_bound,
            )
        )  # fmt: skip


# Falling back


def _restore(gm: torch.fx.GraphModule, original: torch.fx.Graph) -> None:
    gm.graph = original
    gm.recompile()


def _give_up(failure: _StageError, options: Options) -> None:
    """Raise where the user asked for it, else warn once per reason and go on."""
    if options.strict:
        raise failure.error
    reason = str(failure)
    journal.record(StageFailed(graph=failure.graph, stage=failure.stage, error=reason))
    if reason not in _WARNED:
        _WARNED.add(reason)
        warnings.warn(
            f"moe_compile: {reason}; the graph is compiled without MoE kernels (moe.strict=True raises)", stacklevel=2
        )


def _text(gm: torch.fx.GraphModule) -> str:
    return gm.print_readable(print_output=False) if journal.wants_text() else ""


def _ops(gm: torch.fx.GraphModule) -> tuple[tuple[str, int], ...]:
    if not journal.wants_text():
        return ()
    calls = (n.target for n in gm.graph.nodes if n.op in ("call_function", "call_method", "call_module"))
    counts = Counter(t if isinstance(t, str) else getattr(t, "__name__", str(t)) for t in calls)
    return tuple(counts.most_common())


# The inner backend


def _inner(name: str, mode: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    if name == "inductor":
        return _inductor(mode, options)
    if options:
        raise ValueError(f"options {', '.join(options)} are for Inductor, but moe.inner={name}")
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def _inductor(mode: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    patches = _patches(mode, options)

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Any = compile_fx(gm, example_inputs, config_patches=patches or None)
        return compiled

    return compile_graph


def _patches(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's settings of a mode and then the options', as torch.compile itself would apply them."""
    from torch._inductor import list_mode_options

    return {**(list_mode_options(mode, None) if mode not in (None, "default") else {}), **options}


def _launch_mode(ours: Options, mode: str | None, options: dict[str, Any]) -> str:
    """ "graph" where Inductor will replay the kernels from CUDA graphs, else "eager": launches' prices differ."""
    if ours.launch != "auto":
        return ours.launch
    import torch._inductor.config as config

    graphs = ours.inner == "inductor" and _patches(mode, options).get("triton.cudagraphs", config.triton.cudagraphs)
    return "graph" if graphs else "eager"
