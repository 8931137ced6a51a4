"""Our grouped kernels for Hopper (kernels/hopper.py): for many rows an expert, where the tensor cores are the time.

In: ExpertsSpec and a device. Out: launchers; sorting and the weighted sum are triton_grouped's.
Tiles have 64-row parts, of which those without rows rest, or are as high as an expert's rows are many, in units of 32:
the weights are then the tall operand of the products (M=64 and M=160, kernels/hopper_swapped.py).
Invariant: as of triton_grouped: weights in place, torch.empty only, no synchronization, safe in a CUDA graph. x is
copied into sorted order where the tactic says so, and where its rows are not aligned for 16-byte loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hardware import Device
from ..kernels.sizes import HEIGHTS
from ..operands import ExpertWeights
from ..spec import ExpertsSpec
from ..verdict import OK, Reject, Verdict
from ..work import Work
from .base import Launcher, Provider, Tactic
from .triton_grouped import (
    active_experts,
    one_stride_pattern,
    triton_available,
    triton_supports,
    triton_version,
    whole_knobs,
)
from .triton_launch import launcher_of, sorted_run
from .triton_work import hopper_work

if TYPE_CHECKING:
    import torch

    from ..kernels.sort import Schedule

KNOBS = ("M", "N1", "N2", "GATHER")
VALID = {"M": tuple(HEIGHTS), "N1": (64, 128, 256), "N2": (128, 256), "GATHER": (0, 1)}
# Rows an expert from which tiles of more than 64 are offered. Below, they are mostly empty (H200, 2026-12-01: with 32
# rows from 1 % faster than triton_grouped on mixtral to 1 % slower on olmoe, with 64 2 to 13 % faster).
FEWEST_ROWS = 48
# Rows an expert for which tiles of 64 are offered, where these gather and weights are contiguous along the depth, so
# that they fetch in pairs (H200, 2026-12-01: with 16 rows 1 % slower than triton_grouped, with 20 to 48 from 2 % faster
# on mixtral to 1 % slower on olmoe; where weights are contiguous along columns 2 % slower).
SMALL_ROWS = (20, 56)
# Rows an expert up to which tiles of 160 are offered (H200, 2026-12-01: at 512 they are 0 to 3 % slower than the best
# others, at 1024 3 to 6 %), and up to which they gather, by warps that have few registers (to 128 the fastest or within
# 1 % of it, at 160 3 % slower, at 256 4 to 6 %).
SWAPPED_ROWS, SWAPPED_GATHER_ROWS = 640, 144


class TritonHopper(Provider):
    """Sort, fc1 with bias and activation, fc2 with bias, weighted sum. Knobs: M rows of a tile, N columns of one of the
    first and of the second linear, GATHER whether fc1 reads x's rows by their routes."""

    name = "triton_hopper"
    dispatches = False

    def available(self) -> Verdict:
        found = triton_available()
        if not found:
            return found
        import triton

        if triton.knobs.runtime.interpret:
            return Reject("Triton's interpreter does not run Gluon")
        try:
            import triton.experimental.gluon.language.nvidia.hopper
        except ImportError as missing:
            return Reject("this triton has no Gluon for Hopper", str(missing))
        return OK

    def supports(self, spec: ExpertsSpec, device: Device) -> Verdict:
        able = triton_supports(spec, device)
        if not able:
            return able
        if device.type != "cuda" or device.capability != (9, 0):
            return Reject("not compute capability 9.0", str(device))
        if spec.x not in ("bf16", "f16"):
            return Reject("bf16 and fp16 only", f"x={spec.x}")
        if spec.H % 8 or spec.I % 8:
            return Reject("rows of weights are not whole 16-byte pieces", f"H={spec.H} I={spec.I}")
        if spec.tensors == "listed":
            return Reject("experts in tensors of their own", "a tensor descriptor has one address")
        together = spec.gate_up.halves in ("up", "gate_up_interleaved", "up_gate_interleaved")
        if spec.gate_up.storage == "EHG" and not together:
            return Reject("gate and up of a column lie far apart", str(spec.gate_up))
        return OK

    def tactics(self, spec: ExpertsSpec, device: Device, T: int) -> list[tuple[Tactic, Work]]:
        rows = T * spec.K / active_experts(spec, max(T, 1))
        return [(Tactic.of(**knobs), hopper_work(spec, knobs)) for knobs in _ranked(spec, rows)]

    def work(self, tactic: Tactic, spec: ExpertsSpec, device: Device) -> Work:
        return hopper_work(spec, _checked(tactic, spec))

    def reads_any(self, spec: ExpertsSpec) -> bool:
        return False  # weights need not be aligned for tensor descriptors

    def reads(self, weights: ExpertWeights) -> Verdict:
        for w in (*weights.gate_up, weights.down):
            if w.data_ptr() % 16 or w.stride(-1) != 1 or any(s % 8 for s in w.stride()[:-1]):
                return Reject("weights are not aligned for tensor descriptors", f"strides {tuple(w.stride())}")
        return one_stride_pattern(weights)

    def build(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device) -> Launcher:
        k = _checked(tactic, spec)

        import torch

        from ..kernels.hopper import Persistent, fc1, fc2, permute

        gather = bool(k["GATHER"])
        # ahead of fc1 is permute, or the sort, which makes the schedule; ahead of fc2 is fc1
        first = Persistent(N=k["N1"], GATHER=gather, ROWS=k["M"], AHEAD=not gather)
        second = Persistent(N=k["N2"], ROWS=k["M"], AHEAD=True)

        def read(x_TH: torch.Tensor, schedule: Schedule) -> torch.Tensor:
            if x_TH.stride(1) != 1 or (gather and (x_TH.stride(0) % 16 or x_TH.data_ptr() % 16)):
                x_TH = x_TH.clone(memory_format=torch.contiguous_format)
            return x_TH if gather else permute(x_TH, schedule, spec.K)

        run = sorted_run(spec, fc1, fc2, (first, second), k["M"], HEIGHTS[k["M"]].part, read, fast=True)
        return launcher_of(run, self, spec, device)

    def version(self) -> str:
        return triton_version()


