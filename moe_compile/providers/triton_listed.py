"""Experts in tensors of their own, as our Triton kernels read them: by a table of their addresses (kernels/listed.py).

In: ExpertWeights of lists. Out: whether one kernel can address them all, and launchers that do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..operands import ExpertWeights
from ..verdict import OK, Reject, Verdict
from .base import Launcher, Unserved

if TYPE_CHECKING:
    import torch


def alike(weights: ExpertWeights) -> Verdict:
    """OK where the tensors of one operand have the same strides, and biases are contiguous."""
    *lists, _ = weights.arguments()
    for several in lists:
        strides = {t.stride() for t in several}
        if len(strides) > 1 or any(s != (1,) for s in strides if len(s) == 1):
            return Reject("experts' tensors are strided differently", " and ".join(map(str, sorted(strides))))
    return OK


def by_table(run: Launcher) -> Launcher:
    """`run` with a table in the place of each list, for lists that are `alike`."""
    from ..kernels.listed import NoTable, tables

    def found(
        hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, packed: ExpertWeights
    ) -> torch.Tensor:
        if isinstance(able := alike(packed), Reject):
            raise Unserved(able)
        try:
            packed = tables(packed)
        except NoTable as why:
            raise Unserved(Reject("no table of the experts' addresses", str(why))) from None
        return run(hidden_TH, ids_TK, weights_TK, packed)

    return found
