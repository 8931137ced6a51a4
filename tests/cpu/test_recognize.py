"""Recognition proves true blocks and refuses blocks that are wrong in one detail, each with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import blocks
import pytest
import torch
import torch.nn.functional as F
from blocks import E, GatheredBlock, GroupedBlock, H, I, K, Parts
from torch import nn

from moe_compile.backend import moe_backend
from moe_compile.recognize import Recognition, recognize

T = 10


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def recognized(
    module: nn.Module, x: torch.Tensor | None = None, dynamic: bool = False, grad: bool = False
) -> Recognition:
    """What recognition says of the module's one graph."""
    found: list[Recognition] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(recognize(gm))
        return gm.forward

    with torch.set_grad_enabled(grad):
        torch.compile(module, backend=backend, dynamic=dynamic, fullgraph=True)(torch.randn(T, H) if x is None else x)
    assert len(found) == 1
    return found[0]


def same_as_eager(module: nn.Module, x: torch.Tensor) -> None:
    run = compiled(module)
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x))


def compiled(module: nn.Module) -> Any:
    options = {"moe.inner": "eager", "moe.strict": True, "moe.route": "op"}
    return torch.compile(module, backend=lambda gm, inputs: moe_backend(gm, inputs, options=options))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", [GroupedBlock, GatheredBlock])
def test_true_blocks_are_proved(make: Callable[[], nn.Module], dynamic: bool) -> None:
    result = recognized(make(), dynamic=dynamic)
    assert not result.rejections
    (region,) = result.regions
    experts, router = region.spec.experts, region.spec.router
    assert (experts.E, experts.K, experts.H, experts.I) == (E, K, H, I)
    assert experts.act.name == "swiglu"
    assert str(experts.gate_up) == "EGH:gate_up"
    assert router is not None
    assert (router.score, router.renorm) == ("softmax", "sum" if make is GroupedBlock else "none")
    same_as_eager(make(), torch.randn(T, H))


# what the block does wrong, and the reason: few, since tests/cpu/test_impostors.py has the others, without Dynamo
IMPOSTORS: dict[str, tuple[nn.Module, str]] = {
    "ids of the second linear shifted": (
        GatheredBlock(lambda ids, x, w: (ids, (ids + 1) % E, x, w)), "the expert ids differ between the linears"),
    "a different permutation on the way back": (
        GroupedBlock(Parts(back=lambda s, perm, ids: torch.argsort(perm))),
        "sorted rows are read at an index that is not a route's position"),
    "the expert number used as data": (
        GroupedBlock(Parts(between=lambda s, g, u, ids, perm: F.silu(g) * u * ids.unsqueeze(-1))),
        "the activation reads something else than the first linear"),
    "the weight applied twice": (
        GroupedBlock(Parts(weigh=lambda s, y, w: y * w.unsqueeze(-1) * w.unsqueeze(-1))),
        "the routing weight is applied more than once, or is an expression"),
}  # fmt: skip


