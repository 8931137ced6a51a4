"""The table of families: what becomes of the MoE blocks of each one that transformers has, on tiny random models.

In: families.json (configuration, model class and what is not usual about it). Out: an `Outcome` a family, which
test_table.py checks, and docs/models.md, written in place by

    python tests/models/table.py

under the newest transformers, and again under each older one: that adds a section with the rows that differ there.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
import zoo
from torch import Tensor, nn

import moe_compile
from moe_compile import journal, ops
from moe_compile.backend import moe_backend
from moe_compile.spec import MoESpec

FAMILIES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "families.json").read_text())
# Passed to a configuration that knows the name, unless the family says otherwise.
USUAL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 256,
    "num_local_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "sliding_window": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8,
    "decoder_sparse_step": 1, "num_nextn_predict_layers": 0, "n_routed_experts": 8, "n_shared_experts": 1,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`absent`: why the family does not run here, else "". `gap`: largest difference to eager over the largest value.

    `calls`: operator calls in one run; it should be the model's MoE blocks. `specs` and `router_whys`: of the regions.
    `prepared`: what prepare changed, and why.
    """

    absent: str = ""
    graphs: int = 0
    calls: int = 0
    gap: float = 0.0
    specs: tuple[MoESpec, ...] = ()
    router_whys: tuple[str, ...] = ()
    rejections: tuple[str, ...] = ()
    prepared: tuple[str, ...] = ()


