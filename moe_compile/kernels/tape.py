"""A call's launches, recorded once for each kind of call and replayed with other addresses, at little host time.

In: a launcher, that is a function of tensors which allocates by torch.empty and launches by launch.Bound. Out: the same
launcher. The first call of a kind runs as written and is recorded; a later one allocates its output and one scratch
buffer, and hands addresses to the compiled kernels. A kind is all that the spec leaves open but addresses: T, the ids'
dtype, strides.
Invariants:
* A tape holds no tensor and no address: weights are read where they are at each call.
* Only what was seen whole is replayed. A call in which torch copies or computes (x that a kernel can't read in place),
  whose operands are not aligned to 16 bytes, or two of which lie at one address, runs as written.
* Buffers share memory only where the last launch that uses one comes before the first that uses the other, as torch's
  allocator would share them; like its blocks, the scratch belongs to the stream.
* A tape doesn't change once it is made: threads and streams may replay it side by side, and into a CUDA graph.
"""

from __future__ import annotations

import copy
import inspect
import threading
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
from .listed import Table, base

Launcher = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, ExpertWeights], torch.Tensor]
_ALIGNED = 256  # bytes, of a buffer in the scratch
_MOST = 2048  # tapes of a launcher, shapes of tensor maps, and maps of a shape


def recorded(run: Launcher) -> Launcher:
    """`run`, for tensors of the current CUDA device, replayed where it can be."""
    tapes: dict[Any, Tape | Reject] = {}
    lock = threading.Lock()

    def replayed(
        x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, packed: ExpertWeights
    ) -> torch.Tensor:
        operands = [x_TH, ids_TK, *packed.gate_up, packed.down, *packed.gate_up_bias]
        operands += [t for t in (weights_TK, packed.down_bias, packed.post_scale) if t is not None]
        kind: tuple[Any, ...] = (x_TH.shape[0], ids_TK.dtype)
        if type(packed.down) is Table:
            kind += tuple((t.strides, t.multiple) for t in operands if type(t) is Table)
            operands = list(map(base, operands))
        if not all(map(torch.Tensor.is_contiguous, operands)):  # else strides follow from T and the spec
            kind += tuple(t.stride() for t in operands)
        addresses = [t.data_ptr() for t in operands]
        tape = tapes.get(kind)
        if isinstance(tape, Reject) or launch.only_compiled() or reduce(or_, addresses) & 15:
            return run(x_TH, ids_TK, weights_TK, packed)
        if tape is not None:
            return tape(addresses)
        with _Recorder() as recorder:
            out = run(x_TH, ids_TK, weights_TK, packed)
        tape = recorder.tape(addresses, out)
        with lock:
            if len(tapes) >= _MOST:
                del tapes[next(iter(tapes))]
            tapes[kind] = tape
        return out

    return replayed


class _Recorder(TorchDispatchMode):
    """Notes this thread's launches, and keeps what it allocates until the end, so that every buffer has its address."""

    allocating = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: list[Launched] = []
        self.allocated: list[torch.Tensor] = []
        self.computed: list[str] = []  # by torch, which no replay does

    def __enter__(self) -> _Recorder:
        launch.note(self.launched)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        launch.note(None)
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.allocating:
            self.allocated.append(out)
        elif not func.is_view:
            self.computed.append(str(func))
        return out

    def tape(self, addresses: Sequence[int], out: torch.Tensor) -> Tape | Reject:
        if self.computed:
            return Reject("torch computes in this call", ", ".join(self.computed))
        try:
            return Tape(self.launched, addresses, self.allocated, out)
        except _Unknown as what:
            return Reject("not all of this call is known", str(what))


class _Unknown(Exception):
    """What of a call a tape can't hold."""


