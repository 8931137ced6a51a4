"""Compiles our kernels for an H200 that is not there, in a process of its own: Triton keeps one driver a process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

PREAMBLE = """
import json, re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
class Absent:  # enough of a driver to compile for a GPU that is not there
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
driver.set_active(Absent())
from moe_compile.kernels import launch
launch.overlaps = lambda device: True
made = []
def compile_only(bound, key, grid, arguments, free):
    made.append(bound.kernel.warmup(*arguments, *free, *bound.constants, grid=grid, **bound.options))
launch.Bound._compile = compile_only
def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)
"""


def printed(program: str) -> Any:
    """What `program`, run after PREAMBLE, prints last, as JSON; launches append what they compile to `made`."""
    run = subprocess.run([sys.executable, "-c", PREAMBLE + program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])
