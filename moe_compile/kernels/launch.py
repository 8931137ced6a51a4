"""Launches a triton.jit kernel without repeating Triton's analysis of its arguments once a signature is known.

In: a kernel whose parameters are, in this order, arguments (tensors, tensor descriptors, specialized ints), free ints
(listed in do_not_specialize), and constexprs. Out: the launch, on the current stream.
Invariant: two calls share a compiled kernel only if Triton itself would share it: same device, constants and options,
dtypes, 16-byte alignment of every tensor, values of every specialized int.
Triton's own path took 30 to 90 us of host time a launch here (H200 machine, triton 3.6, 2026-11-30: 137 us for the two
launches of decode.py, 370 us for the four of a grouped call, two of them with tensor descriptors).
"""

from __future__ import annotations

from typing import Any

import torch
import triton

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], free: tuple[int, ...], constants: tuple[Any, ...],
    warps: int = 4, stages: int = 3, **options: Any,
) -> None:  # fmt: skip
    """kernel[grid](*arguments, *free, *constants); `free` must lie in [0, 2^31)."""
    key: list[Any] = [kernel.__name__, arguments[0].get_device(), warps, stages, len(options), constants]
    for a in arguments:
        if isinstance(a, torch.Tensor):
            key.append(a.dtype)
            key.append(a.data_ptr() % 16)
        elif isinstance(a, int):
            key.append(a)
        else:
            key.append((a.base.dtype, *a.block_shape))
    known = _compiled.get(found := tuple(key))
    if known is not None:
        known[(*grid, 1)](*arguments, *free, *constants)
        return
    assert all(0 <= n < 2**31 for n in free), free
    made = kernel[grid](*arguments, *free, *constants, num_warps=warps, num_stages=stages, **options)
    if isinstance(kernel, triton.JITFunction):
        _compiled[found] = made
