"""How exact the operators are in bf16, family by family: their error beside that of the nodes that they replace.

In: a row of families.json. Its tiny model runs in bf16, prepared and captured, with the operators standing beside the
original nodes, so that both read the same hidden states, logits and weights. Out: a `Rounding`. Of each block and token

    error = |y - exact|_2 / |exact|_2

where `exact` is the block in float64 on the same operands, its routing weights in float64 too where the router is an
operator. Errors are averaged over the tokens of all blocks of the family; `ratio` is the operator's over the
original's. Tokens for which operator, original and float64 don't choose the same set of experts (a near tie) are left
out and counted, as are those to which no expert contributes.

    PYTHONPATH=. python tests/models/rounding.py    (writes rounding_cpu.json to $OUT or here)
"""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import table
import torch
import transformers
import zoo
from torch import Tensor

import moe_compile
from moe_compile import lower, reference
from moe_compile.backend import moe_backend
from moe_compile.nodes import copy_graph
from moe_compile.operands import ExpertWeights
from moe_compile.spec import ExpertsSpec, RouterSpec

OPERATORS = torch.ops.moe_compile
TOKENS = (4, 32)


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """`ours` and `original`: mean relative error of the tokens that were compared; `left_out`: how many were not."""

    blocks: int
    tokens: int
    left_out: int
    ours: float
    original: float

    @property
    def ratio(self) -> float:
        return self.ours / self.original


def rounding(name: str) -> Rounding:
    """Of a family in bf16, in the library's default implementation."""
    torch._dynamo.reset()
    model = table.build(name, dtype=torch.bfloat16)
    ids = zoo.tokens(*TOKENS)
    given = {k: v.bfloat16() if v.is_floating_point() else v for k, v in table.inputs(name, model, ids).items()}
    found: list[tuple[Tensor, Tensor, int]] = []
    moe_compile.prepare(model)
    with torch.no_grad():
        torch.compile(model, backend=functools.partial(_beside, found))(**given)
    ours, original, left_out = zip(*found)
    return Rounding(
        blocks=len(found), tokens=sum(map(len, ours)), left_out=sum(left_out), ours=torch.cat(ours).mean().item(),
        original=torch.cat(original).mean().item(),
    )  # fmt: skip


def _beside(found: list[Any], gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The backend, whose result first runs the graph in which operators stand beside the nodes, to compare them."""
    stood: list[_Both] = []
    swap = lower.lower

    def both(gm: torch.fx.GraphModule, regions: list[Any], plans: Any, before_swap: Any) -> None:
        swap(gm, regions, plans, lambda outs: stood.append(_Both(gm, regions, outs)))

    options = {"moe.inner": "eager", "moe.strict": True, "moe.route": "op", "moe.tune": "off"}
    with mock.patch.object(lower, "lower", both):
        compiled = moe_backend(gm, inputs, options=options)

    def call(*values: Any) -> Any:
        for graph in stood:
            found.extend(graph.compare(*(v.clone() if isinstance(v, Tensor) else v for v in values)))
        return compiled(*values)

    return call


class _Both(torch.fx.Interpreter):
    """A copy of the graph before the swap."""

    def __init__(self, gm: torch.fx.GraphModule, regions: list[Any], outs: list[torch.fx.Node]) -> None:
        graph, copies = copy_graph(gm.graph)
        super().__init__(torch.fx.GraphModule(gm, graph), garbage_collect_values=False)
        self.ids = [copies[r.match.ids] for r in regions]
        self.ends = {copies[r.root]: copies[out] for r, out in zip(regions, outs)}

    def compare(self, *inputs: Any) -> list[tuple[Tensor, Tensor, int]]:
        """Of each block: (the operator's errors, the original's, tokens left out)."""
        self.routed: tuple[Tensor, ...] | None = None
        self.read: list[tuple[Any, ...]] = []
        self.compared: list[tuple[Tensor, Tensor, int]] = []
        self.run(*inputs)
        return self.compared

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is OPERATORS.route.default:
            self.routed = args
        if target is OPERATORS.experts.default:
            chosen = self.env[self.ids[len(self.read)]].reshape(args[1].shape)
            self.read.append((chosen.clone(), args, self.routed))
            self.routed = None
        return super().call_function(target, args, kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.ends:
            root = result if isinstance(result, Tensor) else self.env[n.args[0]]  # setitem has no result
            self.compared.append(_compare(root, self.env[self.ends[n]], *self.read[-1]))
        return result


def _compare(original: Tensor, ours: Tensor, chosen: Tensor, operands: Any, routed: Any) -> tuple[Tensor, Tensor, int]:
    hidden, ids, weights, *tensors, text, _ = operands
    spec = ExpertsSpec.parse(text)
    same = torch.ones(len(ids), dtype=torch.bool)
    if routed is not None:
        logits, bias, scale, router = routed
        exact = replace(RouterSpec.parse(router), logits="f64", score_dtype="f64", out="f64")
        wide = (None if t is None else t.double() for t in (logits, bias, scale))
        weights, ids_of_truth = reference.route(exact, *wide)
        sets = [i.clamp(max=spec.E).sort(-1)[0] for i in (ids, ids_of_truth, chosen)]
        same = (sets[0] == sets[1]).all(-1) & (sets[0] == sets[2]).all(-1)
        ids = ids_of_truth
    held = ExpertWeights.of(spec, *_wide(tensors))
    truth = reference.experts(
        reference.exact(spec), hidden.double(), ids, None if weights is None else weights.double(), held
    )
    size = truth.norm(dim=-1)
    same &= size > 0
    errors = [((y.reshape(truth.shape).double() - truth).norm(dim=-1) / size)[same] for y in (ours, original)]
    return errors[0], errors[1], int((~same).sum())


def _wide(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_wide(y) for y in x]
    return None if x is None else x.double()


def report(rows: dict[str, Rounding]) -> dict[str, Any]:
    """What docs/measured holds."""
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "unknown")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "what": "bf16 blocks beside the nodes that they replace: mean relative error of a token against float64",
        "command": "PYTHONPATH=. python tests/models/rounding.py",
        "device": cpu.split(":")[-1].strip(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {**versions, "transformers": transformers.__version__},
        "rows": [{"family": name, **asdict(r), "ratio": round(r.ratio, 3)} for name, r in rows.items()],
    }


def main() -> None:
    rows = {}
    for name, family in table.FAMILIES.items():
        if "stays" not in family:
            rows[name] = rounding(name)
            print(name, rows[name], round(rows[name].ratio, 3), flush=True)
    (Path(os.environ.get("OUT", ".")) / "rounding_cpu.json").write_text(json.dumps(report(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
