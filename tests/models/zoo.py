"""Tiny random models of HuggingFace's MoE families: configurations that run in seconds on a CPU."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
_GROUPED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}


@dataclass(frozen=True)
class Family:
    """`moe_layers`: how many MoE blocks the tiny model has."""

    config: str
    model: str
    moe_layers: int
    settings: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", 2, {
        "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": Family("Qwen2MoeConfig", "Qwen2MoeForCausalLM", 2, {
        "intermediate_size": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen3_moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", 2, {
        "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True}),
    "qwen3_next": Family("Qwen3NextConfig", "Qwen3NextForCausalLM", 2, {
        "intermediate_size": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "layer_types": ["full_attention", "full_attention"]}),
    "olmoe": Family("OlmoeConfig", "OlmoeForCausalLM", 2, {
        "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v2": Family("DeepseekV2Config", "DeepseekV2ForCausalLM", 1, {
        **_MLA, **_GROUPED, "intermediate_size": 32, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "topk_method": "greedy"}),
    "deepseek_v3": Family("DeepseekV3Config", "DeepseekV3ForCausalLM", 1, {
        **_MLA, **_GROUPED, "intermediate_size": 32, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1}),
    "glm4_moe": Family("Glm4MoeConfig", "Glm4MoeForCausalLM", 1, {
        **_GROUPED, "intermediate_size": 32, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1}),
    "gpt_oss": Family("GptOssConfig", "GptOssForCausalLM", 2, {
        "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}),
    "granitemoe": Family("GraniteMoeConfig", "GraniteMoeForCausalLM", 2, {
        "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "nemotron_h": Family("NemotronHConfig", "NemotronHForCausalLM", 1, {
        "intermediate_size": 32, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
        "n_shared_experts": 1, **_GROUPED, "layers_block_type": ["attention", "moe"]}),
    "minimax_m2": Family("MiniMaxM2Config", "MiniMaxM2ForCausalLM", 2, {
        "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}),
}  # fmt: skip


def build(name: str, dtype: torch.dtype, implementation: str | None = None, **settings: Any) -> nn.Module:
    """The family's tiny model in eval mode with random weights."""
    family = FAMILIES[name]
    config_module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    model_module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(config_module, family.config)(**{**_COMMON, **family.settings, **settings})
    if implementation is not None:
        config._experts_implementation = implementation
    return filled(getattr(model_module, family.model), config, dtype)


def filled(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """A model in eval mode, with random weights everywhere (biases too) from a fixed seed."""
    torch.manual_seed(0)
    model: nn.Module = model_class._from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            # zeros, and memory that the library left as it was
            if tensor.is_floating_point() and tensor.dim() and not 1e-6 < tensor.abs().max() < 1e4:
                tensor.normal_(0, 0.02)
    return model.eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 1, vocab: int = 128) -> torch.Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def moe_block(model: nn.Module) -> nn.Module:
    """The last module that holds both the router and the experts, as a copy of its own."""
    blocks = [m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]
    return copy.deepcopy(blocks[-1])


def in_float64(block: nn.Module) -> nn.Module:
    """The block evaluated in float64 by HuggingFace's plain loop over experts: the oracle of errors."""
    oracle = copy.deepcopy(block).double()
    for module in oracle.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return oracle