class MutatesHidden(GroupedBlock):
    """x is changed in place between its gather and the combination: reading it late would be wrong."""

    def __init__(self) -> None:
        super().__init__(Parts(weigh=lambda s, y, w: (s.kept.add_(1), y * w.unsqueeze(-1))[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x * 1
        return super().forward(self.kept)


IMPOSTORS["hidden mutated after it was gathered"] = (MutatesHidden(), "a tensor was changed after the block read it")


@pytest.mark.parametrize("name", list(IMPOSTORS))
def test_impostors_are_refused_with_a_reason(name: str) -> None:
    module, reason = IMPOSTORS[name]
    result = recognized(module)
    assert not result.regions
    said = [str(r.verdict) for r in result.rejections]
    assert any(reason in text for text in said), said
    torch._dynamo.reset()
    same_as_eager(module, torch.randn(T, H))


@pytest.mark.parametrize("change", [lambda w: w.roll(1, 0), lambda w: w[:, [1, 0]], lambda w: 1 - w])
def test_weights_from_elsewhere_are_just_weights(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Another [T, K] tensor of weights is no impostor, but the router is not the weights' whole story then."""
    module = GatheredBlock(lambda ids, x, w: (ids, ids, x, change(w)))
    (region,) = recognized(module).regions
    assert region.router is None
    assert region.router_why
    torch._dynamo.reset()
    same_as_eager(module, torch.randn(T, H))


def test_a_value_that_escapes_stays_computed() -> None:
    class Escapes(GatheredBlock):
        def forward(self, x: torch.Tensor) -> Any:
            weights, ids = torch.topk(F.softmax(F.linear(x, self.gate), dim=-1, dtype=torch.float32), K, dim=-1)
            up = torch.bmm(self.gate_up[ids.reshape(-1)], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
            g, u = up.chunk(2, dim=-1)
            y = torch.bmm(self.down[ids.reshape(-1)], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
            y.mul_(weights.reshape(-1, 1))
            return y.view(-1, K, H).sum(dim=1), y.abs().sum(), y

    module, x = Escapes(), torch.randn(T, H)
    assert len(recognized(module).regions) == 1
    torch._dynamo.reset()
    run = compiled(module)
    with torch.no_grad():
        for got, expected in zip(run(x), module(x)):
            torch.testing.assert_close(got, expected)


def test_weights_that_are_a_slice_of_a_wider_tensor() -> None:
    """Shared experts' weights stand behind the routed ones in one tensor: the slice is the operand."""
    wide: Callable[..., Any] = lambda ids, x, w: (ids, ids, x, torch.cat((w, w[:, :1]), -1).abs()[:, :K])
    module, x = GatheredBlock(wide), torch.randn(T, H)
    (region,) = recognized(module).regions
    assert region.match.weights is not None
    assert tuple(region.match.weights.meta["example_value"].shape) == (T, K)
    torch._dynamo.reset()
    same_as_eager(module, x)


class Accumulates(nn.Module):
    """The combination by index_add_ into zeros that are then read by their own name, or through a view made before."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        base = GroupedBlock()
        self.gate, self.gate_up, self.down, self.view = base.gate, base.gate_up, base.down, view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, ids = torch.topk(F.softmax(F.linear(x, self.gate), dim=-1), K, dim=-1)
        _, perm, offsets = blocks.sorted_rows(ids.reshape(-1))
        g, u = blocks.grouped(x[perm // K], self.gate_up.transpose(1, 2), offsets).chunk(2, dim=-1)
        y = blocks.grouped(F.silu(g) * u, self.down.transpose(1, 2), offsets) * w.reshape(-1)[perm].unsqueeze(-1)
        out = torch.zeros_like(x)
        read = out.view(-1, H) if self.view else out
        out.index_add_(0, perm // K, y)
        out.add_(1)
        return read * 2


@pytest.mark.parametrize("view", [False, True])
def test_a_combination_read_under_another_name(view: bool) -> None:
    module, x = Accumulates(view), torch.randn(T, H)
    result = recognized(module)
    assert len(result.regions) == (0 if view else 1)
    assert [r.verdict.reason for r in result.rejections] == (
        ["the combined value lives in memory that is read under another name"] if view else []
    )
    torch._dynamo.reset()
    same_as_eager(module, x)


class Waited(GatheredBlock):
    """A block of a view or copy that was made before its base was written, and that nothing asked for until after."""

    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.copy = copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = x * 2
        waits = (base.clone() if self.copy else base).view(1, -1, H)[0]
        base.mul_(3)
        return super().forward(waits)


@pytest.mark.parametrize("copy", [False, True])
def test_a_view_that_waits_while_its_base_is_written(copy: bool) -> None:
    module, x = Waited(copy), torch.randn(T, H)
    result = recognized(module)
    assert len(result.regions) == (0 if copy else 1)
    assert [r.verdict.reason for r in result.rejections] == (
        ["a tensor was changed after the block read it"] if copy else []
    )
    torch._dynamo.reset()
    same_as_eager(module, x)


class PartlyConstant(GatheredBlock):
    """A block of which one part is computed without gradients."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def gradients(part: str) -> Any:
            return torch.no_grad() if part == self.part else contextlib.nullcontext()

        logits = F.linear(x, self.gate)
        with gradients("router"):
            weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K, dim=-1)
        with gradients("first linear"):
            up = torch.bmm(self.gate_up[ids.reshape(-1)], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        g, u = up.chunk(2, dim=-1)
        y = torch.bmm(self.down[ids.reshape(-1)], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        return (y * weights.reshape(-1, 1)).view(-1, K, H).sum(dim=1)


@pytest.mark.parametrize(("part", "regions"), [("router", 1), ("first linear", 0)])
def test_what_has_no_gradient_is_not_given_one(part: str, regions: int) -> None:
    module, x = PartlyConstant(part), torch.randn(T, H)
    assert len(recognized(module, x, grad=True).regions) == regions
    torch._dynamo.reset()
    found = []
    for call in (module, compiled(module)):
        module.zero_grad()
        call(x).square().sum().backward()
        found.append([p.grad for p in (module.gate, module.gate_up, module.down)])
    for expected, got in zip(*found):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected)


class SharedRouter(GatheredBlock):
    """Two sets of experts under one router."""

    def __init__(self) -> None:
        super().__init__()
        self.second_gate_up, self.second_down = (nn.Parameter(p.flip(0).clone()) for p in (self.gate_up, self.down))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, ids = torch.topk(F.softmax(F.linear(x, self.gate), dim=-1, dtype=torch.float32), K, dim=-1)
        w /= w.sum(-1, keepdim=True)
        rows, flat = x.repeat_interleave(K, dim=0).unsqueeze(-1), ids.reshape(-1)
        out = []
        for gate_up, down in ((self.gate_up, self.down), (self.second_gate_up, self.second_down)):
            g, u = torch.bmm(gate_up[flat], rows).squeeze(-1).chunk(2, dim=-1)
            y = torch.bmm(down[flat], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
            out.append((y * w.reshape(-1, 1)).view(-1, K, H).sum(dim=1))
        return out[0] - out[1]


def test_two_regions_under_one_router() -> None:
    module, x = SharedRouter(), torch.randn(T, H)
    regions = recognized(module).regions
    assert [r.router is not None for r in regions] == [True, True]
    torch._dynamo.reset()
    same_as_eager(module, x)


def test_a_block_that_reads_another_blocks_result_directly() -> None:
    module, x = nn.Sequential(GroupedBlock(), GatheredBlock(), GroupedBlock()), torch.randn(T, H)
    assert len(recognized(module).regions) == 3
    torch._dynamo.reset()
    same_as_eager(module, x)
