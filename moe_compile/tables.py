"""Rows and words of a report: plans, predictions, measurements as columns; in, what the journal has; out, text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from . import journal
from .providers.base import Plan


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def verdicts(candidates: Iterable[str]) -> list[str]:
    """ "aten: ok", "triton_decode, triton_grouped: no CUDA device": what was said of each, said once."""
    said: dict[str, list[str]] = {}
    for line in candidates:
        name, _, verdict = line.partition(": ")
        said.setdefault(verdict, []).append(name)
    return [f"{', '.join(names)}: {verdict}" for verdict, names in said.items()]


def places(modules: Iterable[str]) -> str:
    """ "model.layers.0.mlp ... model.layers.3.mlp": runs of modules that differ in one number, in order."""
    runs: dict[str, list[str]] = {}
    for module in dict.fromkeys(modules):
        runs.setdefault(re.sub(r"\d+", "#", module, count=1), []).append(module or "(module unknown)")
    return ", ".join(f"{r[0]} ... {r[-1]}" if len(r) > 2 else ", ".join(r) for r in runs.values())


def trial_rows(tuned: Sequence[journal.Tuned]) -> list[tuple[str, ...]]:
    """A heading and a row a bucket: microseconds measured and predicted of the chosen one, the experts that so many
    tokens reached, the fastest other contender over it."""
    rows: list[tuple[str, ...]] = [("tokens", "us", "predicted", "experts", "others", "chosen")]
    for t in tuned:
        times = {trial.candidate: trial for trial in t.trials}
        mine = times.get(t.chosen)
        if mine is None or mine.us is None:
            continue
        others = [o.us for o in t.trials if o.us is not None and o is not mine and not o.why]
        behind = f"{min(others) / mine.us:.2f}" if others else "-"
        part = "" if t.complete else " (cut by the budget)"
        rows.append(
            (str(t.at), f"{mine.us:.1f}", f"{mine.predicted_us:.1f}", f"{t.reach:.1f}", behind, f"{t.chosen}{part}")
        )
    return rows


def bucket_rows(buckets: Sequence[journal.Bucket]) -> list[tuple[str, ...]]:
    """A heading and a row for each run of buckets that chose alike, at the largest token count of the run.

    fill: of the rows that tensor cores compute, the share that are routes. runner-up: the next best that was offered,
    and its time over the chosen one's.
    """
    rows: list[tuple[str, ...]] = [
        ("tokens", "us", "limit", "of limit", "set by", "experts", "fill", "waves", "runner-up")
    ]
    for chosen, run in groupby(buckets, key=lambda b: b.chosen):
        *_, bucket = run
        mine = next((o for o in bucket.offers if o.candidate == chosen), None)
        if mine is None:
            continue
        others = [o for o in bucket.offers if o is not mine]
        fill, waves = bucket.step_rows("fill"), bucket.step_rows("waves")
        rows.append(
            (
                str(bucket.tokens),
                f"{1e6 * mine.predicted:.1f}",
                f"{1e6 * bucket.limit:.1f}",
                f"{bucket.limit / mine.predicted:.0%}",
                bucket.bound_by,
                f"{bucket.active:.0f}",
                f"{min(fill):.0%}" if fill else "",
                " + ".join(f"{w:.1f}" for w in waves),
                f"{_unlike(others[0].candidate, chosen)}, {others[0].predicted / mine.predicted:.2f} x"
                if others
                else "none",
            )
        )
    return rows


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns as wide as they need be; numbers to the right, the last column as it is."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join((*(f"{c:>{w}}" for c, w in zip(row[:-1], widths)), row[-1])).rstrip() for row in rows]


def plan_lines(text: str) -> list[str]:
    """["up to 16 tokens  aten", "more  triton_grouped"] of the plan "16:aten;*:triton_grouped"."""
    buckets = [(str(b or "*"), str(c)) for b, c in Plan.parse(text).buckets]
    if len(buckets) == 1:
        return [f"{buckets[0][1]} for any number of tokens"]
    bounds = ["more" if bound == "*" else f"up to {bound} token{'' if bound == '1' else 's'}" for bound, _ in buckets]
    return [f"{bound:{max(map(len, bounds))}}  {c}" for bound, (_, c) in zip(bounds, buckets)]


def _unlike(candidate: str, other: str) -> str:
    """`candidate` by what tells it from `other`: of the same provider only the knobs that differ."""
    (name, knobs), (other_name, other_knobs) = (c.rstrip(")").partition("(")[::2] for c in (candidate, other))
    if name != other_name:
        return name
    return ",".join(k for k in knobs.split(",") if k not in other_knobs.split(","))
