"""Halves exchanged in place: the same numbers everywhere, checkpoints as before, every bit back."""

import copy
import functools
import pickle

import pytest
import torch

import moe_compile
from moe_compile import inplace, journal
from moe_compile.backend import moe_backend
from moe_compile.providers import copied_bytes
from moe_compile.spec import MoESpec

transformers = pytest.importorskip("transformers")
IDS = torch.arange(7)[None]


def build(kind: str = "Qwen3Moe", **changes):
    sizes = {
        "hidden_size": 32, "moe_intermediate_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
        "num_experts_per_tok": 2, "num_experts": 8, "num_local_experts": 8,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.float32).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def compiled(model) -> tuple[torch.Tensor, list[str]]:
    torch._dynamo.reset()
    backend = functools.partial(moe_backend, options={"moe.inner": "eager", "moe.strict": True})
    with journal.capture() as events:
        out = logits(torch.compile(model, backend=backend, fullgraph=True))
    return out, [e.spec for e in events if isinstance(e, journal.RegionFound)]


@pytest.fixture
def model():
    return build()


def test_the_numbers_stay_and_the_order_is_read_off_the_graph(model):
    expected, (_, before) = logits(model), compiled(model)
    weights = model.model.layers[0].mlp.experts.gate_up_proj
    address, old = weights.data_ptr(), weights.detach().clone()
    assert inplace.swap(model) == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert inplace.swap(model) == ()
    assert weights.data_ptr() == address
    assert torch.equal(weights, torch.cat(old.chunk(2, 1)[::-1], 1))
    assert torch.equal(logits(model), expected)
    got, after = compiled(model)
    torch.testing.assert_close(got, expected)
    assert len(before) == len(after) == 2
    assert "gate_up=EGH:gate_up" in before[0] and "gate_up=EGH:up_gate" in after[0]
    assert copied_bytes(["flashinfer_cutlass"], MoESpec.parse(before[0]).experts) > 0
    assert copied_bytes(["flashinfer_cutlass"], MoESpec.parse(after[0]).experts) == 0


def test_prepare_asks_for_it_and_restore_undoes_it(model):
    expected = logits(model)
    model.config._experts_implementation = "eager"  # the loop, which prepare replaces first
    report = str(moe_compile.prepare(model, weights="swap_in_place"))
    assert "runs [up; gate] rows, exchanged in place" in report and "experts_implementation=grouped_mm" in report
    assert not moe_compile.prepare(model, weights="swap_in_place")
    torch.testing.assert_close(logits(model), expected)
    assert moe_compile.restore(model) == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert model.config._experts_implementation == "eager"
    torch.testing.assert_close(logits(model), expected)
    with pytest.raises(ValueError, match="is not one of as_is, swap_in_place"):
        moe_compile.prepare(model, weights="swap")


def test_a_copy_stays_exchanged_and_a_pickle_is_refused(model):
    expected = logits(model)
    inplace.swap(model)
    twin = copy.deepcopy(model)
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(model)
    assert inplace.restore(twin)
    assert torch.equal(logits(twin), expected)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_every_implementation_that_leaves_the_gate_to_the_module(model, implementation):
    model.config._experts_implementation = implementation
    expected = logits(model)
    inplace.swap(model)
    assert torch.equal(logits(model), expected)


def test_the_loop_over_experts_raises(model):
    inplace.swap(model)
    model.config._experts_implementation = "eager"
    with pytest.raises(RuntimeError, match=r"experts_implementation='eager' can't read; .*moe_compile.restore"):
        logits(model)


def test_checkpoints_are_as_before(model, tmp_path):
    expected, state = logits(model), {k: v.clone() for k, v in model.state_dict().items()}
    inplace.swap(model)
    saved = model.state_dict()
    assert saved.keys() == state.keys() and all(torch.equal(saved[k], state[k]) for k in state)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(again), expected)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(state)
    assert torch.equal(logits(model), expected)


def test_restore_gives_every_bit_back(model):
    expected, state = logits(model), {k: v.clone() for k, v in model.state_dict().items()}
    inplace.swap(model)
    inplace.swap(twin := copy.deepcopy(model))
    assert inplace.restore(model) == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert inplace.restore(model) == ()
    assert all(torch.equal(p, state[k]) for k, p in model.named_parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    experts = model.model.layers[0].mlp.experts
    assert not {"forward", "_apply_gate", inplace._HANDLES} & vars(experts).keys()
    model.config._experts_implementation = "eager"
    torch.testing.assert_close(logits(model), expected)
    # the copy is a model of its own
    assert all(torch.equal(v, state[k]) for k, v in twin.state_dict().items())
    inplace.restore(twin)
    assert all(torch.equal(p, state[k]) for k, p in twin.named_parameters())
    assert all(torch.equal(v, state[k]) for k, v in twin.state_dict().items())


def test_pieces_cover_every_expert(monkeypatch):
    monkeypatch.setattr(inplace, "PIECE", 3 * 4 * 5 * 4)  # three experts, then two
    w = torch.randn(5, 8, 5)
    old = w.clone()
    inplace._exchange(w)
    assert torch.equal(w, torch.cat((old[:, 4:], old[:, :4]), 1))


def test_what_is_left_alone():
    gpt_oss = build("GptOss")
    assert inplace.swap(gpt_oss) == ()
    assert inplace.why_not(gpt_oss.model.layers[0].mlp.experts) == "its rows are not two halves"
    model = build()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert inplace.why_not(model.model.layers[0].mlp) == "not fused experts of transformers"
    first.gate_up_proj.grad = torch.zeros_like(first.gate_up_proj)
    assert inplace.why_not(first) == "it is being trained"
    second.forward = second.forward
    assert inplace.why_not(second) == "its code was replaced by somebody else"
    assert inplace.swap(model) == ()
    shared = build()
    shared.model.layers[1].mlp.experts.gate_up_proj = shared.model.layers[0].mlp.experts.gate_up_proj
    assert inplace.swap(shared) == ()
