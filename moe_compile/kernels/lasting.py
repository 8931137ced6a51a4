"""Device memory that outlives the call that makes it.

In: a function that makes a tensor, and its device. Out: the tensor, complete. Another thread makes it: Inductor's
warm-up before a CUDA graph allocates from the graph's pool, per thread, and refuses what of it is left after the call;
and modes of dispatch, one of which records calls (tape.py), are a thread's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def lasting(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """make(), whose tensor belongs to the current stream, like what a call allocates; not while that is captured."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> torch.Tensor:
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            made = make()
        if stream:
            stream.synchronize()
        return made

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()
