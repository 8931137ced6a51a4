"""Ask what became of each MoE block of a model, and why.

The model is a tiny gpt-oss with random weights: interleaved gate and up rows, biases and a clamped activation, all read
from the graph, none of it from the model's name.
"""

import torch
from transformers import GptOssConfig, GptOssForCausalLM

import moe_compile


def main() -> moe_compile.Report:
    """The report, printed too."""
    config = GptOssConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        report = moe_compile.explain(model, torch.arange(16)[None])
    print(report)

    # The report is data, too.
    for region in report.regions[:1]:
        experts = region.spec.experts
        print(f"\n{region.where.module}: {experts.E} experts, {experts.K} a token, activation {experts.act.name}")
    return report


if __name__ == "__main__":
    main()
