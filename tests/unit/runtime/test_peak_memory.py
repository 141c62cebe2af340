import pytest
import torch
from msgspec.structs import replace

from tests.helpers.exports import bucketize
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.sent import CastSums, SentDigests, casts_of
from weightcast.exporters.module import ModuleExporter
from weightcast.runtime import peak_memory
from weightcast.runtime.free_memory import Scratch
from weightcast.runtime.gc_pause import gc_paused
from weightcast.runtime.peak_memory import PeakMemory
from weightcast.wire.layout import Packing, plan_buckets

MIB = 1 << 20
CPU = torch.device("cpu")


def touch(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """An agent that another test has left in the middle of an update measures on."""
    monkeypatch.setattr(peak_memory, "_open", [])


@pytest.fixture(params=["resets", "does not reset"])
def kernel(request, monkeypatch, tmp_path):
    """Whether the kernel lets a process reset its high-water mark."""
    if request.param != "resets":
        monkeypatch.setattr(peak_memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    return request.param


def test_peak_is_seen_after_it_is_gone():
    with PeakMemory(CPU) as peak:
        block = touch(64 * MIB)
        del block
    assert 60 * MIB < peak.extra_bytes < 80 * MIB


def test_what_is_still_there_at_the_end_is_seen_on_any_kernel(kernel):
    block = touch(256 * MIB)
    del block
    with PeakMemory(CPU) as peak:
        block = touch(64 * MIB)
    assert 60 * MIB < peak.extra_bytes < 80 * MIB
    assert block[-1] == 1


def test_memory_from_before_the_measurement_does_not_count(kernel):
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
    peak_memory._trim()  # what earlier tests have freed
    monkeypatch.setattr(peak_memory, "_trim", lambda: trims.append(1))
    with PeakMemory(CPU, trim=False) as peak:
        block = touch(64 * MIB)
    assert trims == []
    assert block[-1] == 1
    assert peak.extra_bytes > 60 * MIB
    with PeakMemory(CPU):
        assert trims == [1]


def test_pages_of_a_mapped_model_are_not_extra_memory(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"\1" * (64 * MIB))
    mapped = torch.from_file(str(path), shared=True, size=64 * MIB, dtype=torch.uint8)
    with PeakMemory(CPU) as peak:
        block = touch(32 * MIB)
        assert int(mapped[:: 4 * 1024].long().sum()) == 16 * 1024
        del block
    assert 28 * MIB < peak.extra_bytes < 48 * MIB


def test_casts_in_turn_take_one_buffer():
    # Allocated one by one, the same casts leave holes in the heap and take hundreds of MiB.
    source = torch.ones(16 * MIB, dtype=torch.bfloat16)
    scratch, kept = Scratch(), []
    with PeakMemory(CPU) as peak:
        for number in range(24):
            part = scratch.cast(source[: (4 - number % 3) * MIB], torch.float32)
            kept.append(part.sum())
            del part
        scratch.free()
    assert [int(value) >> 20 for value in kept[:3]] == [4, 3, 2]
    assert peak.extra_bytes < 24 * MIB


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_filling_and_summing_buckets_takes_no_more_than_two_casts(wire_dtype):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(24 * 1024, 1024))  # 96 MiB
    exporter = ModuleExporter(model, wire_dtype=wire_dtype, family="plain")
    group = TrainerGroup.connect(exporter.device, timeout_s=60.0)
    specs = tuple(exporter.specs())
    layouts = plan_buckets(specs, bucket_bytes=8 * MIB, packing=Packing())
    slots = [touch(8 * MIB), touch(8 * MIB)]
    kept = [replace(spec, dtype="float32") for spec in specs]
    with PeakMemory(CPU) as peak, gc_paused():
        digests = SentDigests(CastSums(casts_of(specs, [kept])))
        for bucket in bucketize(exporter, layouts, group, slots, sums=True):
            digests.add(bucket)
        digests.release()
    group.close()
    assert peak.extra_bytes < 56 * MIB
