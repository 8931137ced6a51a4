"""Launches: while kernels are only compiled none runs, not even one that is compiled already: what it reads, a
schedule say, may come from a kernel that has not run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moe_compile.kernels.launch import Bound, ceil_div, compiling, power_of_2


class Kernel:
    """Stands in for a triton kernel: notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def warmup(self, *arguments: Any, **options: Any) -> None:
        self.asked.append("compile")

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.asked.append("run")


def test_nothing_runs_while_kernels_are_compiled() -> None:
    kernel = Kernel()
    bound = Bound(kernel, (), torch.device("cpu"))
    bound.compiled[(7,)] = (lambda *arguments: pytest.fail("a kernel ran"), None, None, ())
    with ThreadPoolExecutor(1) as pool, compiling(pool):
        bound((1, 1), (7,))
        bound((1, 1), (8,))
    assert kernel.asked == ["compile"]
    bound((1, 1), (8,))
    assert kernel.asked == ["compile", "run"]


def test_other_threads_run_while_one_compiles() -> None:
    """A server answers on one thread while another compiles for the next length."""
    kernel = Kernel()
    bound = Bound(kernel, (), torch.device("cpu"))
    with ThreadPoolExecutor(1) as pool, compiling(pool):
        with ThreadPoolExecutor(1) as other:
            other.submit(bound, (1, 1), (7,)).result()
            ran = list(kernel.asked)
        bound((1, 1), (7,))
    assert (ran, kernel.asked) == (["run"], ["run", "compile"])


def test_sizes_of_grids_and_blocks() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [power_of_2(n) for n in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]
