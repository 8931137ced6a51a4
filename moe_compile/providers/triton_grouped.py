"""Our grouped Triton kernels (kernels/sort.py, grouped.py): sort, two grouped linears, finalize; any T, any layout.

In: ExpertsSpec and a device. Out: launchers of three launches plus the sort's (one, or three for many routes).
Invariant: weights are read in place in every layout; a launcher allocates with torch.empty, never synchronizes, and is
safe in a CUDA graph. A tactic names both linears' tiles; what can't run is a ValueError when it is built.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..hardware import Device, facts
from ..operands import ExpertWeights, Listed
from ..spec import ELEMENT_BYTES, ExpertsSpec
from ..verdict import OK, Reject, Verdict
from ..work import Work
from .base import Launcher, Provider, Tactic
from .triton_launch import launcher_of, sorted_run
from .triton_listed import alike
from .triton_work import grouped_work

if TYPE_CHECKING:
    import torch

    from ..kernels.grouped import Tile

KNOBS = ("M", "N1", "K1", "W1", "S1", "SWAP1", "TMA1", "N2", "K2", "W2", "S2", "SWAP2", "TMA2")


def triton_available() -> Verdict:
    """OK where triton imports."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return Reject("triton is not installed")
    return OK


def triton_supports(spec: ExpertsSpec, device: Device) -> Verdict:
    """OK where our kernels run `spec` on such a device."""
    import torch
    import triton

    if "f64" in (spec.x, spec.out):
        return Reject("fp64 is not supported", f"x={spec.x} out={spec.out}")
    if spec.E > 4096:
        return Reject("too many experts", f"E={spec.E} is over 4096")
    if device.type == "cpu":
        interpreter = triton.knobs.runtime.interpret
        return OK if interpreter else Reject("no CUDA device", "a CPU runs it in Triton's interpreter only")
    if device.type != "cuda" or torch.version.hip:
        return Reject("not a CUDA device", str(device))
    if device.capability < (8, 0):
        return Reject("compute capability below 8.0", str(device))
    return OK


@lru_cache(None)
def triton_version() -> str:
    """Triton's version and a hash of the kernels' source."""
    import triton

    text = b"".join(p.read_bytes() for p in sorted((Path(__file__).parent.parent / "kernels").glob("*.py")))
    return f"{triton.__version__}+{hashlib.sha256(text).hexdigest()[:12]}"


def one_stride_pattern(weights: ExpertWeights) -> Verdict:
    """Our kernels address gate and up by the same strides, which separate tensors need not have, and rows of biases
    without any."""
    if isinstance(weights.down, Listed):
        return alike(weights)
    for pair in (weights.gate_up, weights.gate_up_bias):
        if len(pair) == 2 and pair[0].stride() != pair[1].stride():
            return Reject("gate and up are strided differently", f"{pair[0].stride()} and {pair[1].stride()}")
    for bias in (*weights.gate_up_bias, weights.down_bias):
        if bias is not None and bias.stride(1) != 1:
            return Reject("biases are not in contiguous rows", f"strides {bias.stride()}")
    return OK


def active_experts(spec: ExpertsSpec, T: int) -> float:
    """Experts that T tokens reach under uniform routing, E (1 - (1 - K/E)^T): an upper bound for real routing."""
    return spec.E * (1 - (1 - min(spec.K, spec.E) / spec.E) ** T)


class TritonGrouped(Provider):
    """Sort, fc1 with bias and activation, fc2 with bias, norm, weighted sum. Knobs: M rows of a tile; for both linears
    N, K, W(arps), S(tages), SWAP and TMA, all as in kernels.grouped.Tile."""

    name = "triton_grouped"
    dispatches = False

    def available(self) -> Verdict:
        return triton_available()

    def supports(self, spec: ExpertsSpec, device: Device) -> Verdict:
        return triton_supports(spec, device)

    def tactics(self, spec: ExpertsSpec, device: Device, T: int) -> list[tuple[Tactic, Work]]:
        T = max(T, 1)
        offered = _offered(spec, T * spec.K, active_experts(spec, T), hopper(device) and spec.tensors == "stacked")
        offered = [k for k in offered if _shared_bytes(k, spec) <= shared_limit(device)]
        return [(Tactic.of(**knobs), grouped_work(spec, knobs)) for knobs in offered or [_SMALL]]

    def work(self, tactic: Tactic, spec: ExpertsSpec, device: Device) -> Work:
        return grouped_work(spec, checked_knobs(tactic, spec, device))

    def reads(self, weights: ExpertWeights) -> Verdict:
        return one_stride_pattern(weights)

    def build(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device) -> Launcher:
        first, second = tiles_of(tactic, spec, device)

        from ..kernels.grouped import fc1, fc2

        run = sorted_run(spec, fc1, fc2, (first, second), first.BLOCK_M)
        return launcher_of(run, self, spec, device)

    def version(self) -> str:
        return triton_version()


def whole_knobs(provider: str, tactic: Tactic, names: tuple[str, ...]) -> dict[str, int]:
    """The tactic's knobs as numbers; ValueError where names differ from `names` or a value is text."""
    if tuple(sorted(dict(tactic.knobs))) != tuple(sorted(names)):
        raise ValueError(f"{provider}: knobs are {', '.join(names)}; got {tactic}")
    for name, value in tactic.knobs:
        if not isinstance(value, int):
            raise ValueError(f"{provider}: {name}={value} is not a whole number")
    return {name: int(value) for name, value in tactic.knobs}


