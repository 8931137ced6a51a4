"""Tapes: calls are replayed by address, wherever their tensors are, and run as written where not all of them is known.

The kernels here add numbers in the CPU's memory, at the addresses that they are given.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from moe_compile.kernels import tape, tensor_maps
from moe_compile.kernels.launch import Bound, compiling
from moe_compile.kernels.zeroed import zeroed
from moe_compile.operands import ExpertWeights

H = 8
STREAM = 7


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    """CUDA's current stream and its allocator, whose memory is given back."""
    held: dict[int, torch.Tensor] = {}

    def take(size: int, stream: int) -> int:
        memory = torch.empty(size, dtype=torch.uint8)
        held[memory.data_ptr()] = memory
        return memory.data_ptr()

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", take, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", held.pop, raising=False)
    yield
    assert not held


def at(address: int, n: int) -> numpy.ndarray:
    return numpy.frombuffer((ctypes.c_float * n).from_address(address), numpy.float32)


class Adding(Bound):
    """A kernel out = a + b of n numbers, compiled by its first launch."""

    def __init__(self) -> None:
        super().__init__(None, ("constant",), torch.device("cpu"))
        self.fails = False

    def run(self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
        assert (x, y, z, stream, function, metadata) == (3, 1, 1, STREAM, "function", "metadata")
        if self.fails:
            raise RuntimeError("out of resources")
        *hooks, a, b, out, number, n, constant, pdl = rest
        assert (hooks, number, constant, pdl) == ([None] * 3, 5, "constant", False)
        at(out, n)[:] = at(a, n) + at(b, n)

    def _compile(self, key: Any, grid: Any, arguments: Any, free: Any) -> None:
        self.compiled[key] = (self.run, "function", "metadata", ())
        addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        self.run(*grid, 1, STREAM, "function", "metadata", None, None, None, *addresses, *free, *self.constants)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(a.shape)
        self((3, 1), (a, b, out, 5), (a.numel(),))
        return out


class Program:
    """2 (x + down) + x, noting how often it runs as written."""

    def __init__(self) -> None:
        self.calls, self.kernel = 0, Adding()
        self.between: Any = lambda x: x

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, w: Any, packed: ExpertWeights) -> torch.Tensor:
        self.calls += 1
        x = self.between(x)
        once = self.kernel.add(x, packed.down)
        return self.kernel.add(self.kernel.add(once, once), x)


def inputs(T: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, None, ExpertWeights]:
    g = torch.Generator().manual_seed(seed)
    x, down = torch.randn(T, H, generator=g), torch.randn(T, H, generator=g)
    return x, torch.zeros(T, 1, dtype=torch.int64), None, ExpertWeights(gate_up=(torch.randn(2),), down=down)


