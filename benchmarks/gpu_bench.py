"""`moe-compile bench` over every geometry and token count at once, on all GPUs: h200.json, providers.json under $OUT.

Each geometry's token counts are split, a process a part, and the processes dealt out over the GPUs. All of them first
draw weights and compile (kernels, Inductor, CuTe-DSL) side by side; then, GPU by GPU, one process after the other has
the GPU to itself, draws its weights again and times its cells. What other libraries' tuners found while the GPU was
shared is forgotten, and tuned again (with fewer repeats of a tactic where a call is long). A process whose time is up
is ended; what it has timed is kept: h200.json is written anew after each process's turn, and --into goes on with one.
How the record stands is printed last.
providers.json has the cells' providers, and with --memory that of those that copy weights, of a layer drawn afresh,
after kernels are compiled: `kept` is what stays allocated after its first call, `peak` the most that the call had
beyond what was there and its result, `declared` what was said before.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else asking for devices keeps forked processes from them
import tuners
from record import GEOMETRIES, THEIRS, Record, write

TOKENS = tuple(1 << i for i in range(14))
BIG = "dsv3"  # has one process: two would fill a GPU
LONG = 0.3e-3  # seconds of a call, at least, from which a tuner repeats it less
WEIGHT = {"dsv3": 3.0, "mixtral": 1.6}  # of a cell's time, others 1
PATIENCE = 20.0  # seconds that a compilation under way may take: what is timed beside it is no use
LAST = 3.0  # seconds that writing and the table take


def say(*words: Any) -> None:
    print(f"[{time.time() - START:6.1f}s]", *words, flush=True)


def work(geometry: str, tokens: list[int], folder: Path, arguments: argparse.Namespace) -> None:
    """A process: compile, say that it is ready, wait for its turn, time."""
    for name in arguments.imports:
        importlib.import_module(name)
    import torch

    from moe_compile import contest, suite

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    of = contest.Contest(geometry, device, rounds=arguments.rounds, only=tuple(filter(None, arguments.only.split(","))))
    cells = []
    tuners.shared()
    with torch.no_grad():
        # of one that fills the GPU with what others copy, those come last: the other processes have let go of theirs
        for T in tokens if geometry != BIG else tokens[::-1]:
            if time.time() > arguments.prepared:
                say(geometry, "not compiled in time, from", T, "on")
                break
            # FlashInfer's CUTLASS is compiled, and would only tune; what others compile serves every T, or few
            took = of.compile(T, without=("flashinfer_cutlass",) if T == tokens[0] else THEIRS)
            say(geometry, T, "compiled:", ", ".join(f"{name} {s:.1f} s" for name, s in took.items() if s > 0.2))
            if geometry != BIG:
                of.forget()  # other processes need the memory
        of.forget()
        settle()
        (folder / "ready").touch()
        while not (folder / "turn").exists():
            time.sleep(0.05)
        until = float((folder / "turn").read_text())
        for T in tokens:
            if time.time() > until:
                say(geometry, "not timed:", tokens[tokens.index(T) :])
                break
            tuners.alone(suite.limit(of.spec, suite.tokens_of(of.spec, T, device)[1]) >= LONG)
            cells.append(of.cell(T))
            say(cells[-1])
            write(folder / "cells.json", contest.as_json(contest.record(cells, device)))
    if arguments.memory and folder.name.endswith("_0"):
        write(folder / "memory.json", json.dumps(memory(of, tokens[0])))
    (folder / "done").touch()


def memory(of: Any, T: int) -> dict[str, dict[str, int]]:
    """Bytes of each provider that may copy weights, for one layer."""
    import torch

    from moe_compile import suite
    from moe_compile.hardware import facts
    from moe_compile.providers import copied_bytes, providers

    found: dict[str, dict[str, int]] = {}
    spec, device = of.spec, of.device
    of.forget()
    for name, p in providers().items() if device.type == "cuda" else ():
        if p.priced or not (p.available() and p.supports(spec, facts(device))):
            continue
        if not (offers := p.tactics(spec, facts(device), T)):
            continue
        layer, tokens = suite.weights_of(spec, device, 99), suite.tokens_of(spec, T, device)
        run = p.build(offers[0][0], spec, device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            out = run(*tokens, layer)
        except RuntimeError as error:
            say(of.geometry, name, "has no memory:", str(error)[:100])
            continue
        torch.cuda.synchronize()
        own = before + out.numel() * out.itemsize
        kept, peak = torch.cuda.memory_allocated() - own, torch.cuda.max_memory_allocated() - own
        found[name] = {"declared": copied_bytes((name,), spec), "kept": kept, "peak": peak}
        del layer, out
    return found


def settle() -> None:
    """Nothing runs, nothing is chosen, no memory is held that is not used."""
    import torch

    tuners.forget()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def cost(geometry: str, tokens: list[int]) -> float:
    """About so many seconds are the cells' timing."""
    return WEIGHT.get(geometry, 1.0) * sum(1.7 + T / 1500 for T in tokens)


