"""report.html: what the compiler did, on one page that needs nothing else; in, the journal's events; out, HTML text.

For each distinct block: what it computes and where it is, time against tokens beside the device's limit (with the
plan's choice shaded), a row for each token bucket, and how unevenly the workload's tokens load the experts; then what
was not proved and why, and each graph before and after. Colours follow the reader's light or dark setting: plots are
SVG that takes the page's text colour. Plots need matplotlib (`pip install moe_compile[report]`); without it the page
says so and has the tables alone.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from . import journal
from .explain import Region, Report
from .tables import count, places, verdicts

INK = "#010203"  # stands for the page's text colour in plots
# Mid-tones that read on white and on near-black, told apart without red against green (after Okabe and Ito, 2008).
COLOURS = ("#2f8fd0", "#d9822b", "#1aa179", "#c763a0", "#8a7fd6", "#b59b1c", "#777777")


def html(events: Iterable[journal.Event]) -> str:
    """The page of these events."""
    events = tuple(events)
    report = Report.from_events(events)
    groups: dict[Any, list[Region]] = {}
    for region in report.regions:
        groups.setdefault((region.spec, region.chosen, region.replaced, region.skipped), []).append(region)
    sections = [_region(same) for same in groups.values()]
    sections += [_rejections(report)] if report.rejections or report.failures else []
    sections += _graphs(events)
    replaced = sum(r.replaced for r in report.regions)
    summary = f"{count(report.graphs, 'graph')}, {replaced} of {count(len(report.regions), 'MoE block')} replaced"
    return _PAGE.format(summary=escape(summary), sections="\n".join(sections))


def _region(same: list[Region]) -> str:
    first = same[0]
    e = first.spec.experts
    facts = [
        ("computes", f"{e.K} of {e.E} experts a token, {e.H} → {e.I} → {e.H}, {e.act.name}, {e.x}"),
        ("spec", "<br>".join(_code(str(part)) for part in (e, first.spec.router) if part)),
        ("source", f"{escape(first.where.source)} {_code(first.where.code)}"),
        ("router", f"keeps its nodes: {escape(first.router_why)}" if first.router_why else ""),
        ("planned for", escape(first.device)),
        ("considered", "<br>".join(map(escape, verdicts(first.candidates)))),
    ]
    if not first.replaced:
        facts.append(("not replaced", escape(first.skipped or "a later stage failed")))
    rows = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in facts if text.strip())
    heading = f"{escape(places(r.where.module for r in same))} <small>{count(len(same), 'block')}</small>"
    body = [f"<h2>{heading}</h2><table class=facts>{rows}</table>"]
    if first.buckets:
        body += [_figure(_roofline(first.buckets), _ROOFLINE_CAPTION), _bucket_table(first.buckets)]
    if first.tuned:
        body += [_tuning(first), _figure(_reach(first), _REACH_CAPTION)]
    if first.load:
        body.append(_figure(_load(first), _LOAD_CAPTION))
    return f"<section>{''.join(body)}</section>"


def _tuning(region: Region) -> str:
    tokens = ", ".join(dict.fromkeys(t.workload for t in region.tuned))
    cached = sum(t.source == "cache" for t in region.tuned)
    text = f"{count(len(region.tuned), 'bucket')} measured on {tokens}, {cached} of them by an earlier run"
    if why := next((t.why for t in region.tuned if t.why), ""):
        text += f" ({why})"
    if b := region.beside:
        text += f"; for {b.tokens} tokens the block's own nodes take {b.nodes_us:.1f} µs"
        text += f", the operator {b.operator_us:.1f} µs"
    return f"<p>{escape(text)}.</p>"


_LOAD_CAPTION = (
    "How unevenly the workload's tokens load the experts: rows of each expert over the mean, the most popular first. "
    "1 everywhere would be no skew."
)
_REACH_CAPTION = (
    "Experts that so many tokens reach. Dots: the tokens that tuning measured on; line: routes without any skew, "
    "which the prediction assumes where nothing was measured. The fewer, the more rows an expert has."
)
_ROOFLINE_CAPTION = (
    "Time of a call against its tokens. Dashed: the device's limit. Lines: what the cost model predicts for the best "
    "candidate of each provider; dots: measured. Shaded: the provider that the plan chose."
)


def _bucket_table(buckets: Sequence[journal.Bucket]) -> str:
    head = ("tokens", "chosen", "predicted, µs", "measured, µs", "limit, µs", "set by", "experts", "fill", "waves")
    rows = []
    for b in buckets:
        mine = next((o for o in b.offers if o.candidate == b.chosen), None)
        fill, waves = b.step_rows("fill"), b.step_rows("waves")
        bound = f"{b.bound}" if b.bound is not None else f"more (at {b.tokens})"
        cells = (
            bound,
            _code(b.chosen),
            f"{1e6 * mine.predicted:.1f}" if mine else "",
            f"{1e6 * mine.measured:.1f}" if mine and mine.measured else "",
            f"{1e6 * b.limit:.1f}",
            b.bound_by,
            f"{b.active:.0f}",
            f"{min(fill):.0%}" if fill else "",
            " + ".join(f"{w:.1f}" for w in waves),
        )
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    titles = "".join(f"<th>{h}</th>" for h in head)
    return f"<div class=wide><table class=rows><tr>{titles}</tr>{''.join(rows)}</table></div>"


def _rejections(report: Report) -> str:
    items = [
        f"<dt>{escape(r.where.module or 'module unknown')}</dt><dd>{escape(r.reason)}"
        f"{': ' + escape(r.detail) if r.detail else ''}<br>{escape(r.where.source)} {_code(r.where.code)} "
        f"<small>node {escape(r.node)}</small></dd>"
        for r in report.rejections
    ]
    items += [
        f"<dt>stage {escape(f.stage)} failed, graph {f.graph} was compiled as it was</dt><dd>{escape(f.error)}</dd>"
        for f in report.failures
    ]
    return f"<section><h2>Left as it was</h2><dl>{''.join(items)}</dl></section>"


def _graphs(events: Sequence[journal.Event]) -> list[str]:
    before = {e.graph: e for e in events if isinstance(e, journal.GraphSeen)}
    after = {e.graph: e for e in events if isinstance(e, journal.Lowered)}
    sections = []
    for number, seen in before.items():
        lowered = after.get(number)
        if lowered is None or not seen.text:
            continue
        old, new = seen.text.splitlines(), lowered.text.splitlines()
        gone: set[int] = set()
        come: set[int] = set()
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if tag != "equal":
                gone.update(range(i1, i2))
                come.update(range(j1, j2))
        sections.append(
            f"<section><h2>Graph {number}</h2><p>{seen.nodes} nodes before, {lowered.nodes_after} after.</p>"
            f"<details><summary>before: what the blocks were is marked</summary>{_listing(old, gone, 'gone')}</details>"
            f"<details><summary>after: what stands for them is marked</summary>{_listing(new, come, 'come')}</details>"
            "</section>"
        )
    return sections


def _listing(lines: Sequence[str], marked: set[int], mark: str) -> str:
    shown = (f"<span class={mark}>{escape(x)}</span>" if i in marked else escape(x) for i, x in enumerate(lines))
    return f"<pre>{chr(10).join(shown)}</pre>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>" if text else ""


# Plots


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _reach(region: Region) -> str:
    """Experts reached against tokens."""
    drawing = _axes(width=8.0, height=2.6)
    if drawing is None:
        return ""
    figure, axes = drawing
    tokens = [b.tokens for b in region.buckets]
    axes.plot(tokens, [b.active for b in region.buckets], "--", color=INK, linewidth=1.2, label="without skew")
    axes.plot([t.at for t in region.tuned], [t.reach for t in region.tuned], "o", color=COLOURS[0], label="measured on")
    axes.set(xscale="log", xlabel="tokens", ylabel="experts", ylim=(0, 1.05 * region.spec.experts.E))
    _label_tokens(axes, tokens)
    return _svg(figure)


def _load(region: Region) -> str:
    """Rows an expert over the mean, by popularity."""
    drawing = _axes(width=8.0, height=2.6)
    if drawing is None:
        return ""
    figure, axes = drawing
    e = region.spec.experts
    shares = [p * e.E / e.K for experts, p in region.load for _ in range(experts)]
    axes.fill_between(range(len(shares)), shares, step="mid", color=COLOURS[0], alpha=0.6, linewidth=0)
    axes.axhline(1, linestyle="--", color=INK, linewidth=1.2)
    axes.set(xlabel="experts, by popularity", ylabel="rows / mean", xlim=(-0.5, len(shares) - 0.5), ylim=(0, None))
    return _svg(figure)


def _label_tokens(axes: Any, tokens: Sequence[int]) -> None:
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.minorticks_off()
    axes.legend(frameon=False, labelcolor=INK)


def _roofline(buckets: Sequence[journal.Bucket]) -> str:
    """Time against tokens, both logarithmic."""
    drawing = _axes(width=8.0, height=4.2)
    if drawing is None:
        return _NO_PLOTS
    figure, axes = drawing
    tokens = [b.tokens for b in buckets]
    chosen = [o.predicted for b in buckets for o in b.offers if o.candidate == b.chosen]
    names = list(dict.fromkeys(_provider(o.candidate) for b in buckets for o in b.offers))
    colour = dict(zip(names, COLOURS * len(names)))
    axes.plot(tokens, [1e6 * b.limit for b in buckets], "--", color=INK, linewidth=1.2, label="limit")
    for name in names:
        best = [min((o.predicted for o in b.offers if _provider(o.candidate) == name), default=None) for b in buckets]
        points = [(t, 1e6 * s) for t, s in zip(tokens, best) if s is not None]
        axes.plot(*zip(*points), "-", color=colour[name], linewidth=1.6, label=name)
        dots = [
            (b.tokens, 1e6 * o.measured)
            for b in buckets
            for o in b.offers
            if _provider(o.candidate) == name and o.measured
        ]
        if dots:
            axes.plot(*zip(*dots), "o", color=colour[name], markersize=4)
    edges = [tokens[0] / 1.4, *((a * b) ** 0.5 for a, b in pairwise(tokens)), tokens[-1] * 1.4]
    for b, (low, high) in zip(buckets, pairwise(edges)):
        axes.axvspan(low, high, color=colour.get(_provider(b.chosen), INK), alpha=0.13, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs", xlim=(edges[0], edges[-1]))
    if chosen:  # what is far above the choice would squeeze the rest together
        axes.set_ylim(0.7e6 * min(b.limit for b in buckets), 3e6 * max(chosen))
    _label_tokens(axes, tokens)
    return _svg(figure)


def _provider(candidate: str) -> str:
    return candidate.partition("(")[0]


def _axes(width: float, height: float) -> tuple[Any, Any] | None:
    """(figure, axes) in the page's colours, inches; None without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return None
    ink: Any = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    with matplotlib.rc_context({**dict.fromkeys(ink, INK), "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.grid(True, alpha=0.18, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe_compile"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r'(<svg[^>]*?) width="[^"]*"([^>]*?) height="[^"]*"', r"\1\2", text, count=1)


_NO_PLOTS = "<p>No plots: <code>pip install 'moe_compile[report]'</code> brings the library that draws them.</p>"

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>moe_compile report</title>
<style>
:root {{ --page: #fdfdfc; --ink: #1c1c1a; --soft: #66665f; --line: #d9d8d2;
  --tint: #f1f0ec; --gone: #f6d9cf; --come: #cfe8dc; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #161614; --ink: #e6e5df; --soft: #9b9a92; --line: #3a3a35;
    --tint: #22221f; --gone: #5a2f22; --come: #1f4a38; }}
}}
body {{ margin: 0 auto; padding: 1.5rem; max-width: 70rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }}
small, figcaption {{ color: var(--soft); font-weight: normal; font-size: .85rem; }}
section {{ border-top: 1px solid var(--line); padding: 1.2rem 0; }}
code, pre {{ font: .82rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }}
pre, .wide {{ overflow-x: auto; }} pre {{ background: var(--tint); padding: .8rem; overflow-wrap: normal; }}
table {{ border-collapse: collapse; }} th {{ text-align: left; font-weight: 600; }}
.facts th {{ color: var(--soft); padding: .1rem 1rem .1rem 0; vertical-align: top; white-space: nowrap; }}
.rows {{ font-size: .85rem; width: 100%; }}
.rows th, .rows td {{ padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }}
.rows td:nth-child(2) {{ white-space: normal; min-width: 14rem; }}
figure {{ margin: 1rem 0; }} svg {{ width: 100%; max-width: 46rem; height: auto; color: var(--ink); }}
.gone {{ background: var(--gone); }} .come {{ background: var(--come); }}
dt {{ font-weight: 600; overflow-wrap: anywhere; }} dd {{ margin: 0 0 .8rem 1rem; }}
</style>
<h1>moe_compile</h1>
<p>{summary}</p>
{sections}
</html>
"""
