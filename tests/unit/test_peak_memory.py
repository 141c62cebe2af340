import pytest
import torch

from tests.harness import wait_for
from weightcast.runtime import peak_memory
from weightcast.runtime.peak_memory import PeakMemory

MIB = 1 << 20
CPU = torch.device("cpu")


def touch(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """An agent that another test has left in the middle of an update measures on."""
    monkeypatch.setattr(peak_memory, "_open", [])


@pytest.fixture(params=["kernel", "sampler"])
def way(request, monkeypatch, tmp_path):
    if request.param == "sampler":
        monkeypatch.setattr(peak_memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    return request.param


def test_peak_is_seen_after_it_is_gone(way):
    with PeakMemory(CPU) as peak:
        block = touch(64 * MIB)
        if way == "sampler":
            wait_for(lambda: peak_memory._Sampler.peak_bytes - peak._start_bytes > 60 * MIB, "the thread that samples")
        del block
    assert 60 * MIB < peak.extra_bytes < 80 * MIB


def test_memory_from_before_the_measurement_does_not_count(way):
    block = touch(64 * MIB)
    with PeakMemory(CPU) as peak:
        assert block[-1] == 1
    assert peak.extra_bytes < 16 * MIB


def test_an_inner_measurement_does_not_hide_the_outer_peak():
    with PeakMemory(CPU) as outer:
        block = touch(96 * MIB)
        del block
        with PeakMemory(CPU) as inner:
            block = touch(32 * MIB)
            del block
    assert 24 * MIB < inner.extra_bytes < 60 * MIB
    assert outer.extra_bytes > 90 * MIB


def test_peak_can_be_read_from_inside():
    with PeakMemory(CPU) as peak:
        assert peak.extra_bytes < 16 * MIB
        block = touch(64 * MIB)
        assert peak.extra_bytes > 60 * MIB
        del block


def test_freed_heap_memory_stays_with_a_process_that_will_need_it_again(monkeypatch):
    trims: list[int] = []
    monkeypatch.setattr(peak_memory, "_trim", lambda: trims.append(1))
    with PeakMemory(CPU, trim=False) as peak:
        block = touch(64 * MIB)
    assert trims == []
    assert block[-1] == 1
    assert peak.extra_bytes > 60 * MIB
    with PeakMemory(CPU):
        assert trims == [1]