def start(geometry: str, tokens: list[int], folder: Path, gpu: str, arguments: argparse.Namespace) -> None:
    """A forked process. Where CUDA can't be used in one, a new Python takes its place."""
    import torch

    os.environ.update(CUDA_VISIBLE_DEVICES=gpu, GPU_BENCH_START=str(START))
    log = (folder / "log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
    except RuntimeError as error:
        say("starts anew:", error)
        command = [sys.executable, __file__, *sys.argv[1:], "--work", geometry, ",".join(map(str, tokens)), str(folder)]
        os.execv(sys.executable, [*command, "--prepared", str(arguments.prepared)])
    work(geometry, tokens, folder, arguments)


def turns(
    tasks: list[tuple[str, list[int], Path]], processes: dict[Path, Any], prepared: float, end: float,
    ended: Callable[[Path], None],
) -> None:  # fmt: skip
    """One GPU's processes, each alone on it in turn. PATIENCE after `prepared` those not ready come last."""

    def ready(folder: Path) -> bool:
        return (folder / "ready").exists()

    while time.time() < prepared + PATIENCE and not all(ready(f) or not processes[f].is_alive() for _, _, f in tasks):
        time.sleep(0.1)
    left = list(tasks)
    while left and time.time() < end - LAST:
        task = next((t for t in left if ready(t[2])), None)
        if task is None:
            if not any(processes[f].is_alive() for _, _, f in left):
                break
            time.sleep(0.1)
            continue
        geometry, tokens, folder = task
        share = cost(geometry, tokens) / sum(cost(g, t) for g, t, _ in left)
        until = time.time() + (end - time.time()) * min(1.0, 1.4 * share)
        write(folder / "turn", str(min(until, end - LAST)))
        while time.time() < end and not (folder / "done").exists() and processes[folder].is_alive():
            time.sleep(0.05)
        processes[folder].kill()
        processes[folder].join()
        left.remove(task)
        ended(folder)
    for geometry, _, folder in left:
        say(geometry, folder.name, "had no turn:", "ready" if ready(folder) else "not ready")
        processes[folder].kill()
        ended(folder)


def deal(cells: list[str], gpus: int, most: int) -> list[tuple[str, list[int], str, int]]:
    """(geometry, tokens, name, GPU) of each process, in the order of their turns."""
    parts: list[tuple[str, list[int], str]] = []
    for text in cells:
        geometry, _, some = text.partition(":")
        tokens = [int(t) for t in some.split(",")] if some else list(TOKENS)
        many = 1 if geometry == BIG else most
        parts += [(geometry, tokens[k::many], f"{geometry}_{k}") for k in range(many) if tokens[k::many]]
    load = [0.0] * gpus
    to: dict[str, int] = {}
    for geometry, tokens, name in sorted(parts, key=lambda part: -cost(*part[:2])):
        to[name] = load.index(min(load))
        load[to[name]] += cost(geometry, tokens)
    return [(*part, to[part[2]]) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(GEOMETRIES), metavar="GEOMETRY[:T,T]", help="default all")
    parser.add_argument("--gpus", type=int, default=0, help="default all")
    parser.add_argument("--parts", type=int, default=4, help="processes of a geometry")
    parser.add_argument("--seconds", type=float, default=1e4, help="end after so many")
    parser.add_argument("--prepare", type=float, default=5e3, help="begin no compilation after so many seconds")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    parser.add_argument("--only", default="", metavar="NAMES", help="columns that start with one of these")
    parser.add_argument("--memory", action="store_true", help="measure what providers keep and need")
    parser.add_argument("--into", default="", metavar="FILE", help="a record of the same day to go on with")
    parser.add_argument("--name", default="h200.json", help="of the record, under $OUT")
    parser.add_argument(
        "--imports", nargs="*", default=[], metavar="MODULE", help="modules that each process imports first"
    )
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)  # geometry, tokens, folder of a process
    parser.add_argument("--prepared", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        geometry, tokens, folder = arguments.work
        work(geometry, [int(t) for t in tokens.split(",")], Path(folder), arguments)
        return
    from ahead import warm  # and with it torch, which takes seconds: they count

    warm(
        "transformers.models.gpt_oss.modeling_gpt_oss", "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "moe_compile.contest", "moe_compile.kernels.hopper", "moe_compile.kernels.decode",
    )  # fmt: skip
    import torch

    from moe_compile import contest, standing

    gpus = arguments.gpus or max(1, torch.cuda.device_count())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    arguments.prepared, end = START + arguments.prepare, START + arguments.seconds
    kept = tempfile.TemporaryDirectory(prefix="gpu_bench_", ignore_cleanup_errors=True)  # until this process ends
    root = Path(kept.name)
    tasks: list[list[tuple[str, list[int], Path]]] = [[] for _ in range(gpus)]
    processes: dict[Path, Any] = {}
    for geometry, tokens, name, gpu in deal(arguments.cells, gpus, arguments.parts):
        folder = root / name
        folder.mkdir()
        of = geometry, tokens, folder, visible[gpu], arguments
        processes[folder] = get_context("fork").Process(target=start, args=of)
        processes[folder].start()
        tasks[gpu].append((geometry, tokens, folder))
    say(len(processes), "processes")
    out = Path(os.environ.get("OUT", "."))
    earlier = json.loads(Path(arguments.into).read_text()) if arguments.into else None
    record = Record(out, arguments.name, f"{contest.__doc__}\n{__doc__}", earlier)
    threads = [threading.Thread(target=turns, args=(t, processes, arguments.prepared, end, record.add)) for t in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not record.parts:
        raise SystemExit("no cell was timed")
    cells = record.found()["cells"]
    say(len(cells), "cells")
    print(standing.table(cells), flush=True)


START = float(os.environ.get("GPU_BENCH_START", time.time()))
if __name__ == "__main__":
    main()
