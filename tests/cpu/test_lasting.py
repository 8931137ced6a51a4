"""Memory that outlives the call that makes it is made by another thread, on the caller's stream."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from moe_compile.kernels.lasting import lasting

CPU = torch.device("cpu")


def test_it_is_complete_on_the_callers_stream(monkeypatch):
    seen = []
    stream = SimpleNamespace(synchronize=lambda: seen.append("complete"))

    @contextlib.contextmanager
    def on(given):
        assert given is stream
        seen.append("there")
        yield
        seen.append("left")

    def make():
        seen.append(threading.get_ident())
        return torch.zeros(3)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    assert lasting(make, torch.device("cuda", 0)).tolist() == [0, 0, 0]
    assert seen == ["there", seen[1], "left", "complete"] and seen[1] != threading.get_ident()


def test_the_callers_modes_are_not_its():
    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Refuses(), torch.inference_mode():
        made = lasting(lambda: torch.zeros(2), CPU)
    assert made.tolist() == [0, 0] and not made.is_inference()


def test_what_fails_there_fails_here():
    def make():
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        lasting(make, CPU)
