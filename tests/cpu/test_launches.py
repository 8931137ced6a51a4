"""A tape's launches by one call of C: what the driver is given is what Triton's launcher would be, in order and whole.

The driver is fake_cuda.c, which records launches. A kernel there is the address of what says which parameters it takes.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import struct
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton import knobs
from triton.backends.nvidia.driver import include_dirs

from moe_compile.kernels import launches, tape, tensor_maps
from moe_compile.kernels.launch import Bound
from moe_compile.kernels.launches import Address, Given, Map
from moe_compile.kernels.zeroed import zeroed
from moe_compile.verdict import Reject

pytestmark = pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="no C compiler")
HERE = Path(__file__).parent
SOURCE = Path(launches.__file__).with_suffix(".c")
CONTEXT, STREAM = 0x1000, 0x2000
EARLY, COOPERATIVE = 6, 2  # CUlaunchAttributeID


class Kernel(ctypes.Structure):
    """As fake_cuda.c's."""

    _fields_ = (
        ("error", ctypes.c_int), ("waits", ctypes.c_int), ("parameters", ctypes.c_long),
        ("bytes", ctypes.c_size_t * 64),
    )  # fmt: skip


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_char * 60))


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("number", ctypes.c_uint),
    )  # fmt: skip


class Record(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p), ("config", Config), ("attributes", Attribute * 2), ("bytes", ctypes.c_ubyte * 512)
    )  # fmt: skip


class TensorMap:
    """Ends in 128 bytes: 16 addresses of objects, as Triton's own ends in a CUtensorMap."""

    __slots__ = tuple(f"s{i:02}" for i in range(16))

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, object())

    def __bytes__(self) -> bytes:
        return struct.pack("16Q", *(id(getattr(self, name)) for name in self.__slots__))


class Launcher:
    """Triton's launcher: it notes what it is called with."""

    def __init__(self, *, pdl: bool = False, cooperative: bool = False, **others: Any) -> None:
        self.launch_pdl, self.launch_cooperative_grid = pdl, cooperative
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch: list[Any] = []
        self.__dict__.update(others)

    def __call__(self, *arguments: Any) -> None:
        self.launch.append(arguments)


