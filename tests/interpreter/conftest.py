"""Tests of our Triton kernels on the CPU, in Triton's interpreter: `pytest tests/interpreter`, alone.

They need their own process, because triton reads TRITON_INTERPRET when it is first imported, and the providers then say
that a CPU runs them. A run over all of tests/ leaves the folder out; one that names it beside others is refused.
"""

import os
import sys
from pathlib import Path

import pytest


def pytest_configure(config):
    here, at = Path(__file__).parent, config.invocation_params.dir
    paths = [(at / arg.partition("::")[0]).resolve() for arg in config.args]
    ours = [path == here or here in path.parents for path in paths]
    if any(ours) and not (all(ours) and "triton" not in sys.modules):
        raise pytest.UsageError("tests/interpreter runs alone: triton asks once, when imported, whether to interpret")
    if any(ours):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path, config):
    return None if os.environ.get("TRITON_INTERPRET") == "1" else True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips what triton 3.6 can't interpret: it makes a loop's bound of an array of one number, which numpy refuses
    from 2.4 on."""
    try:
        return (yield)
    except Exception as error:
        import numpy
        import triton

        old = triton.__version__.startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0"
        if old and "only 0-dimensional arrays can be converted to Python scalars" in str(error):
            pytest.skip("triton 3.6 interprets a loop over a computed number of steps with numpy below 2.4 only")
        raise
