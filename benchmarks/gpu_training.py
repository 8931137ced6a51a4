"""Training on a GPU: errors of the gradients, time of each product's tiles, and forward + backward beside others.

In: what to do, geometries and token counts on the command line. Out: tables on stdout, training.json under $OUT (or .).
  check   gradients in bf16 against fp64, beside those of the torch bf16 path; repeatability
  stages  each product alone, for each tile of VARIANTS
  total   forward + backward of the experts (routing given) beside HuggingFace's grouped_mm under Inductor: time of a
          CUDA graph of one layer (its weights exceed L2), memory kept after the forward, peak beyond what was there;
          host time of a step run eagerly
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import gpu_kernels
from gpu_kernels import Timer, spec_of, tokens_of, weights_of

from moe_compile import ops, reference  # noqa: F401  (ops registers the operators)
from moe_compile.activation import derivative
from moe_compile.hardware import facts
from moe_compile.kernels import hopper, hopper_act, hopper_outer, launch, spread
from moe_compile.kernels.backward import act_backward, dx_routes
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.finalize import finalize
from moe_compile.kernels.grouped import Tile, fc2
from moe_compile.kernels.kept import fc1_kept
from moe_compile.kernels.outer import Rows, outer
from moe_compile.kernels.sort import sort_routes
from moe_compile.operands import ExpertWeights
from moe_compile.providers import aten_backward, triton_backward, triton_grouped
from moe_compile.spec import ExpertsSpec, torch_dtype

# (M, N, K, warps, stages, SWAP, TMA, GROUP_M)
VARIANTS: dict[str, list[tuple[int, ...]]] = {
    "fc1": [(128, 128, 64, 8, 4, 1, 1, 8)],
    "fc2": [(128, 256, 64, 8, 4, 0, 1, 8)],
    "act": [(128, 256, 64, 8, 4, 0, 1, 8), (128, 128, 64, 4, 3, 1, 1, 8), (128, 128, 64, 4, 3, 0, 1, 8)],
    "dx": [(128, 256, 64, 8, 4, 0, 1, 8)],
    "ddown": [(128, 256, 64, 8, 3, 0, 1, 8), (128, 128, 64, 4, 2, 0, 1, 8), (128, 128, 32, 4, 4, 0, 1, 8)],
    "ddown whole": [(128, 256, 64, 8, 5, 0, 1, 8), (128, 256, 64, 8, 7, 0, 1, 8), (128, 128, 64, 4, 3, 0, 1, 8)],
}  # fmt: skip
VARIANTS["dgate_up whole"] = VARIANTS["ddown whole"]
# of kernels for Hopper: (GATHER,), or none
HOPPER = {"fc1 hopper": [(1,), (0,)], "fc2 hopper": [()], "act hopper": [()], "dx hopper": [()], "ddown hopper": [()],
          "dgate_up hopper": [()], "spread": [()]}  # fmt: skip
VARIANTS |= HOPPER
VARIANTS["dgate_up"] = VARIANTS["ddown"]


def tile_of(product: str, v: tuple[int, ...]) -> Any:
    if product in HOPPER:
        return v
    m, n, k, warps, stages, swap, tma, group = v
    return Tile(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, warps=warps, stages=stages, SWAP=swap, TMA=tma, GROUP_M=group)


def calls_of(spec: ExpertsSpec, T: int, p: ExpertWeights, device: str) -> dict[str, Any]:
    """{product: a function of a tile}, on random intermediates."""
    on_gpu = device == "cuda"
    x = (
        torch.randn(T, spec.H, device=device).to(torch_dtype(spec.x))
        if on_gpu
        else torch.empty(T, spec.H, dtype=torch_dtype(spec.x))
    )
    ids = tokens_of(spec, T)[1] if on_gpu else torch.zeros(T, spec.K, dtype=torch.int64)
    w = torch.rand(T, spec.K, device=device)
    schedule = sort_routes(ids, spec.E, 128, inverse=True)
    ends = schedule.ends(spec.E)
    expr = spec.act.expr
    act = epilogue(expr)
    acts = (act, epilogue(derivative(expr, "gate")), epilogue(derivative(expr, "up")))
    R = T * spec.K

    def rows(n: int) -> torch.Tensor:
        t = torch.empty(R, n, dtype=x.dtype, device=device)
        return t.normal_() if on_gpu else t

    kept, a, y = rows(spec.G), rows(spec.I), rows(spec.H)
    common = {"choices": spec.K, "halves": spec.gate_up.halves}
    k_major, down_k_major = spec.gate_up.storage == "EGH", spec.down == "EHI"

    def sums(left: Rows, right: Rows, as_is: bool, whole: bool) -> Any:
        pair = (left, right) if as_is else (right, left)
        return lambda tile: outer(*pair, schedule, ends, choices=spec.K, tile=tile, whole=whole)

    x_rows = Rows(of=x, tokens=True)
    sorted_x = hopper.permute(x, schedule, spec.K)
    fast = tuple(epilogue(e, fast=True) for e in (expr, derivative(expr, "gate"), derivative(expr, "up")))
    blocks = kept.split(spec.G if spec.gate_up.halves.endswith("interleaved") else spec.I, 1)

    def hopper_sums(other: torch.Tensor, tokens_first: bool) -> Any:
        pair = (sorted_x, other) if tokens_first else (other, sorted_x)
        return lambda tile: hopper_outer.outer(*pair, ends)

    return {
        "fc1 hopper": lambda tile: hopper.fc1(
            x if tile[0] else sorted_x, p.gate_up, p.gate_up_bias, None, schedule, fast[0], sizes=(spec.H, spec.I),
            gated=spec.gated, k_major=k_major, tile=hopper.Persistent(N=128, GATHER=tile[0]), kept=kept, **common,
        ),
        "fc2 hopper": lambda tile: hopper.fc2(
            a, p.down, p.down_bias, schedule, k_major=down_k_major, tile=hopper.Persistent(N=256)
        ),
        "act hopper": lambda tile: hopper_act.act_backward(
            sorted_x, p.down, blocks, w, schedule, fast, halves=spec.gate_up.halves, k_major=down_k_major, parts=True
        ),
        "dx hopper": lambda tile: hopper.fc2(
            kept, p.gate_up[0], None, schedule, k_major=not k_major, tile=hopper.Persistent(N=256)
        ),
        "ddown hopper": hopper_sums(a, down_k_major),
        "dgate_up hopper": hopper_sums(kept, not k_major),
        "spread": lambda tile: spread.spread(x, ids, schedule, spec.E),
        "fc1": lambda tile: fc1_kept(
            x, p.gate_up, p.gate_up_bias, None, schedule, act, sizes=(spec.H, spec.I), k_major=k_major, tile=tile,
            **common,
        ),
        "fc2": lambda tile: fc2(a, p.down, p.down_bias, schedule, k_major=down_k_major, tile=tile),
        "act": lambda tile: act_backward(
            x, p.down, kept, w, schedule, acts, k_major=down_k_major, parts=True, tile=tile, **common
        ),
        "dx": lambda tile: dx_routes(kept, p.gate_up, schedule, k_major=k_major, tile=tile),
        "ddown": sums(x_rows, Rows(of=a), down_k_major, False),
        "ddown whole": sums(x_rows, Rows(of=a), down_k_major, True),
        "dgate_up": sums(Rows(of=kept), x_rows, k_major, False),
        "dgate_up whole": sums(Rows(of=kept), x_rows, k_major, True),
        "finalize": lambda tile: finalize(y, ids, w, spec.E, x.dtype),
        "sort": lambda tile: sort_routes(ids, spec.E, 128, inverse=True),
    }  # fmt: skip


def compile_job(job: tuple[str, str, tuple[int, ...]]) -> str:
    name, product, v = job
    from triton.runtime.driver import driver

    driver.set_active(gpu_kernels.NoDevice(90))
    launch.overlaps = lambda device: True
    launch.Bound._compile = lambda self, key, grid, arguments, free: self.kernel.warmup(
        *arguments, *free, *self.constants, grid=grid, **self.options
    )
    try:
        spec = spec_of(name)
        calls_of(spec, 64, weights_of(spec, "cpu", draw=False), "cpu")[product](tile_of(product, v))
        return ""
    except Exception as e:  # noqa: BLE001  (reported; the timing below skips the variant)
        return f"{job}: {type(e).__name__} {str(e)[-400:]}"


def compile_all(names: list[str]) -> None:
    began = time.time()
    jobs = [(n, product, v) for n in names for product, vs in VARIANTS.items() for v in vs]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=get_context("fork")) as pool:
        for line in filter(None, pool.map(compile_job, jobs)):
            print("NOT COMPILED", line, flush=True)
    print(f"compiled {len(jobs)} in {time.time() - began:.0f} s", flush=True)


def flop(spec: ExpertsSpec, T: int, product: str) -> float:
    wide = product.split()[0] in ("fc1", "dx", "dgate_up")
    return 2.0 * T * spec.K * spec.H * (spec.G if wide else spec.I)


def stages(name: str, Ts: list[int], timer: Timer) -> list[Any]:
    spec, rows = spec_of(name), []
    p = weights_of(spec, "cuda")
    for T in Ts:
        products = calls_of(spec, T, p, "cuda")
        row: dict[str, Any] = {"geometry": name, "T": T, "us": {}}
        for product, call in products.items():
            variants = VARIANTS.get(product, [(128, 128, 64, 4, 3, 0, 0, 8)])
            tiles = {str(v): tile_of(product, v) for v in variants}
            us = timer.medians({k: [lambda t=t, call=call: call(t)] for k, t in tiles.items()}, rounds=5)
            work = flop(spec, T, product)
            ranked = sorted((u[0], v) for v, u in us.items())
            row["us"][product] = {v: round(u, 1) for u, v in ranked}
            best = "; ".join(f"{u:.0f} ({work / u / 1e6:.0f}) {v[1:-1]}" for u, v in ranked[:5])
            print(f"{name} T={T} {product}: {best}", flush=True)
            torch.cuda.empty_cache()
        rows.append(row)
    return rows


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
    n, biases = len(p.gate_up), iter(exact[3:])
    q = ExpertWeights(
        gate_up=tuple(exact[2 : 2 + n]), down=exact[2 + n],
        gate_up_bias=tuple(exact[3 + n : 3 + n + len(p.gate_up_bias)]),
        down_bias=exact[-1] if p.down_bias is not None else None,
    )  # fmt: skip
    del biases
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


def keeping(spec: ExpertsSpec, keep: str) -> Any:
    """`ours` under moe.keep."""
    return ours(spec, f"keep={keep};")


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


def totals(name: str, Ts: list[int], timer: Timer) -> list[Any]:
    spec, rows = spec_of(name), []
    p = weights_of(spec, "cuda")
    for T in Ts:
        x, ids, w = tokens_of(spec, T)
        inputs = (x, ids, w, p, torch.randn_like(x))
        torch._dynamo.reset()
        steps = {
            "moe": ours(spec), "moe, keep=half": keeping(spec, "half"), "moe, keep=none": keeping(spec, "none"),
            "moe, train=grouped": ours(spec, "train=grouped;"),
            "HF grouped_mm, Inductor": by_autograd(hf(spec)), "torch._grouped_mm": by_autograd(grouped_mm(spec)),
        }  # fmt: skip
        row: dict[str, Any] = {"geometry": name, "E": spec.E, "K": spec.K, "H": spec.H, "I": spec.I, "T": T}
        row["memory_MB"] = {k: [round(m, 1) for m in memory(s, inputs)] for k, s in steps.items()}
        torch.cuda.empty_cache()
        us = timer.medians({k: [lambda s=s, i=inputs: list(s(*i))] for k, s in steps.items()}, rounds=10)
        forward = timer.medians({k: [lambda s=s, i=inputs: next(s(*i))] for k, s in steps.items()}, rounds=10)
        row["us"] = {k: round(v[0], 1) for k, v in us.items()}
        row["forward_us"] = {k: round(v[0], 1) for k, v in forward.items()}
        row["spread"] = round(max(v[1] for v in us.values()), 3)
        if T <= 4096:
            row["host_us"] = {k: round(host_us(s, inputs), 1) for k, s in steps.items()}
        print(row, flush=True)
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["check", "stages", "total"])
    parser.add_argument("--geometries", default="qwen3_30b,mixtral")
    parser.add_argument("--tokens", default="4096,16384")
    args = parser.parse_args()
    names, Ts = args.geometries.split(","), [int(t) for t in args.tokens.split(",")]
    triton_grouped.hopper = lambda device: True
    if "stages" in args.what:
        compile_all(names)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }  # fmt: skip
    out = Path(os.environ.get("OUT", "."), "training.json")
    if "check" in args.what:
        result["check"] = [row for name in ("qwen3_30b", "gpt_oss_20b") for row in check(name)]
        out.write_text(json.dumps(result, indent=1))
    timer = Timer()
    for name in names if "total" in args.what else ():
        result.setdefault("cells", []).extend(totals(name, Ts, timer))
        out.write_text(json.dumps(result, indent=1))
    for name in names if "stages" in args.what else ():
        result.setdefault("stages", []).extend(stages(name, Ts, timer))
        out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
