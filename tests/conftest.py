"""Tests find no tuning cache of the user's, and each parallel worker of pytest computes on one thread.

Two workers of two threads on two cores wait for one another:

tests/models of two families took 113 s with two threads and 23 s with one (2 busy cores, 2026-11-30).
"""

import os
import shutil
import tempfile

import hypothesis

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by child processes too
    CACHE = os.path.join(os.environ["XDG_CACHE_HOME"], WORKER)  # in the folder of the process that started it
else:
    CACHE = tempfile.mkdtemp(prefix="moe_compile_tests_")
os.environ["XDG_CACHE_HOME"] = CACHE
PROCESS = os.getpid()

hypothesis.settings.register_profile("busy", deadline=None)  # what other processes take counts against a deadline
hypothesis.settings.load_profile("busy")


def pytest_unconfigure():
    """Workers have ended by then; a fork of this process leaves what is not its own."""
    if os.getpid() == PROCESS and not WORKER:
        shutil.rmtree(CACHE, ignore_errors=True)
