"""`moe-compile demo`: the main job on a small Qwen3-MoE with random weights, on any machine, with nothing downloaded.

Compiles one model with Inductor and with moe, reports what became of its blocks, measures the error of eager, Inductor
and moe against an fp64 evaluation of the same weights, and times the three side by side. Fails (`ok` False) where a
block was not replaced or moe's error is not of the size of the others'; it never fails on time, which it only prints.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import bench, journal
from .explain import Report

TOKENS = (1, 16, 256)
ERROR_RATIO = 2.0  # moe's error over the larger of eager's and Inductor's: rounding differs by chance, wrong is far off

# Small enough for a minute on two cores with nothing cached, nearly all of it g++: Inductor 25 s (9 s of which are its
# start), moe 8 s, everything together 42 s (2026-11-30). Four layers took 1.6 times as long.
SIZES: dict[str, dict[str, int]] = {
    "cpu": {"layers": 2, "H": 256, "I": 128, "E": 32, "K": 4},
    "cuda": {"layers": 2, "H": 1024, "I": 512, "E": 64, "K": 8},
}


@dataclass(frozen=True, kw_only=True)
class Demo:
    """errors: name -> (max, rms) relative. seconds: T -> name -> Timing. model: what was built, in words."""

    model: str
    report: Report
    blocks: int
    errors: dict[str, tuple[float, float]]
    times: dict[int, dict[str, bench.Timing]]
    compile_seconds: dict[str, float]

    @property
    def ok(self) -> bool:
        worst = max(rms for name, (_, rms) in self.errors.items() if name != "moe")
        return self.replaced >= self.blocks and self.errors["moe"][1] <= ERROR_RATIO * worst

    @property
    def replaced(self) -> int:
        """Distinct modules whose block was replaced."""
        return len({r.where.module for r in self.report.regions if r.replaced})

    def as_dict(self) -> dict[str, Any]:
        times = {
            str(T): {**{n: {"median": t.median, "spread": t.spread} for n, t in row.items()}}
            | {"moe/inductor": row["moe"].over(row["inductor"])}
            for T, row in self.times.items()
        }
        rest = {"errors": self.errors, "seconds": times, "compile_seconds": self.compile_seconds, "ok": self.ok}
        return {"model": self.model, "report": self.report.as_dict(), **rest}

    def __str__(self) -> str:
        lines = [self.model, "", str(self.report), ""]
        lines.append("relative error of the logits against an fp64 evaluation of the same weights")
        lines.append(f"  {'':10}{'max':>10}{'rms':>10}")
        lines += [f"  {name:10}{high:10.1e}{rms:10.1e}" for name, (high, rms) in self.errors.items()]
        lines += ["", "time of a forward, ms (median of interleaved rounds, +- half the quartile distance)"]
        names = list(next(iter(self.times.values())))
        lines.append(f"  {'tokens':8}{''.join(f'{n:>17}' for n in names)}{'moe/inductor':>15}")
        for T, row in self.times.items():
            cells = "".join(f"{t.median * 1e3:10.3f} +-{t.spread:4.0%}" for t in row.values())
            lines.append(f"  {T:<8}{cells}{row['moe'].over(row['inductor']):15.2f}")
        seconds = ", ".join(f"{n} {s:.0f} s" for n, s in self.compile_seconds.items())
        lines += ["", f"compilation: {seconds} (the first one also pays for the compiler's start)"]
        verdict = f"{self.replaced} of {self.blocks} MoE layers replaced"
        lines.append(f"{'ok' if self.ok else 'FAILED'}: {verdict}")
        return "\n".join(lines)


def build_model(device: str) -> tuple[Any, str]:
    """(a Qwen3-MoE in eval mode on `device`, its description). fp32 on a CPU, bf16 on CUDA."""
    import torch
    import transformers

    size = SIZES[device]
    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=size["H"],
        intermediate_size=2 * size["H"],
        moe_intermediate_size=size["I"],
        num_hidden_layers=size["layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=size["E"],
        num_experts_per_tok=size["K"],
        norm_topk_prob=True,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = transformers.Qwen3MoeForCausalLM(config).to(device, dtype).eval()
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    sizes = " ".join(f"{k}={v}" for k, v in size.items())
    return model, f"Qwen3-MoE, {sizes}, {millions:.1f} M random parameters, {str(dtype)[6:]} on {device}"


def run(say: Callable[[str], None] = lambda text: None) -> Demo:
    """The demo; `say` is told what is going on."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    say("building the model")
    model, description = build_model(device)
    generator = torch.Generator().manual_seed(1)
    inputs = {T: torch.randint(0, 512, (1, T), generator=generator).to(device) for T in sorted(TOKENS, reverse=True)}
    ids = inputs[max(TOKENS)]

    # Dynamic from the start: one graph for T = 16 and 256. T = 1 is always a graph of its own.
    forwards: dict[str, Any] = {"eager": model}
    compile_seconds = {}
    for name in ("inductor", "moe"):
        say(f"compiling with {name}")
        forwards[name] = torch.compile(model, backend=name, dynamic=True)
        start = time.perf_counter()
        with journal.capture() as events, torch.no_grad():
            for x in inputs.values():
                forwards[name](x, use_cache=False)
        compile_seconds[name] = time.perf_counter() - start

    say("comparing with fp64")
    errors = {}
    with torch.no_grad():
        double = copy.deepcopy(model).to("cpu", torch.float64)
        double.set_experts_implementation("eager")  # torch's grouped product takes no fp64
        exact = double(ids.cpu(), use_cache=False).logits
        for name, forward in forwards.items():
            difference = forward(ids, use_cache=False).logits.cpu().double() - exact
            rms = difference.square().mean().sqrt() / exact.square().mean().sqrt()
            errors[name] = (float(difference.abs().max() / exact.abs().max()), float(rms))

    say("timing")
    times = {}
    with torch.no_grad():
        for T in TOKENS:
            calls = {name: _call(forward, inputs[T]) for name, forward in forwards.items()}
            synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
            # 0.1 s a sample: a few calls, so that what one contender leaves in the allocator is not the next one's time
            times[T] = bench.compare(calls, sample_seconds=0.1, synchronize=synchronize)
    return Demo(
        model=description,
        report=Report.from_events(events),
        blocks=SIZES[device]["layers"],
        errors=errors,
        times=times,
        compile_seconds=compile_seconds,
    )


def _call(forward: Any, ids: Any) -> Callable[[], Any]:
    return lambda: forward(ids, use_cache=False)
