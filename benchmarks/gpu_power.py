"""What holds training's products back: time, clock, power and energy of each in a steady run, and the bytes that it
moves to and from memory, beside torch.matmul and a copy.

In: geometries and token counts on the command line. Out: a table on stdout, power.json under $OUT (or .).
A call is repeated in a CUDA graph for SECONDS; energy is the driver's counter, from one of its steps to another; the
clock is the mean of samples. Bytes are Nsight Compute's of one call (`ncu` on the PATH, else left out): it runs this
program again with --once. Needs nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import gpu_training_stages
import pynvml
import torch
import triton
from gpu_kernels import spec_of, weights_of
from record import Cells

from moe_compile import bench

SECONDS, WARM, BATCH = 1.5, 0.4, 0.04
PRODUCTS = ("fc1 hopper", "fc2 hopper", "act hopper", "dx hopper", "ddown hopper", "dgate_up hopper")
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
SIZE, COPIED = 8192, 1 << 30  # of the matrices, and the bytes of the copy's source


def products(name: str, T: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """{product: (a call, its FLOP)}."""
    spec = spec_of(name)
    calls = gpu_training_stages.calls_of(spec, T, weights_of(spec, "cuda"), "cuda")
    sorted_rows = (0,)  # the first linear reads x's copy, as it does where I is large
    return {p: (lambda p=p: calls[p](sorted_rows), gpu_training_stages.flop(spec, T, p)) for p in PRODUCTS}


def references() -> dict[str, tuple[Callable[[], Any], float]]:
    a, b = (torch.randn(SIZE, SIZE, device="cuda").bfloat16() for _ in range(2))
    source = torch.randn(COPIED // 4, device="cuda")
    to = torch.empty_like(source)
    return {"torch.matmul": (lambda: a @ b, 2.0 * SIZE**3), "copy": (lambda: torch.neg(source, out=to), 0.0)}


def steady(call: Callable[[], Any], device: Any) -> dict[str, float]:
    """us of a call, W and MHz, from one step of the energy counter to another."""
    captured = bench.capture([call] * 10)
    replays = 1 + int(BATCH / captured.calls / captured.seconds(1))  # between two looks at the counter, which take time
    began = time.perf_counter()

    def batch() -> Any:
        for _ in range(replays):
            captured.graph.replay()
        done = torch.cuda.Event()
        done.record()
        return done

    calls, last = 0, None
    clocks: list[int] = []
    marks: list[tuple[float, int, int, int]] = []
    running = batch()
    while len(marks) < 2:
        following = batch()  # so that the device never waits
        running.synchronize()
        running, calls = following, calls + captured.calls * replays
        now, energy = time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
        clocks.append(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))
        stepped, last = last not in (None, energy), energy
        if stepped and now - began > WARM + (SECONDS if marks else 0):
            marks.append((now, energy, calls, len(clocks)))
    torch.cuda.synchronize()
    (t0, e0, n0, c0), (t1, e1, n1, c1) = marks
    return {
        "us": round(1e6 * (t1 - t0) / (n1 - n0), 1), "W": round((e1 - e0) / (t1 - t0) / 1e3),
        "mJ": round((e1 - e0) / (n1 - n0), 1), "MHz": round(statistics.mean(clocks[c0:c1])),
    }  # fmt: skip


def once(calls: dict[str, tuple[Callable[[], Any], float]]) -> None:
    """Each call as a range of the profiler."""
    for call, _ in calls.values():
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def moved(name: str, T: int, rows: list[str]) -> dict[str, float]:
    """Bytes of each row's kernel; none where there is no ncu, or it fails."""
    if not shutil.which("ncu"):
        return {}
    command = [
        "ncu", "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS), "--csv",
        "--page", "raw", sys.executable, __file__, name, "-T", str(T), "--once",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    table = list(csv.reader(line for line in run.stdout.splitlines() if line.startswith('"')))
    if run.returncode or len(table) != 2 + len(rows):
        print("ncu:", run.returncode, run.stdout[-500:], run.stderr[-500:], flush=True)
        return {}
    head, units, *found = table
    at = [head.index(m) for m in METRICS]
    return {row: sum(float(line[i].replace(",", "")) * UNITS[units[i]] for i in at) for row, line in zip(rows, found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometries", nargs="*", default=["qwen3_30b", "mixtral"])
    parser.add_argument("-T", nargs="+", type=int, default=[4096])
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        once({**products(args.geometries[0], args.T[0]), **references()})
        return
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    record = Cells("power.json", "")
    record.begin(
        date=time.strftime("%Y-%m-%d"), device=torch.cuda.get_device_name(),
        versions={m.__name__: m.__version__ for m in (torch, triton)}, what=__doc__,
        limit_W=pynvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1e3,
        most_MHz=pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_SM),
    )  # fmt: skip
    for name in args.geometries:
        for T in args.T:
            calls = {**products(name, T), **references()}
            bytes_of = moved(name, T, list(calls))
            rows: dict[str, Any] = {}
            for row, (call, flop) in calls.items():
                rows[row] = steady(call, device)
                rows[row] |= {"GFLOP": round(flop / 1e9, 1)} | (
                    {"GB": round(bytes_of[row] / 1e9, 3)} if bytes_of else {}
                )
                print(name, T, row, rows[row], flush=True)
                record.add({"geometry": name, "T": T, "rows": rows})
            del calls
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
