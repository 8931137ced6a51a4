"""A call's launches, recorded once for each kind of call and replayed with other addresses: little is left for the host.

In: a launcher, that is a function of tensors which allocates by torch.empty and launches by launch.Bound. Out: the same
launcher. The first call of a kind runs as written and is recorded; a later one allocates its output and one scratch
buffer, and hands addresses to the compiled kernels. A kind is all but addresses: T, dtypes, strides.
Invariants:
* A tape holds no tensor and no address, so weights are read where they are at each call.
* Only what was seen whole is replayed. A call that copies or computes by torch (x that a kernel can't read in place),
  operands that are not aligned to 16 bytes or lie at one address: each runs as written.
* Buffers share memory only where the last launch that uses one comes before the first that uses the other, as torch's
  allocator would share them; like its blocks the scratch belongs to the stream.
* A tape doesn't change once it is made: several threads and streams may replay it, also into a CUDA graph.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import itemgetter, or_
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..operands import ExpertWeights
from ..verdict import Reject
from . import launch
from .launch import Launched

Launcher = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, ExpertWeights], torch.Tensor]
_ALIGNED = 256  # bytes, of a buffer in the scratch
_MOST = 2048  # tapes of a launcher, and tensor maps of an operand


def recorded(run: Launcher) -> Launcher:
    """`run` on a CUDA device, which is current, replayed where it can be."""
    tapes: dict[Any, Tape | Reject] = {}

    def replayed(
        x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, packed: ExpertWeights
    ) -> torch.Tensor:
        operands = [x_TH, ids_TK, *packed.gate_up, packed.down, *packed.gate_up_bias]
        operands += [t for t in (weights_TK, packed.down_bias, packed.post_scale) if t is not None]
        addresses = [t.data_ptr() for t in operands]
        kind = (x_TH.shape[0], ids_TK.dtype, *[t.stride() for t in operands])
        tape = tapes.get(kind)
        if isinstance(tape, Reject) or launch.only_compiled() or reduce(or_, addresses) & 15:
            return run(x_TH, ids_TK, weights_TK, packed)
        if tape is not None:
            return tape(addresses)
        with _Recorder() as recorder:
            out = run(x_TH, ids_TK, weights_TK, packed)
        if len(tapes) >= _MOST:
            tapes.pop(next(iter(tapes)), None)
        tapes[kind] = recorder.tape(addresses, out)
        return out

    return replayed


class _Unseen(Exception):
    """Why a call can't be replayed."""


class _Recorder(TorchDispatchMode):
    """Notes this thread's launches and allocations, which stay apart: none is freed before the end."""

    allocating = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Launched] = []
        self.allocated: list[torch.Tensor] = []
        self.computed: list[str] = []  # by torch, which no replay does

    def __enter__(self) -> _Recorder:
        launch.note(self.launched)
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        launch.note(None)
        super().__exit__(*failure)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.allocating:
            self.allocated.append(out)
        elif not func.is_view:
            self.computed.append(str(func))
        return out

    def tape(self, addresses: Sequence[int], out: torch.Tensor) -> Tape | Reject:
        try:
            if self.computed:
                raise _Unseen(f"torch computes: {', '.join(self.computed)}")
            return Tape(self.launched, addresses, self.allocated, out)
        except _Unseen as why:
            return Reject("a call that runs as written", str(why))


