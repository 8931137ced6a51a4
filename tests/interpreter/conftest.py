"""Tests of our Triton kernels on the CPU, in Triton's interpreter: `pytest tests/interpreter`, alone.

They need their own process, because triton reads TRITON_INTERPRET when it is first imported, and the providers then say
that a CPU runs them. In a run that collects anything else the folder is ignored.
"""

import os
import sys
from pathlib import Path


def pytest_configure(config):
    if all("interpreter" in Path(arg).parts for arg in config.args) and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path, config):
    return None if os.environ.get("TRITON_INTERPRET") == "1" else True