def built(source: Path, to: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("gcc") or shutil.which("clang")
    command = [compiler, "-shared", "-fPIC", str(source), "-o", str(to), *(f"-I{d}" for d in include_dirs), *flags]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    """The fake driver, in use."""
    folder = tmp_path_factory.mktemp("fake")
    done = built(HERE / "fake_cuda.c", folder / "libcuda.so", "-lpthread")
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        patch.setattr(launches, "DRIVER", str(folder / "libcuda.so"))
        launches._library.cache_clear()
        assert not isinstance(launches._library(launches.DRIVER), Reject)
        yield ctypes.CDLL(launches.DRIVER)
    launches._library.cache_clear()


@pytest.fixture
def driver(cuda):
    """The fake driver, which has recorded nothing."""
    cuda.cuCtxSetCurrent(ctypes.c_void_p(CONTEXT))
    ctypes.c_long.in_dll(cuda, "recorded").value = 0
    ctypes.c_int.in_dll(cuda, "go_on").value = 0
    return cuda


def recorded(driver: Any) -> list[Record]:
    number = ctypes.c_long.in_dll(driver, "recorded").value
    return list((Record * number).in_dll(driver, "records"))


KEPT: list[Kernel] = []  # what functions are the addresses of


def kernel(*sizes: int, error: int = 0, waits: bool = False) -> int:
    """A function of parameters of so many bytes, and of Triton's two pointers to scratch memory."""
    all_ = (*sizes, 8, 8)
    KEPT.append(Kernel(error, waits, len(all_), (ctypes.c_size_t * 64)(*all_)))
    return ctypes.addressof(KEPT[-1])


BYTES = {"*fp16": 8, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u32": 4, "u64": 8, "tensordesc": 128}


def test_what_the_driver_is_given(driver):
    maps = [TensorMap(), TensorMap()]
    function = kernel(8, 8, 128, 4, 4, 8, 8, 4, 128, 4, 8)
    types = ("*bf16", "*i32", "tensordesc<bf16[64, 32],#x>", "constexpr", "i32", "tensordesc<fp16[16]>", "constexpr")
    arguments = (Address(0, 0), Address(1, 96), Map(3), 70, 80, 90, 1, 1, -7, Map(2), 5, 6, "SwiGLU")
    run = Launcher(pdl=True)
    last = Given(Launcher(cooperative=True), kernel(), (8, 1, 0), (), (2, 3), ())
    launch = launches.together(
        [Given(run, function, (4, 1, 1000), types, (7, 1), arguments), last], 4, TensorMap
    )  # fmt: skip
    assert not isinstance(launch, Reject)
    assert launch([2**63 + 16, 4096, *maps], STREAM) is None
    first, second = recorded(driver)
    assert (first.kernel, list(first.config.grid), list(first.config.block)) == (function, [7, 1, 1], [128, 1, 1])
    assert (first.config.shared, first.config.stream, first.config.number) == (1000, STREAM, 1)
    assert (first.attributes[0].id, first.attributes[0].value) == (EARLY, 1)
    want = struct.pack("<QQ", 2**63 + 16, 4096 + 96) + bytes(maps[1]) + struct.pack("<iiqqi", 70, 80, 90, 1, -7)
    want += bytes(maps[0]) + struct.pack("<iqQQ", 5, 6, 0, 0)
    assert bytes(first.bytes).startswith(want)
    assert (list(second.config.grid), list(second.config.block), second.config.number) == ([2, 3, 1], [256, 1, 1], 1)
    assert (second.attributes[0].id, second.attributes[0].value) == (COOPERATIVE, 1)
    assert not run.launch


numbers = {name: st.integers(-(2 ** (8 * n - 1)), 2 ** (8 * n - 1) - 1) for name, n in BYTES.items() if name[0] == "i"}
numbers |= {name: st.integers(0, 2 ** (8 * n - 1)) for name, n in BYTES.items() if name[0] == "u"}
numbers["u64"] = st.integers(0, 2**63 - 1)
ARGUMENT = st.one_of(
    st.tuples(st.just("*fp16"), st.builds(Address, st.integers(0, 4), st.integers(0, 2**20))),
    st.tuples(st.just("constexpr"), st.integers(0, 9)),
    *(st.tuples(st.just(name), values) for name, values in numbers.items() if name != "i1"),
)


@settings(max_examples=100, deadline=None)
@examples(
    st.lists(st.tuples(st.lists(ARGUMENT, max_size=12), st.tuples(st.integers(1, 99), st.integers(1, 9))), max_size=5),
    st.lists(st.integers(0, 2**64 - 2**20 - 1), min_size=5, max_size=5),
)
def test_both_ways_give_the_same(cuda, kernels, values):
    """One call of C gives the driver what Triton's launcher is given one by one."""
    cuda.cuCtxSetCurrent(ctypes.c_void_p(CONTEXT))
    ctypes.c_long.in_dll(cuda, "recorded").value = 0
    given = []
    for several, grid in kernels:
        types = tuple(t for t, _ in several)
        function = kernel(*(BYTES[t] for t in types if t != "constexpr"))
        given.append(Given(Launcher(), function, (4, 1, 64), types, grid, tuple(a for _, a in several)))
    launch = launches.together(given, 5, None)
    assert not isinstance(launch, Reject), launch
    launch(list(values), STREAM)
    apart = launches.one_by_one(given, 5)
    before = list(values)
    apart(values, STREAM)
    assert values == before
    found = recorded(cuda)
    assert len(found) == len(given)
    for record, each in zip(found, given):
        (called,) = each.run.launch
        *grid, stream, function, metadata = called[:6]
        arguments = called[9:]
        assert (list(record.config.grid), record.config.stream, record.kernel) == (grid, stream, function)
        assert (metadata[0] * 32, metadata[2]) == (record.config.block[0], record.config.shared)
        at = bytes(record.bytes)
        for type_, a in zip(each.types, arguments):
            if type_ != "constexpr":
                size = BYTES[type_]
                assert int.from_bytes(at[:size], "little", signed=a < 0) == a
                at = at[size:]


KNOWN: dict[str, Any] = {
    "run": Launcher(), "metadata": (4, 1, 0), "types": ("*fp32", "i32"), "grid": (1, 1),
    "arguments": (Address(0, 0), 5), "sizes": (8, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"sizes": (8, 8)}, "takes 8 bytes"),
        ({"sizes": (8, 4, 4)}, "takes 4 bytes, given (8,"),
        ({"sizes": (8, 4, 8)}, "more than 4"),
        ({"sizes": (8,)}, "takes 8 bytes, given (4,"),
        ({"sizes": ()}, "takes 8 bytes, given (4,"),
        ({"sizes": (4, 4)}, "takes 4 bytes"),
        ({"types": ("*fp32", "i16"), "sizes": (8, 2), "arguments": (Address(0, 0), 70000)}, "70000"),
        ({"types": ("*fp32", "fp32")}, "5 for fp32"),
        ({"types": ("*fp32", "*fp32")}, "5 for"),
        ({"types": ("i64", "i32")}, "for i64"),
        ({"types": ("*fp32",)}, "2 arguments for"),
        ({"types": (("*fp32", "i32"), "i32")}, "for ('*fp32', 'i32')"),
        ({"arguments": (Address(2, 0), 5)}, "of 2 values"),
        ({"arguments": (Map(0), 5), "types": ("tensordesc<fp16[8]>",), "sizes": (128, 4)}, "2 arguments"),
        ({"metadata": (4, 2, 0)}, "clusters"),
        ({"metadata": (4, 1, 2**18)}, "more shared memory"),
        ({"grid": (0, 1)}, "grid (0, 1, 1)"),
        ({"run": Launcher(gsan_enabled=True)}, "sanitizer"),
        ({"run": Launcher(of_tomorrow=1)}, "another kind"),
        ({"run": print}, "another kind"),
        ({"run": Launcher(global_scratch_size=64)}, "scratch memory"),
        ({"run": Launcher(profile_scratch_size=64)}, "scratch memory"),
        ({"types": ("i32",) * 70, "arguments": (5,) * 70}, "72 parameters"),
    ],
)
def test_what_is_not_known_is_left_to_triton(driver, other, reason):
    found = {**KNOWN, **other}
    function = kernel(*found.pop("sizes"))
    verdict = launches.together([Given(function=function, **found)], 2, None)
    assert isinstance(verdict, Reject)
    assert reason in str(verdict)
    fine = {k: v for k, v in KNOWN.items() if k != "sizes"}
    assert launches.together([Given(function=kernel(8, 4), **fine)], 2, None)


