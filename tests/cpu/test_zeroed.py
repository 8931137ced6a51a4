"""Zeroed words: launches that may run side by side never share them."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moe_compile.kernels import zeroed as module
from moe_compile.kernels.zeroed import Zeroed, zeroed


@pytest.fixture
def device(monkeypatch):
    """A device whose current stream and capture the test sets; its memory is the CPU's."""
    now = SimpleNamespace(stream=7, capturing=False, lasting=0)

    def lasting(make, device):
        now.lasting += 1
        return make()

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: now.capturing, raising=False)
    monkeypatch.setattr(module, "lasting", lasting)
    monkeypatch.setattr(module, "_LAUNCHES", 8)
    now.words = Zeroed(torch.device("cpu"))
    now.words.cuda = True
    return now


def addresses(words, times):
    return [words().data_ptr() for _ in range(times)]


def test_a_stream_keeps_its_words(device):
    first = addresses(device.words, 3)
    device.stream = 8
    second = addresses(device.words, 3)
    device.stream = 7
    assert set(addresses(device.words, 2)) == set(first) and len({*first, *second}) == 2
    assert device.words(8).data_ptr() == second[0]
    assert all(a % 16 == 0 for a in (*first, *second))
    assert device.lasting == len(device.words.made) == 1


def test_a_captured_launch_has_words_of_its_own(device):
    eager = addresses(device.words, 1)
    device.capturing = True
    captured = addresses(device.words, 7)
    assert len({*eager, *captured}) == 8
    assert all(device.words.owns(device.words.made[0][i]) for i in range(8))
    late = [device.words() for _ in range(3)]  # none are left, and a capture can't make some
    assert len(device.words.made) == 1 and not any(map(device.words.owns, late))
    assert all(t.tolist() == [0] * module.WORDS for t in late) and len({t.data_ptr() for t in late}) == 3
    device.capturing = False
    assert addresses(device.words, 1) == eager
    device.stream = 9
    assert device.words.owns(device.words()) and len(device.words.made) == 2


def test_the_stream_of_every_thread_is_another_one(device):
    device.stream = 2
    found = []
    thread = threading.Thread(target=lambda: found.append(device.words().data_ptr()))
    thread.start()
    thread.join()
    assert found[0] != device.words().data_ptr()


def test_words_of_a_device_are_found_again():
    cpu = torch.device("cpu")
    assert zeroed(cpu) is zeroed(cpu) and zeroed(cpu)().data_ptr() == zeroed(cpu)().data_ptr()
    assert not zeroed(cpu).owns(torch.zeros(4))
    memory = torch.zeros(24)
    own = Zeroed(cpu)
    own.made.append(memory[8:16])
    assert [own.owns(memory[i : i + 4]) for i in (0, 4, 8, 12, 16)] == [False, False, True, True, False]
