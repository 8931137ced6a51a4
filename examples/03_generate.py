"""Generate with a static cache: transformers compiles the decoding step with the backend that CompileConfig names.

It passes `mode="reduce-overhead"`, which reaches Inductor (CUDA graphs on a GPU). In fp32 the text is that of eager,
token for token. The model is a tiny Qwen3-MoE with random weights.
"""

import torch
from transformers import CompileConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM


def main() -> tuple[list[int], list[int]]:
    """(the tokens of the compiled model, those of eager)."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,  # spreads the logits, so that random weights have something to say
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3MoeForCausalLM(config).to(device).eval()
    prompt = torch.arange(10, device=device)[None]
    settings = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": "static"}

    compile_config = CompileConfig(backend="moe")
    compile_config._compile_all_devices = True  # transformers compiles on accelerators only; this is for a CPU
    compiled = model.generate(prompt, compile_config=compile_config, **settings)[0].tolist()
    eager = model.generate(prompt, disable_compile=True, **settings)[0].tolist()
    print(f"moe   {compiled[10:]}\neager {eager[10:]}")
    return compiled, eager


if __name__ == "__main__":
    main()
