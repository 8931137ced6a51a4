"""Tensor maps: what a kernel gets for a tensor descriptor. Triton encodes one for each at each launch, in Python.

In: a descriptor, what Triton's launcher knows of it, and an address. Out: its map, kept by address: it holds no tensor,
and says nothing but address, shape, strides and box.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import inspect
from functools import lru_cache
from typing import Any

from . import launches

_MOST = 2048  # shapes, and maps of a shape


class TensorMaps:
    """The tensor maps of descriptors that differ in their address only; kept, since they hold nothing else.

    type: of the maps. rest: the descriptor's shape and strides, which a kernel takes after the map.
    """

    def __init__(self, descriptor: Any, meta: Any) -> None:
        self.descriptor, self.meta = copy.copy(descriptor), meta
        encoded = _encode(descriptor, meta)
        self.type, self.rest, self.context = type(encoded[0]), encoded[1:], _Context()
        self.descriptor.base = None  # no tensor is kept
        self.made: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        found = self.made.get(address)
        if found is None:
            if len(self.made) >= _MOST:
                self.made = {}
            descriptor = copy.copy(self.descriptor)
            descriptor.base = _At(address)
            self.context.bind()
            found = self.made[address] = _encode(descriptor, self.meta)[0]
        return found


class _Context:
    """The driver's context of this thread, for one that has none: there the driver encodes nothing, and torch gives it
    one when it first needs it, which no allocation does that torch's cache serves."""

    def __init__(self) -> None:
        self.known, self.driver = ctypes.c_void_p(), None
        with contextlib.suppress(OSError):  # no driver, no contexts
            self.driver = ctypes.CDLL(launches.DRIVER)
            self.driver.cuCtxGetCurrent(ctypes.byref(self.known))

    def bind(self) -> None:
        current = ctypes.c_void_p()
        if self.driver and self.driver.cuCtxGetCurrent(ctypes.byref(current)) == 0 and not current:
            self.driver.cuCtxSetCurrent(self.known)


class _At:
    """Stands for a tensor of which only the address is asked."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


_KNOWN: dict[Any, TensorMaps] = {}


def maps_of(descriptor: Any, meta: Any) -> TensorMaps:
    """Those of the descriptor's kind; meta: what Triton's launcher knows of it."""
    key = (tuple(descriptor.shape), tuple(descriptor.strides), descriptor.padding, repr(meta))
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        found = _KNOWN[key] = TensorMaps(descriptor, meta)
    return found


@lru_cache(1024)
def without_encoding(run: Any) -> tuple[Any, tuple[Any, ...]]:
    """Triton's launcher without its step that encodes descriptors, and what that step knows of each of them.

    LookupError where this Triton does it elsewhere.
    """
    inside = inspect.getclosurevars(run.launch).nonlocals
    if "launcher" not in inside or not inside.get("tensordesc_meta"):
        raise LookupError("this triton encodes descriptors elsewhere")
    bare = copy.copy(run)
    bare.launch = inside["launcher"]
    return bare, tuple(inside["tensordesc_meta"])


@lru_cache(None)
def _encoder() -> tuple[Any, int]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg, len(inspect.signature(make_tensordesc_arg).parameters)


def _encode(descriptor: Any, meta: Any) -> list[Any]:
    """[tensor map, *shape, *strides]."""
    make, parameters = _encoder()
    return list(make(descriptor, meta, *(None,) * (parameters - 2)))
