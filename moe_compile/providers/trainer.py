"""Training's operators on our kernels, at little host time: triton_backward's functions, whose launches are replayed.

In: what a spec and a plan decide, on a device, and the tensors of a call. Out: as triton_backward. As written, a step
of qwen3_30b costs the host as much as the GPU (T=4096: 2.4 ms; H200 machine, 2026-12-01): descriptors are checked and
encoded at each launch, and the spec's expressions are looked up. kernels/tape.py has what a replay does, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..hardware import facts
from ..operands import ExpertWeights
from ..spec import ExpertsSpec
from . import triton_backward
from .base import Plan
from .training_products import Tiles, tiles_of
from .triton_hopper import FEWEST_ROWS

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Trainer:
    """A forward and the halves of its backward."""

    def __init__(self, spec: ExpertsSpec, plan: Plan, device: torch.device) -> None:
        from ..kernels.tape import Tapes

        self.spec, self.plan, self.device, self.tapes = spec, plan, device, Tapes()

    @cached_property
    def hopper(self) -> bool:
        """Whether kernels for Hopper train many tokens, whose rows lie beside the weights' gradients anyway."""
        return self._tiles(1 << 24).hopper

    def _tiles(self, T: int) -> Tiles:
        return tiles_of(self.spec, T, facts(self.device), self.plan.train)

    def forward(self, x_TH: Tensor, ids_TK: Tensor, w_TK: Tensor | None, p: ExpertWeights) -> Any:
        def run(tiles: Tiles) -> Any:
            return triton_backward.forward(self.spec, x_TH, ids_TK, w_TK, p, tiles, self.plan.keep)

        return self._replayed("forward", run, p, x_TH, ids_TK, w_TK)

    def backward_down(
        self, dout_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, w_TK: Tensor | None, p: ExpertWeights,
        kept: Tensor | None, order: Tensor | None, needs: Sequence[bool],
    ) -> list[Tensor]:  # fmt: skip
        def run(tiles: Tiles) -> list[Tensor]:
            return triton_backward.backward_down(
                self.spec, dout_TH, x_TH, ids_TK, w_TK, p, kept, needs, tiles, order
            )  # fmt: skip

        return self._replayed(("down", *needs), run, p, x_TH, ids_TK, w_TK, dout_TH, kept, order)

    def backward_gate_up(
        self, dgate_up_RG: Tensor, x_TH: Tensor, ids_TK: Tensor, w_TK: Tensor | None, p: ExpertWeights,
        order: Tensor | None, needs: Sequence[bool],
    ) -> list[Tensor]:  # fmt: skip
        def run(tiles: Tiles) -> list[Tensor]:
            return triton_backward.backward_gate_up(
                self.spec, dgate_up_RG, x_TH, ids_TK, w_TK, p, needs, tiles, order
            )  # fmt: skip

        T = x_TH.shape[0]
        if T * self.spec.K > FEWEST_ROWS * self.spec.E and not self.hopper:
            # as written, the routes' rows [R, H] go before the weights' gradients come; a replay's scratch stays
            return run(self._tiles(T))
        return self._replayed(("gate_up", *needs), run, p, x_TH, ids_TK, w_TK, dgate_up_RG, order)

    def _replayed(self, what: Any, run: Any, p: ExpertWeights, x_TH: Tensor, *others: Tensor | None) -> Any:
        """run's result. p and the others: all tensors that it reads; what: all else that tells calls apart."""
        T = x_TH.shape[0]

        def written() -> Any:
            return run(self._tiles(T))

        if self.device.type != "cuda":
            return written()
        with triton_backward.on(self.device):
            operands = [t for t in (x_TH, *others, *p.tensors()) if t is not None]
            kind = (what, T, *(t if t is None else t.dtype for t in others))
            return self.tapes(kind, operands, written)