def test_one_place_is_an_address_or_a_map(driver):
    types, arguments = ("tensordesc<fp16[8]>", "*fp16"), (Map(1), 8, 1, Address(1, 0))
    given = [Given(Launcher(), kernel(128, 4, 8, 8), (4, 1, 0), types, (1, 1), arguments)]
    assert "given (8, 1, 0)" in str(launches.together(given, 2, TensorMap))
    for type_ in (None, object):
        assert "tensor maps in objects of" in str(
            launches.together([given[0]._replace(arguments=(Map(1), 8, 1, Address(0, 0)))], 2, type_)
        )


def simple(**options: Any) -> Given:
    return Given(Launcher(), kernel(8, 4, **options), (4, 1, 0), ("*fp32", "i32"), (1, 1), (Address(0, 0), 5))


def test_a_tape_tells_each_place(driver, monkeypatch):
    """Operands, what begins within one, an output, scratch memory that two buffers share, zeroed words."""
    x, scratch = torch.randn(8, 8), torch.empty(4096, dtype=torch.uint8)
    words, held = zeroed(torch.device("cpu")), []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_cudaCachingAllocator_raw_alloc", lambda n, s: held.append(n) or scratch.data_ptr(),
        raising=False,
    )  # fmt: skip
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", lambda at: held.pop(), raising=False)

    class Recorded(Bound):
        def _compile(self, key: Any, grid: Any, arguments: Any, free: Any) -> None:
            types = ("*fp16",) * len(arguments) + ("i32",) * len(free) + ("constexpr",)
            function = kernel(*(BYTES[t] for t in types[:-1]))
            self.compiled[key] = (Launcher(pdl=True), function, (4, 1, 0), types)

    one, two, three = (Recorded(None, (), torch.device("cpu")) for _ in range(3))

    def run(x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        first, second, third, out = (torch.empty(n) for n in (100, 30, 100, 8))
        one((3, 1), (x, x[4:], first, words()), (7,))
        two((1, 1), (first, second[4:], down))
        three((1, 1), (second, third, out), (9,))
        return out

    tapes = tape.Tapes()
    outs = [tapes((), [x, down := torch.randn(8)], run, x, down) for _ in range(2)]
    made = next(iter(tapes.known.values()))
    assert isinstance(made, tape.Tape)
    assert not isinstance(made.together, Reject), made.together
    assert not held
    at, w, start = x.data_ptr(), words().data_ptr(), scratch.data_ptr()
    first, second, third = (start, start + 512, start)  # each of 400 or 120 bytes
    want = [
        struct.pack("<4QiQQ", at, at + 128, first, w, 7, 0, 0),
        struct.pack("<5Q", first, second + 16, down.data_ptr(), 0, 0),
        struct.pack("<3QiQQ", second, third, outs[1].data_ptr(), 9, 0, 0),
    ]  # fmt: skip
    found = recorded(driver)
    assert [bytes(r.bytes)[: len(each)] for r, each in zip(found, want)] == want
    assert [(r.config.stream, r.attributes[0].id) for r in found] == [(STREAM, EARLY)] * 3


def test_a_launch_that_fails_is_the_last(driver):
    launch = launches.together([simple(), simple(error=701), simple()], 1, None)
    with pytest.raises(RuntimeError, match=r"launch 2: too many resources \(CUDA error 701\)"):
        launch([16], STREAM)
    assert len(recorded(driver)) == 1
    with pytest.raises(RuntimeError, match=r"launch 1: unknown error \(CUDA error 999\)"):
        launches.together([simple(error=999)], 1, None)([16], STREAM)


def test_what_c_is_given_is_checked(driver):
    tensor_map = TensorMap()
    mapped = Given(Launcher(), kernel(128, 4, 8), (4, 1, 0), ("tensordesc<fp16[8]>",), (1, 1), (Map(1), 8, 1))
    launch = launches.together([mapped], 2, TensorMap)
    for arguments, error in [
        ((), TypeError), (([16, tensor_map],), TypeError), (([16, tensor_map], STREAM, 1), TypeError),
        (((16, tensor_map), STREAM), TypeError), (([16], STREAM), TypeError), (([16, 16], STREAM), TypeError),
        (([-1, tensor_map], STREAM), OverflowError), (([2**64, tensor_map], STREAM), OverflowError),
        ((["16", tensor_map], STREAM), TypeError), (([16, tensor_map], None), TypeError),
    ]:  # fmt: skip
        with pytest.raises(error):
            launch(*arguments)
    assert not recorded(driver)
    launch([2**64 - 1, tensor_map], 0)
    assert (recorded(driver)[0].config.stream, len(recorded(driver))) == (None, 1)

    made = launches._library(launches.DRIVER).Launches
    function, parameters = kernel(), ((8, -1, 0), (8, -1, 0))
    fine = (function, (1, 1, 1), 128, 0, False, False, parameters)
    made(0, None, (fine,))
    for wrong, error in [
        ((0, None), TypeError), ((0, None, [fine]), TypeError), ((0, 5, (fine,)), TypeError),
        ((-1, None, (fine,)), ValueError), ((65, None, (fine,)), ValueError), ((0, None, (list(fine),)), TypeError),
        ((0, None, ((*fine[:-1], (list(parameters[0]),)),)), TypeError), ((0, None, ((0, *fine[1:]),)), ValueError),
        ((0, None, ((function, (1, 1), *fine[2:]),)), TypeError), ((0, None, ((*fine[:2], 0, *fine[3:]),)), ValueError),
        ((0, None, ((*fine[:-1], ((8, -2, 0), (8, -1, 0))),)), ValueError),
        ((0, None, ((*fine[:-1], ((-8, -1, 0), (8, -1, 0))),)), ValueError),
    ]:  # fmt: skip
        with pytest.raises(error):
            made(*wrong)
    with pytest.raises(TypeError):
        made(0, None, (fine,), name=1)


def test_threads_launch_side_by_side(driver):
    """Each with values of its own; one whose thread has no context gets the one that the kernels are of."""
    launch = launches.together([simple(), simple()], 1, None)

    def calls(seed: int) -> None:
        for i in range(500):
            launch([1 + seed * 1000 + i], seed)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(calls, range(1, 9)))
    found = [(r.config.stream, int.from_bytes(bytes(r.bytes)[:8], "little")) for r in recorded(driver)]
    for seed in range(1, 9):
        assert [v for s, v in found if s == seed] == [1 + seed * 1000 + i for i in range(500) for _ in range(2)]


