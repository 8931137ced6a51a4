"""Processes for tests of several: forks of one server that has imported what they need, once."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["pytest", "torch._dynamo", "torch.distributed", "torch.testing", "transformers.integrations.moe", "sympy",
     "moe_compile.backend", "moe_compile.choose", "moe_compile.lower", "moe_compile.recognize",
     "moe_compile.providers.triton_grouped"]
)  # fmt: skip
