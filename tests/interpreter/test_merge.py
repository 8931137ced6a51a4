"""Routes for other libraries: repeated experts are one, ids outside are none, and the sum is the same."""

import pytest
import torch

from moe_compile.kernels.merge import merge_routes, merge_routes_torch


@pytest.mark.parametrize("absent", [-1, 0])
@pytest.mark.parametrize("K", [1, 3, 8])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_the_kernel_is_its_twin(ids_dtype, K, absent):
    g = torch.Generator().manual_seed(K)
    ids = torch.randint(-2, 6, (9, K), generator=g).to(ids_dtype)  # repeats, and ids outside of 0 to 4
    weights = torch.randn(9, K, generator=g).half()
    got, expected = merge_routes(ids, weights, 5, absent), merge_routes_torch(ids, weights, 5, absent)
    assert got[0].dtype == torch.int32 and got[1].dtype == torch.float32
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-7)


def test_the_weighted_sum_over_experts_is_unchanged():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 5, (32, 6), generator=g)
    weights = torch.randn(32, 6, generator=g)
    y = torch.randn(4, generator=g).double()
    valid = (ids >= 0) & (ids < 4)
    before = (weights.double() * torch.where(valid, y[ids.clamp(0, 3)], 0.0)).sum(-1)
    merged, w = merge_routes(ids, weights, 4, -1)
    kept = merged >= 0
    after = (w.double() * torch.where(kept, y[merged.clamp(0).long()], 0.0)).sum(-1)
    torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-6)
    for row in merged.tolist():
        real = [i for i in row if i >= 0]
        assert len(real) == len(set(real))


def test_distinct_ids_and_their_weights_pass_exactly():
    ids = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i))[:8] for i in range(5)])
    weights = torch.rand(5, 8, generator=torch.Generator().manual_seed(9))
    merged, w = merge_routes(ids[:, ::2], weights[:, ::2], 64, -1)  # strided
    assert torch.equal(merged, ids[:, ::2].int())
    assert torch.equal(w, weights[:, ::2])


def test_no_weights_are_ones_and_a_repeat_counts_twice():
    merged, w = merge_routes(torch.tensor([[1, 1, 2]]), None, 4, -1)
    assert merged.tolist() == [[1, -1, 2]]
    assert w.tolist() == [[2.0, 0.0, 1.0]]
