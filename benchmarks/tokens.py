"""Does it matter which tokens are tuned on? Three ways to tune, judged on the routing of held-out text.

In: --model, the folder of a trained MoE language model over bytes, with heldout.txt. Out: tokens.json in $OUT or here.
For each geometry and T = 1 .. 8192 every candidate of the short list is timed on batches of four kinds:

    constant   one token id everywhere
    uniform    K experts of each row drawn at random, all equally likely
    pool       varied token ids through the model, as workload.py draws them (tokens=varied)
    text       windows of held-out text, 512 tokens long: what the choices are judged on

and each of the first three chooses its fastest. The choices are then timed once more side by side on text, with the
candidate that was fastest on text: a choice's loss is its time over that one's, the median of ratios of single rounds.
byte_moe is the model's own blocks: its hidden states, routers and expert weights. For the other geometries the rows
that reach each of the model's routers are routed by a random linear router of E experts, one a layer: the skew is that
of the tokens, not of training; expert weights and rows are random. Times are of CUDA graphs that rotate over layers.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from moe_compile import bench, tune
from moe_compile.activation import Activation
from moe_compile.clock import Clock
from moe_compile.cost import Load
from moe_compile.hardware import facts
from moe_compile.operands import ExpertWeights
from moe_compile.plan import plan_experts
from moe_compile.spec import ExpertsSpec, torch_dtype
from moe_compile.workload import Batch, Workload

GEOMETRIES: dict[str, dict[str, int]] = {
    "byte_moe": {},
    "E128_K8": {"E": 128, "K": 8, "H": 2048, "I": 768},
    "E896_K16": {"E": 896, "K": 16, "H": 2048, "I": 512},
}
TOKENS = tuple(1 << i for i in range(14))
KINDS = ("constant", "uniform", "pool", "text")
ROWS, WINDOW = 8192, 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
START = time.time()


def say(*words: Any) -> None:
    print(f"[{time.time() - START:6.1f}s]", *words, flush=True)


class Model:
    """The rows that reach each router of the trained model, for ids of each kind."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()
        self.blocks = [layer.mlp for layer in self.model.model.layers]
        text = list((folder / "heldout.txt").read_bytes())
        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(0, len(text) - WINDOW, (rows // WINDOW,), generator=generator).tolist()
        windows = torch.tensor([text[s : s + WINDOW] for s in starts])
        vocabulary = self.model.config.vocab_size
        self.rows = {
            "constant": self._rows(torch.full_like(windows, ord("e"))),
            "pool": self._rows(torch.randint(0, vocabulary, windows.shape, generator=generator)),
            "text": self._rows(windows),
        }

    def _rows(self, ids: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, args, kwargs: found.append((args or tuple(kwargs.values()))[0]),
                                            with_kwargs=True)
            for block in self.blocks
        ]  # fmt: skip
        with torch.no_grad():
            self.model.model(input_ids=ids.to(DEVICE), use_cache=False)
        for hook in hooks:
            hook.remove()
        return [x.reshape(-1, x.shape[-1]) for x in found]


def spec_of(name: str, model: Model) -> ExpertsSpec:
    g = GEOMETRIES[name]
    if not g:
        c = model.model.config
        g = {"E": c.num_experts, "K": c.num_experts_per_tok, "H": c.hidden_size, "I": c.moe_intermediate_size}
    return ExpertsSpec(**g, act=Activation.parse("swiglu"), x="bf16", w="bf16" if name == "byte_moe" else "f32")


def workloads(name: str, spec: ExpertsSpec, model: Model) -> dict[str, Workload]:
    """A workload of each kind; all with the same weights, and a pool for each layer."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    own = not GEOMETRIES[name]
    pools: dict[str, list[Batch]] = {kind: [] for kind in KINDS}
    for i, block in enumerate(model.blocks):
        if own:
            weights = ExpertWeights(
                gate_up=(block.experts.gate_up_proj.detach(),), down=block.experts.down_proj.detach()
            )
        else:
            first, down = (
                torch.empty(s, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02, generator=generator)
                for s in spec.weight_shapes()
            )
            weights = ExpertWeights(gate_up=(first,), down=down)
        width = model.rows["text"][i].shape[1]
        router = torch.randn(spec.E, width, generator=generator, device=DEVICE)
        for kind in KINDS:
            x = model.rows["text" if kind == "uniform" else kind][i]
            rows = len(x)
            if kind == "uniform":
                scores = torch.rand(rows, spec.E, generator=generator, device=DEVICE).softmax(-1)
            else:
                logits = torch.nn.functional.linear(x, block.gate.weight) if own else x.float() @ router.T / width**0.5
                scores = logits.float().softmax(-1)
            w, ids = scores.topk(spec.K, -1)
            hidden = x if own else torch.randn(rows, spec.H, generator=generator, device=DEVICE).to(torch.bfloat16)
            pools[kind].append(
                Batch(
                    hidden_TH=hidden, ids_TK=ids, weights_TK=(w / w.sum(-1, keepdim=True)).to(torch_dtype(spec.w)),
                    rest=weights.arguments(),
                )
            )  # fmt: skip
    return {kind: Workload(spec=spec, kind=kind, pools=tuple(found), seed=3) for kind, found in pools.items()}


class Text(Workload):
    """Text keeps its order: a batch is a run of rows, where the others sample."""

    def batch(self, T: int, number: int = 0) -> Batch:
        pool = self.pools[number % len(self.pools)]
        rows = len(pool.hidden_TH)
        start = (number * 7919 + 101) * 512 % rows
        index = (torch.arange(T, device=pool.ids_TK.device) + start) % rows
        return Batch(
            hidden_TH=pool.hidden_TH[index],
            ids_TK=pool.ids_TK[index],
            weights_TK=None if pool.weights_TK is None else pool.weights_TK[index],
            rest=pool.rest,
        )


def candidates(spec: ExpertsSpec, loads: dict[str, Load], limit: int) -> dict[int, list[str]]:
    """T -> every candidate that is on the short list of any load."""
    found: dict[int, list[str]] = {}
    for load in loads.values():
        lists = plan_experts(spec, facts(torch.device(DEVICE)), mode="graph", load=load, limit=limit).lists
        for bound, offers in lists.items():
            known = found.setdefault(bound or ROWS, [])
            known += [c for p in offers if (c := str(p.candidate)) not in known]
    return found


def calls(spec: ExpertsSpec, workload: Workload, T: int, candidate: str) -> list[Any]:
    number = max(2, min(8, (1 << 16) // (T * spec.K)))
    return [
        functools.partial(tune.experts_call, *workload.batch(T, i).arguments(), str(spec), f"*:{candidate}")
        for i in range(number)
    ]


def row(spec: ExpertsSpec, T: int, found: list[str], kinds: dict[str, Workload], clock: Any) -> dict[str, Any]:
    reach = {kind: w.reach(T) for kind, w in kinds.items()}
    single: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for c in found:
        try:
            for kind, w in kinds.items():
                single[kind][c] = clock.once(calls(spec, w, T, c)[0])
        except tune.faults() as error:
            say("left out", c, type(error).__name__, str(error)[:200])
    # as tuning does: what is far behind in a single call on every kind of tokens is not timed any further
    best = {kind: min(s.values()) for kind, s in single.items()}
    limits = {kind: max(tune.HOPELESS * s, s + tune.LAUNCHES_SECONDS) for kind, s in best.items()}
    able = [c for c in found if all(c in s for s in single.values())]
    working = [c for c in able if any(s[c] <= limits[kind] for kind, s in single.items())]
    times = {kind: bench.level(clock({c: calls(spec, w, T, c) for c in working}, 7)) for kind, w in kinds.items()}
    chosen = {kind: min(working, key=lambda c, t=t: t[c].median) for kind, t in times.items()}
    final = clock({c: calls(spec, kinds["text"], T, c) for c in dict.fromkeys(chosen.values())}, 15)
    best = final[chosen["text"]]
    out: dict[str, Any] = {"T": T, "candidates": len(working), "text_us": round(1e6 * best.median, 2), "kinds": {}}
    for kind in KINDS:
        ratios = [a / b for a, b in zip(final[chosen[kind]].samples, best.samples, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        out["kinds"][kind] = {
            "reach": round(reach[kind], 1),
            "chosen": chosen[kind],
            "us_when_tuned": round(1e6 * times[kind][chosen[kind]].median, 2),
            "loss_percent": round(100 * (middle - 1), 2),
            "spread_percent": round(100 * (high - low) / 2, 2),
        }
    for w in kinds.values():
        w.forget()
    return out


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for kind in KINDS[:3]:
        losses = [r["kinds"][kind]["loss_percent"] for r in rows]
        same = [r["T"] for r in rows if r["kinds"][kind]["chosen"] == r["kinds"]["text"]["chosen"]]
        out[kind] = {
            "mean_loss_percent": round(statistics.mean(losses), 2),
            "largest_loss_percent": max(losses),
            "chose_as_text_at_T": same,
            "within_spread_at_T": [
                r["T"] for r in rows
                if r["kinds"][kind]["loss_percent"] <= max(1.0, r["kinds"][kind]["spread_percent"])
            ],
        }  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--model", type=Path, default=here / "shared" / "models" / "byte_moe")
    parser.add_argument("--geometries", default=",".join(GEOMETRIES))
    parser.add_argument("--seconds", type=float, default=170.0, help="no geometry is begun after so long")
    parser.add_argument("--tokens", type=lambda s: tuple(map(int, s.split(","))), default=TOKENS)
    parser.add_argument("--limit", type=int, default=8, help="candidates of a short list")
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT", ".")) / "tokens.json"
    device = torch.device(DEVICE)
    model = Model(arguments.model, ROWS)
    say("rows of the model are there:", {k: len(v[0]) for k, v in model.rows.items()})
    result: dict[str, Any] = {
        "what": __doc__, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "geometries": {},
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu", "complete": False,
    }  # fmt: skip
    clock = Clock(device=device, launch="graph")
    for name in arguments.geometries.split(","):
        if time.time() - START > arguments.seconds:
            say("no time for", name)
            continue
        spec = spec_of(name, model)
        kinds = workloads(name, spec, model)
        kinds["text"] = Text(spec=spec, kind="text", pools=kinds["text"].pools, seed=3)
        loads = {kind: Load.of_counts(*w.counts()) for kind, w in kinds.items()}
        lists = candidates(spec, loads, arguments.limit)
        wanted = [(tune.Candidate.parse(c), T) for T in arguments.tokens for c in lists[T]]
        tune.compile_ahead(spec, wanted, kinds["pool"], device)
        say(name, len({c for c, _ in wanted}), "candidates compiled")
        rows = result["geometries"].setdefault(name, {"spec": str(spec), "rows": []})["rows"]
        for T in arguments.tokens:
            rows.append(row(spec, T, lists[T], kinds, clock))
            k = rows[-1]["kinds"]
            say(
                name,
                T,
                {n: (v["reach"], v["loss_percent"], v["spread_percent"]) for n, v in k.items()},
                {v["chosen"] for v in k.values()},
            )
            out.write_text(json.dumps(result, indent=1))
        result["geometries"][name]["summary"] = summary(rows)
        say(name, json.dumps(result["geometries"][name]["summary"]))
        del kinds
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    result["complete"] = all(len(g["rows"]) == len(TOKENS) for g in result["geometries"].values())
    out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