class Tape:
    """The launches of one kind of call.

    A replay makes one list of values: the addresses of operands, output and buffers, the tensor maps, the stream, and
    what never changes. Each launch picks what it is given from that list.
    """

    def __init__(
        self, launched: Sequence[Launched], addresses: Sequence[int], allocated: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        buffers = [t for t in allocated if t.data_ptr() != out.data_ptr()]
        every = [*addresses, out.data_ptr(), *(t.data_ptr() for t in buffers)]
        if len(set(every)) < len(every):
            raise _Unknown("two tensors at one address")
        if len(buffers) == len(allocated) or not out.is_contiguous():
            raise _Unknown("where the output comes from")
        self.shape, self.strides, self.dtype, self.index = tuple(out.shape), out.stride(), out.dtype, out.device.index
        # as Inductor's own code allocates: 2 us, torch.empty 4 (H200 machine, 2026-11-30)
        self.empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{out.device.type}")
        self.maps: list[tuple[int, TensorMaps]] = []  # those of the address at each index
        self.constant: list[Any] = []
        uses: dict[int, list[int]] = {i: [] for i in range(len(every))}  # the launches that each address is given to
        picked: list[tuple[Any, list[tuple[str, int]]]] = []
        for step, each in enumerate(launched):
            run, arguments = _taken_apart(each)
            picks = []
            for kind, value in arguments:
                if kind == "tensor" or kind == "map":
                    tensor, maps = value
                    if tensor.data_ptr() not in every:
                        raise _Unknown("an argument that is no operand and was not allocated")
                    at = every.index(tensor.data_ptr())
                    uses[at].append(step)
                    if kind == "map" and (at, maps) not in self.maps:
                        self.maps.append((at, maps))
                    picks.append((kind, at if kind == "tensor" else self.maps.index((at, maps))))
                elif kind == "stream":
                    picks.append((kind, 0))
                else:
                    self.constant.append(value)
                    picks.append((kind, len(self.constant) - 1))
            picked.append((run, picks))
        if launched and not uses[len(addresses)]:
            raise _Unknown("what writes the output")
        first = {"tensor": 0, "map": len(every), "stream": len(every) + len(self.maps)}
        first["constant"] = first["stream"] + 1
        self.launches = [(run, itemgetter(*(first[kind] + i for kind, i in picks))) for run, picks in picked]
        sizes = [t.numel() * t.element_size() for t in buffers]
        self.offsets, size = placed(sizes, [uses[len(addresses) + 1 + i] for i in range(len(buffers))])
        self.bytes = (size,)

    def __call__(self, addresses: list[int]) -> torch.Tensor:
        """The output. `addresses` is the caller's no more."""
        out = self.empty(self.shape, self.strides, self.dtype)
        scratch = self.empty(self.bytes, (1,), torch.uint8)
        start = scratch.data_ptr()
        values: list[Any] = addresses
        values.append(out.data_ptr())
        values += [start + offset for offset in self.offsets]
        for at, maps in self.maps:
            values.append(maps(values[at]))
        values.append(torch._C._cuda_getCurrentRawStream(self.index))
        values += self.constant
        for run, pick in self.launches:
            run(*pick(values))
        return out


def _taken_apart(launched: Launched) -> tuple[Any, list[tuple[str, Any]]]:
    """Triton's launcher and what it takes: ("tensor", (t, None)), ("map", (t, its maps)), ("stream", _), ("constant",
    value)."""
    if launched.compiled is None:
        raise _Unknown("a kernel that is not kept compiled")
    run, function, metadata = launched.compiled
    known: tuple[Any, ...] = ()  # of each descriptor
    if any(not isinstance(a, (int, torch.Tensor)) for a in launched.arguments):
        run, known = _without_encoding(run)
    metas = iter(known)

    def constants(*values: Any) -> list[tuple[str, Any]]:
        return [("constant", v) for v in values]

    taken = [*constants(*launched.grid, 1), ("stream", None), *constants(function, metadata, None, None, None)]
    for a in launched.arguments:
        if isinstance(a, int):
            taken += constants(a)
        elif isinstance(a, torch.Tensor):
            taken.append(("tensor", (a, None)))
        else:
            maps = _maps(a, next(metas))
            taken += [("map", (a.base, maps)), *constants(*maps.rest)]
    taken += constants(*launched.free, *launched.constants)
    call, order = _passed_on(run, len(taken))
    return call, [("constant", a) if i is None else taken[i] for i, a in order]


@lru_cache(1024)
def _passed_on(run: Any, count: int) -> tuple[Any, list[tuple[int | None, Any]]]:
    """What Triton's launcher calls for `count` arguments, where all it does is to pass them on: a microsecond less a
    launch. And with what: the argument of an index, or (None, another value).

    It would allocate scratch memory that a kernel asks for; ours ask for none. (triton 3.6 passes on arguments one by
    one, 3.9 in a tuple: there the launcher itself is called.)
    """
    itself: list[tuple[int | None, Any]] = [(i, None) for i in range(count)]
    if any(getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile")):
        return run, itself
    passed: list[Any] = []
    marks = [object() for _ in range(count)]
    probe = copy.copy(run)
    probe.launch = lambda *arguments: passed.extend(arguments)
    probe(*marks)
    index = {id(mark): i for i, mark in enumerate(marks)}
    if not index.keys() <= set(map(id, passed)):
        return run, itself
    return run.launch, [(index[id(a)], None) if id(a) in index else (None, a) for a in passed]


def placed(sizes: Sequence[int], uses: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Where each buffer starts, and the bytes of all: two may share memory if all launches that use one come first."""
    ends: list[tuple[int, int, Sequence[int]]] = []  # of those placed: start, end, launches
    starts = []
    for size, launches in zip(sizes, uses, strict=True):
        size = -(-max(size, 1) // _ALIGNED) * _ALIGNED
        start = 0
        for first, end, others in sorted(ends, key=itemgetter(0)):
            apart = not launches or not others or max(launches) < min(others) or max(others) < min(launches)
            if not apart and first < start + size and start < end:
                start = end
        ends.append((start, start + size, launches))
        starts.append(start)
    return starts, max((end for _, end, _ in ends), default=0)


# --- tensor maps: what a kernel gets for a tensor descriptor. Triton encodes one at each launch, in Python ---


class TensorMaps:
    """The tensor maps of descriptors that differ in their address only; kept, since they hold nothing else.

    rest: the descriptor's shape and strides, which a kernel takes after the map.
    """

    def __init__(self, descriptor: Any, meta: Any) -> None:
        self.descriptor, self.meta = copy.copy(descriptor), meta
        self.rest = _encode(descriptor, meta)[1:]
        self.descriptor.base = None  # no tensor is kept
        self.made: dict[int, Any] = {}

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
    """Stands for a tensor of which only the address is asked."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


_known_maps: dict[Any, TensorMaps] = {}


def _maps(descriptor: Any, meta: Any) -> TensorMaps:
    key = (tuple(descriptor.shape), tuple(descriptor.strides), descriptor.padding, repr(meta))
    found = _known_maps.get(key)
    if found is None:
        if len(_known_maps) >= _MOST:
            _known_maps.clear()
        found = _known_maps[key] = TensorMaps(descriptor, meta)
    return found


@lru_cache(1024)
def _without_encoding(run: Any) -> tuple[Any, tuple[Any, ...]]:
    """Triton's launcher without its step that encodes descriptors, and what that step knows of each of them."""
    inside = inspect.getclosurevars(run.launch).nonlocals
    if "launcher" not in inside or not inside.get("tensordesc_meta"):
        raise _Unknown("where this triton encodes descriptors")
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
