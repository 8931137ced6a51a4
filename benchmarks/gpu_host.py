"""The host's time for a call of the experts on a GPU: launchers, the operator, compiled code, and what they consist of.

In: geometries and token counts on the command line. Out: tables on stdout, host.json under $OUT (or .).
Time is that of CALLS calls one after the other without a synchronization, over CALLS, so few that no queue is full: the
median of ROUNDS such runs, and the least of them. A virtual machine shares its processors, and some are half as fast as
others for seconds: so each round goes through all that is timed, on the processor that a loop of Python is fastest on
at the time. A provider's column is its cheapest tactic by the cost model; where it offers none for so few tokens, that
of T = 4096.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no workers that start beside what is timed

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent.parent))
import moe_compile.ops  # noqa: F401  the operator
from moe_compile.hardware import facts
from moe_compile.kernels.launch import compiling
from moe_compile.kernels.launches import Address, Given, one_by_one, together
from moe_compile.operands import ExpertWeights
from moe_compile.providers import Candidate, Plan, launcher, providers
from moe_compile.spec import ExpertsSpec
from moe_compile.suite import GEOMETRIES, tokens_of, weights_of

CALLS, ROUNDS, WARM = 20, 40, 5
MORE = 8
PROVIDERS = ("triton_decode", "triton_grouped", "triton_hopper")
MOST_TOKENS = {"triton_decode": 64}  # beyond, a call takes the device milliseconds
GPU = torch.device("cuda", 0)
experts = torch.ops.moe_compile.experts


@triton.jit(do_not_specialize=["n"])
def _nothing(a, b, n, SIZE: tl.constexpr):
    if n < 0:
        tl.store(a, tl.load(b))


PROCESSORS = os.sched_getaffinity(0)


def fastest_processor() -> int:
    """That which a loop of Python takes least time on."""

    def seconds(processor: int) -> float:
        os.sched_setaffinity(0, {processor})
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(5000):
                pass
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return min(PROCESSORS, key=seconds)


@dataclass(frozen=True)
class Way:
    """A call, so many of which are timed at once, in a mode of torch's."""

    call: Callable[[], Any]
    calls: int = CALLS
    mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad


def host(ways: dict[Any, Way]) -> dict[Any, tuple[float, float]]:
    """(median, least) us of host time a call, of each."""
    times: dict[Any, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        os.sched_setaffinity(0, {fastest_processor()})
        for name, way in ways.items():
            with way.mode():
                for _ in range(WARM):  # the processor's caches know nothing of it
                    way.call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(way.calls):
                    way.call()
                times[name].append(1e6 * (time.perf_counter() - start) / way.calls)
                torch.cuda.synchronize()
    os.sched_setaffinity(0, PROCESSORS)
    return {name: (round(statistics.median(us), 2), round(min(us), 2)) for name, us in times.items()}


def candidate(name: str, spec: ExpertsSpec, T: int) -> Candidate | None:
    """The provider's first tactic for T tokens; None where it is not for so many."""
    if T > MOST_TOKENS.get(name, T) or not providers()[name].supports(spec, facts(GPU)):
        return None
    provider = providers()[name]
    offered = provider.tactics(spec, facts(GPU), T) or provider.tactics(spec, facts(GPU), 4096)
    return Candidate(provider=name, tactic=offered[0][0])


def parts(spec: ExpertsSpec, p: ExpertWeights) -> dict[str, tuple[float, float]]:
    """What a call consists of, each alone."""
    x, ids, w = tokens_of(spec, 1, GPU)
    library = torch.library.Library("moe_compile_host", "FRAGMENT")
    library.define(str(experts.default._schema).replace("moe_compile::experts", "passes"))
    library.impl("passes", lambda *operands: operands[0], "CompositeExplicitAutograd")
    passes = torch.ops.moe_compile_host.passes.default
    operands = (x, ids, w, *p.arguments(), str(spec), "*:aten")
    made = _nothing[(1, 1)](x, x, 5, 3)
    stream, address = torch.cuda.current_stream().cuda_stream, x.data_ptr()
    launch = (1, 1, 1, stream, made.function, made.packed_metadata, None, None, None, address, address, 5, 3)
    types = tuple(made.src.signature.values())
    arguments = (Address(0, 0), Address(0, 0), 5, 3)
    four = [Given(made.run, made.function, made.packed_metadata, types, (1, 1), arguments)] * 4
    ways = {n: together(four[:n], 1, None) for n in (0, 1, 4)}
    apart, empty = one_by_one(four, 1), torch._C._dynamo.guards._empty_strided_cuda
    alloc, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
    return host({
        "torch.empty": Way(lambda: torch.empty((1, spec.H), dtype=x.dtype, device=GPU), 100),
        "x.add_(1)": Way(lambda: x.add_(1), 100),
        "an operator that does nothing": Way(lambda: passes(*operands), 100),
        "a launch by kernel[grid]": Way(lambda: _nothing[(1, 1)](x, x, 5, 3), 50),
        "a launch by Triton's launcher": Way(lambda: made.run(*launch), 50),
        **{f"{n} launches by launches.c": Way(lambda w=w: w([address], stream), 50) for n, w in ways.items() if w},
        "4 launches one by one": Way(lambda: apart([address], stream), 50),
        "an output": Way(lambda: empty((1, spec.H), (spec.H, 1), x.dtype), 100),
        "scratch memory": Way(lambda: free(alloc(1 << 20, stream)), 100),
        "the current stream": Way(lambda: torch._C._cuda_getCurrentRawStream(0), 100),
        "an address": Way(x.data_ptr, 100),
    })  # fmt: skip


def calls(spec: ExpertsSpec, tokens: list[int], p: ExpertWeights, of: Any) -> list[dict[str, Any]]:
    """A row for each provider and T. of: of_call or of_compiled."""
    inputs = {T: tokens_of(spec, T, GPU) for T in tokens}
    several = [(T, c) for T in tokens for name in PROVIDERS if (c := candidate(name, spec, T))]
    with ThreadPoolExecutor(16) as pool, compiling(pool):
        for T, c in several:
            launcher(c, spec, GPU)(*inputs[T], p)
    times = of([(c, inputs[T]) for T, c in several], spec, p)
    rows = []
    for (T, c), found in zip(several, times):
        print(f"{T:6} {c.provider:16} {found}", flush=True)
        us, least = ({k: v[i] for k, v in found.items()} for i in (0, 1))
        rows.append({"T": T, "candidate": str(c), "us": us, "least_us": least})
    return rows


def chain(rest: tuple[Any, ...], n: int, x: torch.Tensor) -> torch.Tensor:
    """n calls, each of what the one before gave."""
    for _ in range(n):
        x = experts(x, *rest)
    return x


Several = list[tuple[Candidate, tuple[torch.Tensor, ...]]]


def rest_of(c: Candidate, inputs: tuple[torch.Tensor, ...], spec: ExpertsSpec, p: ExpertWeights) -> tuple[Any, ...]:
    """The operator's arguments but the first."""
    return (*inputs[1:], *p.arguments(), str(spec), str(Plan.of([(None, c)])))


def of_call(several: Several, spec: ExpertsSpec, p: ExpertWeights) -> list[dict[str, tuple[float, float]]]:
    """One call by each way to it."""
    ways: dict[Any, Way] = {}
    for i, (c, inputs) in enumerate(several):
        run, arguments = launcher(c, spec, GPU), (inputs[0], *rest_of(c, inputs, spec, p))
        ways[i, "launcher"] = Way(lambda run=run, inputs=inputs: run(*inputs, p))
        ways[i, "operator"] = Way(lambda arguments=arguments: experts(*arguments))
        ways[i, "operator, inference_mode"] = Way(ways[i, "operator"].call, mode=torch.inference_mode)
    times = host(ways)
    return [{name: us for (j, name), us in times.items() if j == i} for i in range(len(several))]


def of_compiled(several: Several, spec: ExpertsSpec, p: ExpertWeights) -> list[dict[str, tuple[float, float]]]:
    """Each further call in a function that Inductor compiled."""
    found = []
    for c, inputs in several:
        rest = rest_of(c, inputs, spec, p)
        torch._dynamo.reset()  # each candidate is another constant of the same code
        one, more = (torch.compile(partial(chain, rest, n), fullgraph=True) for n in (1, 1 + MORE))
        times = host({1: Way(partial(one, inputs[0])), 1 + MORE: Way(partial(more, inputs[0]), CALLS // 4)})
        first, all_ = times.values()
        found.append({"one more in compiled code": (_each(first[0], all_[0]), _each(first[1], all_[1]))})
    return found


def _each(one: float, more: float) -> float:
    return round((more - one) / MORE, 2)


def fresh(spec: ExpertsSpec, p: ExpertWeights) -> dict[str, float]:
    """us of the first call with a T, kernels compiled: the median of 16."""
    found = {}
    for name in PROVIDERS:
        if not (c := candidate(name, spec, 40)):
            continue
        run, times = launcher(c, spec, GPU), []
        for T in range(20, 40):
            inputs = tokens_of(spec, T, GPU)
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(*inputs, p)
            times.append(1e6 * (time.perf_counter() - start))
        found[name] = round(statistics.median(times[4:]), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("geometries", nargs="*", default=["qwen3_30b"])
    parser.add_argument("-T", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096])
    options = parser.parse_args()
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    results: dict[str, Any] = {
        "what": __doc__.splitlines()[0], "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(0),
        "cpu": (cpu[0].partition(":")[2].strip() if cpu else platform.processor()), "cpus": os.cpu_count(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "protocol": f"host us a call: median and least of {ROUNDS} runs of {CALLS} calls without a synchronization, "
        "each round through all of them, on the processor that a loop of Python is fastest on",
        "geometries": {},
    }  # fmt: skip
    out = Path(os.environ.get("OUT", ".")) / "host.json"
    for name in options.geometries:
        spec = GEOMETRIES[name]
        p = weights_of(spec, GPU)
        found: dict[str, Any] = {"parts": {}, "first call": {}, "calls": []}
        results["geometries"][name] = found
        found["parts"] = {k: {"us": v[0], "least_us": v[1]} for k, v in parts(spec, p).items()}
        print(name, found["parts"], flush=True)
        found["calls"] = calls(spec, options.T, p, of_call)
        out.write_text(json.dumps(results, indent=1))
        found["first call"] = fresh(spec, p)
        print(found["first call"], flush=True)
        for row in calls(spec, [options.T[0], options.T[-1]], p, of_compiled):  # leaves much behind: after all others
            (known,) = (c for c in found["calls"] if (c["T"], c["candidate"]) == (row["T"], row["candidate"]))
            known["us"] |= row["us"]
            known["least_us"] |= row["least_us"]
            out.write_text(json.dumps(results, indent=1))
        del p


if __name__ == "__main__":
    main()