def build(name: str, implementation: str | None = None, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    """The family's tiny model. ImportError or AttributeError where this transformers lacks it."""
    family = FAMILIES[name]
    module = family.get("module", name)
    config_class = getattr(_import(module, "configuration"), family["config"])
    model_class = getattr(_import(module, "modeling"), family["model"])
    renamed = getattr(config_class, "attribute_map", None) or {}
    known = {*vars(config_class()), *renamed}
    settings: dict[str, Any] = {}
    for key, value in USUAL.items():
        if key in known and key not in family.get("without", ()):
            settings.setdefault(renamed.get(key, key), value)
    config = config_class(**{**settings, **family.get("settings", {}), **more})
    if implementation is not None:
        config._experts_implementation = implementation
    return zoo.filled(model_class, config, dtype)


def _import(module: str, what: str) -> Any:
    return importlib.import_module(f"transformers.models.{module}.{what}_{module}")


def inputs(name: str, model: Any, ids: Tensor | None = None) -> dict[str, Tensor]:
    """What one call takes: token ids, unless the family says otherwise."""
    kind, ids = FAMILIES[name].get("inputs", "ids"), zoo.tokens() if ids is None else ids
    generator = torch.Generator().manual_seed(2)
    match kind:
        case "ids":
            return {"input_ids": ids}
        case "embeds":
            return {"inputs_embeds": torch.randn(*ids.shape, model.config.hidden_size, generator=generator)}
        case "encdec":
            return {"input_ids": ids, "decoder_input_ids": ids[:, :6].contiguous()}
        case "modalities":
            return {
                "input_ids": ids,
                "moe_mm_token_type_ids": (torch.arange(ids.numel()).view(ids.shape) % 3 == 1).int(),
            }
        case _:
            size = model.config.image_size
            pixels = torch.randn(
                2, 3, *(size if isinstance(size, (list, tuple)) else (size, size)), generator=generator
            )
            return {"pixel_values": pixels, "dataset_index": torch.ones(2, dtype=torch.long)}


def answer(output: Any) -> Tensor:
    """The tensor to compare of a model's output."""
    found = getattr(output, "logits", None)
    if found is None:
        found = output[0]
    return found[0] if isinstance(found, tuple) else found


def outcome(
    name: str, implementation: str | None = None, dynamic: bool = False, noise: dict[str, Any] | None = None
) -> Outcome:
    """Build, run eagerly, prepare, run compiled, restore, run again. noise: settings of a model in training."""
    torch._dynamo.reset()
    try:
        model = build(name, implementation, **(noise or {})).train(noise is not None)
    except (ImportError, AttributeError) as error:
        return Outcome(absent=f"not in transformers {transformers.__version__}: {error}")
    given = inputs(name, model)
    options = {"moe.inner": "eager", "moe.strict": True, "moe.route": "op", "moe.tune": "off"}

    def ran(call: Any) -> Tensor:
        torch.manual_seed(0)  # what is drawn at random must be the same
        return answer(call(**given))

    with torch.no_grad():
        try:
            expected = ran(model)
        except TypeError as error:
            if str(error) != FAMILIES[name].get("fails"):
                raise
            return Outcome(absent=f"fails in transformers {transformers.__version__} itself: {error}")
        report = moe_compile.prepare(model)
        with journal.capture() as events:
            run = torch.compile(model, backend=functools.partial(moe_backend, options=options), dynamic=dynamic)
            got = ran(run)
        with mock.patch.object(ops, "_call", wraps=ops._call) as calls:
            ran(run)
        undone = moe_compile.restore(model)
        assert set(undone) == {c.module for c in report.changes}
        assert torch.equal(ran(model), expected), "restore did not give the model back"
    abandoned = {e.graph for e in events if isinstance(e, journal.GraphAbandoned)}
    kept = [e for e in events if e.graph not in abandoned]
    regions = [e for e in kept if isinstance(e, journal.RegionFound)]
    return Outcome(
        graphs=len([e for e in kept if isinstance(e, journal.GraphSeen)]),
        calls=calls.call_count,
        gap=((got - expected).abs().max() / expected.abs().max()).item(),
        specs=tuple(MoESpec.parse(e.spec) for e in regions),
        router_whys=tuple(e.router_why for e in regions if e.router_why),
        rejections=tuple(f"{e.reason} ({e.where})" for e in kept if isinstance(e, journal.RegionRejected)),
        prepared=tuple(dict.fromkeys(f"{c.kind}: {c.why}" for c in report.changes)),
    )


# --- docs/models.md ---------------------------------------------------------------------------------------------------

DOCS = Path(__file__).resolve().parents[2] / "docs" / "models.md"
HEAD = """# Models

What becomes of the MoE blocks of the model families that transformers {version} has: {families} families and
{branches} branches of their configurations, as tiny random models in float32, prepared, compiled and compared with
eager. Written by `python tests/models/table.py`; `tests/models/test_table.py` holds each line.

* **blocks**: operator calls in one run, of the MoE blocks that run.
* **router**: what one `moe_compile::route` computes, or why the router keeps its nodes.
* **experts**: the activation, how the weights are stored (`gate_up` and its halves; `down`), biases.
* **prepare**: what [`moe_compile.prepare(model)`](prepare.md) changes, and what of it breaks a graph.

Where attention breaks the graph (qwen4_exp, glm5_next), the layers share the compiled frame that holds the block.
[Below](#under-transformers-5170) is what an older transformers changes.

Routers that keep their nodes are no function of a token's own logits, or not one that a RouterSpec can say:
DeepSeek-V4's hash layers look experts up by the token's id; Switch and NLLB drop what comes after an expert's capacity
is used up; Ernie-VL, given images, sends tokens to one set of experts by their modality; Phimoe makes its second choice
among what the first leaves, each with the softmax of the logits near the best; Inkling's softmax goes over the chosen
experts and the shared ones together.

"""
COLUMNS = """| family | blocks | router | experts | prepare |
|---|---|---|---|---|
"""
SECTION = """
## Under transformers {version}

Rows that differ there; each of the other {same} is as above.

"""


def rows(section: str) -> dict[str, str]:
    """The rows of a part of the page, by family."""
    return {row.split("|")[1].strip(): row for row in section.splitlines() if re.match(r"\| (?!family )", row)}


def documented(page: str, version: str) -> dict[str, str]:
    """What the page says of each family under `version`; nothing where it has no section for it."""
    first, *others = page.split("\n## Under transformers ")
    if f"transformers {version} " in first:
        return rows(first)
    older = next((o for o in others if o.startswith(f"{version}\n")), None)
    return {} if older is None else {**rows(first), **rows(older)}


def line(name: str, o: Outcome) -> str:
    """The family's row."""
    family = FAMILIES[name]
    title = f"{family['module']}, {family['branch']}" if "branch" in family else name
    if o.absent:
        return f"| {title} | - | {o.absent} | | |"
    if "stays" in family:
        return f"| {title} | {o.calls} of {family['blocks']} | stays as it is: {family['stays']} | | |"
    routers = dict.fromkeys(
        [*(_router(s) for s in o.specs if s.router), *("nodes: " + _short(w) for w in o.router_whys)]
    )
    experts = dict.fromkeys(_experts(s) for s in o.specs)
    cells = (title, f"{o.calls} of {family['blocks']}", "; ".join(routers), "; ".join(experts), "; ".join(o.prepared))
    return "| " + " | ".join(cells) + " |"


def _short(why: str) -> str:
    return why.split(": ")[0]


def _router(spec: MoESpec) -> str:
    r = spec.router
    assert r is not None
    late = r.score.startswith("topk_")
    words = [f"{r.score.removeprefix('topk_')} of the chosen" if late else r.score]
    words += ["bias"] * r.bias
    words += [f"best {r.top_groups} of {r.groups} groups by {r.group_score}"] if r.groups > 1 else []
    words += ["masked values"] * (r.values == "choice")
    words += {"none": [], "sum_plus_eps": [f"/ (sum + {r.eps:g})"], "sum_at_least_eps": [f"/ max(sum, {r.eps:g})"]}.get(
        r.renorm, ["/ sum"]
    )
    words += [f"x {r.scale:g}"] if r.scale != 1 else []
    words += ["x scale per expert"] * r.expert_scale
    words += [f"{r.E - spec.experts.E} more than the experts"] if r.E != spec.experts.E else []
    return ", ".join(words)


def _experts(spec: MoESpec) -> str:
    e = spec.experts
    words = [e.act.name if e.act.name != "expression" else f"`{e.act}`", f"{e.gate_up}", e.down]
    words += [] if e.bias == "none" else [f"bias {e.bias}"]
    words += ["weight on the input"] * (e.weight == "input")
    words += ["a tensor per expert"] * (e.tensors == "listed")
    words += [f"{e.post} after each expert"] if e.post != "none" else []
    return ", ".join(words)


def written(page: str) -> str:
    """The page with what the installed transformers says: all of it if no newer one wrote it, else a section."""
    first, *others = page.split("\n## Under transformers ")
    version, of = transformers.__version__, re.search(r"transformers (\S+) has", first)
    lines = {}
    for name in FAMILIES:
        lines[name] = line(name, outcome(name))
        print(lines[name], flush=True)
    own = "".join(f"{row}\n" for row in lines.values())
    if of is None or _number(version) >= _number(of[1]):
        branches = sum("branch" in f for f in FAMILIES.values())
        first = HEAD.format(version=version, families=len(FAMILIES) - branches, branches=branches) + COLUMNS + own
    else:
        above = rows(first).values()
        differing = "".join(f"{row}\n" for row in lines.values() if row not in above)
        same = len(lines) - differing.count("\n")
        others = [o for o in others if not o.startswith(f"{version}\n")]
        section = SECTION.format(version=version, same=same) + COLUMNS + differing
        others.append(section.removeprefix("\n## Under transformers "))
    return "\n## Under transformers ".join([first, *others])


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text()))