def _checked(tactic: Tactic, spec: ExpertsSpec) -> dict[str, int]:
    """The tactic's knobs. ValueError names those that are unknown, missing, or don't go together or with the spec."""
    k = whole_knobs("triton_hopper", tactic, KNOBS)
    for name, valid in VALID.items():
        if k[name] not in valid:
            raise ValueError(f"triton_hopper: {name}={k[name]} is not one of {', '.join(map(str, valid))}")
    if spec.gated and k["N1"] == 256:
        raise ValueError("triton_hopper: N1=256 with a gate is 512 columns of accumulators; the most is N1=128")
    if HEIGHTS[k["M"]].as_columns and (k["N1"] != (128 if spec.gated else 256) or k["N2"] != 256):
        given = f"N1={k['N1']} N2={k['N2']}"
        raise ValueError(f"triton_hopper: M={k['M']} is for 256 columns of weights, {given} are others")
    if k["GATHER"] and spec.H % 64:
        raise ValueError(f"triton_hopper: GATHER=1 copies 64 columns at a time, which H={spec.H} is no multiple of")
    return k


def gathers(spec: ExpertsSpec) -> tuple[int, ...]:
    """GATHER, the better first: copying x's rows pays from an I between 2048 and 2880 up."""
    return (0,) if spec.H % 64 else (1, 0) if spec.I < 2560 else (0, 1)


def _ranked(spec: ExpertsSpec, rows: float) -> list[dict[str, int]]:
    """Knobs for so many rows an expert: each height of tile, x's rows gathered or copied."""
    n1, ways = 128 if spec.gated else 256, gathers(spec)
    offered = []
    if SMALL_ROWS[0] <= rows <= SMALL_ROWS[1] and 1 in ways and spec.gate_up.storage == "EGH":
        offered.append((64, 1))
    if rows >= FEWEST_ROWS:
        offered += [(m, way) for m in (128, 192) for way in ways]
    if FEWEST_ROWS <= rows <= SWAPPED_ROWS:
        offered.append((160, 0))
    if FEWEST_ROWS <= rows <= SWAPPED_GATHER_ROWS and ways[0]:
        offered.append((160, 1))
    return [dict(zip(KNOBS, (m, n1, 256, gather))) for m, gather in offered]
