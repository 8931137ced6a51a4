"""Tests of kernels and models on a GPU take the predicted plan, which is the same everywhere and costs no time."""

import os

os.environ.setdefault("MOE_COMPILE", "tune=off")
