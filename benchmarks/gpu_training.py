"""Training on a GPU: errors of the gradients, time of each product's tiles, and forward + backward beside others.

In: what to do, and cells, on the command line. Out: tables on stdout, training.json under $OUT (or .), written anew
after each cell; with --into it goes on with an earlier one, whose cells aren't timed again.
  check   gradients in bf16 against fp64, beside those of the torch bf16 path; repeatability
  stages  each product alone, for each tile of gpu_training_stages.py
  total   forward + backward of the experts (routing given) beside HuggingFace's grouped_mm under Inductor: time of a
          CUDA graph of one layer (its weights exceed L2), memory kept after the forward, peak beyond what was there;
          host time of a step run eagerly. Processes of their own have compiled the columns before, side by side.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import gpu_kernels
import torch
import triton
from ahead import side_by_side, warm
from gpu_kernels import Timer, spec_of, tokens_of, weights_of
from gpu_training_stages import compile_all, stages
from record import Cells

from moe_compile import ops, reference  # noqa: F401  (ops registers the operators)
from moe_compile.hardware import facts
from moe_compile.operands import ExpertWeights
from moe_compile.providers import aten_backward, triton_backward, triton_grouped
from moe_compile.spec import ExpertsSpec


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def check(name: str, T: int = 300) -> list[Any]:
    """Errors of every gradient, on a geometry cut to few experts and sizes."""
    torch.manual_seed(0)
    spec = spec_of(name, E=16, H=1024 if name != "gpt_oss_20b" else 720, I=384 if name != "gpt_oss_20b" else 720)
    x, ids, w = tokens_of(spec, T)
    ids[3, 0] = spec.E
    ids[ids == 5] = 6
    p = weights_of(spec, "cuda")
    each = [x, w, *p.tensors()]
    exact = [t.double().requires_grad_() for t in each]
    n = len(p.gate_up)
    q = ExpertWeights(
        gate_up=tuple(exact[2 : 2 + n]), down=exact[2 + n],
        gate_up_bias=tuple(exact[3 + n : 3 + n + len(p.gate_up_bias)]),
        down_bias=exact[-1] if p.down_bias is not None else None,
    )  # fmt: skip
    want = reference.experts(reference.exact(spec), exact[0], ids, exact[1], q)
    dout = torch.randn_like(want).bfloat16()
    wanted = torch.autograd.grad(want, exact, dout.double())
    needs = [True] * len(each)
    base = aten_backward.backward(spec, dout, x, ids, w, p, needs)
    out, kept, order = triton_backward.forward(spec, x, ids, w, p)
    rows = [{"geometry": name, "of": "out", "rms": relative(out, want)}]
    got = triton_backward.backward(spec, dout, x, ids, w, p, kept, needs, order=order)
    again = triton_backward.backward(spec, dout, x, ids, w, p, None, needs)
    names = ["hidden", "weights", *("gate_up",) * n, "down", *("gate_up_bias",) * len(p.gate_up_bias), "down_bias"]
    for what, a, b, c, d in zip(names, got, base, again, wanted):
        row = {
            "geometry": name,
            "of": what,
            "rms": relative(a, d),
            "torch_rms": relative(b, d),
            "bitwise": torch.equal(a, c),
        }
        rows.append(row)
    for row in rows:
        print(row, flush=True)
    return rows


def ours(spec: ExpertsSpec, said: str = "") -> Any:
    tactic = triton_grouped.TritonGrouped().tactics(spec, facts(torch.device("cuda")), 4096)[0][0]
    plan = f"{said}*:triton_grouped({tactic})"

    def call(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
        return torch.ops.moe_compile.experts(x, ids, w, [gate_up], [down], [], [], None, str(spec), plan)

    return by_autograd(call)


def by_autograd(function: Any) -> Any:
    def step(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, p: ExpertWeights, dout: torch.Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in (x, w, p.gate_up[0], p.down)]
        out = function(leaves[0], ids, leaves[1], leaves[2], leaves[3])
        yield out
        yield torch.autograd.grad(out, leaves, dout)

    return step


def hf(spec: ExpertsSpec) -> Any:
    """Qwen3MoeExperts (gate and up fused, SwiGLU) with grouped_mm, under Inductor."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=spec.H, moe_intermediate_size=spec.I, num_experts=spec.E, num_experts_per_tok=spec.K
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)

    def call(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
        parameters = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(experts, parameters, (x, ids, w))

    return torch.compile(call, fullgraph=True, dynamic=False)


def grouped_mm(spec: ExpertsSpec) -> Any:
    def call(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
        p = ExpertWeights(gate_up=(gate_up,), down=down)
        return gpu_kernels.torch_path(spec, x, ids, w, p)

    return call


def memory(step: Any, inputs: tuple[Any, ...]) -> tuple[float, float]:
    """(kept after the forward, peak of both), MB beyond what was there before, the result included."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run = step(*inputs)
        out = next(run)
        kept = torch.cuda.memory_allocated() - before
        grads = next(run)
        peak = torch.cuda.max_memory_allocated() - before
        del out, grads, run
    return kept / 1e6, peak / 1e6


def host_us(step: Any, inputs: tuple[Any, ...]) -> float:
    """What a step costs the host: the least of 3 runs of 10 steps, without a synchronization."""
    runs = []
    for _ in range(4):  # the first is not counted
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            list(step(*inputs))
        runs.append((time.perf_counter() - began) / 10)
    torch.cuda.synchronize()
    return 1e6 * min(runs[1:])


COLUMNS: dict[str, Any] = {
    "moe": ours,
    "moe, keep=half": lambda spec: ours(spec, "keep=half;"),
    "moe, keep=none": lambda spec: ours(spec, "keep=none;"),
    "moe, train=grouped": lambda spec: ours(spec, "train=grouped;"),
    "HF grouped_mm, Inductor": lambda spec: by_autograd(hf(spec)),
    "torch._grouped_mm": lambda spec: by_autograd(grouped_mm(spec)),
}
EAGER = "torch._grouped_mm"  # has nothing to compile


def inputs_of(spec: ExpertsSpec, T: int, p: ExpertWeights) -> tuple[Any, ...]:
    x, ids, w = tokens_of(spec, T)
    return (x, ids, w, p, torch.randn_like(x))


def ahead(name: str, Ts: list[int], column: str) -> None:
    """A process: a step for each T, so that all that it needs is compiled."""
    spec, began = spec_of(name), time.time()
    p = weights_of(spec, "cuda")
    for T in Ts:
        torch._dynamo.reset()
        list(COLUMNS[column](spec)(*inputs_of(spec, T, p)))
        torch.cuda.synchronize()
    print(f"compiled {name} {column} in {time.time() - began:.0f} s", flush=True)


def total(name: str, T: int, columns: list[str], p: ExpertWeights, timer: Timer) -> dict[str, Any]:
    spec = spec_of(name)
    inputs = inputs_of(spec, T, p)
    torch._dynamo.reset()
    steps = {column: COLUMNS[column](spec) for column in columns}
    row: dict[str, Any] = {"geometry": name, "E": spec.E, "K": spec.K, "H": spec.H, "I": spec.I, "T": T}
    row["memory_MB"] = {}
    for k, s in steps.items():
        began = time.time()
        row["memory_MB"][k] = [round(m, 1) for m in memory(s, inputs)]
        print(f"{name} T={T} {k}: first steps {time.time() - began:.1f} s", flush=True)
    torch.cuda.empty_cache()
    rounds = 10 if T > 4096 else 40  # clocks follow the card's power within tenths of a second
    us = timer.medians({k: [lambda s=s: list(s(*inputs))] for k, s in steps.items()}, rounds=rounds)
    forward = timer.medians({k: [lambda s=s: next(s(*inputs))] for k, s in steps.items()}, rounds=rounds)
    row["us"] = {k: round(v[0], 1) for k, v in us.items()}
    row["forward_us"] = {k: round(v[0], 1) for k, v in forward.items()}
    row["spread"] = round(max(v[1] for v in us.values()), 3)
    if T <= 4096:
        row["host_us"] = {k: round(host_us(s, inputs), 1) for k, s in steps.items()}
    torch.cuda.empty_cache()
    return row


def cells_of(texts: list[str]) -> dict[str, list[int]]:
    """Token counts by geometry, of GEOMETRY[:T,T]."""
    parts = [text.partition(":") for text in texts]
    return {name: [int(t) for t in Ts.split(",")] if Ts else [4096, 16384] for name, _, Ts in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["check", "stages", "total"])
    parser.add_argument("--cells", nargs="+", default=["qwen3_30b", "mixtral"], metavar="GEOMETRY[:T,T]",
                        help="of stages and total; default both of T = 4096, 16384")  # fmt: skip
    parser.add_argument("--only", default="", metavar="NAMES", help="total's columns that start with one of these")
    parser.add_argument("--into", default="", metavar="FILE", help="a record of the same day to go on with")
    args = parser.parse_args()
    began, cells = time.time(), cells_of(args.cells)
    if unknown := cells.keys() - gpu_kernels.GEOMETRIES.keys():
        parser.error(f"--cells: {', '.join(unknown)} is none of {', '.join(gpu_kernels.GEOMETRIES)}")
    columns = [c for c in COLUMNS if c.startswith(tuple(args.only.split(",")))]
    if not columns:
        parser.error(f"--only {args.only}: no column of {'; '.join(COLUMNS)} starts so")
    triton_grouped.hopper = lambda device: True
    if "stages" in args.what:
        compile_all(list(cells))
    record = Cells("training.json", args.into)

    def left() -> dict[str, list[int]]:
        """Cells of total that are not there yet."""
        every = cells if "total" in args.what else {}
        return {name: [T for T in Ts if not record.has(name, T, columns)] for name, Ts in every.items()}

    compiled = [(name, Ts, column) for name, Ts in left().items() for column in columns if Ts and column != EAGER]
    if compiled:
        warm("transformers.models.qwen3_moe.modeling_qwen3_moe")
    side_by_side(ahead, compiled)
    print(f"[{time.time() - began:.0f} s] compiled", flush=True)
    record.begin(
        date=time.strftime("%Y-%m-%d"), device=torch.cuda.get_device_name(),
        versions={"torch": torch.__version__, "triton": triton.__version__},
    )  # fmt: skip
    if "check" in args.what:
        record.put(check=[row for name in ("qwen3_30b", "gpt_oss_20b") for row in check(name)])
    timer = Timer()
    for name, Ts in left().items():
        p = weights_of(spec_of(name), "cuda")
        for T in Ts:
            row = total(name, T, columns, p, timer)
            record.add(row)
            print(f"[{time.time() - began:.0f} s]", row, flush=True)
    for name, Ts in cells.items() if "stages" in args.what else ():
        for row in stages(name, Ts, timer):
            record.add(row, "stages")


if __name__ == "__main__":
    main()