def test_python_runs_on_while_the_driver_waits(driver):
    """Its queue may be full until other Python code has run."""
    launch = launches.together([simple(waits=True)], 1, None)
    thread = threading.Thread(target=launch, args=([16], STREAM))
    thread.start()
    ctypes.c_int.in_dll(driver, "go_on").value = 1
    thread.join()
    assert len(recorded(driver)) == 1


def test_maps_are_encoded_in_the_devices_context(driver, monkeypatch):
    """A thread that has used no device yet has none."""

    class Descriptor:
        shape, strides, padding, base = [16, 16], [16, 1], "zero", torch.zeros(16, 16)

    def context() -> int | None:
        found = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(found))
        return found.value

    monkeypatch.setattr(tensor_maps, "_encode", lambda *_: [context(), 16, 16, 16, 1])
    maps = tensor_maps.TensorMaps(Descriptor(), {})
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(context).result() is None
        assert pool.submit(maps, 4096).result() == CONTEXT
        driver.cuCtxSetCurrent(ctypes.c_void_p(CONTEXT + 1))
        assert maps(8192) == CONTEXT + 1


def test_without_a_context_nothing_is_made(driver):
    driver.cuCtxSetCurrent(None)
    assert "no CUDA context is current" in str(launches.together([simple()], 1, None))


