"""How a tape makes its launches: all by one call of C (launches.c), or one by one by Triton's launcher.

In: what each kernel was given when it was recorded, where an address or a tensor map is told by its place among a
replay's values. Out: launch(values, stream).
Invariants: C launches what Triton's launcher would, with the same parameters and attributes, and only where all of both
is known: parameters are told apart by the kernel's signature and checked against the bytes that the driver says it
takes. Where they differ, or without a C compiler (which Triton needs as well), Triton launches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from operator import itemgetter
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, NamedTuple

from ..verdict import Reject

DRIVER = "libcuda.so.1"
_SOURCE = Path(__file__).with_suffix(".c")
_BYTES = {f"{sign}{8 * n}": n for sign in "iu" for n in (1, 2, 4, 8)}
_MAP = 128  # bytes of a tensor map
_SHARED = 228 * 1024  # bytes of shared memory from which on triton 3.8 passes another attribute
# All that Triton's launchers hold, 3.6 to 3.9: one that holds more may do more.
_LAUNCHER = {
    "arg_annotations", "global_scratch_align", "global_scratch_size", "gsan_enabled", "kernel_signature", "launch",
    "launch_cooperative_grid", "launch_pdl", "num_ctas", "profile_scratch_align", "profile_scratch_size",
}  # fmt: skip


class Address(NamedTuple):
    """values[value] + offset"""

    value: int
    offset: int


class Map(NamedTuple):
    """values[value], a tensor map"""

    value: int


class Given(NamedTuple):
    """A launch: Triton's launcher, which encodes no descriptors; what it knows of the kernel; all that it passes on.

    types: the kernel's signature. arguments: Address, Map or a constant, in the order of the signature.
    """

    run: Any
    function: Any
    metadata: Any
    types: tuple[Any, ...]
    grid: tuple[int, int]
    arguments: tuple[Any, ...]


Launch = Callable[[list[Any], int], None]


def together(given: Sequence[Given], values: int, map_type: type | None) -> Launch | Reject:
    """launch(values, stream) by one call of C. values: how many; map_type: that of the tensor maps among them."""
    library = _library(DRIVER)
    if isinstance(library, Reject):
        return library
    try:
        launches = tuple(map(_of_driver, given))
        return library.Launches(values, map_type, launches).launch
    except (_Unknown, ValueError, RuntimeError, OverflowError) as why:
        return Reject("not launched by the driver itself", str(why))


@lru_cache(1)
def _library(driver: str) -> Any:
    """launches.c, compiled as Triton compiles its own and kept in its cache; Reject where it can't be."""
    from ctypes import CDLL

    from triton.backends.nvidia.driver import include_dirs
    from triton.runtime.build import compile_module_from_src

    try:
        CDLL(driver)  # without one there is nothing to compile for
        library = compile_module_from_src(_SOURCE.read_text(), "moe_compile_launches", include_dirs=include_dirs)
        library.use(driver)
    except (OSError, ImportError, RuntimeError, CalledProcessError) as why:
        return Reject("launches.c can't be used", str(why))
    return library


class _Unknown(Exception):
    """What of a launch is not known well enough to be made without Triton."""


def _of_driver(launch: Given) -> tuple[Any, ...]:
    """What launches.c takes of a launch: (function, grid, threads, shared, early, cooperative, parameters)."""
    run, has = launch.run, getattr(launch.run, "__dict__", {})
    if not has.keys() <= _LAUNCHER or "launch_pdl" not in has:
        raise _Unknown(f"a launcher of another kind: {run}")
    warps, programs, shared = launch.metadata
    if programs != 1 or shared > _SHARED or has.get("gsan_enabled"):
        raise _Unknown(f"clusters, more shared memory or a sanitizer: {launch.metadata}")
    if run.global_scratch_size or run.profile_scratch_size:
        raise _Unknown("a kernel that asks for scratch memory")
    types = [t for each in launch.types for t in _expanded(each)]
    if len(types) != len(launch.arguments):
        raise _Unknown(f"{len(launch.arguments)} arguments for {types}")
    parameters = [_parameter(t, a) for t, a in zip(types, launch.arguments) if t != "constexpr"]
    scratch = (8, -1, 0)
    return (
        launch.function, (*launch.grid, 1), 32 * warps, shared, run.launch_pdl, run.launch_cooperative_grid,
        (*parameters, scratch, scratch),
    )  # fmt: skip


def _expanded(type_: Any) -> list[Any]:
    """A tensor descriptor is a map, its shape and its strides."""
    if not isinstance(type_, str) or not type_.startswith("tensordesc"):
        return [type_]
    axes = len(re.findall(r"\[([^\]]*)\]", type_)[0].split(","))
    return ["map", *["i32"] * axes, *["i64"] * axes]


def _parameter(type_: Any, argument: Any) -> tuple[int, int, int]:
    """(bytes, index, number) as launches.c reads them."""
    if isinstance(argument, Address) and str(type_).startswith("*"):
        return 8, argument.value, argument.offset
    if isinstance(argument, Map) and type_ == "map":
        return _MAP, argument.value, 0
    if type(argument) is int and type_ in _BYTES:
        return _BYTES[type_], -1, argument
    raise _Unknown(f"{argument} for {type_}")


def one_by_one(given: Sequence[Given], values: int) -> Launch:
    """launch(values, stream) by Triton's launcher, each of whose arguments is picked from one list: the values, the
    stream, addresses within or after them, and what never changes."""
    arguments = [
        (*each.grid, 1, _STREAM, each.function, each.metadata, None, None, None, *each.arguments) for each in given
    ]
    flat = [a for several in arguments for a in several]
    places = list(dict.fromkeys(a for a in flat if isinstance(a, Address) and a.offset))
    constants = [a for a in flat if a is not _STREAM and not isinstance(a, (Address, Map))]
    following = count(values + 1 + len(places))

    def index(a: Any) -> int:
        if a is _STREAM:
            return values
        if isinstance(a, Address) and a.offset:
            return values + 1 + places.index(a)
        return a.value if isinstance(a, (Address, Map)) else next(following)

    picks = [(each.run, itemgetter(*map(index, several))) for each, several in zip(given, arguments)]

    def launch(values: list[Any], stream: int) -> None:
        values = [*values, stream, *(values[at] + offset for at, offset in places), *constants]
        for run, pick in picks:
            run(*pick(values))

    return launch


_STREAM = object()
