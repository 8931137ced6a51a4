"""moe.verify: agrees on true blocks, catches a wrong operator, names the block, and touches nothing of the caller's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import GatheredBlock, GroupedBlock, H, Parts
from torch import nn

from moe_compile import journal, ops
from moe_compile.backend import moe_backend
from moe_compile.verify import VerificationError

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def verified(module: nn.Module, inner: str = "eager", dynamic: bool | None = None) -> Any:
    options = {"moe.inner": inner, "moe.verify": True, "moe.strict": True}
    return torch.compile(module, backend=functools.partial(moe_backend, options=options), dynamic=dynamic)


class Counting(nn.Module):
    """Two blocks, a counter that the graph increments, and dropout: state that a second run could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GroupedBlock(), GatheredBlock()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        self.calls += 1
        cache.add_(x)
        return self.second(F.dropout(self.first(cache), 0.5, self.training))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_true_blocks_agree_once_and_nothing_is_disturbed(inner: str, dynamic: bool) -> None:
    def run(model: Any, calls: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        cache = torch.ones(10, H)
        outs = [model(torch.full((10, H), 0.1 * i).cos(), cache) for i in range(3)]
        return [*outs, cache, calls.clone(), torch.get_rng_state()]

    module = Counting().train()
    with torch.no_grad(), journal.capture() as events:
        got = run(verified(module, inner, dynamic), module.calls)
        module.calls.zero_()
        want = run(module, module.calls)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    found = [e for e in events if isinstance(e, journal.Verified)]
    assert [e.region for e in found] == [0, 1], "each block once"
    assert all(e.ok and 0 < e.rms < e.rms_bound < 1e-4 for e in found)


def test_training_goes_on_with_gradients() -> None:
    module, x = GroupedBlock(), torch.randn(10, H, requires_grad=True)
    verified(module, "aot_eager")(x).sum().backward()
    got, x.grad = x.grad, None
    module(x).sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_a_wrong_operator_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.launcher
    seen = []

    def wrong(*args: Any, **kwargs: Any) -> Any:
        launch = right(*args, **kwargs)
        seen.append(launch)
        return lambda *a: launch(*a) * 1.001

    monkeypatch.setattr(ops, "launcher", wrong)
    monkeypatch.setattr(ops, "_call", ops._Call)  # without its cache
    module = nn.Sequential(GroupedBlock(), GroupedBlock(Parts(finish=lambda s, y: y.sum(dim=1) * 2)))
    with torch.no_grad(), journal.capture() as events, pytest.raises(VerificationError, match=r"region 0 .*DIFFERS"):
        verified(module)(torch.randn(10, H))
    assert seen
    assert [e.ok for e in events if isinstance(e, journal.Verified)] == [False, False]


def test_tokens_that_overflow_are_not_compared() -> None:
    """Of what the model itself computes no number of, the operator can be no other."""
    x = torch.randn(10, H)
    x[3], x[5] = float("nan"), 1e30
    with torch.no_grad(), journal.capture() as events:
        torch.testing.assert_close(verified(GroupedBlock())(x), GroupedBlock()(x), equal_nan=True)
    (found,) = (e for e in events if isinstance(e, journal.Verified))
    assert found.ok
    assert 0 < found.rms < 1e-6


def test_inputs_that_share_memory_that_is_written_are_refused() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = GroupedBlock()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return self.block(y)

    memory = torch.randn(20, H)
    with torch.no_grad(), pytest.raises(Exception, match="share memory that the graph writes"):
        verified(Shares())(memory[:10], memory[5:15])
