"""`prepare(model)`: MoE modules that Dynamo can't capture get a form that it can; `restore(model)` undoes it.

In: a model. Out: the same model, and a report of what changed and why. No weight is copied, moved or renamed, unless
asked for: `weights="swap_in_place"` exchanges gate and up rows (inplace.py). The library's own implementations are
preferred; where a class has none, its forward is replaced on the instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from . import inplace
from .capturable import FORMS, Form

_REPLACED = "_moe_compile_replaced"  # on a module whose forward was replaced
_SWITCHED = "_moe_compile_switched"  # on an experts module: the implementation that its config named before


@dataclass(frozen=True, kw_only=True)
class Change:
    """One module's: its path in the model and its class, what it runs now, and what of its own breaks the graph."""

    module: str
    kind: str
    to: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` changed in this call, what it had changed before, and what breaks graphs but was left alone."""

    changes: tuple[Change, ...] = ()
    before: tuple[str, ...] = ()
    left: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        """Whether this call changed anything."""
        return bool(self.changes)

    def __str__(self) -> str:
        already = f", {len(self.before)} were already" if self.before else ""
        lines = [f"moe_compile.prepare: {len(self.changes)} modules changed{already}"]
        for items, verb in ((self.changes, "runs"), (self.left, "is left alone:")):
            groups: dict[tuple[str, str, str], list[str]] = {}
            for c in items:
                groups.setdefault((c.kind, c.to, c.why), []).append(c.module or "(the model itself)")
            for (kind, to, why), modules in groups.items():
                place = modules[0] if len(modules) == 1 else f"{modules[0]} ... {modules[-1]} ({len(modules)})"
                lines += [f"  {place}: {kind} {verb} {to}", f"    because of {why}"]
        return "\n".join(lines)


def prepare(model: nn.Module, *, weights: str = "as_is") -> Prepared:
    """Make the MoE modules of `model` capturable, in place. Idempotent; `restore(model)` undoes it exactly.

    model: any module; what is not MoE, or can be captured as it is, stays. TypeError for anything else.
    weights: "as_is", or "swap_in_place": the rows of fused gate and up weights change places, for kernels that want
    [up; gate], without memory for a copy; the modules compute what they did. ValueError for anything else.
    """
    _check("prepare", model)
    if weights not in ("as_is", "swap_in_place"):
        raise ValueError(f"prepare: weights={weights!r} is not one of as_is, swap_in_place")
    changes: list[Change] = []
    before: list[str] = []
    left: list[Change] = []
    loops = {id(m): _implementation(m) for m in model.modules() if _loops(m)}  # read first: modules share configs
    for path, module in model.named_modules():
        kind = type(module).__name__
        form = _form(module)
        if _prepared(module):
            before.append(path)
        elif id(module) in loops:
            setattr(module, _SWITCHED, loops[id(module)])
            _switch(module, "grouped_mm")
            why = "experts_implementation=eager, a loop over the experts that nonzero() names"
            changes.append(Change(module=path, kind=kind, to="experts_implementation=grouped_mm", why=why))
        elif form is not None:
            missing = [name for name in form.reads if not hasattr(module, name)]
            if missing or "forward" in vars(module):
                why = f"it lacks {', '.join(missing)}" if missing else "its forward was replaced by somebody else"
                left.append(Change(module=path, kind=kind, to=why, why=form.breaks))
                continue
            module.forward = MethodType(form.forward, module)
            setattr(module, _REPLACED, inplace.Unpicklable())
            changes.append(Change(module=path, kind=kind, to=f"capturable.{form.forward.__name__}", why=form.breaks))
    if weights == "swap_in_place":
        kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        to, why = "[up; gate] rows, exchanged in place", "weights=swap_in_place"
        changes += [Change(module=path, kind=kinds[path], to=to, why=why) for path in inplace.swap(model)]
    return Prepared(changes=tuple(changes), before=tuple(before), left=tuple(left))


def restore(model: nn.Module) -> tuple[str, ...]:
    """Undo `prepare`; the paths of the modules that run their own code again. Other replacements are not touched.
    TypeError where model is no module."""
    _check("restore", model)
    undone = list(inplace.restore(model))
    for path, module in model.named_modules():
        if not _prepared(module):
            continue
        undone.append(path)
        if _SWITCHED in vars(module):
            _switch(module, vars(module)[_SWITCHED])
            delattr(module, _SWITCHED)
        else:
            del module.forward
            delattr(module, _REPLACED)
    return tuple(dict.fromkeys(undone))


def _check(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model is a {type(model).__name__}, not a torch.nn.Module")


def breaking(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(path, what breaks the graph) of the modules that `prepare` would change."""
    for path, module in model.named_modules():
        form = _form(module)
        if not _prepared(module) and (form is not None or _loops(module)):
            yield path, form.breaks if form is not None else "experts_implementation=eager"


def _form(module: nn.Module) -> Form | None:
    cls = type(module)
    return FORMS.get(cls.__name__) if cls.__module__.startswith("transformers.") else None


def _prepared(module: nn.Module) -> bool:
    return not {_SWITCHED, _REPLACED}.isdisjoint(vars(module))


def _loops(module: nn.Module) -> bool:
    """Whether a module's forward is chosen by its config, which chooses the loop."""
    if not hasattr(module, "is_concatenated") or not hasattr(module, "config"):  # what the library's decorator sets
        return False
    plain = all(p.is_floating_point() and p.element_size() > 1 for p in module.parameters())
    return plain and _implementation(module) in ("eager", None)


def _implementation(module: Any) -> str | None:
    """What the config of an experts module names; "" where it has no such choice."""
    name: str | None = getattr(module.config, "_experts_implementation", "")
    return name


def _switch(module: Any, implementation: str | None) -> None:
    """Of this module's config only: the public setter would reach into those of its parts as well."""
    module.config._experts_implementation_internal = implementation
