"""What tests of spellings share: small operands, tables of programs that must be proved or refused, and the checks.

A program takes tensors and returns one. `Table` collects those of a file: `spelling` with the fields that the spec must
have, `miss`, wrong in one detail, with the reason that must be given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import graphs
import torch
import torch.nn.functional as F

from moe_compile.recognize import recognize

T, E, K, H, I = 10, 4, 2, 16, 8
Tensor = torch.Tensor
Program = Callable[..., Any]
Inputs = Callable[[], list[Tensor]]


def stacked() -> list[Tensor]:
    """x, router, gate_up, down, a vector of H, and a bias per expert."""
    return list(_drawn((T, H), (E, H), (E, 2 * I, H), (E, H, I), (H,), (E, H)))


def listed() -> list[Tensor]:
    """x, router, then gate, up and down of each expert."""
    return list(_drawn((T, H), (E, H), *((I, H), (I, H), (H, I)) * E))


def biased() -> list[Tensor]:
    """x, router, then gate_up, its bias, down and its bias of each expert."""
    return list(_drawn((T, H), (E, H), *((2 * I, H), (2 * I,), (H, I), (H,)) * E))


def _drawn(*shapes: tuple[int, ...]) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=g) * 0.4 for shape in shapes)


def route(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    w, ids = torch.topk(F.softmax(F.linear(x, router), dim=-1), K, dim=-1)
    return w / w.sum(-1, keepdim=True), ids


def spread(x: Tensor, router: Tensor, fill: float = 0.0) -> Tensor:
    """[T, E]: the weights, and `fill` where an expert was not chosen."""
    w, ids = route(x, router)
    return torch.full_like(F.linear(x, router), fill).scatter_(1, ids, w)


class Table:
    """Programs by name, with their inputs and what is expected of them."""

    def __init__(self) -> None:
        self.spellings: dict[str, tuple[Program, Inputs, dict[str, Any]]] = {}
        self.misses: dict[str, tuple[Program, Inputs, str]] = {}

    def spelling(self, inputs: Inputs, **fields: Any) -> Callable[[Program], Program]:
        def add(f: Program) -> Program:
            self.spellings[f.__name__] = f, inputs, fields
            return f

        return add

    def miss(self, inputs: Inputs, reason: str) -> Callable[[Program], Program]:
        def add(f: Program) -> Program:
            self.misses[f.__name__] = f, inputs, reason
            return f

        return add

    def check_spelling(self, name: str, dynamic: bool) -> None:
        """Proved with its fields, and equal to eager forward and backward."""
        program, make, fields = self.spellings[name]
        graph = graphs.trace(program, make(), (0,) if dynamic else ())
        found = recognize(graph)
        assert len(found.regions) == 1, [str(r.verdict) for r in found.rejections]
        experts = found.regions[0].spec.experts
        assert {k: experts.act.name if k == "act" else getattr(experts, k) for k in fields} == fields
        assert_equal_outcomes(graphs.replaced(graph), program, make())

    def check_miss(self, name: str) -> None:
        """Refused, for its reason."""
        program, make, reason = self.misses[name]
        found = recognize(graphs.trace(program, make()))
        assert not found.regions
        said = [str(r.verdict) for r in found.rejections]
        assert any(reason in text for text in said), said


def assert_equal_outcomes(call: Program, program: Program, inputs: list[Tensor]) -> None:
    """The outputs and the gradients of the inputs."""
    for got, want in zip(_outcomes(call, inputs), _outcomes(program, inputs), strict=True):
        torch.testing.assert_close(got, want)


def _outcomes(call: Program, inputs: list[Tensor]) -> list[Tensor]:
    mine = [t.clone().requires_grad_() for t in inputs]
    out = call(*mine)
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad(out.square().sum(), mine, materialize_grads=True)]
