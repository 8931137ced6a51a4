"""Blocks that a checkpoint computes again in the backward (gradient checkpointing) are replaced where they stand: in
the body that Dynamo made of the checkpointed function. Where something fails, that body is what it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blocks import GatheredBlock, H
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_compile import backend, journal
from moe_compile.backend import moe_backend
from moe_compile.nodes import checkpointed


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """x + block(x), in a checkpoint; in two, one in the other, where `nested`."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.block, self.nested = GatheredBlock(), nested

    def forward(self, x: Tensor) -> Tensor:
        def once(x: Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

        return x + (checkpoint(once, x, use_reentrant=False) if self.nested else once(x))


def step(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The result and the gradients of one training step."""
    model.zero_grad()
    x = torch.randn(10, H, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = call(x)
    y.square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [y.detach(), *(g.clone() for g in grads if g is not None)]


def assert_same(model: nn.Module, **options: Any) -> list[Any]:
    """A step behind the backend is the same as without; the events."""
    settings = {f"moe.{k}": v for k, v in options.items()}
    with journal.capture() as events:
        ours = step(model, torch.compile(model, backend=functools.partial(moe_backend, options=settings)))
    for got, want in zip(ours, step(model, model), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return events


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_blocks_in_checkpoints_are_replaced(inner: str) -> None:
    events = assert_same(nn.Sequential(Layer(), nn.Linear(H, H), Layer()), inner=inner, strict=True, route="op")
    found = [e for e in events if isinstance(e, journal.RegionFound)]
    assert len(found) == len({e.graph for e in found}) == 2
    assert {e.graph for e in found} == {e.graph for e in events if isinstance(e, journal.Lowered)}


def test_a_checkpoint_within_a_checkpoint() -> None:
    bodies = []

    def look(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        bodies.extend(checkpointed(gm))
        return moe_backend(gm, inputs, options={"moe.inner": "eager", "moe.strict": True})

    model = Layer(nested=True)
    step(model, torch.compile(model, backend=look))
    assert len(bodies) == 2
    assert [any("moe_compile" in str(n.target) for n in b.graph.nodes) for b in bodies] == [False, True]


def test_an_inner_backend_that_refuses_gets_every_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str, mode: Any, options: Any) -> Any:
        def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            if any("moe_compile" in str(n.target) for g in (gm, *checkpointed(gm)) for n in g.graph.nodes):
                raise RuntimeError("refused")
            return gm.forward

        return compile_graph

    monkeypatch.setattr(backend, "_inner", refuses)
    with pytest.warns(UserWarning, match="refused"):
        events = assert_same(Layer())
    assert [e.stage for e in events if isinstance(e, journal.StageFailed)] == ["inner"]


def test_a_stage_that_fails_leaves_its_body_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = backend._lower

    def fails(gm: torch.fx.GraphModule, *args: Any) -> Any:
        lower(gm, *args)
        raise ArithmeticError("after the swap")

    monkeypatch.setattr(backend, "_lower", fails)
    with pytest.warns(UserWarning, match="after the swap"):
        events = assert_same(Layer(), inner="eager")
    assert [e.stage for e in events if isinstance(e, journal.StageFailed)] == ["lower"]
