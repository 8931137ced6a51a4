"""The backend: options and modes pass through, faults stay contained, nothing of the user's is touched."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blocks import GatheredBlock, GroupedBlock, H
from torch import nn

from moe_compile import backend, journal
from moe_compile.backend import moe_backend
from moe_compile.explain import Report

STAGES = {"_recognize": "recognize", "_plan": "plan", "_choose": "tune", "_plan_route": "plan", "_lower": "lower"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    backend._WARNED.clear()
    yield
    torch._dynamo.reset()


def compiled(module: nn.Module, dynamic: bool | None = None, **options: Any) -> Any:
    settings = {f"moe.{k}": v for k, v in options.items()}
    return torch.compile(module, backend=functools.partial(moe_backend, options=settings), dynamic=dynamic)


def fault(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("injected")


def half_lowered(gm: torch.fx.GraphModule, *args: Any) -> Any:
    """Fails with the graph already damaged: the last tensor operation's users are cut off."""
    node = next(n for n in reversed(gm.graph.nodes) if n.op == "call_method")
    node.replace_all_uses_with(next(iter(gm.graph.nodes)))
    raise ZeroDivisionError("injected")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(("function", "failing"), [*((f, fault) for f in STAGES), ("_lower", half_lowered)])
def test_a_fault_in_any_stage_leaves_the_graph_as_it_was(
    function: str, failing: Callable[..., Any], inner: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, function, failing)
    module, x = GroupedBlock(), torch.randn(10, H)
    with torch.no_grad(), journal.capture() as events, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = compiled(module, dynamic, inner=inner)(x)
        torch._dynamo.reset()
        again = compiled(module, dynamic, inner=inner)(x)
        torch.testing.assert_close(out, module(x))
        assert torch.equal(out, again)
    failures = [e for e in events if isinstance(e, journal.StageFailed)]
    assert [e.stage for e in failures] == [STAGES[function]] * 2
    assert all("injected" in e.error for e in failures)
    ours = [w for w in caught if "moe_compile" in str(w.message)]
    assert len(ours) == 1, "one warning for one reason"
    assert "injected" in str(ours[0].message)
    assert not any(isinstance(e, journal.Lowered) for e in events)


@pytest.mark.parametrize("function", list(STAGES))
def test_strict_raises_the_fault(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, function, fault)
    with torch.no_grad(), pytest.raises(Exception, match="injected"):
        compiled(GroupedBlock(), inner="eager", strict=True)(torch.randn(10, H))


def test_an_inner_backend_that_refuses_our_graph_gets_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str, mode: Any, options: Any) -> Any:
        def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            if any("moe_compile" in str(n.target) for n in gm.graph.nodes):
                raise RuntimeError("refused")
            return gm.forward

        return compile_graph

    monkeypatch.setattr(backend, "_inner", refuses)
    module, x = GroupedBlock(), torch.randn(10, H)
    with torch.no_grad(), journal.capture() as events, pytest.warns(UserWarning, match="refused"):
        torch.testing.assert_close(compiled(module)(x), module(x))
    (failure,) = [e for e in events if isinstance(e, journal.StageFailed)]
    (seen,) = [e for e in events if isinstance(e, journal.GraphSeen)]
    assert (failure.stage, failure.graph) == ("inner", seen.graph)


def test_a_model_without_moe_is_compiled_as_it_is() -> None:
    module, x = nn.Sequential(nn.Linear(H, H), nn.GELU()), torch.randn(3, H)
    with torch.no_grad(), journal.capture() as events:
        torch.testing.assert_close(compiled(module, inner="eager")(x), module(x))
    assert not any(isinstance(e, (journal.RegionFound, journal.RegionRejected, journal.StageFailed)) for e in events)


