"""FlashInfer's words for ours: versions, architectures, activations, configurations, and what its kernels need built.

In: specs and compute capabilities. Out: FlashInfer's objects, or a Reject that names what is missing and how to get it.
Invariant: nothing of FlashInfer is imported until a spec is asked about on a CUDA architecture (an import takes 2-3 s
and 480 MB); `installed` reads package metadata only. Facts are of FlashInfer 0.7.4.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from ..hardware import Device, facts
from ..spec import ExpertsSpec
from ..verdict import OK, Reject, Verdict

if TYPE_CHECKING:
    import torch

NEEDED = (0, 7, 4)
INSTALL = 'pip install "flashinfer-python>=0.7.4"'
CEILING = 1 << 20  # most tokens of a call; FlashInfer allocates by the bucket of a call, not by this
_T = TypeVar("_T")
tuning_folder = ""  # where FlashInfer's tuner keeps its results; "": in this process only

# Our activation names -> FlashInfer's class and its parameters. swiglu_oai: gate * sigmoid(alpha * gate) * (up + 1).
_ACTIVATIONS: dict[str, tuple[str, dict[str, str | float]]] = {
    "swiglu": ("SwiGLU", {}),
    "swiglu_oai": ("SwiGLU", {"alpha": "alpha", "beta": 1.0, "limit": "limit"}),
    "swiglu_clamped": ("SwiGLU", {"limit": "limit"}),
    "swiglu_step": ("SwiGLUStep", {"limit": "limit"}),
    "geglu": ("GeGLU", {}),
    "geglu_tanh": ("GeGLUTanh", {}),
    "relu2": ("ReLU2", {}),
    "relu": ("ReLU", {}),
    "silu": ("SiLU", {}),
    "gelu": ("GELU", {}),
    "identity": ("Identity", {}),
}
_FORMATS = {"bf16": "BF16", "f16": "FP16"}


def release(package: str) -> tuple[int, ...] | None:
    """The leading numbers of an installed package's version, None where it isn't installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", version(package))[:3]))
    except PackageNotFoundError:
        return None


@lru_cache(None)
def installed() -> Verdict:
    """Whether FlashInfer is there in a usable version."""
    found = release("flashinfer-python")
    if found is None:
        return Reject("flashinfer is not installed", INSTALL)
    if found < NEEDED:
        return Reject("flashinfer is too old", f"{version('flashinfer-python')} is installed; {INSTALL}")
    return OK


@lru_cache(None)
def module(name: str) -> Any:
    """flashinfer.<name>, imported when first asked for."""
    return importlib.import_module(f"flashinfer.{name}")


@lru_cache(None)
def importable() -> Verdict:
    """Whether its MoE API imports; a missing dependency is named."""
    try:
        module("fused_moe.layer")
    except ImportError as error:
        what = error.name or str(error)
        return Reject("flashinfer doesn't import", f"{what} is missing: pip install {what.partition('.')[0]}")
    return OK


def activation(spec: ExpertsSpec) -> Any:
    """FlashInfer's value of the spec's activation, or a Reject."""
    name, _, rest = spec.act.name.partition("(")
    if name not in _ACTIVATIONS:
        return Reject("FlashInfer has no such activation", str(spec.act))
    kind, fields = _ACTIVATIONS[name]
    given = {k: float(v) for k, v in (pair.split("=") for pair in rest.rstrip(")").split(",") if pair)}
    values = {k: given[v] if isinstance(v, str) else v for k, v in fields.items()}
    return getattr(module("fused_moe.api"), kind)(**values)


def config(spec: ExpertsSpec, act: Any, backend: Any) -> Any:
    """The MoEConfig of one backend: routing is given by the caller, the result has the dtype of the hidden states."""
    api = module("fused_moe.api")
    form = getattr(api.QuantFormat, _FORMATS[spec.x])
    return api.MoEConfig(
        routing=api.RoutingConfig(num_experts=spec.E, top_k=spec.K),
        quant=api.QuantConfig(weight=form, activation=form, output=form),
        experts=api.ExpertConfig(intermediate_size=spec.I),
        activation=act,
        backend=api.BackendOptions((backend,)),
        execution=api.ExecutionConfig(tune_max_num_tokens=CEILING),
    )


