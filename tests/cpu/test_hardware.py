"""Devices as facts: found by name and architecture, read from the driver where there is one."""

from types import SimpleNamespace

import pytest
import torch

from moe_compile import hardware
from moe_compile.hardware import DEVICES, GENERIC, facts, named


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_every_row_is_found_by_name_and_holds_together(device):
    assert named(device.name) == named(device.name.lower()) == named(f"NVIDIA {device.name} 80GB") == device
    assert named(device.arch).arch == device.arch
    assert device.flop_rate("bf16") > device.flop_rate("f32") > 1e13
    assert device.flop_rate("f64") == device.flop_rate("f32")  # no units of its own in the table
    assert device.l2_bandwidth > device.bandwidth
    assert device.shared_bytes <= device.shared_per_processor
    assert device.arch in str(device)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"device 'H900' is not one of A100 \(sm_80\), H200"):
        named("H900")


def driver(name, **changes):
    read = {"major": 9, "minor": 0, "multi_processor_count": 78, "L2_cache_size": 30 << 20,
            "shared_memory_per_block_optin": 227 << 10, "shared_memory_per_multiprocessor": 228 << 10,
            "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536}  # fmt: skip
    return SimpleNamespace(name=name, **{**read, **changes})


@pytest.fixture
def machine(monkeypatch):
    """A machine whose GPU the driver describes as told."""

    def have(properties):
        hardware._read.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return facts(torch.device("cuda"))

    yield have
    hardware._read.cache_clear()


def test_counts_are_the_drivers_and_rates_the_rows(machine):
    """A part of an H200 has the row's rates but its own processors."""
    device = machine(driver("NVIDIA H200"))
    assert (device.name, device.processors, device.l2_bytes) == ("H200", 78, 30 << 20)
    assert device.bandwidth == named("H200").bandwidth


def test_a_gpu_without_a_row_is_scaled_by_its_processors_and_memory(machine):
    device = machine(driver("NVIDIA X1", major=8, minor=6, memory_clock_rate=9_000_000, memory_bus_width=256))
    assert (device.name, device.arch) == ("NVIDIA X1", "sm_86")
    assert device.bandwidth == pytest.approx(9e9 * 2 * 256 / 8)
    assert device.flop_rate("bf16") == pytest.approx(0.78 * GENERIC.flop_rate("bf16"))
    assert machine(driver("NVIDIA X2")).bandwidth == pytest.approx(0.78 * GENERIC.bandwidth)


def test_a_cpu_has_its_threads_and_facts_of_facts_are_themselves():
    cpu = facts(torch.device("cpu"))
    assert (cpu.type, cpu.arch, cpu.processors) == ("cpu", "cpu", torch.get_num_threads())
    assert facts(cpu) is cpu