def test_weights_stay_where_they_are_and_are_not_copied() -> None:
    module, x = GroupedBlock(), torch.randn(2, H)
    before = {n: (p.data_ptr(), p.detach().clone()) for n, p in module.named_parameters()}

    def live_bytes() -> int:
        gc.collect()
        storages = {}
        for t in gc.get_objects():
            if type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu":
                storages[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return sum(storages.values())

    run = compiled(module, inner="aot_eager", strict=True)
    held = live_bytes()
    with torch.no_grad():
        for _ in range(3):
            run(x)
    smallest = min(p.numel() * 4 for n, p in module.named_parameters() if n in ("gate_up", "down"))
    assert live_bytes() - held < smallest
    for name, p in module.named_parameters():
        assert p.data_ptr() == before[name][0]
        assert torch.equal(p, before[name][1])


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_go_to_inductor(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def compile_fx(gm: torch.fx.GraphModule, inputs: Any, config_patches: Any = None) -> Any:
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    options = {"epilogue_fusion": True, "moe.strict": True}
    with torch.no_grad():
        torch.compile(GatheredBlock(), backend=lambda gm, i: moe_backend(gm, i, mode=mode, options=options))(
            torch.randn(4, H)
        )
    expected = {} if mode in (None, "default") else torch._inductor.list_mode_options(mode)
    assert seen == [{**expected, "epilogue_fusion": True}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe.striict": True}, "moe.strict"),
        ({"moe.inner": "inductr"}, "inductor"),
        ({"moe.provider": "atn"}, "aten"),
        ({"moe.provider": "aten("}, "moe.provider: candidate 'aten\\('"),
        ({"moe.inner": "eager", "epilogue_fusion": True}, "for Inductor"),
    ],
)
def test_bad_options_name_the_valid_ones(options: dict[str, Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(Exception, match=message):
        torch.compile(
            GatheredBlock(), backend=lambda gm, i: moe_backend(gm, i, options={"moe.strict": True, **options})
        )(torch.randn(4, H))


def test_a_provider_is_forced_where_it_can_run_and_left_where_it_cannot() -> None:
    plans = {}
    for provider in ("aten", "triton_grouped"):
        torch._dynamo.reset()
        with torch.no_grad(), journal.capture() as events:
            compiled(GatheredBlock(), inner="eager", strict=True, provider=provider)(torch.randn(4, H))
        (plans[provider],) = [e for e in events if isinstance(e, journal.Planned)]
    assert plans["aten"].plan == plans["triton_grouped"].plan  # a CPU runs Triton only in its interpreter
    assert any(line.startswith("triton_grouped: ") for line in plans["aten"].candidates)


def test_the_entry_point_needs_no_import_of_ours() -> None:
    """`backend="moe"` by name, with Inductor inside, in a process that never imports moe_compile itself."""
    program = """
import torch, sys
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        shapes = ((4, 8), (4, 16, 8), (4, 8, 8))
        self.gate, self.up, self.down = (torch.nn.Parameter(torch.randn(*s) * .1) for s in shapes)
    def forward(self, x):
        w, ids = torch.topk(torch.softmax(x @ self.gate.T, -1), 2)
        g, u = torch.bmm(self.up[ids.reshape(-1)], x.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down[ids.reshape(-1)], (torch.nn.functional.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        return (y * w.reshape(-1, 1)).view(-1, 2, 8).sum(1)
m, x = Block(), torch.randn(5, 8)
assert "moe_compile" not in sys.modules
with torch.no_grad():
    torch.testing.assert_close(torch.compile(m, backend="moe", fullgraph=True)(x), m(x))
from moe_compile import journal
assert sum(isinstance(e, journal.RegionFound) for e in journal.recent()) == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("settings", "replaced", "why"),
    [
        ({}, [0, 1, 2], ""),
        ({"fuel": 0}, [], "moe.fuel=0 is spent"),
        ({"fuel": 2}, [0, 1], "moe.fuel=2 is spent"),
        ({"only": "*[02]"}, [0, 2], "does not match"),
        ({"only": "*[02]", "fuel": 1}, [0], "moe.fuel=1 is spent"),
        ({"only": "nothing"}, [], "moe.only=nothing does not match"),
    ],
)
def test_fuel_and_only_choose_the_blocks(settings: dict[str, Any], replaced: list[int], why: str) -> None:
    model = nn.Sequential(GroupedBlock(), GatheredBlock(), GroupedBlock())
    x = torch.randn(10, H)
    with torch.no_grad(), journal.capture() as events:
        out = compiled(model, inner="eager", strict=True, **settings)(x)
        torch.testing.assert_close(out, model(x))
    report = Report.from_events(events)
    assert [r.region for r in report.regions if r.replaced] == replaced
    assert [bool(r.skipped) for r in report.regions] == [i not in replaced for i in range(3)]
    assert why in report.regions[2].skipped + report.regions[1].skipped
    assert why in str(report)
