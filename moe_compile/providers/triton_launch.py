"""Launchers of our Triton kernels: what stands between a call and a provider's `run`, at little host time.

In: a provider's `run`, which launches our kernels and allocates (`sorted_run` is that of both grouped providers). Out:
a launcher that refuses what `run` can't read (Unserved), has the tables of listed experts made, the right device
current, and replays calls (kernels/tape.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..operands import ExpertWeights
from ..spec import ExpertsSpec, torch_dtype
from ..verdict import Reject
from .base import Launcher, Provider, Unserved
from .triton_listed import by_table

if TYPE_CHECKING:
    import torch

    from ..kernels.sort import Schedule


def launcher_of(run: Launcher, provider: Provider, spec: ExpertsSpec, device: torch.device) -> Launcher:
    """The launcher of `run`; where the experts are stacked, a call that is replayed asks nothing of the weights again:
    what `provider.reads` looks at is what calls of one kind have in common."""
    from ..kernels.tape import Recorded

    listed, cuda = spec.tensors == "listed", device.type == "cuda"
    if not listed and not provider.reads_any(spec):
        run = _asking(run, provider)
    if cuda:
        run = Recorded(run)
    return on_device(by_table(run) if listed else run, device)


def sorted_run(
    spec: ExpertsSpec, fc1: Any, fc2: Any, tiles: tuple[Any, Any], rows: int, part: int = 0,
    read: Callable[[torch.Tensor, Schedule], torch.Tensor] | None = None, fast: bool = False,
) -> Launcher:  # fmt: skip
    """Sort for tiles of `rows` (of `part`s), the two grouped linears by their tiles, weighted sum.

    fc1, fc2: of kernels.grouped or kernels.hopper. read: what fc1 reads of x; None for x itself. fast: of
    the activation (epilogue).
    """
    from ..kernels.epilogue import epilogue
    from ..kernels.finalize import finalize
    from ..kernels.sort import sort_routes

    act, out_dtype, (first, second) = epilogue(spec.act.expr, fast), torch_dtype(spec.out), tiles
    E, K, sizes = spec.E, spec.K, (spec.H, spec.I)
    halves, k_major, down_k_major = spec.gate_up.halves, spec.gate_up.storage == "EGH", spec.down == "EHI"
    gated, before, after = spec.gated, spec.weight == "input", spec.weight == "output"

    def run(
        hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, packed: ExpertWeights
    ) -> torch.Tensor:
        if hidden_TH.shape[0] == 0:
            return hidden_TH.new_empty((0, sizes[0]), dtype=out_dtype)
        schedule = sort_routes(ids_TK, E, rows, part)
        act_RI = fc1(
            hidden_TH if read is None else read(hidden_TH, schedule), packed.gate_up, packed.gate_up_bias,
            weights_TK if before else None, schedule, act, choices=K, sizes=sizes, gated=gated, halves=halves,
            k_major=k_major, tile=first,
        )  # fmt: skip
        y_RH = fc2(act_RI, packed.down, packed.down_bias, schedule, k_major=down_k_major, tile=second)
        return finalize(
            y_RH, ids_TK, weights_TK if after else None, E, out_dtype, post=spec.post, eps=spec.eps,
            post_scale=packed.post_scale,
        )  # fmt: skip

    return run


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
