"""Launches our kernels: overlapped with the one before where the device can, and at little host time.

In: a triton.jit kernel whose parameters are, in this order, arguments (tensors, tensor descriptors, specialized ints),
free ints (its do_not_specialize), constexprs, and last the constexpr PDL. Out: the launch, on the current stream.

Programmatic dependent launch (Hopper on): with PDL a kernel lets its successor be scheduled early
(gdc_launch_dependents), and one launched with `overlap` waits itself (gdc_wait) before it touches what its predecessor
writes. A kernel that waits first and lets go after that keeps the chain ordered: whatever ran before the predecessor
is complete too.
Invariant: two calls share a compiled kernel only if Triton itself would share it: same device, constants and options,
dtypes, 16-byte alignment of every tensor, values of every specialized int. What calls share is in a `Bound`, so that a
call looks at addresses only; tape.py replays what was launched without even that. Triton's own path repeats the whole
analysis at every call: 137 us of host time for the two launches of decode.py, 370 us for four with tensor descriptors
(H200 machine, triton 3.6, 2026-11-30).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton


class _Thread(threading.local):
    """A thread's own, since others may serve while one compiles. notes: where its launches are noted. compile_only:
    none of its kernels runs."""

    notes: list[Launched] | None = None
    compile_only = False


_thread = _Thread()


class Launched(NamedTuple):
    """A launch that a Bound made: Triton's launcher, function and metadata, and the types of all parameters (None: not
    kept); and all it was given."""

    compiled: tuple[Any, Any, Any, tuple[Any, ...]] | None
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    free: tuple[int, ...]
    constants: tuple[Any, ...]


def note(launches: list[Launched] | None) -> None:
    """From here on this thread's launches are appended to `launches`; None ends it."""
    _thread.notes = launches


def only_compiled() -> bool:
    """Whether this thread's launches compile and run nothing (`compiling`)."""
    return _thread.compile_only


@lru_cache(None)
def overlaps(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


class Bound:
    """A kernel with all that its calls share: constants, options, the device, and the dtypes of its tensors."""

    def __init__(
        self, kernel: Any, constants: tuple[Any, ...], device: torch.device, *, warps: int = 4, stages: int = 3,
        overlap: bool = False, registers: int | None = None,
    ) -> None:  # fmt: skip
        pdl = overlaps(device)
        self.kernel, self.constants, self.index = kernel, (*constants, pdl), device.index
        self.options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        if pdl and overlap:
            self.options["launch_pdl"] = True
        if registers:
            self.options["maxnreg"] = registers
        self.compiled: dict[Any, Any] = {}  # by alignments and specialized ints

    def __call__(self, grid: tuple[int, int], arguments: tuple[Any, ...], free: tuple[int, ...] = ()) -> None:
        """kernel[grid](*arguments, *free, *constants, PDL). `free` are in [0, 2^31)."""
        values: list[Any] = []  # addresses instead of tensors: the launcher asks the driver about every tensor
        key: list[int] = []
        for a in arguments:
            if isinstance(a, torch.Tensor):
                a = a.data_ptr()
                key.append(a & 15)
            elif isinstance(a, int):
                key.append(a)
            values.append(a)
        known = self.compiled.get(found := tuple(key))
        if known is None:
            self._compile(found, grid, arguments, free)
        elif not _thread.compile_only:  # what it would read may come from a kernel that has only been compiled
            stream = torch._C._cuda_getCurrentRawStream(self.index)
            run, function, metadata, _ = known  # and no launch metadata, no profiler's hooks
            run(*grid, 1, stream, function, metadata, None, None, None, *values, *free, *self.constants)
        if _thread.notes is not None:
            _thread.notes.append(Launched(self.compiled.get(found), grid, arguments, free, self.constants))

    def _compile(self, key: Any, grid: tuple[int, int], arguments: tuple[Any, ...], free: tuple[int, ...]) -> None:
        assert all(0 <= n < 2**31 for n in free), free
        if _thread.compile_only:
            self.kernel.warmup(*arguments, *free, *self.constants, grid=grid, **self.options)
            return
        made = self.kernel[grid](*arguments, *free, *self.constants, **self.options)
        if isinstance(self.kernel, triton.JITFunction):
            types = tuple(made.src.signature.values())
            self.compiled[key] = (made.run, made.function, made.packed_metadata, types)


_bound: dict[tuple[Any, ...], Bound] = {}


def launch(
    kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], free: tuple[int, ...], constants: tuple[Any, ...],
    *, warps: int = 4, stages: int = 3, overlap: bool = False,
) -> None:  # fmt: skip
    """As a Bound does, which is found by what it holds; the first argument is a tensor."""
    device = arguments[0].device
    dtypes = tuple(
        a.dtype if isinstance(a, torch.Tensor) else (a.base.dtype, *a.block_shape)
        for a in arguments
        if not isinstance(a, int)
    )
    key = (kernel, device, dtypes, warps, stages, overlap, constants)
    if (bound := _bound.get(key)) is None:
        bound = _bound[key] = Bound(kernel, constants, device, warps=warps, stages=stages, overlap=overlap)
    bound(grid, arguments, free)


@contextlib.contextmanager
def compiling(executor: Executor) -> Iterator[None]:
    """Inside, this thread's launches compile their kernels and run nothing; at the end all are compiled, by the
    executor's threads.

    Triton's passes let go of the interpreter lock: five kernels took 5.8 s one by one and 3.5 s on four threads (2 busy
    cores, triton 3.9, 2026-11-30).
    """
    together = getattr(triton, "AsyncCompileMode", None)
    _thread.compile_only = True
    try:
        with together(executor) if together else contextlib.nullcontext():
            yield
    finally:
        _thread.compile_only = False


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b). (triton.cdiv takes 3 us on the host: it also accepts constexprs.)"""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()