def test_nothing_leaks(driver):
    tensor_map = TensorMap()
    mapped = Given(Launcher(), kernel(128, 4, 8), (4, 1, 0), ("tensordesc<fp16[8]>",), (1, 1), (Map(0), 8, 1))
    wrong = mapped._replace(types=("*fp16",), arguments=(Address(0, 0),))

    def use() -> None:
        for _ in range(300):
            launch = launches.together([mapped] * 4, 1, TensorMap)
            launch([tensor_map], STREAM)
            assert isinstance(launches.together([mapped, wrong], 1, TensorMap), Reject)
            with pytest.raises(TypeError):
                launch([16], STREAM)

    use()
    references = sys.getrefcount(TensorMap), sys.getrefcount(tensor_map)
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    use()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert (sys.getrefcount(TensorMap), sys.getrefcount(tensor_map)) == references
    assert after - before < 20_000  # one Launches of four has 4 KiB: 600 are made


def test_c_has_no_warnings(tmp_path):
    import sysconfig

    python = f"-I{sysconfig.get_paths('posix_prefix')['include']}"
    flags = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror")
    for source, more in ((SOURCE, (python,)), (HERE / "fake_cuda.c", ("-D_GNU_SOURCE",))):
        done = built(source, tmp_path / "library.so", *flags, *more)
        assert (done.returncode, done.stderr) == (0, "")


def no_compiler(*_: Any) -> str:
    raise RuntimeError("Failed to find C compiler")


def no_headers(*_: Any) -> str:
    raise subprocess.CalledProcessError(1, "gcc")


def no_library(*_: Any) -> str:
    return __file__


@pytest.mark.parametrize(
    ("path", "build", "reason"),
    [
        ("/nowhere/libcuda.so", None, "/nowhere/libcuda.so"),
        ("libm.so.6", None, "has no cuLaunchKernelEx"),
        (None, no_compiler, "Failed to find C compiler"),
        (None, no_headers, "non-zero exit status"),
        (None, no_library, "invalid ELF header"),
    ],
)
def test_where_c_can_not_be_used_triton_launches(driver, monkeypatch, tmp_path, path, build, reason):
    monkeypatch.setattr(launches, "DRIVER", path or launches.DRIVER)
    monkeypatch.setattr(knobs.build, "impl", build)
    if build:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches._library.cache_clear()
    verdict = launches.together([simple()], 1, None)
    launches._library.cache_clear()
    assert isinstance(verdict, Reject)
    assert reason in str(verdict)
