"""What a user may set: in, the `options` of torch.compile and the environment; out, a frozen `Options`.

Keys that start with `moe.` are ours; every other key goes to Inductor as it is. MOE_COMPILE="key=value,key=value" sets
defaults for a process (with or without the prefix) and MOE_COMPILE_DUMP names the dump folder; an explicit option wins
over the environment. This is the only file that reads os.environ.

The fields of `Options` are the table: one row an option. docs/options.md is printed from it:
`python -m moe_compile.options > docs/options.md`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "moe."
ENVIRONMENT = "MOE_COMPILE"
DUMP_ENVIRONMENT = "MOE_COMPILE_DUMP"


def _row(default: Any, doc: str, *, choices: tuple[str, ...] = (), least: int = 0) -> Any:
    """A field of `Options`. least: the smallest value, of a number."""
    metadata = {"doc": doc, "choices": choices, "least": least}
    return dataclasses.field(default=default, metadata=metadata)


class OptionError(ValueError):
    """What an option asks for can't be had, found out late: raised to the user, never a reason to fall back."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one compilation. Build it with `parse`, which checks names and values."""

    inner: str = _row(
        "inductor",
        "Who compiles the graph once the blocks are replaced.",
        choices=("inductor", "aot_eager", "eager"),
    )
    strict: bool = _row(
        False, "Raise when a stage of ours fails, instead of compiling the graph as it was with one warning."
    )
    provider: str = _row(
        "auto",
        "Use this candidate for every block that its provider supports: `triton_grouped`, or with some or all of its "
        "knobs `triton_grouped(M=64)`, as `explain` prints them; `auto`: the planner picks.",
    )
    weight_copy_bytes: int = _row(
        0, "Bytes that a graph's blocks may spend together on expert weights in layouts of kernels, beside the model's."
    )
    launch: str = _row(
        "auto",
        "How calls will be launched, which times depend on: `graph`, replayed from a CUDA graph, also one that you "
        "capture yourself, or `eager`; `auto`: `graph` where Inductor records CUDA graphs.",
        choices=("auto", "graph", "eager"),
    )
    train: str = _row(
        "auto",
        "Whose kernels train a block: `auto`, ours, those for compute capability 9.0 where they run; `grouped`, ours "
        "for any device; `aten`, torch's own.",
        choices=("auto", "grouped", "aten"),
    )
    keep: str = _row(
        "all",
        "What training keeps of the first linear's result, where our kernels train a block: `all`; `half`, of gate and "
        "up the second, the other computed again (not where they alternate); `none`. See "
        "[kernels.md](kernels.md#training) for what each costs.",
        choices=("all", "half", "none"),
    )
    tune: str = _row(
        "auto",
        "How kernels are chosen. `measure`: timed on tokens that route like real ones, once, then from the cache; "
        "`cost`: by predicted time, or from the cache where it knows; `off`: by predicted time alone; `auto`: "
        "`measure` on CUDA, `cost` on a CPU. See [tuning.md](tuning.md).",
        choices=("auto", "off", "cost", "measure"),
    )
    tune_seconds: float = _row(20.0, "How long to measure for each distinct spec; what is left keeps its prediction.")
    cache: str = _row(
        "auto", "Folder of the tuning cache; `auto`: moe_compile in the platform's cache folder; `off`: no cache."
    )
    agree: str = _row(
        "auto",
        "Whether ranks choose together, each waiting for all; `auto`: where torch.distributed runs and choices are "
        "measured. `off` where ranks compile different graphs, as in a pipeline.",
        choices=("auto", "on", "off"),
    )
    agree_seconds: float = _row(120.0, "How long a rank waits for the others, beyond the time it may measure.")
    data_parallel_rank: int = _row(
        0, "Seed of the tokens that are measured: the same on ranks that compute the same tokens."
    )
    route: str = _row(
        "auto",
        "Whether a recognized router becomes an operator (`op`) or its nodes stay in the graph (`nodes`); `auto`: an "
        "operator where the provider's fused routing is faster.",
        choices=("auto", "op", "nodes"),
    )
    verify: bool = _row(
        False,
        "Run each emitted operator once, on the values of the first call, beside the nodes it replaces; raise where "
        "they differ by more than rounding.",
    )
    only: str = _row("*", "Replace only blocks whose module path matches this pattern, such as `model.layers.[0-3].*`.")
    fuel: int = _row(-1, "Replace only the first so many blocks of each graph (bisecting); -1: all of them.", least=-1)

    @classmethod
    def parse(
        cls, options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> tuple[Options, dict[str, Any]]:
        """(our options, the rest of `options` for Inductor). `environ` is os.environ unless given.

        ValueError names the option, what is valid and the closest name.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for pair in filter(None, map(str.strip, re.split(r",(?![^()]*\))", environ.get(ENVIRONMENT, "")))):
            key, equals, raw = map(str.strip, pair.partition("="))
            if not equals:
                raise ValueError(
                    f'{ENVIRONMENT}: {pair!r} is not key=value, as in {ENVIRONMENT}="strict=1,inner=eager"'
                )
            name = one_of(f"{ENVIRONMENT} key", key.removeprefix(PREFIX), _FIELDS)
            values[name] = _read(_FIELDS[name], raw, f"{ENVIRONMENT} {name}")
        for key, raw in (options or {}).items():
            if key.startswith(PREFIX):
                name = one_of("option", key, [PREFIX + n for n in _FIELDS]).removeprefix(PREFIX)
                values[name] = _read(_FIELDS[name], raw, key)
            else:
                rest[key] = raw
        return cls(**values), rest


def dump_folder(environ: Mapping[str, str] | None = None) -> str:
    """The folder that MOE_COMPILE_DUMP names, "" if none."""
    return (os.environ if environ is None else environ).get(DUMP_ENVIRONMENT, "")


def cache_folder(setting: str, environ: Mapping[str, str] | None = None) -> str:
    """The folder that `moe.cache` means, "" for none."""
    environ = os.environ if environ is None else environ
    if setting != "auto":
        return "" if setting == "off" else os.path.expanduser(setting)
    if sys.platform == "win32":
        base = environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "moe_compile")


def one_of(what: str, value: str, valid: Iterable[str]) -> str:
    """`value` if it is one of `valid`; else ValueError with the valid ones and the closest."""
    valid = list(valid)
    if value in valid:
        return value
    close = difflib.get_close_matches(str(value), valid, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{what}: {value!r} is not one of {', '.join(valid)}{hint}")


_FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Options)}
_WORDS = {"1": True, "true": True, "0": False, "false": False}


def _read(field: dataclasses.Field[Any], raw: Any, what: str) -> Any:
    """`raw` as the field's type: itself, or the text of it (environment and JSON hold text)."""
    kind: type = type(field.default)
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        word = str(raw).lower()
        return _WORDS[one_of(what, word, _WORDS)]
    if kind in (int, float):
        try:
            number = kind(raw)
            same = isinstance(raw, str) or (number == raw and not isinstance(raw, bool))  # int(2.5) is 2
            if same and number >= field.metadata["least"]:  # which NaN is not
                return number
        except (TypeError, ValueError, OverflowError):
            pass
        named = "whole number" if kind is int else "number"
        raise ValueError(f"{what}: {raw!r} is not a {named} of at least {field.metadata['least']}")
    if not isinstance(raw, str):
        raise ValueError(f"{what}: {raw!r} is not text")
    return one_of(what, raw, field.metadata["choices"]) if field.metadata["choices"] else raw


def markdown() -> str:
    """docs/options.md."""
    rows = []
    for f in _FIELDS.values():
        metadata = f.metadata
        valid = " \\| ".join(f"`{c}`" for c in metadata["choices"]) or type(f.default).__name__
        rows.append(f"| `{PREFIX}{f.name}` | {valid} | `{f.default}` | {metadata['doc']} |")
    return "\n".join((_HEAD, *rows, _TAIL))


_HEAD = f"""\
# Options

Printed by `python -m moe_compile.options`; edit the table in moe_compile/options.py instead.

    torch.compile(model, backend="moe", options={{"moe.strict": True, "max_autotune": True}})

Keys that start with `{PREFIX}` are ours, the others go to Inductor. A wrong name or value is a ValueError that says
what is valid.

| option | values | default | meaning |
| --- | --- | --- | --- |"""

_TAIL = f"""
## Environment

* `{ENVIRONMENT}="key=value,key=value"`: defaults for a process, such as `{ENVIRONMENT}="strict=1,inner=eager"`.
  An option given to torch.compile wins.
* `{DUMP_ENVIRONMENT}=folder`: write every graph before and after, the specs and a runnable reproduction of each block
  there; see [inspecting.md](inspecting.md).
"""

if __name__ == "__main__":
    print(markdown(), end="")
