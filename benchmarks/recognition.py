"""What recognition costs: milliseconds per decoder layer of whole models of 6 to 48 layers, on one core.

A Qwen3-MoE with random weights and small matrices, whose graph is as large as the real one's, captured by Dynamo once
for each number of layers, static and dynamic, for HuggingFace's grouped_mm and batched_mm. `recognize` is timed alone,
single-threaded, in CPU time: a graph's first call apart (caches of torch and sympy are cold), then 9 calls, of which
the median and the least; on a machine with other work the least is nearest to the cost. Prints a table; writes
recognition.json to $OUT or here.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_compile.recognize import recognize

LAYERS, CALLS = (6, 12, 24, 48), 9


def build(layers: int, implementation: str) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=16, intermediate_size=16, num_experts=16, num_experts_per_tok=4,
        num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=64,
        max_position_embeddings=64, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = implementation
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def capture(layers: int, implementation: str, dynamic: bool) -> torch.fx.GraphModule:
    """The model's one graph; with dynamic, the last that Dynamo made."""
    found: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    run = torch.compile(build(layers, implementation), backend=keep, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        run(input_ids=torch.randint(0, 64, (2, 12)), use_cache=False)
    return found[-1]


def measure(gm: torch.fx.GraphModule, layers: int) -> dict[str, Any]:
    seconds = []
    gc.collect()
    gc.freeze()  # what Dynamo holds is not recognition's to collect
    for _ in range(CALLS + 1):
        result = None  # the last one's terms go before, not during
        start = time.process_time()
        result = recognize(gm)
        seconds.append(time.process_time() - start)
    gc.unfreeze()
    assert result is not None and len(result.regions) == layers, [str(r.verdict) for r in result.rejections]
    return {
        "layers": layers,
        "nodes": len(gm.graph.nodes),
        "ms_per_layer": round(1e3 * statistics.median(seconds[1:]) / layers, 3),
        "ms_per_layer_least": round(1e3 * min(seconds) / layers, 3),
        "ms_per_layer_first_call": round(1e3 * seconds[0] / layers, 3),
    }


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for implementation in ("grouped_mm", "batched_mm"):
        for dynamic in (False, True):
            for layers in LAYERS:
                row = {"implementation": implementation, "dynamic": dynamic}
                row.update(measure(capture(layers, implementation, dynamic), layers))
                rows.append(row)
                print(*(f"{k}={v}" for k, v in row.items()), flush=True)
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in facts if "model name" in x), platform.processor())
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    report = {
        "what": "recognize() per decoder layer of a Qwen3-MoE, attention and all: CPU time of one thread, of 9 calls",
        "command": "python benchmarks/recognition.py",
        "device": cpu,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {**versions, "transformers": transformers.__version__},
        "rows": rows,
    }
    out = Path(os.environ.get("OUT", ".")) / "recognition.json"
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
