"""Our few-tokens Triton kernels (kernels/decode.py): two launches, no sorting.

In: ExpertsSpec and a device. Out: launchers for any T, meant for T * K below about E (a shared expert is read twice).
Invariant: as of triton_grouped: weights in place, torch.empty only, no synchronization, safe in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hardware import Device
from ..operands import ExpertWeights
from ..spec import ExpertsSpec, torch_dtype
from ..verdict import Reject, Verdict
from ..work import Work
from .base import Launcher, Provider, Tactic
from .triton_grouped import (
    one_stride_pattern,
    triton_available,
    triton_supports,
    triton_version,
    whole_knobs,
)
from .triton_launch import launcher_of
from .triton_work import decode_work

if TYPE_CHECKING:
    import torch

KNOBS = ("N1", "K1", "W1", "N2", "K2", "W2")


class TritonDecode(Provider):
    """fc1 with bias and activation for each route, then fc2 with bias over all slots of a token. Knobs: N weight rows
    and K columns that a program of the first and of the second launch (there: for each slot) holds, and W(arps)."""

    name = "triton_decode"
    dispatches = False

    def available(self) -> Verdict:
        return triton_available()

    def supports(self, spec: ExpertsSpec, device: Device) -> Verdict:
        if spec.post != "none":
            return Reject(
                "a norm of each expert's output", "a program of the second launch has some of its columns only"
            )
        return triton_supports(spec, device)

    def tactics(self, spec: ExpertsSpec, device: Device, T: int) -> list[tuple[Tactic, Work]]:
        return [(Tactic.of(**knobs), decode_work(spec, knobs)) for knobs in _ranked(spec)]

    def work(self, tactic: Tactic, spec: ExpertsSpec, device: Device) -> Work:
        return decode_work(spec, _checked(tactic))

    def reads(self, weights: ExpertWeights) -> Verdict:
        return one_stride_pattern(weights)

    def build(self, tactic: Tactic, spec: ExpertsSpec, device: torch.device) -> Launcher:
        k = _checked(tactic)

        from ..kernels.decode import Rows, down, up
        from ..kernels.epilogue import epilogue

        rows = Rows(UP_N=k["N1"], UP_K=k["K1"], UP_warps=k["W1"], DOWN_N=k["N2"], DOWN_K=k["K2"], DOWN_warps=k["W2"])
        act, out_dtype = epilogue(spec.act.expr), torch_dtype(spec.out)
        E, sizes, halves, gated = spec.E, (spec.H, spec.I), spec.gate_up.halves, spec.gated
        k_major, down_k_major = spec.gate_up.storage == "EGH", spec.down == "EHI"
        before, after = spec.weight == "input", spec.weight == "output"

        def run(
            hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, packed: ExpertWeights
        ) -> torch.Tensor:
            if hidden_TH.shape[0] == 0:
                return hidden_TH.new_empty((0, sizes[0]), dtype=out_dtype)
            act_RI = up(
                hidden_TH, ids_TK, weights_TK if before else None, packed.gate_up, packed.gate_up_bias, act,
                E=E, sizes=sizes, gated=gated, halves=halves, k_major=k_major, rows=rows,
            )  # fmt: skip
            return down(
                act_RI, ids_TK, weights_TK if after else None, packed.down, packed.down_bias, out_dtype,
                E=E, k_major=down_k_major, rows=rows,
            )  # fmt: skip

        return launcher_of(run, self, spec, device)

    def version(self) -> str:
        return triton_version()


def _checked(tactic: Tactic) -> dict[str, int]:
    k = whole_knobs("triton_decode", tactic, KNOBS)
    for name, value in k.items():
        if value < 1 or value & (value - 1):
            raise ValueError(f"triton_decode: {name}={value} is not a power of two")
    return k


def _ranked(spec: ExpertsSpec) -> list[dict[str, int]]:
    """Knobs, best first: few numbers a thread and many programs, in rows along the weights' contiguous axis.

    Of nine to twelve shapes each, T = 1 to 4 (H200, 2026-11-30, us): up 1 x 1024 (2 rows with the gate) is within 3 %
    of the best everywhere. 4 x 1024 is as good where H is 4096 and more (mixtral T=1: 164.1, 164.6; T=8: 780, 849), but
    costs qwen3_30b 26.0 instead of 23.7; 2 x 2048 is as good where H is 2048, but costs mixtral 183. down 4 x 256 for
    each of 8 slots, 2 x 256 for 16: qwen3_30b 21.8, 23.1 with 2 rows, 24.9 with 8; mixtral (2 slots) 165 with 4 rows,
    174 with 16. Columns beyond 256 pad I = 768 to 1024 and leave fewer programs. 8 warps for down and 2 x 1024 for up
    suit that I (T=1, 2, 4: 20.7, 36.4, 66.9, else 21.3, 37.7, 68.7), not 1024 (olmoe T=1: 31.1, 26.9). Loops that the
    compiler pipelines through shared memory gain nothing (1 x 512 in 3 stages: qwen3_30b T=1 27.7).
    """
    slots = 1 << (spec.K - 1).bit_length()
    n2, k2 = (max(1, min(4, 32 // slots)), 256) if spec.down == "EHI" else (32, max(16, 512 // slots))
    if spec.gate_up.storage == "EHG":  # G is contiguous: 32 of its rows are a 64-byte piece
        shapes = [(16, 128, 4, 4), (32, 256, 4, 4), (64, 128, 4, 4)]
    else:
        shapes = [(1, 1024, 4, 4), (2, 2048, 4, 4) if spec.H < 4096 else (4, 1024, 4, 4)]
        if spec.I <= 768 and slots == 8 and spec.down == "EHI":
            shapes.append((2, 1024, 4, 8))
    ungated = 1 if spec.gated else 2
    return [dict(zip(KNOBS, (n1 * ungated, k1, w1, n2, k2, w2))) for n1, k1, w1, w2 in shapes]
