"""A call's launches, recorded once for each kind of call and replayed with other addresses, at little host time.

In: a function of tensors which allocates by torch.empty and launches by launch.Bound, as a launcher is and training's
operators are. Out: what it returns. The first call of a kind runs as written and is recorded; a later one allocates its
outputs and one scratch buffer, and hands addresses to the compiled kernels. A kind is all that the function leaves open
but addresses: T, the ids' dtype, strides.
Invariants:
* A tape holds no tensor and no address: weights are read where they are at each call.
* Only what was seen whole is replayed. A call in which torch copies or computes (x that a kernel can't read in place),
  whose operands are not aligned to 16 bytes, or while recorded two of which lie at one address, runs as written.
* Buffers share memory only where the last launch that uses one comes before the first that uses the other, as torch's
  allocator would share them; like its blocks, the scratch belongs to the stream.
* A tape doesn't change once it is made: threads and streams may replay it side by side, and into a CUDA graph.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import count
from operator import itemgetter, or_
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..operands import ExpertWeights
from ..verdict import Reject
from . import launch
from .launch import Launched
from .listed import Table, base
from .tensor_maps import TensorMaps, maps_of, without_encoding
from .zeroed import zeroed

Launcher = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, ExpertWeights], torch.Tensor]
_ALIGNED = 256  # bytes, of a buffer in the scratch
_MOST = 2048  # tapes of a function


class Tapes:
    """The tapes of functions, by kind."""

    def __init__(self) -> None:
        self.known: dict[Any, Tape | Reject] = {}
        self.lock = threading.Lock()

    def __call__(self, kind: tuple[Any, ...], operands: Sequence[torch.Tensor], run: Any, *arguments: Any) -> Any:
        """run(*arguments), replayed where it can be. operands: its tensors, all of the current CUDA device; kind: what
        it is apart from them and, where one is not contiguous, their strides."""
        if not all(map(torch.Tensor.is_contiguous, operands)):
            kind += tuple(t.stride() for t in operands)
        addresses = [t.data_ptr() for t in operands]
        tape = self.known.get(kind)
        if isinstance(tape, Reject) or launch.only_compiled() or reduce(or_, addresses) & 15:
            return run(*arguments)
        if tape is not None:
            return tape(addresses)
        if len(set(addresses)) < len(addresses):  # which is which, can't be told
            return run(*arguments)
        with _Recorder() as recorder:
            out = run(*arguments)
        tape = recorder.tape(operands, out)
        with self.lock:
            if len(self.known) >= _MOST:
                del self.known[next(iter(self.known))]
            self.known[kind] = tape
        return out


def recorded(run: Launcher) -> Launcher:
    """`run`, for tensors of the current CUDA device, replayed where it can be."""
    tapes = Tapes()

    def replayed(
        x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, packed: ExpertWeights
    ) -> torch.Tensor:
        operands = [x_TH, ids_TK, *packed.gate_up, packed.down, *packed.gate_up_bias]
        operands += [t for t in (weights_TK, packed.down_bias, packed.post_scale) if t is not None]
        kind: tuple[Any, ...] = (x_TH.shape[0], ids_TK.dtype)
        if type(packed.down) is Table:
            kind += tuple((t.strides, t.multiple) for t in operands if type(t) is Table)
            operands = list(map(base, operands))
        return tapes(kind, operands, run, x_TH, ids_TK, weights_TK, packed)

    return replayed


class _Recorder(TorchDispatchMode):
    """Notes this thread's launches, and keeps what it allocates until the end, so that every buffer has its address."""

    allocating = (
        torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default
    )  # fmt: skip

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

    def tape(self, operands: Sequence[torch.Tensor], out: Any) -> Tape | Reject:
        if self.computed:
            return Reject("torch computes in this call", ", ".join(self.computed))
        try:
            return Tape(self.launched, operands, self.allocated, out)
        except _Unknown as what:
            return Reject("not all of this call is known", str(what))


class _Unknown(Exception):
    """What of a call a tape can't hold."""


