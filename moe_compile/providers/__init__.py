"""Who can run a spec: one file a provider, listed here in order of registration."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from ..operands import ExpertWeights
from ..spec import ExpertsSpec
from ..work import Work
from .base import Candidate, Launcher, Plan, Priced, Provider, Tactic, Unserved

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Candidate", "ExpertWeights", "Launcher", "Plan", "Priced", "Provider", "Tactic", "Unserved", "Work",
    "bypassing", "copied_bytes", "keep_in", "launcher", "providers",
]  # fmt: skip


@lru_cache(None)
def providers() -> dict[str, Provider]:
    """Every provider by name; `aten` is first, and runs any spec on any device."""
    from .aten import Aten
    from .flashinfer_backends import hopper_and_older
    from .flashinfer_trtllm import blackwell
    from .frost import frosts
    from .triton_decode import TritonDecode
    from .triton_grouped import TritonGrouped
    from .triton_hopper import TritonHopper

    return {
        p.name: p
        for p in (Aten(), TritonDecode(), TritonGrouped(), TritonHopper(), *hopper_and_older(), *blackwell(), *frosts())
    }


# A kernel needs neither autocast, since the spec decides dtypes, nor autograd, nor the tracking of views.
_UNNEEDED = (
    "ADInplaceOrView",
    "AutogradFunctionality",
    *(f"Autocast{x}" for x in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1")),
)


@lru_cache(None)
def _unneeded() -> Any:
    import torch

    keys = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in _UNNEEDED)
    return reduce(or_, keys)


def bypassing() -> Any:
    """A context in which torch's operators go to their kernels past autocast, autograd and the tracking of views."""
    import torch

    return torch._C._ExcludeDispatchKeyGuard(_unneeded())


def _bypassing(launch: Launcher) -> Launcher:
    def run(x: Tensor, ids: Tensor, w: Tensor | None, packed: ExpertWeights) -> Tensor:
        with bypassing():
            return launch(x, ids, w, packed)

    return run


@lru_cache(1024)
def launcher(candidate: Candidate, spec: ExpertsSpec, device: object) -> Launcher:
    """The candidate's launcher, built once. ValueError names an unknown provider; KeyError never escapes."""
    known = providers()
    if candidate.provider not in known:
        raise ValueError(f"provider {candidate.provider!r} is not one of {', '.join(known)}")
    provider = known[candidate.provider]
    launch = provider.build(candidate.tactic, spec, device)  # type: ignore[arg-type]
    if provider.dispatches:
        launch = _bypassing(launch)
    if provider.reads_any(spec):
        return launch
    aten = _bypassing(known["aten"].build(Tactic(), spec, device))  # type: ignore[arg-type]

    def run(x: Tensor, ids: Tensor, w: Tensor | None, packed: ExpertWeights) -> Tensor:
        try:
            return launch(x, ids, w, packed)
        except Unserved as unserved:
            warn_once(f"moe_compile: {candidate.provider} leaves calls to aten: {unserved.verdict}")
        return aten(x, ids, w, packed)

    if hasattr(launch, "again"):
        run.again = launch.again  # type: ignore[attr-defined]  # what is replayed was served
    return run


def copied_bytes(names: Iterable[str], spec: ExpertsSpec) -> int:
    """Bytes that these providers keep of a block's weights in layouts of their own; what they share counts once."""
    return sum({k: v for name in names for k, v in providers()[name].copies(spec).items()}.values())


def keep_in(folder: str) -> None:
    """Where the libraries' own tuners keep their results, beside ours; "" for nowhere."""
    from . import flashinfer_api

    flashinfer_api.tuning_folder = folder


@lru_cache(256)
def warn_once(text: str) -> None:
    """Warn, the first time that the text is given."""
    warnings.warn(text, stacklevel=2)
