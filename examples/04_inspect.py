"""Write down everything that the compiler did: graphs before and after, costs, candidates, events, report.html.

The model is a tiny DeepSeek-V3 with random weights: grouped routing with a bias, shared experts beside the routed ones.
"""

import sys
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import moe_compile


def main(folder: str = "build/dump") -> Path:
    """The folder that has the files: of its own in `folder`, for each run."""
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).eval()
    compiled = torch.compile(model, backend="moe", options={"moe.inner": "eager"})
    with torch.no_grad(), moe_compile.debug(folder) as dump:
        compiled(torch.arange(16)[None], use_cache=False)
    assert dump.path is not None
    for file in sorted(dump.path.iterdir()):
        print(f"{file.stat().st_size:8} bytes  {file}")
    return dump.path


if __name__ == "__main__":
    main(*sys.argv[1:2])
