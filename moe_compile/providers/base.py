"""The provider contract: who can run an ExpertsSpec, with which tactics, at what work, and how.

One object owns supports + prepare + build, so an operator and its argument packing can't be chosen apart. Providers
see specs, devices and tensors; never torch.fx and never options. `Plan` is what the planner hands to the operator:
which candidate serves which range of token counts, as text that travels inside the graph.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ..hardware import Device
from ..operands import ExpertWeights
from ..spec import ExpertsSpec
from ..verdict import OK, Reject, Verdict
from ..work import Work

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tactic:
    """A provider's private knob values, in a fixed order. Text: `BLOCK_M=16,BLOCK_N=64`; empty for "the only way"."""

    knobs: tuple[tuple[str, int | str], ...] = ()

    @classmethod
    def of(cls, **knobs: int | str) -> Tactic:
        return cls(tuple(knobs.items()))

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in self.knobs)

    @classmethod
    def parse(cls, text: str) -> Tactic:
        pairs = [part.partition("=")[::2] for part in text.split(",") if part]
        return cls(tuple((k, int(v) if re.fullmatch(r"-?\d+", v) else v) for k, v in pairs))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A provider and one of its tactics. Text: `triton_grouped(BLOCK_M=16)` or `aten`."""

    provider: str
    tactic: Tactic = Tactic()

    def __str__(self) -> str:
        return f"{self.provider}({self.tactic})" if self.tactic.knobs else self.provider

    @classmethod
    def parse(cls, text: str) -> Candidate:
        found = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
        if not found:
            raise ValueError(f"candidate {text!r} is not 'provider' or 'provider(knob=value,...)'")
        return cls(provider=found.group(1), tactic=Tactic.parse(found.group(2) or ""))


# What a plan says of training, and may say: options of these names.
TRAINING = {"train": ("auto", "grouped", "aten"), "keep": ("all", "half", "none")}


@dataclass(frozen=True)
class Plan:
    """Token buckets to candidates: ((upper T, candidate), ...), ascending; the last bound is None, for every larger T.

    train, keep: whose kernels train a block, and what of the first linear is kept (`moe.train`, `moe.keep`).
    Text: `16:aten;*:triton_grouped(BLOCK_M=64)`, with `train=aten;` or `keep=half;` before it where they are not usual.
    """

    buckets: tuple[tuple[int | None, Candidate], ...]
    train: str = TRAINING["train"][0]
    keep: str = TRAINING["keep"][0]

    def __post_init__(self) -> None:
        for name, valid in TRAINING.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"plan {name}={getattr(self, name)} is not one of {', '.join(valid)}")
        bounds = [b for b, _ in self.buckets]
        lower = sorted({b for b in bounds if b is not None})
        if bounds != [*lower, None]:
            raise ValueError(f"plan buckets {bounds} must ascend and end with None")

    def at(self, T: int) -> Candidate:
        """The candidate for T tokens."""
        return next(c for bound, c in self.buckets if bound is None or bound >= T)

    def __str__(self) -> str:
        said = [f"{name}={getattr(self, name)}" for name in TRAINING if getattr(self, name) != TRAINING[name][0]]
        return ";".join([*said, *(f"{'*' if bound is None else bound}:{c}" for bound, c in self.buckets)])

    @classmethod
    @lru_cache(4096)
    def parse(cls, text: str) -> Plan:
        """The plan that `str` printed; ValueError otherwise."""
        parts, said = text.split(";"), {}
        while parts[0].partition("=")[0] in TRAINING:
            name, _, value = parts.pop(0).partition("=")
            said[name] = value
        pairs = [part.partition(":")[::2] for part in parts]
        if not all(b == "*" or b.isdecimal() for b, _ in pairs):
            raise ValueError(f"plan {text!r} is not 'bound:candidate;...;*:candidate'")
        return cls(tuple((None if b == "*" else int(b), Candidate.parse(c)) for b, c in pairs), **said)

    @classmethod
    def of(cls, chosen: Iterable[tuple[int | None, Candidate]]) -> Plan:
        """The plan of (bound, candidate) pairs in ascending order; neighbours that chose alike become one bucket."""
        buckets: list[tuple[int | None, Candidate]] = []
        for bound, candidate in chosen:
            if buckets and buckets[-1][1] == candidate:
                buckets.pop()
            buckets.append((bound, candidate))
        return cls(tuple(buckets))


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A candidate of one token bucket with the seconds that the cost model predicts for it, and the work it priced."""

    candidate: Candidate
    seconds: float
    work: Work

    def __str__(self) -> str:
        return f"{self.candidate} {1e6 * self.seconds:.1f} us"


Launcher = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None", ExpertWeights], "torch.Tensor"]
"""launcher(hidden_TH, ids_TK, weights_TK or None, packed) -> out_TH; allocates its output and workspace, reads its
inputs only, makes no host synchronization on CUDA."""


class Unserved(Exception):
    """A launcher can't serve this very call, and has not begun it: aten runs the call instead. Carries the Reject."""

    def __init__(self, verdict: Reject) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class Provider(ABC):
    """A family of kernels that can run some ExpertsSpecs on some devices."""

    name: str
    priced = True  # whether the cost model was fitted to its kernels; where not, it competes only by measurement
    dispatches = True  # whether its launchers compute by torch's operators, which autocast and autograd must not see

    @abstractmethod
    def available(self) -> Verdict:
        """Whether its libraries import, in usable versions. Asked once per process."""

    @abstractmethod
    def supports(self, spec: ExpertsSpec, device: Device) -> Verdict:
        """Whether it can run `spec` on such a device, for any T. Pure: the device need not be there."""

    @abstractmethod
    def tactics(self, spec: ExpertsSpec, device: Device, T: int) -> list[tuple[Tactic, Work]]:
        """Ways to run T tokens that are worth pricing, each with its work. Empty where it can't run so many."""

    @abstractmethod
    def work(self, tactic: Tactic, spec: ExpertsSpec, device: Device) -> Work:
        """The work of any tactic that `build` takes. ValueError names knobs that are wrong or don't go together."""

    def reads(self, weights: ExpertWeights) -> Verdict:
        """Whether these very tensors can be read in place. Where not, a launcher raises Unserved."""
        return OK

    def reads_any(self, spec: ExpertsSpec) -> bool:
        """Whether a launcher serves every call that the spec allows. Where not, it may raise Unserved."""
        return spec.tensors == "stacked" and spec.gate_up.halves != "separate" and spec.bias == "none"

    def copies(self, spec: ExpertsSpec) -> dict[object, int]:
        """Bytes of weights that it keeps in a layout of its own for each block; providers share what has one key."""
        return {}

    def settled(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device, T: int) -> Tactic:
        """What a launcher of an open `tactic` has come to for T tokens, once it ran, if that serves any T."""
        return tactic

    @abstractmethod
    def build(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device) -> Launcher:
        """The launcher of one tactic; built once per (tactic, spec, device) and kept."""

    @abstractmethod
    def version(self) -> str:
        """Changes when its results or speed may: library versions and the kernels' source hash. Part of tuning keys."""
