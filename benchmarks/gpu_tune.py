"""How long tuning a new spec takes: 14 token buckets on a GPU, nothing cached; then again in another process.

In: names of GEOMETRIES. Out: tune.json under $OUT (or .). The model is a Qwen3-MoE with random bf16 weights, compiled
with dynamic shapes by the eager inner backend, so that what is timed is ours. The first process starts with an empty
tuning cache and an empty Triton cache; the second finds the tuning cache filled. Seconds are those of the tune stage:
looking up, collecting the workload, planning, compiling candidates, measuring, validating, and timing the block's own
nodes beside the operator.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
GEOMETRIES: dict[str, dict[str, int]] = {
    "E128_K8": {"E": 128, "K": 8, "H": 2048, "I": 768, "layers": 4},
    "E896_K16": {"E": 896, "K": 16, "H": 2048, "I": 512, "layers": 2},
}


def build(name: str, device: str) -> Any:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    g = GEOMETRIES[name]
    config = Qwen3MoeConfig(
        hidden_size=g["H"], moe_intermediate_size=g["I"], intermediate_size=2 * g["H"], num_experts=g["E"],
        num_experts_per_tok=g["K"], num_hidden_layers=g["layers"], num_attention_heads=16, num_key_value_heads=4,
        head_dim=64, vocab_size=32000, max_position_embeddings=16384, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def compile_once(name: str, folder: str) -> dict[str, Any]:
    """Compile the model once and run it once; what the tune stage did."""
    import torch

    from moe_compile import backend, journal
    from moe_compile.kernels.launch import Bound

    loaded: list[Any] = []
    compile_one = Bound._compile
    Bound._compile = lambda self, *a: (loaded.append(self), compile_one(self, *a))[1]  # type: ignore[method-assign]
    logging.basicConfig(format="%(relativeCreated)d ms %(message)s")
    logging.getLogger("moe_compile").setLevel(logging.INFO)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(name, device)
    # launched as under mode="reduce-overhead", whose inner compiler is not timed here
    options = {"moe.inner": "eager", "moe.launch": "graph", "moe.tune": "measure", "moe.cache": folder}
    options["moe.strict"] = True
    ids = torch.randint(0, 32000, (4, 512), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad(), journal.capture() as events:
        compiled = torch.compile(
            model, backend=lambda gm, inputs: backend.moe_backend(gm, inputs, options=options), dynamic=True
        )
        got = compiled(ids, use_cache=False).logits
        expected = model(ids, use_cache=False).logits
    tuned = [e for e in events if isinstance(e, journal.Tuned)]
    seconds = [e.seconds for e in events if isinstance(e, journal.Compiled)]
    rows = [
        {
            "tokens": e.tokens, "chosen": e.chosen, "source": e.source, "complete": e.complete,
            "reach": round(e.reach, 1), "seconds": round(e.seconds, 3),
            "trials": [
                {"candidate": t.candidate, "predicted_us": round(t.predicted_us, 2), "us": t.us and round(t.us, 2),
                 "spread": round(t.spread, 4), "error": t.error, "why": t.why} for t in e.trials
            ],
        } for e in tuned
    ]  # fmt: skip
    beside = [vars(e) for e in events if isinstance(e, journal.Beside)]
    return {
        "tune_seconds": round(sum(s.get("tune", 0.0) for s in seconds), 3),
        "plan_seconds": round(sum(s.get("plan", 0.0) for s in seconds), 3),
        "buckets": len(tuned),
        "measured": sum(e.source == "measured" for e in tuned),
        "workload": sorted({f"{e.workload} {e.why}".strip() for e in tuned}),
        "kernels_loaded": len(loaded),
        "logits_rms_from_eager": float((got.float() - expected.float()).norm() / expected.float().norm()),
        "plan": next(e.plan for e in events if isinstance(e, journal.Planned)),
        "beside": [{k: v for k, v in b.items() if k != "graph"} for b in beside],
        "rows": rows,
    }


def main() -> None:
    import torch

    out = Path(os.environ.get("OUT", ".")) / "tune.json"
    result: dict[str, Any] = {
        "what": __doc__,
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "geometries": {},
    }
    for name in sys.argv[1:] or list(GEOMETRIES):
        with tempfile.TemporaryDirectory() as folder:
            environ = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"}
            runs = {}
            for label in ("new", "again"):
                command = [sys.executable, __file__, "--once", name, f"{folder}/cache", f"{folder}/{label}.json"]
                start = time.time()
                subprocess.run(command, env=environ, check=True, timeout=300)
                runs[label] = json.loads(Path(f"{folder}/{label}.json").read_text())
                runs[label]["kernels_on_disk"] = len(list(Path(folder, "triton").rglob("*.cubin")))
                said = {k: v for k, v in runs[label].items() if k not in ("rows", "beside", "plan")}
                result["geometries"][name] = {**GEOMETRIES[name], **runs}
                out.write_text(json.dumps(result, indent=1))
                print(f"[{time.time() - start:5.1f} s]", name, label, json.dumps(said), flush=True)
    for name, g in result["geometries"].items():
        for r in g["new"]["rows"]:
            times = sorted((t["us"], t["predicted_us"], t["candidate"]) for t in r["trials"] if t["us"])
            print(name, r["tokens"], f"reach {r['reach']}", r["chosen"], [(a, b) for a, b, _ in times], flush=True)
        print(name, "beside", g["new"]["beside"], flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        Path(sys.argv[4]).write_text(json.dumps(compile_once(sys.argv[2], sys.argv[3])))
    else:
        main()
