"""Whole models on a GPU: `backend="moe"` beside Inductor, correct and timed. Writes models.json to $OUT or here, anew
after each T; with --into it goes on with an earlier one, whose cells aren't timed again.

Qwen3-30B-A3B's geometry (E128 K8 H2048 I768) cut to 4 layers, random bf16 weights. For each T one forward of [1, T]
tokens without a cache, static shapes; HuggingFace's grouped_mm (its default) and batched_mm (what `generate` decodes
with) under Inductor, and ours, in mode "reduce-overhead" (CUDA graphs); all columns are compiled side by side first, by
processes of their own, into caches on disk. Median of interleaved rounds of event-timed calls. Errors: the
MoE block of the last layer against float64 with the same routing, ours and the original's (HuggingFace's grouped_mm in
eager mode).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import triton
from ahead import side_by_side, warm
from record import Cells
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_compile import journal
from moe_compile.backend import moe_backend

LAYERS, ROUNDS, CALLS = 4, 12, 10
TOKENS, MODE = (1, 16, 256, 4096), "reduce-overhead"
GEOMETRY = f"qwen3_30b x {LAYERS} layers"
START = time.time()


def say(*words: Any) -> None:
    print(f"[{time.time() - START:6.1f}s]", *words, flush=True)


def build(implementation: str | None = None) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
        num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=32000,
        max_position_embeddings=8192, norm_topk_prob=True,
    )  # fmt: skip
    if implementation:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval()


def ours(mode: str | None, **options: Any) -> Any:
    settings = {"moe.strict": True, **{f"moe.{k}": v for k, v in options.items()}}
    return functools.partial(moe_backend, mode=mode, options=settings)


def _forward(ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits  # noqa: F821  (the column's own globals)


def compiled(model: Any, T: int, name: str, backend: Any = None) -> Any:
    """The column `name` for T tokens: a function of its own, since Dynamo caches by code and all stay callable."""
    code = _forward.__code__.replace(co_name=f"forward_{T}_{name}")
    forward = types.FunctionType(code, {**globals(), "model": model})
    how = {"backend": backend} if backend else {"mode": MODE}
    return torch.compile(forward, fullgraph=True, dynamic=False, **how)


def inductor_columns(T: int) -> dict[str, str]:
    """HuggingFace's implementations by column; batched_mm copies an expert's weights for each route."""
    return {f"inductor_{n}": n for n in (("grouped_mm", "batched_mm") if T <= 16 else ("grouped_mm",))}


def tokens(T: int) -> torch.Tensor:
    return torch.randint(0, 32000, (1, T), device="cuda", generator=torch.Generator("cuda").manual_seed(T))


def ahead(T: int, name: str, implementation: str | None) -> None:
    """A process: compile a column; ours by price, for nothing is measured beside others."""
    torch.set_float32_matmul_precision("high")
    with torch.inference_mode():
        compiled(build(implementation), T, name, None if implementation else ours(MODE, tune="off"))(tokens(T))


def block_errors(model: Any) -> dict[str, Any]:
    """Max and RMS of the last block's output error against float64 with the same routing, ours and the original's."""
    block = model.model.layers[-1].mlp
    out: dict[str, Any] = {}
    for T in (1, 16, 256, 1024):
        torch._dynamo.reset()
        generator = torch.Generator("cuda").manual_seed(T)
        x = torch.randn(1, T, 2048, device="cuda", dtype=torch.bfloat16, generator=generator)
        theirs = block(x)[0] if isinstance(block(x), tuple) else block(x)
        with journal.capture() as events:
            got = torch.compile(block, backend=ours(None), fullgraph=True, dynamic=False)(x)
        assert any(isinstance(e, journal.RegionFound) for e in events), events
        got = got[0] if isinstance(got, tuple) else got
        _, weights, ids = block.gate(x.view(-1, 2048))
        xs, w = x.view(-1, 2048).double(), weights.double()
        truth = torch.zeros_like(xs)
        for e in range(128):
            t, k = (ids == e).nonzero(as_tuple=True)
            if len(t):
                g, u = (xs[t] @ block.experts.gate_up_proj[e].double().T).chunk(2, -1)
                y = torch.nn.functional.silu(g) * u @ block.experts.down_proj[e].double().T
                truth.index_add_(0, t, y * w[t, k, None])
        gaps = [(v.view(-1, 2048).double() - truth) for v in (got, theirs)]
        (m1, r1), (m2, r2) = ((g.abs().max().item(), g.square().mean().sqrt().item()) for g in gaps)
        out[str(T)] = {"max": m1, "rms": r1, "original_max": m2, "original_rms": r2}
        say("block", T, f"max {m1 / m2:.3f} rms {r1 / r2:.3f} of the original's error")
    return out


def timed(calls: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Median and spread (interquartile range over median) of each call, in us, rounds interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            start.record()
            for _ in range(CALLS):
                call()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3 / CALLS)
    out = {}
    for name, s in samples.items():
        q = statistics.quantiles(s, n=4)
        out[name] = {"us": round(statistics.median(s), 1), "spread": round((q[2] - q[0]) / statistics.median(s), 4)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="T", help="default 1 16 256 4096")
    parser.add_argument("--into", default="", metavar="FILE", help="a record of the same day to go on with")
    args = parser.parse_args()
    record = Cells("models.json", args.into)

    def left() -> list[int]:
        """Token counts whose cells are not there yet."""
        return [T for T in args.tokens if not record.has(GEOMETRY, T, (*inductor_columns(T), "moe"))]

    warm()
    side_by_side(ahead, [(T, *column) for T in left() for column in (*inductor_columns(T).items(), ("moe", None))])
    say("compiled ahead")
    record.begin(
        date=time.strftime("%Y-%m-%d"), device=torch.cuda.get_device_name(),
        versions={m.__name__: m.__version__ for m in (torch, triton, transformers)}, what=__doc__,
    )  # fmt: skip
    torch.set_float32_matmul_precision("high")
    with torch.inference_mode():
        model = build()
        memory = torch.cuda.memory_allocated()
        say("built", f"{memory / 1e9:.2f} GB")
        if "block_errors" not in record.record:
            record.put(block_errors=block_errors(model))
        batched = build("batched_mm")
        batched.load_state_dict(model.state_dict(), assign=True)
        torch.cuda.empty_cache()
        addresses = [p.data_ptr() for p in model.parameters()]
        for T in left():
            ids = tokens(T)
            torch._dynamo.reset()
            calls: dict[str, Any] = {}
            logits: dict[str, torch.Tensor] = {}
            seconds: dict[str, float] = {}
            plan = ""
            by_name = {n: (batched if m == "batched_mm" else model, None) for n, m in inductor_columns(T).items()}
            for name, (m, backend) in {**by_name, "moe": (model, ours(MODE))}.items():
                run, start = compiled(m, T, name, backend), time.time()

                def call(run: Any = run, ids: torch.Tensor = ids) -> torch.Tensor:
                    torch.compiler.cudagraph_mark_step_begin()
                    return run(ids)

                with journal.capture() as events:
                    for _ in range(4):
                        logits[name] = call().clone()
                torch.cuda.synchronize()
                seconds[name] = round(time.time() - start, 1)
                plan = plan or next((e.plan for e in events if isinstance(e, journal.Planned)), "")
                found = sum(isinstance(e, journal.RegionFound) for e in events)
                if backend is not None and found != LAYERS:
                    say("only", found, "regions;", [str(e)[:300] for e in events][:6])
                    raise SystemExit(1)
                calls[name] = call
                say(T, name, "ready in", seconds[name], "s")
            reference = model(input_ids=ids, use_cache=False).logits.float()
            gaps = {
                n: round(((v.float() - reference).square().mean().sqrt() / reference.square().mean().sqrt()).item(), 5)
                for n, v in logits.items()
            }
            times = timed(calls)
            cell = {
                "geometry": GEOMETRY, "T": T, "us": {n: t["us"] for n, t in times.items()},
                "spread": {n: t["spread"] for n, t in times.items()}, "first_calls_s": seconds,
                "logits_rms_from_eager": gaps, "plan": [plan],
            }  # fmt: skip
            assert addresses == [p.data_ptr() for p in model.parameters()]
            record.add(cell)
            record.put(weights_in_place=True)
            say(json.dumps({k: cell[k] for k in ("T", "us", "spread", "logits_rms_from_eager")}))
    say("done")


if __name__ == "__main__":
    main()
