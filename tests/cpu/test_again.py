"""Calls like one that was replayed: none that differs in anything that counts is taken for one."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moe_compile import ops
from moe_compile.kernels.again import Again, operands_of
from moe_compile.kernels.launch import compiling
from moe_compile.providers import Candidate, providers
from moe_compile.providers import launcher as build
from moe_compile.spec import ExpertsSpec
from moe_compile.suite import SWIGLU, tokens_of, weights_of

CPU = torch.device("cpu")
SPEC = ExpertsSpec(E=4, K=2, H=64, I=64, act=SWIGLU, bias="both")
PLAN = "*:aten"


def arguments(T: int = 6, seed: int = 0) -> list[Any]:
    return [*tokens_of(SPEC, T, CPU, seed=seed), *weights_of(SPEC, CPU).arguments()]


def nested(t: Any, change: Any) -> Any:
    return [change(t[0])] if isinstance(t, list) else change(t)


def wider(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, further apart."""
    return torch.cat([t, t], -1)[..., : t.shape[-1]]


def shifted(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t)


CHANGES = {
    "dtype": lambda t: t.to(torch.int32 if t.dtype == torch.int64 else torch.float16),
    "a row less": lambda t: t[:-1],
    "a column less": lambda t: t[..., :-1].contiguous(),
    "an axis more": lambda t: t[None],
    "strides": wider,
    "the same numbers of another order": lambda t: t.mT.contiguous().mT,
    "not aligned": shifted,
    "a gradient": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t[:-1],
    "another class": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "another device": lambda t: t.to("meta"),
    "none": lambda t: None,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("which", range(7))
def test_what_differs_is_another_call(change, which):
    known = arguments()
    again = Again(lambda addresses: addresses, *known)
    assert again(*arguments(seed=1)) is not None
    other = arguments()
    other[which] = nested(other[which], change)
    assert again(*other) is None
    assert again(*known) == [t.data_ptr() for t in operands_of(*known)]


def test_operands_in_each_others_place_are_another_call():
    x, ids, w, gate_up, down, gate_up_bias, *_ = arguments()
    again = Again(lambda addresses: addresses, x, ids, w, gate_up, down, [], [], None)
    assert again(x, ids, w, gate_up, down, [], [], None) is not None
    for other in [
        (x, ids, w, [*gate_up, *down], [], [], [], None), (x, ids, w, [], [*gate_up, *down], [], [], None),
        (x, ids, None, gate_up, down, [w], [], None), (x, ids, None, gate_up, down, [], [w], None),
        (x, ids, None, gate_up, down, [], [], w), (x, ids, w, gate_up, down, gate_up_bias, [], None),
    ]:  # fmt: skip
        assert again(*other) is None


def test_nothing_is_replayed_while_kernels_are_compiled():
    known = arguments()
    again = Again(lambda addresses: pytest.fail("a kernel ran"), *known)
    with ThreadPoolExecutor(1) as pool, compiling(pool):
        assert again(*known) is None


class Launcher:
    """Counts the calls that it runs, and keeps how those like the first are replayed."""

    def __init__(self) -> None:
        self.runs, self.replays = 0, 0

    def __call__(self, *operands: Any) -> torch.Tensor:
        self.runs += 1
        return operands[0] * 2

    def replay(self, addresses: list[int]) -> torch.Tensor:
        self.replays += 1
        return torch.full((6, 64), 7.0)

    def again(self, *operands: Any) -> Again:
        return Again(self.replay, *operands)


@pytest.fixture
def launcher():
    ops._call.cache_clear()
    call = ops._call(str(SPEC), PLAN, CPU)
    call.only = Launcher()
    yield call.only
    ops._call.cache_clear()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_operator_checks_what_is_another_call(launcher, mode):
    run = torch.ops.moe_compile.experts
    with mode():
        for calls in range(3):
            out = run(*arguments(seed=calls), str(SPEC), PLAN)
            assert (launcher.runs, launcher.replays) == (1, calls)
            assert bool((out == 7).all()) == (calls > 0)
        assert run(*arguments(T=5), str(SPEC), PLAN).shape == (5, 64)
        assert (launcher.runs, launcher.replays) == (2, 2)
        for which, name in enumerate(("hidden", "ids", "weights", "gate_up", "down", "gate_up_bias", "down_bias")):
            wrong = arguments()
            wrong[which] = nested(wrong[which], lambda t: t[..., :-1])
            with pytest.raises(ValueError, match=rf"experts: {name} is"):
                run(*wrong, str(SPEC), PLAN)
        run(*arguments(), str(SPEC), PLAN)
    assert (launcher.runs, launcher.replays) == (2, 3)


def test_modes_have_calls_of_their_own(launcher):
    """What the dispatcher makes of a tensor differs: both are replayed."""
    run = torch.ops.moe_compile.experts
    known = arguments()
    for replays in (0, 2, 4):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                run(*known, str(SPEC), PLAN)
        assert (launcher.runs, launcher.replays) == (2, replays)


@pytest.mark.parametrize("bias", ["none", "both"])
def test_a_launcher_that_may_leave_calls_to_aten_says_so_too(monkeypatch, bias):
    provider, found = providers()["triton_grouped"], Launcher()
    monkeypatch.setattr(type(provider), "build", lambda *_: found)
    build.cache_clear()
    run = build(Candidate(provider=provider.name), dataclasses.replace(SPEC, bias=bias), CPU)
    build.cache_clear()
    assert (run is found) == (bias == "none")
    assert run.again == found.again


def test_shapes_are_bounded(launcher, monkeypatch):
    monkeypatch.setattr(ops, "_MOST", 2)
    with torch.no_grad():
        for T in (1, 2, 3, 3, 1):
            torch.ops.moe_compile.experts(*arguments(T=T), str(SPEC), PLAN)
    assert (launcher.runs, launcher.replays) == (4, 1)