class Tape:
    """The launches of one kind of call.

    A replay makes one list of values: operands' addresses, the output's, the buffers', tensor maps, the stream, then
    what never changes. Each launch picks its arguments from it.
    """

    def __init__(
        self, launched: Sequence[Launched], addresses: Sequence[int], allocated: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        if len(set(addresses)) < len(addresses):
            raise _Unseen("two operands at one address")
        self.shape, self.dtype, self.device = out.shape, out.dtype, out.device
        buffers = [t for t in allocated if t.data_ptr() != out.data_ptr()]
        if len(buffers) == len(allocated) or not out.is_contiguous():
            raise _Unseen("the output is not one of its allocations")
        places = {address: i for i, address in enumerate([*addresses, out.data_ptr(), *(b.data_ptr() for b in buffers)])}
        self.maps: list[tuple[int, Maps]] = []  # of the values at these indices
        uses: list[set[int]] = [set() for _ in buffers]  # the launches of each buffer

        def place(pointer: Any, step: int) -> int:
            found = places.get(pointer.data_ptr())
            if found is None:
                raise _Unseen("an argument is neither an operand nor one of its allocations")
            if found > len(addresses):
                uses[found - len(addresses) - 1].add(step)
            return found

        # tensor maps come between the buffers and the stream; how many is known when all launches were looked at
        first_map, fixed = len(addresses) + 1 + len(buffers), _Fixed()
        picks: list[tuple[Callable[..., None], list[int | Any]]] = []
        for step, each in enumerate(launched):
            if each.compiled is None:
                raise _Unseen("a kernel is not kept compiled")
            run, function, metadata = each.compiled
            arguments: list[Any] = [*map(fixed, (*each.grid, 1)), "stream"]
            arguments += map(fixed, (function, metadata, None, None, None))
            bare, metas = _bare(run) if any(map(is_descriptor, each.arguments)) else (run, iter(()))
            for a in each.arguments:
                if isinstance(a, int):
                    arguments.append(fixed(a))
                elif isinstance(a, torch.Tensor):
                    arguments.append(place(a, step))
                else:
                    maps = _maps(a, next(metas))
                    entry = (place(a.base, step), maps)
                    if entry not in self.maps:
                        self.maps.append(entry)
                    arguments.append(first_map + self.maps.index(entry))
                    arguments += map(fixed, maps.rest)
            arguments += map(fixed, (*each.free, *each.constants))
            picks.append((bare, arguments))
        stream = first_map + len(self.maps)
        self.fixed = fixed.values
        self.launches = [
            (run, itemgetter(*(stream if a == "stream" else a if a >= 0 else stream - a for a in arguments)))
            for run, arguments in picks
        ]
        self.offsets, self.bytes = shared([b.numel() * b.element_size() for b in buffers], uses)

    def __call__(self, addresses: list[int]) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        values: list[Any] = addresses
        values.append(out.data_ptr())
        if self.bytes:
            scratch = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            start = scratch.data_ptr()
            values += [start + offset for offset in self.offsets]
        for at, maps in self.maps:
            values.append(maps(values[at]))
        values.append(torch._C._cuda_getCurrentRawStream(self.device.index))
        values += self.fixed
        for run, pick in self.launches:
            run(*pick(values))
        return out


class _Fixed:
    """What never changes. Numbered -1, -2, ...: the value after the stream is the first."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __call__(self, value: Any) -> int:
        self.values.append(value)
        return -len(self.values)


def shared(sizes: Sequence[int], uses: Sequence[set[int]]) -> tuple[list[int], int]:
    """Where each buffer starts, and the bytes of all; those whose launches don't overlap in time may share memory."""
    placed: list[tuple[int, int, set[int]]] = []  # start, end, launches
    starts = []
    for size, launches in zip(sizes, uses, strict=True):
        size = -(-max(size, 1) // _ALIGNED) * _ALIGNED
        start = 0
        for first, end, others in sorted(placed, key=itemgetter(0)):
            apart = not launches or not others or max(launches) < min(others) or max(others) < min(launches)
            if not apart and first < start + size and start < end:
                start = end
        placed.append((start, start + size, launches))
        starts.append(start)
    return starts, max((end for _, end, _ in placed), default=0)


def is_descriptor(argument: Any) -> bool:
    return hasattr(argument, "block_shape")


def _bare(run: Any) -> tuple[Any, Any]:
    """Triton's launcher without what encodes a tensor map of each descriptor at each call, and the maps' metadata."""
    inside = inspect.getclosurevars(run.launch).nonlocals
    if "launcher" not in inside or not inside.get("tensordesc_meta"):
        raise _Unseen("this triton makes tensor maps elsewhere")
    bare = copy.copy(run)
    bare.launch = inside["launcher"]
    return bare, iter(inside["tensordesc_meta"])


class Maps:
    """The tensor maps of one shape of operand, by address."""

    def __init__(self, descriptor: Any, meta: Any) -> None:
        self.descriptor, self.meta, self.made = copy.copy(descriptor), meta, {}
        self.rest = _encode(descriptor, meta)[1:]
        self.descriptor.base = None

    def __call__(self, address: int) -> Any:
        found = self.made.get(address)
        if found is None:
            if len(self.made) >= _MOST:
                self.made = {}
            descriptor = copy.copy(self.descriptor)
            descriptor.base = _At(address)
            found = self.made[address] = _encode(descriptor, self.meta)[0]
        return found


class _At:
    """Stands for a tensor of which its address is asked."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


_known: dict[Any, Maps] = {}


def _maps(descriptor: Any, meta: Any) -> Maps:
    """Those of all descriptors that differ in addresses only."""
    key = (tuple(descriptor.shape), tuple(descriptor.strides), descriptor.padding, repr(meta))
    if key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = Maps(descriptor, meta)
    return _known[key]


@lru_cache(None)
def _encoder() -> tuple[Any, int]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg, len(inspect.signature(make_tensordesc_arg).parameters)


def _encode(descriptor: Any, meta: Any) -> list[Any]:
    """[tensor map, *shape, *strides], what a kernel takes for a descriptor."""
    make, parameters = _encoder()
    return make(descriptor, meta, *(None,) * (parameters - 2))
