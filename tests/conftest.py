"""Each parallel worker of pytest computes on one thread: two workers with two threads each on two cores spend their time
waiting for one another (tests/models of two families: 113 s, with one thread 23 s; 2 busy cores, 2026-11-30)."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by child processes too
