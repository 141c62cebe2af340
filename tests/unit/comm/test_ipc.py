"""Shared memory between processes: the same bytes, reading only, and nothing left behind."""

from __future__ import annotations

import gc
import os
from typing import Any

import msgspec
import pytest
import torch

from weightcast.comm import cuda_driver, ipc
from weightcast.comm.ipc import Mapping, MappingFailed, SharedBuffer, device_of, device_uuid, host_id
from weightcast.errors import ConfigError
from weightcast.receiver.sources import ipc as ipc_source
from weightcast.receiver.sources.ipc import SharedMemorySource
from weightcast.runtime import cuda_calls
from weightcast.wire.bucket_sources import MemoryHandle
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec

CPU = torch.device("cpu")


@pytest.fixture
def buffer():
    made = SharedBuffer(1000, CPU)
    made.data.copy_(torch.arange(1000) % 251)
    yield made
    made.close()


def changed(handle: MemoryHandle, **changes) -> MemoryHandle:
    return msgspec.structs.replace(handle, **changes)


def test_a_mapping_shows_what_the_owner_writes_without_a_copy(buffer):
    mapping = Mapping(buffer.handle())
    mapping.wait()
    assert torch.equal(mapping.data, buffer.data)
    buffer.data.fill_(7)
    assert mapping.data.unique().tolist() == [7]
    mapping.close()
    mapping.close()
    assert mapping.data.numel() == 0


def test_mapping_process_cannot_write_into_the_owners_memory(buffer):
    mapping = Mapping(buffer.handle())
    mapping.data.fill_(99)
    assert 99 not in buffer.data[:50].tolist()
    mapping.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 2**22 + 1},
        {"pid": 0},
        {"fd": 1_000_000},
        {"fd": 0},
        {"token": ""},
        {"token": "0" * 32},
        {"token": "short"},
        {"token": "../../etc"},
        {"size_bytes": 999},
        {"size_bytes": 1 << 46},
        {"size_bytes": 0},
    ],
    ids=str,
)
def test_buffer_that_differs_from_its_handle_is_refused(buffer, changes):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MappingFailed):
        Mapping(changed(buffer.handle(), **changes))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_token_cut_short_is_not_the_token(buffer):
    with pytest.raises(MappingFailed):
        Mapping(changed(buffer.handle(), token=buffer.handle().token[:8]))


def test_a_descriptor_used_again_is_not_mistaken_for_the_buffer():
    first = SharedBuffer(100, CPU)
    handle = first.handle()
    first.close()
    second = SharedBuffer(100, CPU)
    assert second.handle().fd == handle.fd
    with pytest.raises(MappingFailed, match="no such buffer"):
        Mapping(handle)
    second.close()


def test_a_mapping_outlives_its_owners_interest():
    buffer = SharedBuffer(100, CPU)
    buffer.data.fill_(5)
    mapping = Mapping(buffer.handle())
    buffer.close()
    assert mapping.data.unique().tolist() == [5]
    mapping.close()


def test_nothing_is_left_behind():
    def footprint():
        gc.collect()
        descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        files = [os.readlink(descriptor) for descriptor in descriptors if os.path.islink(descriptor)]
        with open("/proc/self/maps") as file:
            return sum("memfd:weightcast" in name for name in files), file.read().count("memfd:weightcast")

    before = footprint()
    for _ in range(10):
        buffer = SharedBuffer(10_000, CPU)
        mapping = Mapping(buffer.handle())
        mapping.close()
        buffer.close()
        buffer.close()
    assert footprint() == before


def test_a_size_that_cannot_be_is_refused_in_words():
    with pytest.raises(ConfigError, match="cannot allocate a shared buffer of"):
        SharedBuffer(1 << 62, CPU)
    with pytest.raises(ConfigError, match="cannot allocate a shared buffer of 0 bytes"):
        SharedBuffer(0, CPU)


def test_cuda_handles_of_a_gpu_that_is_not_here_are_refused():
    handle = MemoryHandle(kind="cuda", device="GPU-nowhere", size_bytes=10, handle=b"x" * 64)
    with pytest.raises(MappingFailed, match="not visible"):
        Mapping(handle)


