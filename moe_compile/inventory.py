"""What the tuning cache holds, in words, and filling it ahead of time: the commands `moe-compile cache` and `tune`.

In: a folder (as `moe.cache` names it). Out: values that print and have `as_dict` for JSON. Nothing is decided here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cache import Cache, Entry, Key
from .options import cache_folder
from .spec import ExpertsSpec


@dataclass(frozen=True, kw_only=True)
class Held:
    """The entries of one spec on one device under one kind of launch, by bucket. `name` is short and stable."""

    name: str
    spec: str
    device: str
    launch: str
    entries: tuple[Entry, ...]

    def line(self) -> str:
        try:
            s = ExpertsSpec.parse(self.spec)
            sizes = f"E={s.E} K={s.K} H={s.H} I={s.I} {s.act.name} {s.x}"
        except ValueError:  # of a version with other fields
            sizes = self.spec[:44]
        partial = sum(not e.complete for e in self.entries)
        buckets = f"{len(self.entries)} buckets" + (f", {partial} partial" if partial else "")
        newest = max((str(e.facts.get("date", "")) for e in self.entries), default="")[:10]
        return f"{self.name}  {sizes:44} {self.device:20} {self.launch:6} {buckets:22} {newest}"

    def table(self) -> list[str]:
        lines = [self.spec, f"{self.device}, launched by {self.launch}"]
        lines.append(f"{'tokens':>7} {'us':>9} {'predicted':>9} {'reach':>6}  chosen")
        for e in self.entries:
            trials = {t["candidate"]: t for t in e.facts.get("trials", ())}
            mine = trials.get(e.chosen, {})
            rest = [t for c, t in trials.items() if c != e.chosen]
            note = "" if e.complete else "  (cut by the budget)"
            lines.append(
                f"{e.key.tokens:>7} {_us(mine.get('us'))} {_us(mine.get('predicted_us'))} "
                f"{e.facts.get('reach', 0):6.1f}  {e.chosen}{note}"
            )
            lines += [
                f"{'':7} {_us(t['us'])} {_us(t['predicted_us'])} {'':6}  {t['candidate']} {t['why']}" for t in rest
            ]
        lines.append(f"on {', '.join(sorted({e.key.workload for e in self.entries}))}")
        return lines


def _us(value: Any) -> str:
    return f"{value:9.1f}" if isinstance(value, (int, float)) else f"{'-':>9}"


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """A cache folder's contents; `full` prints every bucket and trial. beside: comparisons with blocks' own nodes."""

    folder: str
    held: tuple[Held, ...]
    problems: tuple[str, ...]
    full: bool = False
    beside: int = 0

    def as_dict(self) -> dict[str, Any]:
        found = [
            {
                "name": h.name, "spec": h.spec, "device": h.device, "launch": h.launch,
                "buckets": [
                    {"tokens": e.key.tokens, "chosen": e.chosen, "complete": e.complete, "workload": e.key.workload,
                     "versions": dict(e.key.versions), **e.facts} for e in h.entries
                ],
            } for h in self.held
        ]  # fmt: skip
        return {"folder": self.folder, "held": found, "problems": list(self.problems)}

    def __str__(self) -> str:
        count = sum(len(h.entries) for h in self.held)
        beside = f", {self.beside} of them beside a block's own nodes" if self.beside else ""
        lines = [f"{self.folder}: {count + self.beside} results{beside}"]
        for h in self.held:
            lines += ["", f"{h.name}", *(f"  {line}" for line in h.table())] if self.full else [h.line()]
        return "\n".join([*lines, *(f"! {p}" for p in self.problems)])


def inventory(cache: Cache, match: str = "", *, full: bool = False) -> Inventory:
    """What `cache` holds of the specs whose line or name has `match` in it."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    beside = 0
    for key, entry in cache.entries().items():
        if key.workload.startswith("beside:"):
            beside += not match
        else:
            groups.setdefault((key.spec, key.device, key.launch), []).append(entry)
    held = []
    for (spec, device, launch), entries in groups.items():
        name = hashlib.sha256(f"{spec}|{device}|{launch}".encode()).hexdigest()[:8]
        if match in name or match in spec:
            ordered = sorted(entries, key=lambda e: (e.key.tokens == "*", len(e.key.tokens), e.key.tokens))
            held.append(Held(name=name, spec=spec, device=device, launch=launch, entries=tuple(ordered)))
    if match and not held:
        raise ValueError(f"nothing in {cache.folder} matches {match!r}")
    return Inventory(
        folder=str(cache.folder), held=tuple(held), problems=tuple(cache.problems), full=full, beside=beside
    )


def tune_model(
    name: str, tokens: int, *, cache: str = "auto", launch: str | None = None, seconds: float = 20.0
) -> Inventory:
    """Run a model once under the backend, with every token bucket of its blocks measured; what the cache holds then."""
    import torch

    from .backend import moe_backend
    from .pretrained import load

    if not cache_folder(cache):
        raise ValueError("moe.cache=off: there is nowhere to keep what is measured")
    model, inputs = load(name, tokens)
    if model.device.type == "meta":
        raise ValueError(f"{name} has no weights: tuning measures on the model's own")
    options = {
        "moe.inner": "eager", "moe.strict": True,
        "moe.cache": cache, "moe.tune": "measure", "moe.tune_seconds": seconds,
        "moe.launch": launch or ("graph" if model.device.type == "cuda" else "eager"),
    }  # fmt: skip

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return moe_backend(gm, example_inputs, options=options)

    with torch.no_grad():
        compiled: Any = torch.compile(model, backend=backend, dynamic=True)
        compiled(**inputs)
    return inventory(_open(cache))


def _open(folder: str) -> Cache:
    path = cache_folder(folder)
    if not path:
        raise ValueError("moe.cache=off names no folder")
    return Cache(path)


def _here() -> Key:
    """A Key with this machine's device and every provider's version."""
    import torch

    from .hardware import facts
    from .providers import providers

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    versions = tuple((n, p.version()) for n, p in providers().items() if p.available())
    return Key(spec="", tokens="", device=facts(device).name, launch="", workload="", versions=versions)


def _import(folder: str, file: str) -> str:
    return f"{_open(folder).import_from(file, _here())} results imported"


def _export(folder: str, file: str) -> str:
    return f"{_open(folder).export(file)} results written to {file}"


def _clear(folder: str, _: str) -> str:
    cache = _open(folder)
    return f"{cache.clear()} results dropped from {cache.path}"


ACTIONS: dict[str, Callable[[str, str], Any]] = {
    "list": lambda folder, match: inventory(_open(folder), match),
    "show": lambda folder, match: inventory(_open(folder), match, full=True),
    "export": _export,
    "import": _import,
    "clear": _clear,
}
