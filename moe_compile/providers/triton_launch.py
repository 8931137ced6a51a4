"""Launchers of our Triton kernels: what stands between a call and a provider's `run`, at little host time.

In: a provider's `run`, which launches our kernels and allocates. Out: a launcher that refuses what `run` can't read
(Unserved), has the tables of listed experts made, the right device current, and replays calls (kernels/tape.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..operands import ExpertWeights
from ..spec import ExpertsSpec
from ..verdict import Reject
from .base import Launcher, Provider, Unserved
from .triton_listed import by_table

if TYPE_CHECKING:
    import torch


def launcher_of(run: Launcher, provider: Provider, spec: ExpertsSpec, device: torch.device) -> Launcher:
    """The launcher of `run`; where the experts are stacked, a call that is replayed asks nothing of the weights again:
    what `provider.reads` looks at is what calls of one kind have in common."""
    from ..kernels.tape import recorded

    listed, cuda = spec.tensors == "listed", device.type == "cuda"
    if not listed and not provider.reads_any(spec):
        run = _asking(run, provider)
    if cuda:
        run = recorded(run)
    return on_device(by_table(run) if listed else run, device)


def _asking(run: Launcher, provider: Provider) -> Launcher:
    def asked(
        hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, packed: ExpertWeights
    ) -> torch.Tensor:
        if isinstance(able := provider.reads(packed), Reject):
            raise Unserved(able)
        return run(hidden_TH, ids_TK, weights_TK, packed)

    return asked


def on_device(run: Launcher, device: torch.device) -> Launcher:
    """`run` with `device` current: Triton launches on the current one, whatever its arguments say."""
    import torch

    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return run
    current, index = torch._C._cuda_getDevice, device.index

    def guarded(
        hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, packed: ExpertWeights
    ) -> torch.Tensor:
        if current() == index:
            return run(hidden_TH, ids_TK, weights_TK, packed)
        with torch.cuda.device(device):
            return run(hidden_TH, ids_TK, weights_TK, packed)

    return guarded