@pytest.mark.parametrize("step", ["tensor", "event"])
@pytest.mark.parametrize("error", [RuntimeError("invalid resource handle"), cuda_driver.DriverError("no such memory")])
def test_a_gpu_mapping_that_is_made_in_part_is_closed(monkeypatch, step, error):
    open_at: set[int] = set()

    def open_memory(handle: bytes, device: torch.device) -> int:
        open_at.add(4096)
        return 4096

    def fail(*_: object) -> None:
        assert open_at == {4096}
        raise error

    monkeypatch.setattr(ipc, "device_of", lambda uuid: CPU)
    monkeypatch.setattr(cuda_driver, "open_memory", open_memory)
    monkeypatch.setattr(cuda_driver, "close_memory", lambda pointer, device: open_at.remove(pointer))
    monkeypatch.setattr(cuda_driver, "as_tensor", fail if step == "tensor" else lambda *_: torch.zeros(10))
    monkeypatch.setattr(cuda_driver, "open_event", fail)
    with pytest.raises(MappingFailed, match=f"cannot map memory of GPU here: {error}"):
        Mapping(MemoryHandle(kind="cuda", device="here", size_bytes=10, handle=b"x" * 64, event=b"y" * 64))
    assert open_at == set()


def test_the_driver_is_called_on_a_device_that_the_thread_does_not_keep(monkeypatch):
    current, begun, seen = ["cuda:0"], list[str](), list[tuple[str, str]]()

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = str(device)

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.device

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    class Stream:
        def query(self) -> bool:
            begun.append(current[0])
            return True

    class Driver:
        def __getattr__(self, name: str) -> Any:
            def call(*_: object) -> int:
                seen.append((name, current[0]))
                return 0

            call.argtypes = None  # type: ignore[attr-defined]
            return call

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, str(device)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(cuda_calls, "_driver", Driver)
    other = torch.device("cuda", 1)
    cuda_driver.export_memory(4096, other)
    assert current == ["cuda:0"]
    cuda_driver.open_memory(b"x" * 64, other)
    assert current == ["cuda:0"]
    cuda_driver.close_memory(4096, other)
    assert current == ["cuda:0"]
    assert begun == ["cuda:1"] * 3
    assert seen == [
        (name, "cuda:1")
        for name in ("cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle")
    ]


def test_devices_have_names_that_do_not_depend_on_the_process():
    assert device_uuid(CPU) == "cpu"
    assert device_of("cpu") == CPU
    assert device_of("GPU-nowhere") is None
    assert host_id() == host_id() != ""


# -- the receiver's collection of mappings


def layout_of(size_bytes: int) -> BucketLayout:
    spec = TensorSpec(name="w", dtype="uint8", shape=(size_bytes,))
    slot = TensorSlot(spec=spec, offset_bytes=0, num_rows=size_bytes)
    return BucketLayout(index=0, slots=(slot,), size_bytes=size_bytes)


def test_a_buffer_is_mapped_once(buffer):
    source = SharedMemorySource(CPU)
    first = source.read(layout_of(500), [buffer.handle()])
    again = source.read(layout_of(1000), [buffer.handle()])
    assert first.data.data_ptr() == again.data.data_ptr()
    assert torch.equal(again.data, buffer.data)
    with pytest.raises(MappingFailed, match="1001 bytes, its buffer 1000"):
        source.read(layout_of(1001), [buffer.handle()])
    source.close()
    source.close()
    assert torch.equal(source.read(layout_of(1000), [buffer.handle()]).data, buffer.data)
    source.close()


def test_the_oldest_mapping_goes_when_there_are_many(monkeypatch):
    monkeypatch.setattr(ipc_source, "_MAX_MAPPINGS", 2)
    source = SharedMemorySource(CPU)
    buffers = [SharedBuffer(64, CPU) for _ in range(4)]
    for round_ in range(2):
        for number, buffer in enumerate(buffers):
            buffer.data.fill_(10 * round_ + number)
            assert source.read(layout_of(64), [buffer.handle()]).data.unique().tolist() == [10 * round_ + number]
            assert len(source._mappings) <= 2
    source.close()
    for buffer in buffers:
        buffer.close()


def test_the_buffer_on_the_own_device_is_taken(buffer):
    elsewhere = MemoryHandle(kind="cuda", device="GPU-nowhere", size_bytes=1000, handle=b"x" * 64)
    source = SharedMemorySource(CPU)
    assert torch.equal(source.read(layout_of(1000), [elsewhere, buffer.handle()]).data, buffer.data)
    with pytest.raises(MappingFailed, match=r"runs on cpu; the trainer's buffers are on GPU-nowhere"):
        source.read(layout_of(10), [elsewhere])
    source.close()
