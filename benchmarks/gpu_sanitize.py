"""Small calls of every kernel, for compute-sanitizer; each family alone, or all:

    compute-sanitizer --tool memcheck python benchmarks/gpu_sanitize.py [decode grouped hopper training route]
    compute-sanitizer --tool racecheck python benchmarks/gpu_sanitize.py hopper

Sizes that no tile divides where a kernel allows them, dropped routes, an expert without rows. Prints each call; says
nothing itself of what the tool finds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from moe_compile.activation import Activation
from moe_compile.hardware import facts
from moe_compile.kernels.sort import sort_routes
from moe_compile.operands import ExpertWeights
from moe_compile.providers import triton_backward, triton_route
from moe_compile.providers.base import Provider, Tactic
from moe_compile.providers.triton_decode import TritonDecode
from moe_compile.providers.triton_grouped import TritonGrouped
from moe_compile.providers.triton_hopper import VALID, TritonHopper
from moe_compile.spec import ExpertsSpec, Layout, RouterSpec, torch_dtype
from moe_compile.suite import weights_of

GPU = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")  # there by Triton's interpreter
E, K = 5, 2
SWIGLU, RELU2 = Activation.parse("swiglu"), Activation.parse("relu2")
SPECS = {
    "gated": ExpertsSpec(E=E, K=K, H=192, I=136, act=SWIGLU),
    "interleaved, biases": ExpertsSpec(
        E=E, K=K, H=192, I=136, act=SWIGLU, gate_up=Layout(storage="EHG", halves="gate_up_interleaved"), down="EIH",
        bias="both",
    ),
    "no gate, H not in tiles": ExpertsSpec(E=E, K=K, H=264, I=136, act=RELU2, gate_up=Layout(halves="up")),
}  # fmt: skip
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights]


def operands(spec: ExpertsSpec, T: int) -> Operands:
    """One route is dropped, and the last expert has none."""
    draw = torch.Generator(GPU).manual_seed(T)
    x = torch.randn(T, spec.H, device=GPU, generator=draw).to(torch_dtype(spec.x))
    ids = torch.rand(T, E - 1, device=GPU, generator=draw).argsort(1)[:, :K]
    ids[0, 0] = E
    w = torch.rand(T, K, device=GPU, generator=draw).to(torch_dtype(spec.w))
    return x, ids, w, weights_of(spec, GPU)


def calls(provider: Provider, T: int, tactics: Callable[[ExpertsSpec], list[Tactic]]) -> Iterator[str]:
    for name, spec in SPECS.items():
        if not provider.supports(spec, facts(GPU)):
            continue
        for tactic in tactics(spec):
            provider.build(tactic, spec, GPU)(*operands(spec, T))
            yield f"{provider.name}, {name}, T={T}: {tactic}"


def decode() -> Iterator[str]:
    found = TritonDecode()
    yield from calls(found, 3, lambda spec: [t for t, _ in found.tactics(spec, facts(GPU), 3)[:2]])


def grouped() -> Iterator[str]:
    found = TritonGrouped()
    for T in (7, 200):
        yield from calls(found, T, lambda spec, T=T: [t for t, _ in found.tactics(spec, facts(GPU), T)[:3]])  # type: ignore[misc]


def hopper() -> Iterator[str]:
    def tactics(spec: ExpertsSpec) -> list[Tactic]:
        ways = [(m, g) for m in VALID["M"] for g in ((0, 1) if spec.H % 64 == 0 else (0,))]
        return [Tactic.of(M=m, N1=128 if spec.gated else 256, N2=256, GATHER=g) for m, g in ways]

    yield from calls(TritonHopper(), 300, tactics)


def training() -> Iterator[str]:
    for name, spec in SPECS.items():
        for T, train, keep in ((40, "grouped", "all"), (300, "auto", "all"), (300, "auto", "half")):
            x, ids, w, p = operands(spec, T)
            tiles = triton_backward.tiles_of(spec, T, facts(GPU), train)
            out, kept, order = triton_backward.forward(spec, x, ids, w, p, tiles, keep)
            needs = [True] * (2 + len(p.tensors()))
            triton_backward.backward(spec, out, x, ids, w, p, kept, needs, tiles, order)
            yield f"training, {name}, T={T}: train={train} keep={keep} hopper={tiles.hopper}"


def route() -> Iterator[str]:
    """And the sort, in which programs count all ids, or each its own chunk."""
    for spec in (
        RouterSpec(E=60, K=4, renorm="sum", logits="bf16", out="bf16"),
        RouterSpec(E=160, K=6, groups=8, top_groups=3, group_score="max", scale=16.0, logits="f32"),
    ):
        logits = torch.randn(70, spec.E, device=GPU, dtype=torch_dtype(spec.logits))
        w, ids = triton_route.route(spec, logits, None, None)
        if triton_route.backward_supports(spec, facts(GPU)):
            triton_route.backward(spec, torch.ones_like(w), logits, ids)
        yield f"route, {spec}"
    for T, experts in ((90, 5), (3000, 5), (1500, 600)):
        ids = torch.randint(-1, experts + 1, (T, K), device=GPU, generator=torch.Generator(GPU).manual_seed(T))
        sort_routes(ids, experts, 16)
        sort_routes(ids, experts, 192, 64)
        yield f"sort, T={T}, E={experts}"


FAMILIES = {f.__name__: f for f in (decode, grouped, hopper, training, route)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", metavar="|".join(FAMILIES))
    chosen = parser.parse_args().family or list(FAMILIES)
    if unknown := set(chosen) - set(FAMILIES):
        parser.error(f"no family {', '.join(sorted(unknown))}: {', '.join(FAMILIES)}")
    with torch.no_grad():
        for name in chosen:
            for said in FAMILIES[name]():
                if GPU.type == "cuda":
                    torch.cuda.synchronize()
                print(said, flush=True)


if __name__ == "__main__":
    main()
