"""What a device can do, as numbers: in, a torch.device, a name ("H200") or an architecture ("sm_90"); out, a Device.

A Device is plain frozen data, so planning works for hardware that isn't there. Capability, processors and sizes are
read from the driver where there is one; rates come from the row of the same name, or are scaled from the generic row.
Invariant: nothing here is fitted. What a kernel reaches of these rates is cost.py's business.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KiB, MiB = 1 << 10, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """Datasheet facts. Rates are per second: bytes, or dense multiply-adds counted twice, without sparsity.

    type: "cuda" or "cpu". capability: compute capability. processors: SMs, or cores. clock: boost, Hz. shared_bytes: of
    shared memory that one program may have; shared_per_processor: that resident programs share. flops: by dtype of the
    operands ("bf16", "f16", "f32", "fp8", "fp4"), accumulated in fp32. launch_seconds: host time of one launch in eager
    mode; inside a CUDA graph a launch costs `graph_launch_seconds` on the device.
    """

    name: str
    type: str = "cuda"
    capability: tuple[int, int] = (0, 0)
    processors: int
    clock: float
    bandwidth: float
    l2_bandwidth: float
    l2_bytes: int
    flops: tuple[tuple[str, float], ...]
    shared_bytes: int = 99 * KiB
    shared_per_processor: int = 100 * KiB
    threads_per_processor: int = 2048
    registers: int = 65536
    launch_seconds: float = 8e-6
    graph_launch_seconds: float = 1.5e-6

    @property
    def arch(self) -> str:
        """ "sm_90", or "cpu"."""
        return self.type if self.type == "cpu" else "sm_{}{}".format(*self.capability)

    def flop_rate(self, dtype: str) -> float:
        """Dense FLOP/s on operands of `dtype`; where it has no units for it, those of fp32."""
        rates = dict(self.flops)
        return rates.get(dtype, rates["f32"])

    def __str__(self) -> str:
        return f"{self.name} ({self.arch}, {self.processors} processors, {self.bandwidth / 1e12:.2f} TB/s)"


def _gpu(name: str, capability: tuple[int, int], bf16: float, f32: float, **rest: Any) -> Device:
    """A row, rates in TFLOP/s; fp16 has bf16's in every one of them."""
    rates = {"bf16": bf16, "f16": bf16, "f32": f32, "fp8": rest.pop("fp8", 0), "fp4": rest.pop("fp4", 0)}
    return Device(name=name, capability=capability, flops=tuple((k, 1e12 * v) for k, v in rates.items() if v), **rest)


_HOPPER: dict[str, Any] = {
    "processors": 132, "clock": 1.98e9, "l2_bandwidth": 14.8e12, "l2_bytes": 50 * MiB, "fp8": 1979,
    "shared_bytes": 227 * KiB, "shared_per_processor": 228 * KiB,
}  # fmt: skip
_BLACKWELL: dict[str, Any] = {
    "processors": 148, "clock": 1.92e9, "bandwidth": 8e12, "l2_bandwidth": 18e12, "l2_bytes": 126 * MiB,
    "shared_bytes": 227 * KiB, "shared_per_processor": 228 * KiB,
}  # fmt: skip
_SMALL_SHARED: dict[str, Any] = {"threads_per_processor": 1536, "l2_bytes": 96 * MiB}
# Vendors' datasheets. L2 bandwidth is in none of them: 64 bytes a clock and processor where microbenchmarks come near
# that, else what they show.
DEVICES: tuple[Device, ...] = (
    _gpu("A100", (8, 0), 312, 19.5, processors=108, clock=1.41e9, bandwidth=2.04e12, l2_bandwidth=9.7e12,
         l2_bytes=40 * MiB, shared_bytes=163 * KiB, shared_per_processor=164 * KiB),
    _gpu("H200", (9, 0), 989, 67, bandwidth=4.8e12, **_HOPPER),
    _gpu("H100", (9, 0), 989, 67, bandwidth=3.35e12, **_HOPPER),
    _gpu("B200", (10, 0), 2250, 75, fp8=4500, fp4=9000, **_BLACKWELL),
    _gpu("GB300", (10, 3), 2500, 77, fp8=5000, fp4=15000, **_BLACKWELL),
    _gpu("L40S", (8, 9), 362, 91.6, fp8=733, processors=142, clock=2.52e9, bandwidth=0.864e12, l2_bandwidth=4e12,
         **_SMALL_SHARED),
    _gpu("RTX 5090", (12, 0), 209.5, 104.8, fp8=419, fp4=1676, processors=170, clock=2.41e9, bandwidth=1.79e12,
         l2_bandwidth=6e12, **_SMALL_SHARED),
)  # fmt: skip
# A GPU without a row: the driver's counts, and these rates for each processor.
GENERIC = _gpu(
    "CUDA GPU", (8, 0), 250, 30, processors=100, clock=1.5e9, bandwidth=1.5e12, l2_bandwidth=4e12, l2_bytes=40 * MiB
)
# A server core: 32 fp32 multiply-adds a cycle. The shared bytes are what Triton's interpreter is held to: Hopper's.
CPU = Device(
    name="CPU", type="cpu", processors=2, clock=3e9, bandwidth=4e10, l2_bandwidth=2e11, l2_bytes=32 * MiB,
    flops=(("f32", 3.8e11), ("bf16", 3.8e11), ("f16", 1.9e11), ("f64", 1.9e11)), shared_bytes=227 * KiB,
    launch_seconds=5e-6, graph_launch_seconds=5e-6,
)  # fmt: skip
_ALIASES = {"B300": "GB300", "GB200": "B200", "GH200": "H200"}


