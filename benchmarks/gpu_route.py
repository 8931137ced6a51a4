"""The routing kernel on a GPU: the same experts as torch's calls choose, and its time alone and with sorting.

In: nothing. Out: tables on stdout, route.json under $OUT (or .). Time is that of a chain of CALLS calls in one CUDA
graph, the median of 20 interleaved replays, over CALLS: what it adds to a model's graph.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from gpu_kernels import Timer

from moe_compile import reference
from moe_compile.kernels.route import route
from moe_compile.kernels.sort import sort_routes
from moe_compile.spec import RouterSpec, torch_dtype

INF = math.inf
SPECS = {
    "qwen3_30b": RouterSpec(E=128, K=8, renorm="sum", logits="bf16", out="bf16"),
    "qwen3next": RouterSpec(E=512, K=10, renorm="sum", logits="bf16", out="bf16"),
    "olmoe": RouterSpec(E=64, K=8, logits="bf16", out="bf16"),
    "mixtral": RouterSpec(E=8, K=2, renorm="sum", logits="bf16"),
    "odd": RouterSpec(E=60, K=4, logits="f32"),
    "most": RouterSpec(E=1023, K=32, logits="f32", renorm="sum_at_least_eps", eps=0.5),
    "all": RouterSpec(E=1024, K=32, logits="bf16"),
    "bf16 scores": RouterSpec(E=128, K=8, score_dtype="bf16", renorm="sum", logits="bf16", out="bf16"),
    "f16 scores": RouterSpec(E=64, K=6, score_dtype="f16", logits="f16", out="f16"),
    "deepseek v2": RouterSpec(
        E=160, K=6, groups=8, top_groups=3, group_score="max", scale=16.0, logits="f32",
    ),
    "deepseek v3": RouterSpec(
        E=256, K=8, score="sigmoid", bias=True, groups=8, top_groups=4, group_score="top2_sum", group_fill=-INF,
        renorm="sum_plus_eps", eps=1e-20, scale=2.5, logits="f32",
    ),
    "deepseek v3 filled": RouterSpec(
        E=256, K=8, score="sigmoid", bias=True, groups=8, top_groups=4, group_score="top2_sum", group_fill=0.0,
        renorm="sum_plus_eps", eps=1e-20, scale=2.5, logits="bf16", score_dtype="bf16",
    ),
    "deepseek v4": RouterSpec(
        E=256, K=6, score="sqrtsoftplus", bias=True, renorm="sum", scale=1.5, logits="f32",
    ),
    "gpt_oss": RouterSpec(E=32, K=4, score="topk_softmax", score_dtype="bf16", logits="bf16", out="bf16"),
    "llama4": RouterSpec(E=16, K=1, score="topk_sigmoid", logits="bf16", out="bf16"),
    "choice": RouterSpec(
        E=64, K=12, groups=8, top_groups=1, group_score="max", values="choice", expert_scale=True, logits="bf16",
    ),
}  # fmt: skip


def operands(spec: RouterSpec, T: int, spread: float = 1.5) -> tuple[torch.Tensor, ...]:
    def vector(there: bool) -> torch.Tensor | None:
        return 0.3 * torch.randn(spec.E, device="cuda") if there else None

    logits = (spread * torch.randn(T, spec.E, device="cuda")).to(torch_dtype(spec.logits))
    return logits, vector(spec.bias), vector(spec.expert_scale)


def check() -> list[Any]:
    """For each spec: tokens whose chosen sets differ from torch's, whose order differs, and the weights' distance."""
    rows = []
    for name, spec in SPECS.items():
        for spread in (1.5, 12.0):  # the second saturates sigmoids: ties
            torch.manual_seed(1)
            inputs = operands(spec, 20000, spread)
            weights, ids = route(spec, *inputs)
            again, _ = route(spec, *inputs)
            want_weights, want_ids = reference.route(spec, *inputs)
            place, want_place = ids.argsort(1), want_ids.argsort(1)
            same = (ids.gather(1, place) == want_ids.gather(1, want_place)).all(1)
            a = weights.gather(1, place)[same].float()
            b = want_weights.gather(1, want_place)[same].float()
            off = ((a - b).abs() / b.abs().clamp_min(1e-30)).max().item() if len(a) else math.nan
            row = {
                "spec": name, "spread": spread, "tokens": len(ids), "other_sets": int((~same).sum()),
                "other_order": int((ids != want_ids).any(1).sum()), "weights_off": off,
                "bitwise": torch.equal(weights, again),
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    return rows


def time_all() -> list[Any]:
    timer, rows, calls = Timer(), [], 16
    for name in ("qwen3_30b", "qwen3next", "deepseek v3", "mixtral"):
        spec = SPECS[name]
        for T in (1, 16, 64, 256, 1024, 4096):
            inputs, block = operands(spec, T), 128 if T * spec.K > 64 * spec.E else 16
            _, ids = route(spec, *inputs)

            def both(inputs: Any = inputs, spec: RouterSpec = spec, block: int = block) -> None:
                sort_routes(route(spec, *inputs)[1], spec.E, block)

            us = timer.medians({
                "route": [lambda i=inputs, s=spec: route(s, *i)] * calls,
                "sort": [lambda ids=ids, s=spec, b=block: sort_routes(ids, s.E, b)] * calls,
                "route and sort": [both] * calls,
                "torch": [lambda i=inputs, s=spec: reference.route(s, *i)] * calls,
            })  # fmt: skip
            rows.append(
                {"spec": name, "E": spec.E, "K": spec.K, "T": T, "us": {k: round(v[0], 2) for k, v in us.items()}}
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__}, "check": check(),
    }  # fmt: skip
    result["times"] = time_all()
    Path(os.environ.get("OUT", "."), "route.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
