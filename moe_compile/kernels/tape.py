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

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..operands import ExpertWeights
from ..verdict import Reject
from . import launch
from .again import Again, operands_of
from .launch import Launched
from .launches import Address, Given, Map, one_by_one, together
from .listed import Table, base
from .tensor_maps import TensorMaps, maps_of, without_encoding
from .zeroed import Zeroed, zeroed

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
        kind = _with_strides(kind, operands)
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


def _with_strides(kind: tuple[Any, ...], operands: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    if all(map(torch.Tensor.is_contiguous, operands)):
        return kind
    return kind + tuple(t.stride() for t in operands)


class Recorded:
    """A launcher, for tensors of the current CUDA device, replayed where it can be."""

    def __init__(self, run: Launcher) -> None:
        self.run, self.tapes = run, Tapes()

    def __call__(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, packed: ExpertWeights
    ) -> torch.Tensor:
        down_bias = () if packed.down_bias is None else (packed.down_bias,)
        operands = operands_of(
            x_TH, ids_TK, weights_TK, packed.gate_up, (packed.down,), packed.gate_up_bias, down_bias, packed.post_scale
        )
        kind: tuple[Any, ...] = (x_TH.shape[0], ids_TK.dtype)
        if type(packed.down) is Table:
            kind += tuple((t.strides, t.multiple) for t in operands if type(t) is Table)
            operands = list(map(base, operands))
        return self.tapes(kind, operands, self.run, x_TH, ids_TK, weights_TK, packed)

    def again(self, *arguments: Any) -> Again | None:
        """For calls like that of these arguments of the operator, not in tables; None where it can't be replayed."""
        operands = operands_of(*arguments)
        tape = self.tapes.known.get(_with_strides((operands[0].shape[0], operands[1].dtype), operands))
        return Again(tape, *arguments) if isinstance(tape, Tape) else None


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

    A replay makes one list of values: the addresses of operands, outputs, scratch memory and zeroed words, and tensor
    maps. What a launch is given is told by places in that list (launches.py). together: all launches by one call, or
    why not.
    """

    def __init__(
        self, launched: Sequence[Launched], operands: Sequence[torch.Tensor], allocated: Sequence[torch.Tensor],
        out: Any,
    ) -> None:  # fmt: skip
        self.alone = isinstance(out, torch.Tensor)
        outs = [out] if self.alone else list(out)
        taken = {t.data_ptr() for t in outs}
        buffers = [t for t in allocated if t.data_ptr() not in taken]
        where, start = _Places([*operands, *outs, *buffers]), len(operands) + len(outs)
        if len(buffers) + len(outs) != len(allocated) or not all(map(torch.Tensor.is_contiguous, outs)):
            raise _Unknown("where an output comes from")
        device = outs[0].device
        self.outs, self.index = [(tuple(t.shape), t.stride(), t.dtype) for t in outs], device.index
        # as Inductor's own code allocates: 2 us, torch.empty 4 (H200 machine, 2026-11-30)
        self.empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")
        parts = [_taken_apart(each, zeroed(device)) for each in launched]
        uses: list[list[int]] = [[] for _ in where.starts]  # the launches that each tensor is given to
        for step, (_, arguments) in enumerate(parts):
            for a in arguments:
                if isinstance(a, (torch.Tensor, _Mapped)):
                    uses[where(a)[0]].append(step)
        if launched and any(t.numel() and not used for t, used in zip(outs, uses[len(operands) :])):
            raise _Unknown("what writes an output")
        offsets, self.bytes = placed([t.numel() * t.element_size() for t in buffers], uses[start:])
        self.words = zeroed(device) if any(a is _WORDS for _, arguments in parts for a in arguments) else None
        self.maps: list[tuple[int, int, TensorMaps]] = []  # those of values[at] + offset
        first_map = start + (1 if self.words is None else 2)

        def place(a: Any) -> Any:
            """An argument by its place among a replay's values; a constant is itself."""
            if a is _WORDS:
                return Address(start + 1, 0)
            if not isinstance(a, (torch.Tensor, _Mapped)):
                return a
            at, within = where(a)
            address = Address(at, within) if at < start else Address(start, offsets[at - start] + within)
            if isinstance(a, torch.Tensor):
                return address
            if (*address, a.maps) not in self.maps:
                self.maps.append((*address, a.maps))
            return Map(first_map + self.maps.index((*address, a.maps)))

        given = [each._replace(arguments=tuple(map(place, arguments))) for each, arguments in parts]
        values = first_map + len(self.maps)
        self.together = together(given, values, self.maps[0][-1].type if self.maps else None)
        self.launch = one_by_one(given, values) if isinstance(self.together, Reject) else self.together

    def __call__(self, addresses: list[int]) -> Any:
        """The outputs. `addresses` is the caller's no more."""
        outs = [self.empty(*each) for each in self.outs]
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        # not a tensor, which would be made and freed as well
        start = torch._C._cuda_cudaCachingAllocator_raw_alloc(self.bytes, stream)
        try:
            values: list[Any] = addresses
            values += [t.data_ptr() for t in outs]
            values.append(start)
            if self.words is not None:
                words = self.words(stream)
                values.append(words.data_ptr())
            for at, offset, maps in self.maps:
                values.append(maps(values[at] + offset))
            self.launch(values, stream)
        finally:
            torch._C._cuda_cudaCachingAllocator_raw_delete(start)
        return outs[0] if self.alone else outs


class _Mapped(NamedTuple):
    """What a kernel is given for a descriptor of a tensor: one of its maps."""

    tensor: torch.Tensor
    maps: TensorMaps


_WORDS = object()  # stands for the zeroed words


class _Places:
    """Which of known tensors others begin in."""

    def __init__(self, every: Sequence[torch.Tensor]) -> None:
        self.starts = [t.data_ptr() if t.numel() else -i for i, t in enumerate(every, 1)]
        if len(set(self.starts)) < len(every):
            raise _Unknown("two tensors at one address")
        self.ends = [start + _extent(t) if t.numel() else start for start, t in zip(self.starts, every)]

    def __call__(self, tensor: torch.Tensor | _Mapped) -> tuple[int, int]:
        """(the known tensor's index, bytes from its start on)."""
        address = (tensor.tensor if isinstance(tensor, _Mapped) else tensor).data_ptr()
        if address in self.starts:
            return self.starts.index(address), 0
        around = [i for i, (start, end) in enumerate(zip(self.starts, self.ends)) if start < address < end]
        if len(around) != 1:
            raise _Unknown("an argument that is no operand and was not allocated")
        return around[0], address - self.starts[around[0]]


def _extent(t: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    return (1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))) * t.element_size()


def _taken_apart(launched: Launched, words: Zeroed) -> tuple[Given, list[Any]]:
    """A launch, but for its arguments; and those, each a tensor, _Mapped, _WORDS or a constant."""
    if launched.compiled is None:
        raise _Unknown("a kernel that is not kept compiled")
    run, function, metadata, types = launched.compiled
    known: tuple[Any, ...] = ()  # of each descriptor
    if any(not isinstance(a, (int, torch.Tensor)) for a in launched.arguments):
        try:
            run, known = without_encoding(run)
        except LookupError as where:
            raise _Unknown(f"the tensor maps: {where}") from None
    metas = iter(known)
    arguments: list[Any] = []
    for a in launched.arguments:
        if isinstance(a, int):
            arguments.append(a)
        elif isinstance(a, torch.Tensor):
            arguments.append(_WORDS if words.owns(a) else a)
        else:
            maps = maps_of(a, next(metas))
            arguments += [_Mapped(a.base, maps), *maps.rest]
    given = Given(run, function, metadata, types, launched.grid, ())
    return given, [*arguments, *launched.free, *launched.constants]


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
