"""Plan without the hardware: which kernels would run a block of Qwen3-30B-A3B on an H200, and how long they would take.

The specs are those that recognition reads off a graph; here they are written by hand.
"""

from moe_compile import ExpertsSpec
from moe_compile.hardware import named
from moe_compile.plan import account, plan_experts
from moe_compile.tables import bucket_rows

QWEN3_30B = (
    "experts(E=128 K=8 H=2048 I=768 act=swiglu gate_up=EGH:gate_up down=EHI bias=none weight=output x=bf16 w=f32 "
    "out=bf16)"
)


def main(device: str = "H200") -> list[tuple[str, ...]]:
    """Rows of the plan: tokens, predicted us, the datasheet's limit, what sets it, fill, waves, the runner-up."""
    spec, gpu = ExpertsSpec.parse(QWEN3_30B), named(device)
    planning = plan_experts(spec, gpu)
    rows = bucket_rows(account(planning, spec, gpu))
    print(f"{spec}\non {gpu}")
    for row in rows:
        print("  ".join(f"{cell:>9}" for cell in row))
    for bound, candidate in planning.plan.buckets:
        print(f"up to {bound or 'any'} tokens: {candidate}")
    return rows


if __name__ == "__main__":
    main()
