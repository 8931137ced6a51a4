"""What benchmarks compile before they time anything, side by side, a process each, into Triton's and Inductor's caches.

In: a function and its arguments, call by call. A process is a fork of one that has imported what all need, for imports
take seconds; where the program has asked CUDA for something, a fork can't use it, and starts a Python of its own
instead. What fails prints its traceback and is left to the program, where it fails again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from typing import Any

import torch
import torch._inductor.config


def warm(*modules: str) -> None:
    """Imports torch's compilers, which come late else, and `modules`."""
    compilers = (
        "torch._dynamo.convert_frame", "torch._inductor.compile_fx", "torch._inductor.codegen.triton",
        "torch._inductor.runtime.triton_heuristics", "torch._functorch.aot_autograd",
    )  # fmt: skip
    for name in (*compilers, *modules):
        importlib.import_module(name)


def side_by_side(function: Callable[..., None], calls: Iterable[tuple[Any, ...]]) -> None:
    """function(*arguments) of each call; done when all are."""
    processes = [get_context("fork").Process(target=_forked, args=(function, arguments)) for arguments in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _forked(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        fresh = get_context("spawn").Process(target=_alone, args=(function, arguments))
        fresh.start()
        fresh.join()
    else:
        _alone(function, arguments)


def _alone(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch._inductor.config.compile_threads = 1  # a process a processor
    function(*arguments)