def want(x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return 2 * (x + down) + x


def test_a_kind_of_call_runs_as_written_once():
    run = tape.Recorded(program := Program())
    kept = []
    for seed in range(4):
        x, ids, w, p = inputs(seed=seed)
        kept.append((x, p, run(x, ids, w, p)))
        assert program.calls == 1
    run(*inputs(T=5))
    assert program.calls == 2
    x, ids, w, p = inputs()
    run(x, ids.int(), w, p)
    assert program.calls == 3
    for x, p, out in kept:  # outputs are fresh, and no replay touched another's operands
        torch.testing.assert_close(out, want(x, p.down))


@pytest.mark.parametrize("apart", [False, True])
def test_how_calls_like_one_are_replayed(apart):
    """Also where operands are not contiguous, which is another kind."""
    run = tape.Recorded(program := Program())
    x, ids, w, p = inputs()
    arguments = (x, torch.cat([ids, ids], 1)[:, :1] if apart else ids, w, *p.arguments())
    assert arguments[1].is_contiguous() != apart
    assert run.again(*arguments) is None
    run(*arguments[:3], p)
    other, *_, q = inputs(seed=1)
    torch.testing.assert_close(run.again(*arguments)(other, *arguments[1:3], *q.arguments()), want(other, q.down))
    run(*inputs(T=5))
    assert program.calls == 2
    assert run.again(*inputs(T=6)[:3], *p.arguments()) is None


def test_weights_that_move_are_found():
    run = tape.Recorded(program := Program())
    x, ids, w, p = inputs()
    run(x, ids, w, p)
    p.down.mul_(3)
    torch.testing.assert_close(run(x, ids, w, p), want(x, p.down))
    p.down.data = torch.randn(4, H)
    torch.testing.assert_close(run(x, ids, w, p), want(x, p.down))
    assert program.calls == 1


def test_what_is_not_aligned_runs_as_written():
    run = tape.Recorded(program := Program())
    x, ids, w, p = inputs()
    shifted = torch.randn(4 * H + 1)[1:].view(4, H)
    for _ in range(2):
        torch.testing.assert_close(run(shifted, ids, w, p), want(shifted, p.down))
    assert program.calls == 2
    run(x, ids, w, p)
    run(shifted, ids, w, p)
    assert program.calls == 4


ELSEWHERE = torch.ones(4, H)


@pytest.mark.parametrize(
    ("between", "replayed"),
    [
        (lambda x: x * 1, False),
        (lambda x: x.clone(), False),
        (lambda x: ELSEWHERE, False),
        (lambda x: x.view(-1), True),
    ],
    ids=["torch computes", "torch copies", "a tensor from elsewhere", "a view"],
)
def test_only_what_is_known_is_replayed(between, replayed):
    run = tape.Recorded(program := Program())
    program.between = between
    for seed in range(3):
        x, ids, w, p = inputs(seed=seed)
        expected = want(between(x).view(4, H), p.down)
        torch.testing.assert_close(run(x, ids, w, p).view(4, H), expected)
    assert program.calls == (1 if replayed else 3)


def test_two_operands_at_one_address_run_as_written():
    run = tape.Recorded(program := Program())
    x, ids, w, p = inputs()
    same = ExpertWeights(gate_up=p.gate_up, down=x)
    for _ in range(2):
        torch.testing.assert_close(run(x, ids, w, same), want(x, x))
    torch.testing.assert_close(run(x, ids, w, p), want(x, p.down))
    assert program.calls == 3


def test_several_outputs_and_what_begins_within_a_tensor():
    tapes, kernel, calls = tape.Tapes(), Adding(), []

    def halves(x: torch.Tensor, empty: torch.Tensor) -> list[torch.Tensor]:
        """[upper half of x + upper half of 2 x, 2 x, nothing]"""
        calls.append(1)
        twice, buffer = kernel.add(x, x), kernel.add(x, x)
        return [kernel.add(x[2:], buffer[2:]), twice, torch.empty((4, 0))]

    for seed in range(4):
        x, empty = inputs(seed=seed)[0], torch.empty((4, 0))
        upper, twice, nothing = tapes(("halves",), [x, empty], halves, x, empty)
        torch.testing.assert_close(upper, 3 * x[2:])
        torch.testing.assert_close(twice, 2 * x)
        assert nothing.shape == (4, 0)
    assert len(calls) == 1


def test_what_begins_within_two_operands_runs_as_written():
    tapes, kernel, calls = tape.Tapes(), Adding(), []
    whole = torch.arange(64.0).view(8, 8)

    def run() -> torch.Tensor:
        calls.append(1)
        return kernel.add(whole[4, 4:], whole[4, 4:])

    for _ in range(3):
        got = tapes(("within",), [whole[:, :4], whole[:, 4:]], run)
        torch.testing.assert_close(got, 2 * whole[4, 4:])
    assert len(calls) == 3


def test_a_tape_holds_no_tensor():
    run = tape.Recorded(Program())
    x, ids, w, p = inputs()
    run(x, ids, w, p)
    run(x, ids, w, p)
    alive = [weakref.ref(t) for t in (x, ids, p.down, *p.gate_up)]
    del x, ids, p
    gc.collect()
    assert [r() for r in alive] == [None] * 4


def test_zeroed_words_are_those_of_the_calls_stream(monkeypatch):
    words, made = zeroed(torch.device("cpu")), {STREAM: torch.zeros(4), 8: torch.zeros(4)}
    given: list[int] = []

    class Counting(Bound):
        def run(self, *arguments: Any) -> None:
            given.append(arguments[10])

        def _compile(self, key: Any, grid: Any, arguments: Any, free: Any) -> None:
            self.compiled[key] = (self.run, "function", "metadata", ())

    kernel = Counting(None, (), torch.device("cpu"))

    def program(x: torch.Tensor, ids: torch.Tensor, w: Any, packed: ExpertWeights) -> torch.Tensor:
        out = torch.empty(x.shape)
        kernel((1, 1), (x, words(), out))
        return out

    run, (x, ids, w, p) = tape.Recorded(program), inputs()
    run(x, ids, w, p)
    monkeypatch.setattr(type(words), "__call__", lambda self, stream: made[stream])
    for stream in (STREAM, 8, STREAM):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index, stream=stream: stream)
        run(x, ids, w, p)
    assert given == [made[s].data_ptr() for s in (STREAM, 8, STREAM)]


def test_a_launch_that_fails_keeps_no_memory():
    run = tape.Recorded(program := Program())
    run(*inputs())
    program.kernel.fails = True
    with pytest.raises(RuntimeError, match="out of resources"):
        run(*inputs())


def test_threads_replay_side_by_side():
    run = tape.Recorded(program := Program())
    run(*inputs())

    def calls(seed: int) -> None:
        x, ids, w, p = inputs(seed=seed)
        for _ in range(50):
            torch.testing.assert_close(run(x, ids, w, p), want(x, p.down))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(calls, range(8)))
    assert program.calls == 1


