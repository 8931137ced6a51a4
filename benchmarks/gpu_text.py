"""A trained model writing text on a GPU: `backend="moe"` beside Inductor, per token and for a prompt. Writes text.json.

In: a folder with a Qwen3-MoE model of bytes and heldout.txt (default ../shared/models/byte_moe). Out, under $OUT or
here: us of a decoded token (greedy, batch 1, static cache, the choice on the device, no synchronization in between) and
of one forward over a prompt, each the median of interleaved rounds. HuggingFace's grouped_mm and batched_mm under
Inductor, and ours, all in mode "reduce-overhead", static shapes. `same`: how many of the bytes written first are those
of eager; in bf16 near ties fall either way.
"""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import triton
from transformers import AutoModelForCausalLM, StaticCache

from moe_compile import journal
from moe_compile.backend import moe_backend

ROOT = Path(__file__).resolve().parents[1]
NEW, ROUNDS = 192, 7  # bytes written a round
PROMPT, READ = 256, 1536  # bytes before the written ones; bytes of the prompt that is timed
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODE = "reduce-overhead" if DEVICE.type == "cuda" else None
START = time.time()


def say(*words: Any) -> None:
    print(f"[{time.time() - START:6.1f}s]", *words, flush=True)


def _next(ids: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
    given = {"input_ids": ids, "position_ids": position, "past_key_values": cache, "use_cache": True}
    return model(**given).logits[:, -1].argmax(-1, keepdim=True)  # noqa: F821  (the column's own globals)


def _whole(ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits[:, -1]  # noqa: F821


class Column:
    """One way to run the model: functions for the prompt before the text, for a token, and for reading."""

    def __init__(self, name: str, model: Any, backend: Any, text: torch.Tensor) -> None:
        kwargs = {"backend": backend} if backend else {"mode": MODE} if MODE else {}

        def own(function: Any, what: str) -> Callable[..., Any]:  # Dynamo caches by code: each has a code of its own
            code = function.__code__.replace(co_name=f"{what}_{name}")
            made = types.FunctionType(code, {**globals(), "model": model})
            return made if name == "eager" else torch.compile(made, fullgraph=True, dynamic=False, **kwargs)

        self.model, self.text = model, text
        self.prompt, self.token, self.read = own(_next, "prompt"), own(_next, "token"), own(_whole, "read")
        c = model.config
        self.cache = StaticCache(config=c, max_cache_len=PROMPT + NEW)
        # allocated before the first compiled call, else it would be an output of a CUDA graph
        self.cache.early_initialization(1, c.num_key_value_heads, c.head_dim, model.dtype, DEVICE)
        self.start = torch.arange(PROMPT, device=DEVICE)[None]

    def write(self) -> tuple[torch.Tensor, float]:
        """The bytes after the prompt, and seconds of a decoded one."""
        self.cache.reset()
        torch.compiler.cudagraph_mark_step_begin()
        ids = self.prompt(self.text[:, :PROMPT], self.start, self.cache).clone()
        position, out = self.start[:, -1:] + 1, torch.empty(NEW, dtype=ids.dtype, device=DEVICE)
        out[:1] = ids[0]
        wait()
        begun = time.perf_counter()
        for i in range(1, NEW):
            torch.compiler.cudagraph_mark_step_begin()
            ids.copy_(self.token(ids, position, self.cache))
            out[i : i + 1] = ids[0]
            position += 1
        wait()
        return out, (time.perf_counter() - begun) / (NEW - 1)

    def reads(self) -> float:
        """Seconds of a forward over the prompt that is timed."""
        wait()
        begun = time.perf_counter()
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            self.read(self.text)
        wait()
        return (time.perf_counter() - begun) / 5


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    torch.set_float32_matmul_precision("high")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "models" / "byte_moe"
    plain = re.search(rb"[\t-\r -~]{%d}" % READ, (folder / "heldout.txt").read_bytes())
    assert plain, f"heldout.txt has no {READ} bytes of ASCII in a row"
    text = torch.tensor(list(plain[0]), device=DEVICE)[None]
    models = {}
    for implementation in ("grouped_mm", "batched_mm"):
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, experts_implementation=implementation
        )
        models[implementation] = loaded.to(DEVICE).eval()
    ours = functools.partial(moe_backend, mode=MODE, options={"moe.strict": True})
    with torch.no_grad():
        eager, _ = Column("eager", models["grouped_mm"], None, text).write()
        columns: dict[str, Column] = {}
        first: dict[str, float] = {}
        same: dict[str, int] = {}
        for name, model, backend in (
            ("inductor_grouped_mm", models["grouped_mm"], None), ("moe", models["grouped_mm"], ours),
            ("inductor_batched_mm", models["batched_mm"], None),
        ):  # fmt: skip
            begun = time.time()
            columns[name] = column = Column(name, model, backend, text)
            with journal.capture() as events:
                for _ in range(3):  # CUDA graphs are recorded at the second call
                    got, _ = column.write()
                    column.reads()
            found = sum(isinstance(e, journal.RegionFound) for e in events)
            if backend is not None and found != 3 * model.config.num_hidden_layers:
                raise SystemExit(f"only {found} blocks were replaced: {[str(e)[:300] for e in events][:6]}")
            differs = (got != eager).nonzero()
            same[name] = int(differs[0]) if len(differs) else NEW
            first[name] = round(time.time() - begun, 1)
            say(name, "ready in", first[name], "s;", same[name], "of", NEW, "bytes as eager")
        samples: dict[str, dict[str, list[float]]] = {n: {"token": [], "prompt": []} for n in columns}
        for _ in range(ROUNDS):
            for name, column in columns.items():
                samples[name]["token"].append(column.write()[1])
                samples[name]["prompt"].append(column.reads())
    us = {
        what: {n: round(1e6 * statistics.median(s[what]), 1) for n, s in samples.items()}
        for what in ("token", "prompt")
    }
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "versions": {m.__name__: m.__version__ for m in (torch, triton, transformers)},
        "what": __doc__, "model": folder.name, "new": NEW, "prompt": READ, "us": us,
        "tokens_per_second": {n: round(1e6 / t, 1) for n, t in us["token"].items()},
        "spread": {
            n: {what: round((max(v) - min(v)) / statistics.median(v), 3) for what, v in s.items()}
            for n, s in samples.items()
        },
        "same": same, "first_calls_s": first,
    }  # fmt: skip
    Path(os.environ.get("OUT", "."), "text.json").write_text(json.dumps(result, indent=1))
    say(json.dumps({k: result[k] for k in ("us", "tokens_per_second", "same")}))


if __name__ == "__main__":
    main()
