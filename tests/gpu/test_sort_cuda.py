"""Sorting on a CUDA device: the schedule of its torch twin at any size, from several streams at once and in graphs."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytest.importorskip("triton")

from moe_compile.kernels import sort  # noqa: E402
from moe_compile.kernels.sort import Schedule, sort_routes, sort_routes_reference  # noqa: E402
from moe_compile.kernels.zeroed import zeroed  # noqa: E402

GPU = torch.device("cuda", 0)


def drawn(T: int, K: int, E: int, seed: int = 0) -> torch.Tensor:
    """Ids of which some are dropped."""
    return torch.randint(-1, E + 1, (T, K), device=GPU, generator=torch.Generator(GPU).manual_seed(seed))


def same(got: Schedule, want: Schedule, ids: torch.Tensor, E: int) -> bool:
    placed = int(((ids >= 0) & (ids < E)).sum())
    return torch.equal(got.tiles(), want.tiles()) and torch.equal(got.routes()[:placed], want.routes()[:placed])


def clean() -> bool:
    """Whether every launch left its words zero."""
    torch.cuda.synchronize()
    return not any(bool(made.any()) for made in zeroed(GPU).made)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("T", "K", "E"),
    [(3, 8, 128), (256, 8, 128), (300, 10, 512), (1025, 8, 128), (4096, 2, 8), (70_000, 8, 1024), (600_000, 8, 64)],
)
def test_any_size(T, K, E, dtype):
    ids = drawn(T, K, E).to(dtype)
    for block, part in ((16, 0), (64, 0), (160, 32), (192, 64)):
        want = sort_routes_reference(ids, E, block, part)
        assert same(sort_routes(ids, E, block, part), want, ids, E)
        got = sort_routes(ids, E, block, part, inverse=True)
        assert same(got, want, ids, E) and torch.equal(got.ends(E), want.ends(E))
        here = (ids.reshape(-1) >= 0) & (ids.reshape(-1) < E)
        assert torch.equal(got.positions()[here], want.positions()[here])
    assert clean()


@pytest.mark.parametrize("kept", [0, 1])
def test_one_expert_takes_all_or_none_does(kept):
    ids = torch.full((3000, 4), 5 if kept else -1, device=GPU)
    assert same(sort_routes(ids, 64, 128), sort_routes_reference(ids, 64, 128), ids, 64)
    assert clean()


def test_most_routes():
    """Of 2^31 - 1 the last two have an expert: counting and placing reach the end, and stop there."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    ids = torch.full((2**31 - 1, 1), -1, dtype=torch.int32, device=GPU)
    ids[-2:] = 3
    got = sort_routes(ids, 8, 128)
    assert got.tiles().tolist() == [[3, 0, 2, 1 << 16]]
    assert got.routes()[:2].tolist() == [2**31 - 3, 2**31 - 2]
    assert clean()


@pytest.mark.parametrize("T", [300, 4096, 70_000])
def test_programs_that_count_what_others_do(T, monkeypatch):
    """Without patience, all of them at once."""
    monkeypatch.setattr(sort, "_PATIENCE", 0)
    monkeypatch.setattr(sort, "counts_alone", lambda R, E: False)
    for seed in range(10):
        ids = drawn(T, 8, 128, seed=seed)
        assert same(sort_routes(ids, 128, 64), sort_routes_reference(ids, 128, 64), ids, 128)
    assert clean()


def test_streams_side_by_side():
    each = [drawn(T, 8, 128, seed=T) for T in (4096, 2048, 8192, 512)]
    want = [sort_routes_reference(ids, 128, 64) for ids in each]
    streams = [torch.cuda.Stream() for _ in each]
    torch.cuda.synchronize()
    got: list[list[Schedule]] = [[] for _ in each]
    for _ in range(100):
        for found, ids, stream in zip(got, each, streams):
            with torch.cuda.stream(stream):
                found.append(sort_routes(ids, 128, 64))
    torch.cuda.synchronize()
    for found, ids, twin in zip(got, each, want):
        assert all(same(schedule, twin, ids, 128) for schedule in found)
    assert clean()


def test_graphs_captured_on_one_stream_and_replayed_side_by_side():
    each = [drawn(4096, 8, 128, seed=seed) for seed in range(3)]
    want = [sort_routes_reference(ids, 128, 64) for ids in each]
    sort_routes(each[0], 128, 64)  # compiles
    capturing, graphs, got = torch.cuda.Stream(), [], []
    for ids in each:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=capturing):
            got.append([sort_routes(ids, 128, 64) for _ in range(5)])
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(capturing):
            sort_routes(each[0], 128, 64)
    torch.cuda.synchronize()
    for found, ids, twin in zip(got, each, want):
        assert all(same(schedule, twin, ids, 128) for schedule in found)
    assert clean()