@lru_cache(None)
def named(text: str) -> Device:
    """The device of a name ("H200", "NVIDIA H200 141GB HBM3e") or architecture ("sm_90": the first of that kind).

    An architecture without a row ("sm_107") is GENERIC with that capability. ValueError lists what there is.
    """
    wanted = text.lower().replace("sm90a", "sm_90").replace("sm_90a", "sm_90")
    for device in (*DEVICES, CPU):
        if wanted in (device.arch, device.arch.replace("_", ""), device.name.lower()):
            return device
    if row := _row(text):
        return row
    if found := re.fullmatch(r"sm_?(\d+)(\d)[af]?", wanted):
        return dataclasses.replace(GENERIC, capability=(int(found[1]), int(found[2])))
    known = ", ".join((*(f"{d.name} ({d.arch})" for d in DEVICES), "cpu"))
    raise ValueError(f"device {text!r} is not one of {known}")


def facts(device: torch.device | Device) -> Device:
    """The facts of a device of this machine; a Device is returned as it is. Without CUDA, "cuda" means GENERIC."""
    if isinstance(device, Device):
        return device
    if device.type != "cuda":
        return _cpu() if device.type == "cpu" else dataclasses.replace(CPU, name=device.type, type=device.type)
    return _read(device.index if device.index is not None else -1)


def _row(name: str) -> Device | None:
    """The row that a driver's name for a GPU contains."""
    words = name.lower().replace("geforce ", "").replace("nvidia ", "")
    words = next((full.lower() for alias, full in _ALIASES.items() if alias.lower() in words), words)
    return next((d for d in DEVICES if re.search(rf"\b{d.name.lower()}\b", words)), None)


@lru_cache(None)
def _cpu() -> Device:
    import torch

    threads = torch.get_num_threads()
    return dataclasses.replace(
        CPU, processors=threads, flops=tuple((k, v / CPU.processors * threads) for k, v in CPU.flops)
    )


@lru_cache(None)
def _read(index: int) -> Device:
    import torch

    if not torch.cuda.is_available():
        return GENERIC
    p: Any = torch.cuda.get_device_properties(torch.cuda.current_device() if index < 0 else index)
    counts = {
        "capability": (p.major, p.minor),
        "processors": p.multi_processor_count,
        "l2_bytes": p.L2_cache_size,
        "shared_bytes": getattr(p, "shared_memory_per_block_optin", 0),
        "shared_per_processor": getattr(p, "shared_memory_per_multiprocessor", 0),
        "threads_per_processor": p.max_threads_per_multi_processor,
        "registers": getattr(p, "regs_per_multiprocessor", 0),
    }
    known = {k: v for k, v in counts.items() if v}
    if row := _row(p.name):
        return dataclasses.replace(row, **known)
    share = p.multi_processor_count / GENERIC.processors
    clock, width = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)  # kHz, bits; two transfers
    return dataclasses.replace(
        GENERIC, name=p.name, **known, bandwidth=2e3 * clock * width / 8 if clock and width else share * 1.5e12,
        l2_bandwidth=share * GENERIC.l2_bandwidth, flops=tuple((k, share * v) for k, v in GENERIC.flops),
    )  # fmt: skip
