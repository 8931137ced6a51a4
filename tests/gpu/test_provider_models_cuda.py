"""Whole models on a CUDA device, `moe.provider` forced to each backend of FlashInfer: eager's text, one graph."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import moe_compile
from moe_compile import journal
from moe_compile.backend import moe_backend
from moe_compile.hardware import facts
from moe_compile.providers import Plan, providers, stored

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "models" / "byte_moe"
PROMPT, NEW = "The compiler reads a graph and", 48
GPU = torch.device("cuda", 0)
FORCED = {  # CuTe-DSL's tuner takes 20 s a size, cuTile's longer
    "triton_grouped": "triton_grouped", "flashinfer_cutlass": "flashinfer_cutlass",
    "flashinfer_frost_low_latency": "flashinfer_frost_low_latency",
    "flashinfer_cutile": "flashinfer_cutile(PICK=32_128_64_1_128_64_1)",
    "flashinfer_cute_dsl_sm90": "flashinfer_cute_dsl_sm90(PICK=128_128_64_1_128_64_1_1_0)",
    "flashinfer_cudnn": "flashinfer_cudnn",
}  # fmt: skip


def greedy(model: Any, forward: Any, prompt: torch.Tensor, new: int) -> tuple[list[int], list[float]]:
    """The continuation, and by how much each choice beat the next one, relative: bf16 logits are 2^-8 apart."""
    from transformers import StaticCache

    c = model.config
    cache = StaticCache(config=c, max_cache_len=prompt.shape[1] + new)
    # Allocated here, not by the first compiled call: that would make it an output of the CUDA graph, gone by the next.
    cache.early_initialization(1, c.num_key_value_heads, c.head_dim, model.dtype, GPU)
    ids, position, out, margins = prompt, torch.arange(prompt.shape[1], device=GPU), [], []
    with torch.no_grad():
        while len(out) < new:
            torch.compiler.cudagraph_mark_step_begin()
            logits = forward(input_ids=ids, past_key_values=cache, position_ids=position[None], use_cache=True).logits
            (first, second), (token, _) = (t.tolist() for t in logits[0, -1].float().topk(2))
            out.append(token)
            margins.append((first - second) / abs(first))
            ids, position = torch.tensor([[token]], device=GPU), position[-1:] + 1
    return out, margins


def compiled(model: Any, name: str, mode: str | None, copies: int) -> Any:
    options = {"moe.provider": FORCED[name], "moe.weight_copy_bytes": copies, "moe.strict": True, "moe.tune": "off"}
    if mode is None:  # Inductor's part is the other mode's
        options["moe.inner"] = "aot_eager"
    return torch.compile(model, backend=functools.partial(moe_backend, mode=mode, options=options), fullgraph=True)


def check(
    model: Any, name: str, prompt: torch.Tensor, new: int, mode: str | None, close: float, copies: int = 1 << 40
) -> None:
    expected, margins = greedy(model, model, prompt, new)
    torch._dynamo.reset()
    with journal.capture() as events:
        got, _ = greedy(model, compiled(model, name, mode, copies), prompt, new)
    plans = [Plan.parse(e.plan) for e in events if isinstance(e, journal.Planned)]
    layers = model.config.num_hidden_layers
    assert len(plans) >= 2 * layers and len(plans) % layers == 0
    assert not [e for e in events if isinstance(e, journal.RegionRejected)]
    assert all(plan.at(1).provider == name for plan in plans)
    differ = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), None)
    assert differ is None or margins[differ] <= close, f"token {differ}, by {margins[differ]}"


def needs(name: str, model: Any) -> None:
    from moe_compile.activation import Activation
    from moe_compile.spec import ExpertsSpec

    c = model.config
    spec = ExpertsSpec(
        E=c.num_experts, K=c.num_experts_per_tok, H=c.hidden_size, I=c.moe_intermediate_size,
        act=Activation.parse("swiglu"), w="bf16",
    )  # fmt: skip
    verdict = providers()[name].available() and providers()[name].supports(spec, facts(GPU))
    if not verdict:
        pytest.skip(str(verdict))


@pytest.fixture(scope="module")
def byte_moe() -> Any:
    import transformers

    if not FOLDER.is_dir():
        pytest.skip(f"the trained model byte_moe is not at {FOLDER}")
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).cuda().eval()


@pytest.fixture(scope="module")
def qwen3_30b() -> Any:
    """Its geometry cut to four layers, random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
        num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=4096,
        max_position_embeddings=4096, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(GPU):
        return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name", FORCED)
def test_trained_model(name: str, mode: str | None, byte_moe: Any) -> None:
    needs(name, byte_moe)
    prompt = torch.tensor(list(PROMPT.encode()), device=GPU)[None]
    check(byte_moe, name, prompt, NEW, mode, close=2**-6)


@pytest.mark.parametrize("name", FORCED)
def test_qwen3_30b_geometry_under_cuda_graphs(name: str, qwen3_30b: Any) -> None:
    needs(name, qwen3_30b)
    prompt = torch.randint(0, 4096, (1, 24), device=GPU, generator=torch.Generator(GPU).manual_seed(0))
    check(qwen3_30b, name, prompt, 12, "reduce-overhead", close=2**-6)


@pytest.mark.parametrize("name", ["flashinfer_cutlass", "flashinfer_frost_low_latency"])
def test_rows_exchanged_in_place_need_no_copy(name: str, qwen3_30b: Any) -> None:
    needs(name, qwen3_30b)
    prompt = torch.randint(0, 4096, (1, 24), device=GPU, generator=torch.Generator(GPU).manual_seed(0))
    expected, _ = greedy(qwen3_30b, qwen3_30b, prompt, 4)
    held = stored.held_bytes()
    assert len(moe_compile.prepare(qwen3_30b, weights="swap_in_place").changes) == 4
    try:
        assert greedy(qwen3_30b, qwen3_30b, prompt, 4)[0] == expected
        check(qwen3_30b, name, prompt, 8, None, close=2**-6, copies=0)
        assert stored.held_bytes() == held
    finally:
        moe_compile.restore(qwen3_30b)
    assert greedy(qwen3_30b, qwen3_30b, prompt, 4)[0] == expected