def test_another_threads_launches_are_not_recorded():
    run = tape.Recorded(program := Program())
    other = Adding()

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: other.add(torch.randn(4, H), torch.randn(4, H))).result()
        return x

    program.between = elsewhere
    x, ids, w, p = inputs()
    for _ in range(2):
        torch.testing.assert_close(run(x, ids, w, p), want(x, p.down))
    assert program.calls == 1


def test_nothing_is_replayed_while_kernels_are_compiled(monkeypatch):
    run = tape.Recorded(program := Program())
    x, ids, w, p = inputs()
    run(x, ids, w, p)
    monkeypatch.setattr(program.kernel, "run", lambda *a: pytest.fail("a kernel ran"))
    with ThreadPoolExecutor(1) as pool, compiling(pool):
        run(x, ids, w, p)
    assert program.calls == 2


def test_tapes_are_bounded(monkeypatch):
    monkeypatch.setattr(tape, "_MOST", 2)
    run = tape.Recorded(program := Program())
    for T in (1, 2, 3, 3, 2, 1):
        run(*inputs(T=T))
    assert program.calls == 4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.lists(st.integers(0, 6), max_size=3)), max_size=7))
def test_buffers_in_use_together_never_overlap(buffers):
    sizes, uses = [size for size, _ in buffers], [steps for _, steps in buffers]
    starts, total = tape.placed(sizes, uses)
    for i, (size, start) in enumerate(zip(sizes, starts)):
        assert start % 256 == 0
        assert start + size <= total
        for j in range(i):
            apart = start + size <= starts[j] or starts[j] + sizes[j] <= start
            after = uses[i] and uses[j] and (max(uses[i]) < min(uses[j]) or max(uses[j]) < min(uses[i]))
            assert apart or after or not uses[i] or not uses[j]


def test_buffers_share_memory_one_after_the_other():
    """Of a copy of x, the activation and y, which launches 1 to 4 use, y lies where the copy was."""
    assert tape.placed([1024, 512, 1024], [[1, 2], [2, 3], [3, 4]]) == ([0, 1024, 0], 1536)


class Described:
    """Triton's launcher of a kernel with a descriptor: what its own wrapper is given, and what passes it."""

    def __init__(self, given: list[Any]) -> None:
        from triton.backends.nvidia.driver import wrap_handle_tensordesc

        signature = {0: "tensordesc<fp16[16, 16]>", 1: "*fp16", 2: "constexpr"}
        self.launch = wrap_handle_tensordesc(given.append, signature, [{"block_size": [16, 16]}])

    def __call__(self, *arguments: Any) -> None:
        self.launch(arguments)


class Elsewhere:
    """A launcher that encodes descriptors where nobody knows."""

    def __init__(self, given: list[Any]) -> None:
        self.launch = lambda *arguments: given.append(arguments)

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)


def describing(compiled: Any) -> Any:
    """A launcher of one kernel, which takes a descriptor of `down` and the output."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    class Bare(Bound):
        def _compile(self, key: Any, grid: Any, arguments: Any, free: Any) -> None:
            self.compiled[key] = (compiled, "function", "metadata", ())

    bound = Bare(None, (), torch.device("cpu"))

    def program(x: torch.Tensor, ids: torch.Tensor, w: Any, packed: ExpertWeights) -> torch.Tensor:
        program.calls += 1
        out = torch.empty(x.shape)
        bound((1, 1), (TensorDescriptor.from_tensor(packed.down, [16, 16]), out))
        return out

    program.calls = 0
    return program


def test_descriptors_that_triton_encodes_elsewhere_are_not_replayed():
    given: list[Any] = []
    run = tape.Recorded(program := describing(Elsewhere(given)))
    x, ids, w, _ = inputs()
    for calls in (1, 2):
        run(x, ids, w, ExpertWeights(gate_up=(torch.randn(2),), down=torch.randn(32, 16)))
        assert program.calls == calls
    assert len(given) == 1  # the first compiled


def test_tensor_maps_are_kept_by_address(monkeypatch):
    encoded: list[int] = []

    def encode(descriptor: Any, meta: Any) -> list[Any]:
        assert meta == {"block_size": [16, 16]}
        encoded.append(descriptor.base.data_ptr())
        return [("map of", encoded[-1]), *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(tensor_maps, "_encoder", lambda: (encode, 2))
    monkeypatch.setattr(tensor_maps, "_KNOWN", {})
    given: list[Any] = []
    program = describing(Described(given))
    run = tape.Recorded(program)
    packs = [ExpertWeights(gate_up=(torch.randn(2),), down=torch.randn(32, 16)) for _ in range(3)]
    x, ids, w, _ = inputs()
    outs = [run(x, ids, w, p).data_ptr() for p in (*packs, *packs)]
    addresses = [p.down.data_ptr() for p in packs]
    pairs = list(zip((*addresses, *addresses), outs))[1:]  # the first call was recorded
    assert [g[9:15] for g in given] == [(("map of", a), 32, 16, 16, 1, out) for a, out in pairs]
    assert sorted(encoded) == sorted([*addresses, addresses[0]])  # the first also while it was recorded
