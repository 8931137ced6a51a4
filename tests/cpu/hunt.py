"""Mutation testing for as long as one likes: what test_mutants.py does, on more blocks, with new seeds.

    PYTHONPATH=.:tests/models python tests/cpu/hunt.py SECONDS [FIRST SEED] > found.txt

Blocks are those of steps.py, every spelling of test_spellings.py and test_unrolled.py, and the blocks of the model
families as Dynamo captures them, each also with a symbolic number of tokens. Half of the mutants have two edits.
Outputs, inputs afterwards and gradients are compared. Prints what was wrong, and counts. To be looked at by hand, since
the mutant is at fault: gradients where offsets are written after a custom operator kept them for its backward, and NaN
where an expert that nobody chose is weighted by infinity.
"""

from __future__ import annotations

import collections
import logging
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import graphs
import mutants
import steps
import torch
import zoo

from moe_compile.recognize import recognize

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Block:
    """A true block's graph in float64; `inputs(seed, tokens)`, of `tokens` where that is symbolic."""

    name: str
    graph: torch.fx.GraphModule
    inputs: Callable[[int], Tensors]
    dynamic: tuple[int, ...] = ()


def blocks() -> list[Block]:
    import test_spellings
    import test_unrolled

    found = [
        Block(n, graphs.trace(steps.program(*t), made(0)), made)
        for n, t in steps.TRUE.items()
        for made in [lambda seed: steps.inputs(seed, torch.float64)]
    ]
    for table in (test_spellings.TABLE, test_unrolled.TABLE):
        for name, (program, make, _) in table.spellings.items():
            for dynamic in ((), (0,)):
                inputs = _jittered(make())
                found.append(Block(name, graphs.trace(program, inputs(0), dynamic), inputs, dynamic))
    for family in zoo.FAMILIES:
        for implementation in (None, "batched_mm"):
            graph, given = captured(family, implementation)
            inputs = _jittered(given)
            graphs.propagate(graph, inputs(0))
            found.append(Block(f"{family} {implementation}", graph, inputs))
    return [b for b in found if len(recognize(b.graph).regions) == 1]


def _jittered(given: Tensors) -> Callable[[int], Tensors]:
    """Floats in float64, other for each seed."""

    def inputs(seed: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        return [
            t.detach().double() + 0.3 * torch.randn(t.shape, generator=generator, dtype=torch.float64) * t.std().item()
            if t.is_floating_point()
            else t
            for t in given
        ]

    return inputs


def captured(family: str, implementation: str | None) -> tuple[torch.fx.GraphModule, Tensors]:
    """A family's block as Dynamo hands it over, and what it is called with."""
    found: list[tuple[torch.fx.GraphModule, Tensors]] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    block = zoo.moe_block(zoo.build(family, torch.float32, implementation)).double()
    with torch.no_grad():
        torch.compile(block, backend=keep)(torch.randn(2, 5, 64, dtype=torch.float64))
    ((gm, inputs),) = found
    return gm, inputs


def gradients(call: Callable[..., Any], inputs: Tensors) -> Tensors | None:
    """Of the sum of squares of what has a gradient, by the floating inputs; None where autograd objects."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    wanted = [t for t in leaves if t.requires_grad]
    try:
        with torch.enable_grad():
            out = call(*[t.clone() for t in leaves])
            out = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if t.requires_grad]
            if not out:
                return []
            return list(torch.autograd.grad(sum(t.square().sum() for t in out), wanted, materialize_grads=True))
    except RuntimeError:
        return None


def fate(block: Block, seed: int) -> tuple[str, str]:
    try:
        mutant, said = mutants.mutate(block.graph, seed)
        if seed % 2:
            graphs.propagate(mutant, block.inputs(0), block.dynamic)
            mutant, more = mutants.mutate(mutant, seed + 1)
            said = f"{said}; {more}"
        graphs.propagate(mutant, block.inputs(0), block.dynamic)
    except Exception:  # noqa: BLE001  there was no place for the edit, or what it left can't run
        return "invalid", ""
    if not recognize(mutant).regions:
        return "refused", said
    values = block.inputs(seed)
    try:
        expected, again = graphs.run(mutant, values), graphs.run(mutant, values)
    except Exception:  # noqa: BLE001  real values can raise where fake ones don't
        return "invalid", said
    if graphs.differs(expected, again):
        return "invalid", said
    ours = graphs.replaced(mutant)
    difference = graphs.differs(expected, graphs.run(ours, values))
    if difference:
        return "wrong", f"{said}: {difference}"
    theirs = gradients(mutant, values)
    if theirs is None:
        return "exact", said
    mine = gradients(ours, values)
    if mine is None:  # autograd keeps the hidden states for the operator; a copy of them (rows) for the original
        return "exact but for autograd without functionalization", said
    if len(mine) != len(theirs):
        return "wrong", f"{said}: {len(mine)} gradients, not {len(theirs)}"
    if "half" in said or "bfloat16" in said:  # the original rounds its gradients too
        return "exact", said
    difference = graphs.differs(theirs, mine)
    return ("wrong", f"{said}: gradient, {difference}") if difference else ("exact", said)


def main(seconds: float, first: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL + 1)
    known = blocks()
    print(f"{len(known)} blocks", flush=True)
    start, shown = time.process_time(), 0.0
    fates: collections.Counter[str] = collections.Counter()
    draw = random.Random(first)
    while time.process_time() - start < seconds:
        block, seed = draw.choice(known), draw.randrange(1 << 30)
        try:
            what, said = fate(block, seed)
        except Exception:  # noqa: BLE001  recognition, lowering or what they made raised
            what, said = "raised", traceback.format_exc(limit=-3)
        fates[what] += 1
        if what in ("wrong", "raised"):
            print(what, block.name, block.dynamic, seed, said, flush=True)
        if time.process_time() - shown > 60:
            shown = time.process_time()
            print(int(shown - start), "s", dict(fates), flush=True)
    print(dict(fates), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