def checked_knobs(tactic: Tactic, spec: ExpertsSpec, device: torch.device | Device) -> dict[str, int]:
    """The tactic's knobs. ValueError names those that are unknown, missing or can't run on the device."""
    k = whole_knobs("triton_grouped", tactic, KNOBS)
    for name, value in k.items():
        if name[0] in "MNKW" and (value < (1 if name[0] == "W" else 16) or value & (value - 1)):
            raise ValueError(f"triton_grouped: {name}={value} is not a power of two of at least 16 (warps: 1)")
    if (k["TMA1"] or k["TMA2"]) and spec.tensors == "listed":
        raise ValueError("triton_grouped: TMA1=1 and TMA2=1 need one tensor of all experts")
    if (k["TMA1"] or k["TMA2"]) and device.type == "cuda" and not hopper(device):
        raise ValueError("triton_grouped: TMA1=1 and TMA2=1 need compute capability 9.0")
    if (need := _shared_bytes(k, spec)) > (most := shared_limit(device)):
        raise ValueError(f"triton_grouped: {tactic} needs {need} bytes of shared memory, {device} has {most}")
    return k


def tiles_of(tactic: Tactic, spec: ExpertsSpec, device: torch.device) -> tuple[Tile, Tile]:
    """Tiles of fc1 and fc2, checked."""
    from ..kernels.grouped import Tile

    k = checked_knobs(tactic, spec, device)
    first, second = (
        Tile(
            BLOCK_M=k["M"], BLOCK_N=k[f"N{i}"], BLOCK_K=k[f"K{i}"], warps=k[f"W{i}"], stages=k[f"S{i}"],
            SWAP=k[f"SWAP{i}"], TMA=k[f"TMA{i}"],
        )
        for i in (1, 2)
    )  # fmt: skip
    return first, second


def _shared_bytes(k: dict[str, int], spec: ExpertsSpec) -> int:
    """What the stages of the larger linear hold."""
    columns = {1: k["N1"] * (2 if spec.gated else 1), 2: k["N2"]}
    return max(k[f"S{i}"] * k[f"K{i}"] * (k["M"] + n) * ELEMENT_BYTES[spec.x] for i, n in columns.items())


def shared_limit(device: torch.device | Device) -> int:
    """Bytes of shared memory that a program may have (227 KiB on Hopper, also assumed of the interpreter)."""
    return facts(device).shared_bytes


def hopper(device: torch.device | Device) -> bool:
    """Whether the device has tensor descriptors (TMA) and programmatic dependent launch (PDL)."""
    return facts(device).capability >= (9, 0)


# (N, K, warps, stages, SWAP, TMA) of each linear worth pricing for each height M of a tile: the fewest of which one is
# within 1.5 % of the best of six to eight shapes at T = 16 .. 4096 of qwen3_30b, mixtral, gpt_oss_20b and qwen3next
# wherever that height wins (H200, 2026-11-30; docs/measured/kernels_h200.json):
# * M <= 32: weights as the tall operand (SWAP) of 64 rows; TMA gains nothing there and costs host time.
# * M = 128: 128 x 256 accumulators on 8 warps, weights by TMA (qwen3_30b T=4096: fc1 446 us with, 472 without). SWAP
#   helps fc1 where K is contiguous (mixtral T=4096: 3218, unswapped 3489), hurts where N is (gpt_oss T=1024: 386, 365).
_Shape = tuple[int, int, int, int, int, int]
_NARROW1: tuple[_Shape, ...] = ((32, 128, 4, 3, 1, 0), (64, 64, 4, 4, 1, 0))
_NARROW2: tuple[_Shape, ...] = ((64, 128, 4, 4, 1, 0), (128, 64, 4, 4, 1, 0))
FIRST: dict[int, tuple[_Shape, ...]] = {
    16: _NARROW1,
    32: _NARROW1,
    64: ((64, 64, 4, 3, 0, 0),),
    128: ((128, 64, 8, 4, 1, 1), (128, 64, 8, 4, 0, 1)),
}
SECOND: dict[int, tuple[_Shape, ...]] = {
    16: _NARROW2,
    32: _NARROW2,
    64: ((128, 64, 4, 3, 0, 0), (256, 64, 4, 4, 0, 1)),
    128: ((256, 64, 8, 4, 0, 1), (128, 64, 4, 3, 0, 1)),
}


def _offered(spec: ExpertsSpec, routes: int, active: float, tma: bool) -> list[dict[str, int]]:
    """Knobs worth pricing, in no order that matters but heights: from the power of two nearest 1.5 rows an expert.

    Experts' loads spread around their mean, and a second tile reads the weights again. A height beyond twice that pads
    most of its rows, and one under half of it reads the weights three times: neither is offered.
    """
    rows = routes / max(active, 1)
    if spec.x == "f32":  # FMA dots: small tiles, the accumulators are the registers
        return [_knobs(16 if rows <= 16 else 32, (32, 32, 4, 2, 0, 0), (64, 32, 4, 2, 0, 0)), _SMALL]
    best = min(128, max(16, 1 << math.ceil(math.log2(max(1.5 * rows, 1)))))
    half = 1 if spec.gated and spec.gate_up.halves != "separate" else 2  # gate and up rows in one tile: half of N each
    found = []
    for m in dict.fromkeys((best, min(128, 2 * best), max(16, best // 2))):
        for n1, *rest in FIRST[m]:
            for second in SECOND[m]:
                found.append(_knobs(m, (n1 * (half if m <= 32 else 1), *rest), second))
    if not tma:  # by addresses a stage less is in flight
        found = [k | {"TMA1": 0, "TMA2": 0, "S1": min(k["S1"], 3), "S2": min(k["S2"], 3)} for k in found]
    return found


def _knobs(m: int, first: tuple[int, ...], second: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(KNOBS, (m, *first, *second)))


_SMALL = _knobs(16, (16, 32, 4, 2, 0, 0), (32, 32, 4, 2, 0, 0))