# Modules of compiled CUDA: (python module, generator), what it takes to build it, and whether we may build it now.
_BUILDS: dict[str, tuple[str, str, str]] = {
    "moe_utils": ("fused_moe.cute_dsl.moe_utils", "gen_moe_utils_module", "about 10 minutes and a download"),
    "trtllm_utils": ("tllm_utils", "gen_trtllm_utils_module", "7 seconds"),
    "trtllm_moe": ("fused_moe.core", "gen_trtllm_gen_fused_moe_sm100_module", "a download"),
}
_FUSED_MOE = {110: 100, 107: 100, 121: 120}  # architectures that share another's module (fused_moe/core.py)


@contextmanager
def _without_downloads() -> Iterator[None]:
    """Generators look for headers in FlashInfer's cache and else fetch them, for a minute where there is no network."""
    loader = module("jit.cubin_loader")
    fetch = loader.download_file
    loader.download_file = lambda *args, **kwargs: False
    try:
        yield
    finally:
        loader.download_file = fetch


@lru_cache(None)
def built(name: str, arch: int) -> Verdict:
    """Whether a CUDA module of FlashInfer is compiled. The smallest is compiled here; the others take too long.

    Nothing is downloaded.
    """
    if name == "fused_moe":
        arch = _FUSED_MOE.get(arch, arch)
        place, generator = "fused_moe.core", f"gen_cutlass_fused_moe_sm{arch}_module"
        effort = "30 minutes on 16 cores"
        name = f"fused_moe_{arch}"
    else:
        place, generator, effort = _BUILDS[name]
    options = {"enable_rubin": True} if name == "trtllm_moe" and arch == 107 else {}
    given = ", ".join(f"{k}={v}" for k, v in options.items())
    call = f"import flashinfer.{place} as m; m.{generator}({given}).build_and_load()"
    how = f'pip install flashinfer-jit-cache, or once: python -c "{call}"'
    try:
        with _without_downloads():
            made = getattr(module(place), generator)(**options)
        if getattr(made, "is_compiled", True):
            return OK
        if name == "trtllm_utils":  # without its delay kernel the tuner skips every tactic, silently
            made.build_and_load()
            return OK
    except (OSError, RuntimeError, ValueError, AssertionError) as error:  # no network, no nvcc, no header
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Reject("FlashInfer can't build a module", f"{name}: {first[:200]}; {how}")
    return Reject("FlashInfer's kernels aren't built", f"{name} takes {effort} and nvcc; {how}")


def package_needed(package: str, least: tuple[int, ...]) -> Verdict:
    """Whether a package that a backend needs is installed in its least version."""
    found, wanted = release(package), ".".join(map(str, least))
    if found is None or found < least:
        have = "not installed" if found is None else ".".join(map(str, found))
        return Reject(f"{package} is missing", f'{have}; pip install "{package}>={wanted}"')
    return OK


def tuning_file() -> str | None:
    """FlashInfer's own cache file, of this version; None where it has no folder that can be written."""
    try:
        if tuning_folder:
            os.makedirs(tuning_folder, exist_ok=True)
    except OSError:
        return None
    return os.path.join(tuning_folder, f"flashinfer-{version('flashinfer-python')}.json") if tuning_folder else None


def aside(work: Callable[[], _T], device: torch.device) -> _T:
    """`work()` in a thread of its own, while the device is otherwise idle.

    Inductor's warm-up before a CUDA graph, and the graph, allocate from a private pool, per thread. What outlives
    the call (copies of weights, compiled kernels' constants, tuning) must not come from there. Gradient and inference
    modes are per thread too: off here.
    """
    import torch

    def run() -> _T:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.default_stream(device)), torch.no_grad():
            result = work()
            torch.cuda.synchronize(device)
            return result

    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()


def present(device: Device) -> torch.device | None:
    """The device of this machine that has these facts, the current one first; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    current = torch.cuda.current_device()
    order = sorted(range(torch.cuda.device_count()), key=lambda i: i != current)
    return next((d for i in order if facts(d := torch.device("cuda", i)) == device), None)


def capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()
