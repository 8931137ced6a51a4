"""Other libraries' tuners under a benchmark's clock: what they do while the GPU is shared, how often they repeat after.

FlashInfer's, QuACK's (SonicMoE's products) and Triton's own for SonicMoE's sum over a token's experts. Invariant: what
was found while the GPU was shared is forgotten before anything is timed; what was compiled is kept.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


def _quack() -> list[Any]:
    interface = sys.modules.get("quack.gemm_interface")
    return [interface.gemm_gated_tuned, interface.gemm_tuned] if interface else []


def _sums() -> list[Any]:
    module = sys.modules.get("sonicmoe.functional.reduction_over_k_gather")
    return [module.token_gather_sum_kernel] if module else []


def _once(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
    call()
    return [1.0, 1.0, 1.0]


def shared() -> None:
    """The GPU is shared: tactics are compiled and called once, and not compared."""
    for tuner in _quack():
        tuner._do_bench, tuner.cache_results = _once, False
        tuner.__dict__.pop("do_bench", None)
    for kernel in _sums():
        kernel.do_bench = _once


def alone(long: bool) -> None:
    """The GPU is this process's: tactics are compared, with fewer repeats than is habit; FlashInfer's where `long`."""
    if "flashinfer" in sys.modules:
        tuner = importlib.import_module("flashinfer.autotuner").AutoTuner.get()
        tuner.warmup, tuner.repeat = (1, 3) if long else (3, 10)
    bench = partial(importlib.import_module("triton.testing").do_bench, warmup=2, rep=8)
    for tuner in _quack():
        tuner._do_bench, tuner.cache_results = bench, True
        tuner.__dict__.pop("do_bench", None)
    for kernel in _sums():
        kernel.do_bench = bench


def forget() -> None:
    """What was chosen, not what was compiled."""
    if "flashinfer" in sys.modules:
        from moe_compile.providers import flashinfer

        importlib.import_module("flashinfer.autotuner").AutoTuner.get().clear_cache()
        flashinfer._ready.cache_clear()
    for tuner in (*_quack(), *_sums()):
        tuner.cache.clear()
