"""Every provider beside every other on a GPU: errors, times, and memory beside what was declared.

In: geometries and token counts on the command line. Out: tables on stdout, providers.json under $OUT (or .).
For each geometry and T: each provider that can run it there (a library's own tuner runs first, on these tokens), and
torch._grouped_mm. Experts alone, routing given; sorting, packing and finalize included. Errors are against float64, on
sampled tokens, RMS and largest, relative. Memory is of a layer drawn afresh, after kernels are compiled: `kept` is what
stays allocated after its first call, `peak` the most that the call had beyond what was there and its result.
Times and routing as in gpu_kernels.py. FlashInfer's kernels must be built, or are reported with what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from gpu_kernels import GEOMETRIES, Timer, error, spec_of, tokens_of, torch_path, weights_of

from moe_compile import ops as _registered  # noqa: F401  (the operator)
from moe_compile.hardware import facts
from moe_compile.operands import ExpertWeights
from moe_compile.providers import Candidate, copied_bytes, providers
from moe_compile.spec import ExpertsSpec
from moe_compile.suite import exact

LAYERS, ROUNDS, ROWS = 2, 15, 16
START = time.time()


def say(*words: Any) -> None:
    print(f"[{time.time() - START:6.1f}s]", *words, flush=True)


def call(spec: ExpertsSpec, layer: ExpertWeights, tokens: tuple[Any, ...], plan: str) -> torch.Tensor:
    return torch.ops.moe_compile.experts(*tokens, *layer.arguments(), str(spec), plan)


def contenders(spec: ExpertsSpec, T: int, device: torch.device) -> dict[str, str]:
    """Provider -> the text of its first candidate, or why it has none."""
    found: dict[str, str] = {}
    for name, provider in providers().items():
        verdict = provider.available() and provider.supports(spec, facts(device))
        if name == "triton_decode" and T > 16:
            found[name] = "! reads an expert again for each of its routes"
            continue
        offers = provider.tactics(spec, facts(device), T) if verdict else []
        if not offers:
            found[name] = f"! {verdict if not verdict else f'not for {T} tokens'}"
        else:
            found[name] = str(Candidate(provider=name, tactic=offers[0][0]))
    return found


def cell(spec: ExpertsSpec, T: int, layers: list[ExpertWeights], timer: Timer) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    tokens = [tokens_of(spec, T) for _ in layers]
    rows = torch.linspace(0, T - 1, min(T, ROWS)).round().long().unique().tolist()
    truth = exact(spec, rows, tokens[0], layers[0])
    result: dict[str, Any] = {"T": T, "refused": {}, "error": {}, "picks": {}, "first_s": {}}
    result["error"]["torch._grouped_mm"] = error(torch_path(spec, *tokens[0], layers[0])[rows], truth)
    calls = {"torch._grouped_mm": [lambda i=i, p=p: torch_path(spec, *i, p) for i, p in zip(tokens, layers)]}
    for name, candidate in contenders(spec, T, device).items():
        if candidate.startswith("!"):
            result["refused"][name] = candidate[2:]
            continue
        plan, began = f"*:{candidate}", time.time()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*leaves calls to aten")
                got = call(spec, layers[0], tokens[0], plan)
                for i, p in zip(tokens[1:], layers[1:]):
                    call(spec, p, i, plan)
        except (RuntimeError, ValueError, UserWarning, triton.TritonError) as e:
            result["refused"][name] = f"{type(e).__name__}: {str(e)[:300]}"
            say("FAILED", name, result["refused"][name])
            continue
        torch.cuda.synchronize()
        result["first_s"][name] = round(time.time() - began, 2)
        result["error"][name] = error(got[rows], truth)
        provider, tactic = providers()[name], Candidate.parse(candidate).tactic
        result["picks"][name] = str(provider.settled(tactic, spec, device, T))
        calls[name] = [lambda i=i, p=p, plan=plan: call(spec, p, i, plan) for i, p in zip(tokens, layers)]
    timed = timer.medians({n: c * (3 if T <= 16 else 1) for n, c in calls.items()}, ROUNDS)
    result["us"] = {n: round(us, 2) for n, (us, _) in timed.items()}
    result["spread"] = {n: round(spread, 3) for n, (_, spread) in timed.items()}
    base = result["error"]["torch._grouped_mm"]
    for name, us in sorted(result["us"].items(), key=lambda pair: pair[1]):
        e = result["error"][name]
        say(f"  T={T:5} {name:29}{us:9.1f} us  error x{e[0] / base[0]:.2f} rms x{e[1] / base[1]:.2f} max")
    return result


def memory(spec: ExpertsSpec, T: int, refused: dict[str, str]) -> dict[str, dict[str, int]]:
    """Declared, kept and peak bytes of each provider, for one layer."""
    device, found = torch.device("cuda", 0), {}
    for name in providers():
        if name in refused or name == "aten" or name.startswith("triton"):
            continue
        layer, tokens = weights_of(spec, "cuda"), tokens_of(spec, T)
        candidate = contenders(spec, T, device)[name]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call(spec, layer, tokens, f"*:{candidate}")
        torch.cuda.synchronize()
        own = out.numel() * out.itemsize
        found[name] = {
            "declared": copied_bytes((name,), spec),
            "kept": torch.cuda.memory_allocated() - before - own,
            "peak": torch.cuda.max_memory_allocated() - before - own,
        }
        say(f"  memory {name}: {found[name]}")
        del layer, out
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometries", nargs="+", choices=GEOMETRIES)
    parser.add_argument("-T", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after so many")
    arguments = parser.parse_args()
    packages = ("torch", "triton", "flashinfer-python", "nvidia-cutlass-dsl")
    from importlib.metadata import PackageNotFoundError, version

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(),
        "versions": {p: installed(p) for p in packages}, "what": __doc__, "cells": [], "memory": {},
    }  # fmt: skip
    path = Path(os.environ.get("OUT", ".")) / "providers.json"
    timer = Timer()
    with torch.no_grad():
        for name in arguments.geometries:
            spec = spec_of(name)
            torch.cuda.empty_cache()
            layers = [weights_of(spec, "cuda") for _ in range(LAYERS)]
            say(name, spec)
            found: dict[str, Any] = {}
            for T in arguments.T:
                if time.time() - START > arguments.seconds:
                    break
                found = {"geometry": name, **cell(spec, T, layers, timer)}
                result["cells"].append(found)
                path.write_text(json.dumps(result, indent=1))
            del layers
            if found and time.time() - START < arguments.seconds:
                result["memory"][name] = memory(spec, 4, found["refused"])
                path.write_text(json.dumps(result, indent=1))
    say("done")


if __name__ == "__main__":
    main()
