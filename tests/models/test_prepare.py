"""prepare and restore: what changes, what does not, and that both can be called at any time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import table
import torch
from torch import nn

import moe_compile
from moe_compile import journal
from moe_compile.backend import moe_backend
from moe_compile.prepare import breaking

PATCHED = ("dbrx", "jetmoe", "longcat_flash", "step3p7", "switch_transformers", "nllb_moe", "ernie4_5_vl_moe")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def state(model: nn.Module) -> dict[str, object]:
    """What a model is made of: the weights' addresses, each module's attributes, the configs' implementations."""
    found: dict[str, object] = {n: p.data_ptr() for n, p in model.named_parameters()}
    for path, module in model.named_modules():
        found[f"{path}()"] = {k: v for k, v in vars(module).items() if not k.startswith("_") or "moe_compile" in k}
        found[f"{path}.implementation"] = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return found


@pytest.mark.parametrize("name", [*PATCHED, "openai_privacy_filter", "aria"])
def test_changes_nothing_but_the_forward_and_restore_undoes_it(name: str) -> None:
    model = table.build(name)
    before, keys = state(model), list(model.state_dict())
    expected = [path for path, _ in breaking(model)]
    if name == "aria" and not expected:
        pytest.skip("this transformers' aria can be captured as it is")
    report = moe_compile.prepare(model)
    assert expected
    assert [c.module for c in report.changes] == expected
    assert not list(breaking(model))
    assert report.changes[0].kind in str(report)
    assert report.changes[0].why in str(report)
    assert list(model.state_dict()) == keys
    assert {n: p.data_ptr() for n, p in model.named_parameters()}.items() <= before.items()
    again = moe_compile.prepare(model)
    assert not again
    assert list(again.before) == expected
    assert list(moe_compile.restore(model)) == expected
    assert state(model) == before
    assert moe_compile.restore(model) == ()


@pytest.mark.parametrize("name", ["step3p7", "openai_privacy_filter"])
def test_a_copy_is_prepared_too_and_on_its_own(name: str) -> None:
    model = table.build(name)
    moe_compile.prepare(model)
    twin = copy.deepcopy(model)
    moe_compile.restore(model)
    given = table.inputs(name, model)
    with torch.no_grad():
        first = table.answer(model(**given))
        assert [path for path, _ in breaking(twin)] == []
        for p in model.parameters():
            p.zero_()
        torch.testing.assert_close(table.answer(twin(**given)), first)  # it reads its own weights
    assert moe_compile.restore(twin)


def test_a_pickle_that_could_not_be_loaded_is_not_made() -> None:
    model = table.build("dbrx")
    moe_compile.prepare(model)
    with pytest.raises(TypeError, match=r"can't be pickled; moe_compile.restore\(model\) first"):
        pickle.dumps(model)
    moe_compile.restore(model)
    assert pickle.dumps(model)


def test_an_implementation_that_the_user_chose() -> None:
    model = table.build("mixtral", "eager")
    config = model.config
    report = moe_compile.prepare(model)
    assert len(report.changes) == 2
    assert config._experts_implementation == "grouped_mm"
    moe_compile.restore(model)
    assert config._experts_implementation == "eager"
    assert not moe_compile.prepare(table.build("mixtral", "batched_mm"))


def test_what_others_replaced_is_left_alone() -> None:
    model = table.build("step3p7")
    experts = next(m for m in model.modules() if type(m).__name__ == "Step3p7Experts")
    theirs = experts.forward
    experts.forward = theirs
    report = moe_compile.prepare(model)
    assert not report
    assert "replaced by somebody else" in str(report)
    assert moe_compile.restore(model) == ()
    assert experts.forward is theirs


def test_gradients_are_the_original_ones() -> None:
    model = table.build("longcat_flash")
    given = table.inputs("longcat_flash", model)

    def grads(run: object) -> list[torch.Tensor | None]:
        model.zero_grad()
        table.answer(run(**given)).square().sum().backward()  # type: ignore[operator]
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    expected = grads(model)
    moe_compile.prepare(model)
    options = {"moe.inner": "eager", "moe.strict": True}
    with journal.capture() as events:
        got = grads(torch.compile(model, backend=lambda gm, i: moe_backend(gm, i, options=options)))
    assert len([e for e in events if isinstance(e, journal.RegionFound)]) == 1
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine - theirs).abs().max() <= 1e-4 * max(theirs.abs().max(), 1e-6)


def test_something_that_is_no_module() -> None:
    with pytest.raises(TypeError, match="prepare: model is a str"):
        moe_compile.prepare("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="restore: model is a str"):
        moe_compile.restore("model")  # type: ignore[arg-type]
    assert not moe_compile.prepare(nn.Linear(2, 2))


def test_explain_names_the_remedy() -> None:
    """Where Dynamo broke inside an MoE, and what becomes of it once the model is prepared."""
    model = table.build("step3p7")
    given = table.inputs("step3p7", model)
    with torch.no_grad():
        broken = moe_compile.explain(model, **given)
        moe_compile.prepare(model)
        whole = moe_compile.explain(model, **given)
    assert not broken.regions
    assert broken.uncaptured == (("layers.1.mlp.experts", "a loop over the experts that nonzero() names"),)
    (place,) = {b.where.source.split(":")[0] for b in broken.breaks}
    assert place == "modeling_step3p7.py"
    assert "nonzero" in broken.breaks[0].reason
    text = str(broken)
    assert "layers.1.mlp.experts: MoE that Dynamo can't capture" in text
    assert "moe_compile.prepare(model)" in text
    assert broken.as_dict()["uncaptured"] == [list(broken.uncaptured[0])]
    assert (len(whole.regions), whole.breaks, whole.uncaptured) == (1, (), ())
