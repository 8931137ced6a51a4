"""Launches our kernels: overlapped with the one before where the device can, and at little host time.

In: a triton.jit kernel whose parameters are, in this order, arguments (tensors, tensor descriptors, specialized ints),
free ints (its do_not_specialize), constexprs, and last the constexpr PDL. Out: the launch, on the current stream.

Programmatic dependent launch (Hopper on): with PDL a kernel lets its successor be scheduled early
(gdc_launch_dependents), and one launched with `overlap` waits itself (gdc_wait) before it touches what its predecessor
writes. A kernel that waits first and lets go after that keeps the chain ordered: whatever ran before the predecessor
is complete too.
Invariant: two calls share a compiled kernel only if Triton itself would share it: same device, constants and options,
dtypes, 16-byte alignment of every tensor, values of every specialized int. Triton's own path repeats that analysis at
every call: 137 us of host time for the two launches of decode.py, 370 us for four with tensor descriptors (H200
machine, triton 3.6, 2026-11-30).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

_compiled: dict[tuple[Any, ...], Any] = {}


@lru_cache(None)
def overlaps(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], free: tuple[int, ...], constants: tuple[Any, ...],
    *, warps: int = 4, stages: int = 3, overlap: bool = False,
) -> None:  # fmt: skip
    """kernel[grid](*arguments, *free, *constants, PDL). `free` are in [0, 2^31); the first argument is a tensor."""
    device = arguments[0].device
    pdl = overlaps(device)
    key: list[Any] = [kernel, device, warps, stages, overlap, pdl, constants]
    values: list[Any] = []  # addresses instead of tensors: the launcher asks the driver about every tensor
    for a in arguments:
        if isinstance(a, torch.Tensor):
            values.append(address := a.data_ptr())
            key += (a.dtype, address % 16)
        else:
            values.append(a)
            key.append(a if isinstance(a, int) else (a.base.dtype, *a.block_shape))
    known = _compiled.get(found := tuple(key))
    if known is not None:
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        rest = (None, None, None, *values, *free, *constants, pdl)  # no launch metadata, no profiler's hooks
        known.run(*grid, 1, stream, known.function, known.packed_metadata, *rest)
        return
    assert all(0 <= n < 2**31 for n in free), free
    options: dict[str, Any] = {"launch_pdl": True} if pdl and overlap else {}
    made = kernel[grid](*arguments, *free, *constants, pdl, num_warps=warps, num_stages=stages, **options)
    if isinstance(kernel, triton.JITFunction):
        _compiled[found] = made


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b). (triton.cdiv takes 3 us on the host: it also accepts constexprs.)"""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()
