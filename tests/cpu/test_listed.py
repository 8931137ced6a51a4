"""Kernels that read a table of addresses, compiled for a GPU that is not there: loads as wide as from one tensor."""

import pytest
from absent import printed

pytest.importorskip("triton")

COMPILE = """
from moe_compile.activation import Activation
from moe_compile.kernels import decode, grouped
from moe_compile.kernels.epilogue import epilogue
from moe_compile.kernels.listed import Table
from moe_compile.kernels.sort import Schedule
E, K, H, I = 4, 2, 1024, 128
def table(multiple, *shape):
    return Table(torch.zeros(E, dtype=torch.int64), (E, *shape), (0, shape[1], 1), multiple)
plan, act = Schedule(torch.zeros(1000, dtype=torch.int32), 20, 64), epilogue(Activation.parse("swiglu").expr)
x, ids = bf16(32, H), torch.zeros(32, K, dtype=torch.int64)
rows = decode.Rows(UP_N=2, UP_K=1024, DOWN_N=4, DOWN_K=128)
tile = grouped.Tile(BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, SWAP=1)
for gate, up, down in [(bf16(E, I, H), bf16(E, I, H), bf16(E, H, I))] + [
    (table(m, I, H), table(m, I, H), table(m, H, I)) for m in (16, 2)
]:
    how = {"sizes": (H, I), "gated": True, "halves": "separate", "k_major": True}
    a = decode.up(x, ids, None, (gate, up), (), act, E=E, rows=rows, **how)
    decode.down(a, ids, None, down, None, torch.bfloat16, E=E, k_major=True, rows=rows)
    grouped.fc1(x, (gate, up), (), None, plan, act, choices=K, tile=tile, **how)
wide = re.compile(r"ld.global[\\w.:]*v4|cp.async.cg")
print(json.dumps([[k.metadata.name, len(wide.findall(k.asm["ptx"]))] for k in made]))
"""


def test_a_table_of_aligned_addresses_is_read_as_wide_as_one_tensor():
    found = printed(COMPILE)
    one, aligned, odd = found[:3], found[3:6], found[6:]
    assert [name for name, _ in one] == ["_up_kernel", "_down_kernel", "_fc1_kernel"]
    assert aligned == one
    for (_, narrow), (name, wide) in zip(odd, one, strict=True):
        assert narrow < wide, name  # x and the intermediate are wide still
