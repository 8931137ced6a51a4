"""Tests find no tuning cache of the user's, and each parallel worker of pytest computes on one thread.

Two workers of two threads on two cores wait for one another:

tests/models of two families took 113 s with two threads and 23 s with one (2 busy cores, 2026-11-30).
"""

import os
import tempfile

import hypothesis

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by child processes too

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="moe_compile_tests_")

hypothesis.settings.register_profile("busy", deadline=None)  # what other processes take counts against a deadline
hypothesis.settings.load_profile("busy")
