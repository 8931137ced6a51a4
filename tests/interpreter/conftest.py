"""Tests of our Triton kernels on the CPU, in Triton's interpreter. They need their own pytest process, because triton
reads TRITON_INTERPRET when it is first imported: `pytest tests/interpreter`. Elsewhere the folder is skipped."""

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config, items):
    import triton

    if not triton.knobs.runtime.interpret:
        skip = pytest.mark.skip(reason="triton was imported without TRITON_INTERPRET=1: run `pytest tests/interpreter`")
        for item in items:
            if "interpreter" in item.path.parts:
                item.add_marker(skip)
