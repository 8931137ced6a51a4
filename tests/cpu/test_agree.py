"""Agreement between ranks: processes with gloo, each with its own story; all of them end the same way, with reasons."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import FORKS

from moe_compile import agree as agreement
from moe_compile.agree import Disagreement, Proposal, agree

SPECS = {"specs": "experts(E=8)"}


def proposal(times: dict[str, float | None], **terms: str) -> Proposal:
    return Proposal(terms={**SPECS, **terms}, times={"T=16": times})


def _rank(story: Callable[..., Any], rank: int, world: int, file: str, out: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{file}")
    start = time.monotonic()
    try:
        said: Any = story(rank)
    except Disagreement as error:
        said = str(error)
    out.put((rank, said, time.monotonic() - start))
    dist.barrier()  # the store lives in rank 0's process
    dist.destroy_process_group()


def run(story: Callable[[int], Any], world: int, tmp_path: Path) -> tuple[dict[int, Any], float]:
    """(what each rank ended with, the longest time)."""
    out = FORKS.Queue()
    file = str(tmp_path / "rendezvous")
    processes = [FORKS.Process(target=_rank, args=(story, r, world, file, out)) for r in range(world)]
    for p in processes:
        p.start()
    try:
        said = [out.get(timeout=90) for _ in processes]
    finally:
        for p in processes:
            p.join(timeout=20)
            p.kill()
    return {rank: what for rank, what, _ in said}, max(seconds for *_, seconds in said)


def measured_apart(rank: int) -> Any:
    # a is faster on average, b on the slowest rank; c is known to rank 0 alone
    times = [{"a": 1.0, "b": 2.5, "c": 0.1}, {"a": 3.0, "b": 2.0}, {"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}]
    return agree(proposal(times[rank]), seconds=30)


def cold_and_warm(rank: int) -> Any:
    if rank == 0:
        time.sleep(2.0)  # tunes, while the other has it in its cache
    first = agree(proposal({"a": 1.0 + rank, "b": 1.5}), seconds=30)
    return first, agree(proposal({"c": None}), seconds=30)


def other_specs(rank: int) -> Any:
    return agree(Proposal(terms={"specs": f"experts(E={8 + rank % 2})"}), seconds=30)


def nothing_in_common(rank: int) -> Any:
    return agree(proposal({f"only on {rank}": 1.0}), seconds=30)


def one_error(rank: int) -> Any:
    if rank == 1:
        return agree(None, "out of memory", seconds=30)
    return agree(proposal({"a": 1.0}), seconds=30)


def one_missing(rank: int) -> Any:
    if rank == 1:
        return "stayed away"
    return agree(proposal({"a": 1.0}), seconds=1)


def late(rank: int) -> Any:
    time.sleep(3.0 * rank)
    return agree(proposal({"a": 1.0}), seconds=1)


def a_graph_of_its_own(rank: int) -> Any:
    """Rank 0 compiles a graph that the other does not; after that both compile the same one."""
    alone = None
    if rank == 0:
        with pytest.raises(Disagreement, match="1 did not come"):
            agree(proposal({"a": 1.0}, graph="another"), seconds=1)
        alone = "failed"
    else:
        time.sleep(2.0)
    return alone, agree(proposal({"a": 1.0}, graph="common"), seconds=30)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_measured_apart_choose_together(world: int, tmp_path: Path) -> None:
    said, _ = run(measured_apart, world, tmp_path)
    assert all(said[rank] == {"T=16": "b"} for rank in range(world))


def test_a_warm_rank_waits_for_a_cold_one(tmp_path: Path) -> None:
    said, _ = run(cold_and_warm, 2, tmp_path)
    assert said[0] == said[1] == ({"T=16": "b"}, {"T=16": "c"})


@pytest.mark.parametrize(
    ("story", "world", "reasons"),
    [
        (other_specs, 2, ["differ in specs", "rank 0: experts(E=8)", "rank 1: experts(E=9)"]),
        (other_specs, 4, ["rank 2: experts(E=8)", "rank 3: experts(E=9)"]),
        (nothing_in_common, 2, ["no candidate in common", "rank 0: only on 0", "rank 1: only on 1"]),
        (one_error, 4, ["rank 1: out of memory"]),
        (late, 2, ["1 did not come"]),
    ],
)
def test_one_rank_fails_all_with_the_reasons(
    story: Callable[[int], Any], world: int, reasons: list[str], tmp_path: Path
) -> None:
    said, seconds = run(story, world, tmp_path)
    assert len(set(said.values())) == 1, said
    assert all(reason in said[0] for reason in reasons), said[0]
    assert seconds < 15, "an error was found by waiting"


def test_a_missing_rank_is_named_after_the_timeout(tmp_path: Path) -> None:
    said, seconds = run(one_missing, 4, tmp_path)
    assert said[1] == "stayed away"
    assert {said[r] for r in (0, 2, 3)} == {said[0]}
    assert "of 4 ranks, 1 did not come within 1 s" in said[0]
    assert 1 <= seconds < 15


def test_a_graph_that_one_rank_compiles_alone_costs_only_that_one(tmp_path: Path) -> None:
    said, _ = run(a_graph_of_its_own, 2, tmp_path)
    assert said == {0: ("failed", {"T=16": "a"}), 1: (None, {"T=16": "a"})}


def test_one_process_agrees_with_itself() -> None:
    assert agreement.ranks() == 1
    assert agree(proposal({"a": 2.0, "b": 1.0}), seconds=0) == {"T=16": "b"}
    assert agree(proposal({"a": None}), seconds=0) == {"T=16": "a"}
    with pytest.raises(Disagreement, match="no kernel"):
        agree(None, "no kernel", seconds=0)
