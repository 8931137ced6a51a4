"""Is it us? Compile a model with all of its blocks replaced, with some, and with none, and check each block by itself.

In a program the same switches are MOE_COMPILE="fuel=1", "only=model.layers.0.*" and "verify=1".
"""

from typing import Any

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from moe_compile import journal
from moe_compile.journal import Verified


def main() -> dict[str, tuple[int, float]]:
    """For each setting: (blocks replaced, largest difference of the logits from eager)."""
    config = OlmoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = OlmoeForCausalLM(config).eval()
    ids = torch.arange(16)[None]
    settings: dict[str, dict[str, Any]] = {
        "all blocks": {},
        "the first block": {"moe.fuel": 1},
        "layer 2 alone": {"moe.only": "model.layers.2.*"},
        "none": {"moe.fuel": 0},
        "all, each verified": {"moe.verify": True},
    }
    found = {}
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        for name, options in settings.items():
            torch.compiler.reset()
            compiled = torch.compile(model, backend="moe", options={"moe.inner": "eager", **options})
            with journal.capture() as events:
                logits = compiled(ids, use_cache=False).logits
            replaced = sum(e.regions for e in events if isinstance(e, journal.Lowered))
            found[name] = replaced, float((logits - eager).abs().max())
            print(f"{name:20} {replaced} replaced, logits differ from eager's by {found[name][1]:.1e}")
            for event in events:
                if isinstance(event, Verified):
                    print(f"{'':20} block {event.region}: rms {event.rms:.1e}, bound {event.rms_bound:.1e}")
    return found


if __name__ == "__main__":
    main()