class Tape:
    """The launches of one kind of call.

    A replay makes one list of values: the addresses of operands, outputs and buffers, those within them that kernels
    are given, the tensor maps, the stream, its zeroed words where a kernel takes them, and what never changes. Each
    launch picks what it is given from that list.
    """

    def __init__(
        self, launched: Sequence[Launched], operands: Sequence[torch.Tensor], allocated: Sequence[torch.Tensor],
        out: Any,
    ) -> None:  # fmt: skip
        self.alone = isinstance(out, torch.Tensor)
        outs = [out] if self.alone else list(out)
        taken = {t.data_ptr() for t in outs}
        buffers = [t for t in allocated if t.data_ptr() not in taken]
        every = [*operands, *outs, *buffers]
        where = _Places(every)
        if len(buffers) + len(outs) != len(allocated) or not all(map(torch.Tensor.is_contiguous, outs)):
            raise _Unknown("where an output comes from")
        self.outs, self.index = [(tuple(t.shape), t.stride(), t.dtype) for t in outs], outs[0].device.index
        # as Inductor's own code allocates: 2 us, torch.empty 4 (H200 machine, 2026-11-30)
        self.empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{outs[0].device.type}")
        parts = [_taken_apart(each) for each in launched]
        self.constants = [value for _, arguments in parts for kind, value in arguments if kind == "constant"]
        self.maps: list[tuple[int, TensorMaps]] = []  # those of the address at each index
        uses: list[list[int]] = [[] for _ in every]  # the launches that each tensor is given to
        for step, (_, arguments) in enumerate(parts):
            for kind, value in arguments:
                if kind in ("tensor", "map"):
                    tensor, maps = value if kind == "map" else (value, None)
                    at = where(tensor)
                    uses[where.tensor(at)].append(step)
                    if maps and (at, maps) not in self.maps:
                        self.maps.append((at, maps))
        self.within = where.within
        first, stream = len(operands), len(every) + len(self.within) + len(self.maps)
        self.words = zeroed(outs[0].device) if any(kind == "words" for _, given in parts for kind, _ in given) else None
        if launched and any(t.numel() and not used for t, used in zip(outs, uses[first:])):
            raise _Unknown("what writes an output")
        next_constant = count(stream + (1 if self.words is None else 2))

        def index(kind: str, value: Any) -> int:
            """Of an argument in a replay's list of values."""
            if kind == "stream":
                return stream
            if kind == "words":
                return stream + 1
            if kind == "constant":
                return next(next_constant)
            if kind == "tensor":
                return where(value)
            return len(every) + len(self.within) + self.maps.index((where(value[0]), value[1]))

        self.launches = [(run, itemgetter(*(index(*a) for a in arguments))) for run, arguments in parts]
        sizes = [t.numel() * t.element_size() for t in buffers]
        self.offsets, self.bytes = placed(sizes, uses[first + len(outs) :])

    def __call__(self, addresses: list[int]) -> Any:
        """The outputs. `addresses` is the caller's no more."""
        outs = [self.empty(*each) for each in self.outs]
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        # not a tensor, which would be made and freed as well
        start = torch._C._cuda_cudaCachingAllocator_raw_alloc(self.bytes, stream)
        try:
            values: list[Any] = addresses
            values += [t.data_ptr() for t in outs]
            values += [start + offset for offset in self.offsets]
            values += [values[at] + offset for at, offset in self.within]
            for at, maps in self.maps:
                values.append(maps(values[at]))
            values.append(stream)
            if self.words is not None:
                words = self.words(stream)
                values.append(words.data_ptr())
            values += self.constants
            for run, pick in self.launches:
                run(*pick(values))
        finally:
            torch._C._cuda_cudaCachingAllocator_raw_delete(start)
        return outs[0] if self.alone else outs


class _Places:
    """Which of known tensors others begin in."""

    def __init__(self, every: Sequence[torch.Tensor]) -> None:
        self.starts = [t.data_ptr() if t.numel() else -i for i, t in enumerate(every, 1)]
        if len(set(self.starts)) < len(every):
            raise _Unknown("two tensors at one address")
        self.ends = [start + _extent(t) if t.numel() else start for start, t in zip(self.starts, every)]
        self.within: list[tuple[int, int]] = []  # (index, bytes from there on) of those that begin after a known one

    def __call__(self, tensor: torch.Tensor) -> int:
        """The index of its address among those of the known tensors, and of `within` after them."""
        address = tensor.data_ptr()
        if address in self.starts:
            return self.starts.index(address)
        around = [i for i, (start, end) in enumerate(zip(self.starts, self.ends)) if start < address < end]
        if len(around) != 1:
            raise _Unknown("an argument that is no operand and was not allocated")
        place = (around[0], address - self.starts[around[0]])
        if place not in self.within:
            self.within.append(place)
        return len(self.starts) + self.within.index(place)

    def tensor(self, index: int) -> int:
        """The known tensor that an index is of."""
        return index if index < len(self.starts) else self.within[index - len(self.starts)][0]


def _extent(t: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    return (1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))) * t.element_size()


def _taken_apart(launched: Launched) -> tuple[Any, list[tuple[str, Any]]]:
    """Triton's launcher and what it takes, each ("tensor", t), ("map", (t, its maps)), ("stream", _), ("words", _) or
    ("constant", value)."""
    if launched.compiled is None:
        raise _Unknown("a kernel that is not kept compiled")
    run, function, metadata = launched.compiled
    known: tuple[Any, ...] = ()  # of each descriptor
    if any(not isinstance(a, (int, torch.Tensor)) for a in launched.arguments):
        try:
            run, known = without_encoding(run)
        except LookupError as where:
            raise _Unknown(f"the tensor maps: {where}") from None
    metas = iter(known)

    def constants(*values: Any) -> list[tuple[str, Any]]:
        return [("constant", v) for v in values]

    taken = [*constants(*launched.grid, 1), ("stream", None), *constants(function, metadata, None, None, None)]
    for a in launched.arguments:
        if isinstance(a, int):
            taken += constants(a)
        elif isinstance(a, torch.Tensor):
            taken.append(("words", None) if zeroed(a.device).owns(a) else ("tensor", a))
        else:
            maps = maps_of(a, next(metas))
            taken += [("map", (a.base, maps)), *constants(*maps.rest)]
    taken += constants(*launched.free, *launched.constants)
    call, order = _passed_on(run, len(taken))
    return call, [("constant", a) if i is None else taken[i] for i, a in order]


@lru_cache(1024)
def _passed_on(run: Any, number: int) -> tuple[Any, list[tuple[int | None, Any]]]:
    """What Triton's launcher calls for a number of arguments, where all it does is to pass them on, which saves a
    microsecond a launch. And with what: the argument of an index, or (None, another value).

    It would allocate scratch memory that a kernel asks for; ours ask for none. (triton 3.6 passes on arguments one by
    one, 3.9 in a tuple: there the launcher itself is called.)
    """
    itself: list[tuple[int | None, Any]] = [(i, None) for i in range(number)]
    if any(getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile")):
        return run, itself
    passed: list[Any] = []
    marks = [object() for _ in range(number)]
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
