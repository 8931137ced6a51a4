"""Compile a model with backend="moe". Nothing of moe_compile is imported: torch finds the backend by its name.

The model is a tiny Mixtral with random weights, so nothing is downloaded; `from_pretrained` works the same.
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def main() -> float:
    """The largest difference between the compiled model's logits and eager's."""
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    input_ids = torch.randint(0, config.vocab_size, (1, 24))

    compiled = torch.compile(model, backend="moe")
    with torch.no_grad():
        eager_logits = model(input_ids).logits
        logits = compiled(input_ids).logits

    difference = float((logits - eager_logits).abs().max())
    print(f"logits up to {float(eager_logits.abs().max()):.3f}, largest difference from eager {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
