"""Weights in another library's layout: read in place where the model's layout is that one, else copied once and kept.

In: ExpertWeights in the model's layout and the `Stored` that a library wants. Out: ExpertWeights in that layout.
Invariants: what a copy takes is known from the spec alone (`bytes_of`), before anything is allocated. Two libraries
that want the same layout share one copy. A copy lives as long as the tensors it was made of, and is written again, at
the same address, when their versions say that they changed: a CUDA graph that was captured keeps reading the right
memory. Writes that bypass the version (through `.data`) are not seen.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..operands import ExpertWeights, Listed, PerExpert, canonical
from ..spec import ExpertsSpec, torch_dtype
from ..verdict import OK, Reject, Verdict


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A layout in the spec's words. storage, down: axis orders. halves: up_gate or gate_up, whole halves unless `block`
    rows of the one alternate with `block` of the other. multiple: I is padded with zeros to a multiple of it.
    """

    storage: str = "EGH"
    halves: str = "up_gate"
    down: str = "EHI"
    block: int = 0
    multiple: int = 1

    def rows(self, spec: ExpertsSpec) -> int:
        """I as it is stored."""
        return math.ceil(spec.I / self.multiple) * self.multiple

    def same_gate_up(self, spec: ExpertsSpec) -> bool:
        """Whether the model stores the first linear so."""
        if spec.tensors != "stacked" or spec.gate_up.storage != self.storage or self.rows(spec) != spec.I:
            return False
        return not spec.gated or (not self.block and spec.gate_up.halves == self.halves)

    def same_down(self, spec: ExpertsSpec) -> bool:
        return spec.tensors == "stacked" and spec.down == self.down and self.rows(spec) == spec.I

    def same_bias(self, spec: ExpertsSpec) -> bool:
        """Biases have no storage order: only the halves matter."""
        if spec.tensors != "stacked" or self.rows(spec) != spec.I:
            return False
        return not spec.gated or (not self.block and spec.gate_up.halves == self.halves)

    def copies(self, spec: ExpertsSpec) -> dict[str, tuple[int, ...]]:
        """Shapes of what must be copied, by operand."""
        P = self.rows(spec)
        G = 2 * P if spec.gated else P
        shapes: dict[str, tuple[int, ...]] = {}
        if not self.same_gate_up(spec):
            shapes["gate_up"] = (spec.E, G, spec.H) if self.storage == "EGH" else (spec.E, spec.H, G)
        if not self.same_down(spec):
            shapes["down"] = (spec.E, spec.H, P) if self.down == "EHI" else (spec.E, P, spec.H)
        if spec.has_gate_up_bias and not self.same_bias(spec):
            shapes["gate_up_bias"] = (spec.E, G)
        if spec.has_down_bias and spec.tensors != "stacked":
            shapes["down_bias"] = (spec.E, spec.H)
        return shapes

    def bytes_of(self, spec: ExpertsSpec) -> dict[object, int]:
        """Bytes of each copy of one block."""
        size = torch_dtype(spec.x).itemsize
        return {self.part(spec, name): math.prod(shape) * size for name, shape in self.copies(spec).items()}

    def part(self, spec: ExpertsSpec, name: str) -> tuple[object, ...]:
        """What decides an operand's copy: layouts that agree on it share one."""
        return (name, self.rows(spec), *((self.down,) if name == "down" else (self.storage, self.halves, self.block)))

    def fill_gate_up(self, spec: ExpertsSpec, weights: ExpertWeights, out: Tensor) -> None:
        c = canonical(spec, weights)
        self._halves(spec, out if self.storage == "EGH" else out.mT, c.gate_EIH, c.up_EIH)

    def fill_gate_up_bias(self, spec: ExpertsSpec, weights: ExpertWeights, out: Tensor) -> None:
        c = canonical(spec, weights)
        self._halves(spec, out, c.gate_bias_EI, c.up_bias_EI)

    def fill_down_bias(self, spec: ExpertsSpec, weights: ExpertWeights, out: Tensor) -> None:
        _copy(out, canonical(spec, weights).down_bias_EH)

    def fill_down(self, spec: ExpertsSpec, weights: ExpertWeights, out: Tensor) -> None:
        to = out if self.down == "EHI" else out.mT
        _copy(to[..., : spec.I], canonical(spec, weights).down_EHI)
        to[..., spec.I :].zero_()

    def _halves(self, spec: ExpertsSpec, rows: Tensor, gate: PerExpert | None, up: PerExpert) -> None:
        """Write gate and up, [E, I, ...], into rows, [E, G, ...]."""
        P, I = self.rows(spec), spec.I
        parts = [up] if gate is None else [up, gate] if self.halves == "up_gate" else [gate, up]
        if self.block and gate is not None:
            to = torch.unflatten(rows, 1, (I // self.block, 2, self.block))
            for i, part in enumerate(parts):
                _copy(to[:, :, i], part, (I // self.block, self.block))
            return
        for i, part in enumerate(parts):
            _copy(rows[:, i * P : i * P + I], part)
            rows[:, i * P + I : (i + 1) * P].zero_()


def _copy(to: Tensor, source: PerExpert, rows: tuple[int, ...] = ()) -> None:
    """Write `source`, expert by expert where it is a list, into `to`, whose axis of rows is split into `rows`."""
    for out, t in zip(to, source.tensors) if isinstance(source, Listed) else ((to, source),):
        out.copy_(torch.unflatten(t, int(t is source), rows) if rows else t)


@dataclass
class _Copy:
    tensor: Tensor
    versions: tuple[int, ...]


_LOCK = threading.RLock()
_COPIES: dict[tuple[Any, ...], _Copy] = {}


def held_bytes() -> int:
    """Bytes of all copies that live."""
    with _LOCK:
        return sum(c.tensor.numel() * c.tensor.itemsize for c in tuple(_COPIES.values()))


def readable(stored: Stored, spec: ExpertsSpec, weights: ExpertWeights) -> Verdict:
    """Whether these tensors can be read in place where the layout says so, and copied where it says so."""
    copied = stored.copies(spec)
    for name, tensors in _operands(weights).items():
        for t in tensors:
            if name in copied:
                if t.is_inference():
                    return Reject("weights made in inference mode can't be copied", "they have no version to follow")
            elif not t.is_contiguous() or t.data_ptr() % 16:
                return Reject("weights are not contiguous from a multiple of 16 bytes", f"{name} {t.stride()}")
    return OK


def stored_weights(
    stored: Stored, spec: ExpertsSpec, weights: ExpertWeights, aside: Callable[[Callable[[], Tensor]], Tensor]
) -> ExpertWeights:
    """`weights` in the layout `stored`, detached. aside: runs a function that allocates what outlives the call."""
    copied = stored.copies(spec)
    found: dict[str, Tensor] = {}
    for name, shape in copied.items():
        sources = _operands(weights)[name]
        key = (*stored.part(spec, name), shape, *(s for t in sources for s in _place(t)))
        versions = tuple(t._version for t in sources)
        copy = _COPIES.get(key)
        if copy is None or copy.versions != versions:
            with _LOCK:
                copy = _make(stored, spec, weights, name, shape, key, versions, sources, aside)
        found[name] = copy.tensor
    # DLPack, by which libraries take tensors, exports none that requires a gradient.
    plain = {n: tuple(t.detach() if t.requires_grad else t for t in ts) for n, ts in _operands(weights).items()}
    plain.update((name, (tensor,)) for name, tensor in found.items())
    return ExpertWeights(
        gate_up=plain["gate_up"],
        down=plain["down"][0],
        gate_up_bias=plain["gate_up_bias"],
        down_bias=next(iter(plain["down_bias"]), None),
    )


def _operands(weights: ExpertWeights) -> dict[str, tuple[Tensor, ...]]:
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    return {name: tuple(tensors) for name, tensors in zip(names, weights.arguments())}


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


def _make(
    stored: Stored, spec: ExpertsSpec, weights: ExpertWeights, name: str, shape: tuple[int, ...], key: Any,
    versions: tuple[int, ...], sources: tuple[Tensor, ...], aside: Callable[[Callable[[], Tensor]], Tensor],
) -> _Copy:  # fmt: skip
    """The copy of one operand, made or written again."""
    known = _COPIES.get(key)

    def fill() -> Tensor:
        out = known.tensor if known else torch.empty(shape, dtype=sources[0].dtype, device=sources[0].device)
        getattr(stored, f"fill_{name}")(spec, weights, out)
        return out

    made = _Copy(aside(fill), versions)
    _COPIES[key] = made
    if known is None:
        for t in sources:  # the storage's Python object lives as long as the storage
            weakref.finalize(t.untyped_storage(), _COPIES.pop, key, None).atexit = False
    return made
