"""Buffers that are not where, or not what, a message says: refused by name, by our receiver and by the dialects."""

from __future__ import annotations

import base64
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.helpers.models import specs_of, weights_of
from tests.helpers.session_bench import Bench
from tests.helpers.sessions import Sender
from weightcast.comm import cuda_driver, ipc
from weightcast.comm.ipc import Mapping, MappingFailed, SharedBuffer
from weightcast.comm.pickle_writer import (
    boolean,
    integer,
    integers,
    listing,
    mapping,
    name,
    namespace,
    pickled,
    raw,
    text,
)
from weightcast.comm.shared_buckets import make_slots
from weightcast.comm.torch_reductions import reduced_storage
from weightcast.lab.dialects.lmdeploy import LmdeployDialect, UpdateParams
from weightcast.receiver.sources import ipc as source_module
from weightcast.receiver.sources.ipc import SharedMemorySource
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import MemoryHandle
from weightcast.wire.layout import Packing, plan_buckets

CPU = torch.device("cpu")


@pytest.mark.parametrize(("kind", "device"), [("cuda", "cpu"), ("shm", "GPU-here")])
def test_a_kind_of_memory_that_the_device_has_not_is_refused(monkeypatch, kind, device):
    for module in (ipc, source_module):
        monkeypatch.setattr(module, "device_of", lambda uuid: CPU)  # every device is visible
    buffer = SharedBuffer(4096, CPU)
    handle = msgspec.structs.replace(buffer.handle(), kind=kind, device=device)
    with pytest.raises(MappingFailed, match=f"a buffer of kind {kind} cannot be on {device}"):
        Mapping(handle)
    with pytest.raises(MappingFailed, match=f"a buffer of kind {kind} cannot be on {device}"):
        SharedMemorySource(CPU).read(Sender(weights_of(1)).layouts[0], [handle])
    buffer.close()


def test_memory_of_another_gpu_than_the_message_says_is_refused(monkeypatch):
    memory = torch.arange(10, dtype=torch.uint8)
    lies_on = [2]

    def get_attribute(found: Any, attribute: int, pointer: int) -> None:
        assert (attribute, pointer) == (9, memory.data_ptr())
        found._obj.value = lies_on[0]

    def get_range(first: Any, size: Any, pointer: int) -> None:
        first._obj.value, size._obj.value = memory.data_ptr(), memory.nbytes

    monkeypatch.setattr(cuda_driver, "_get_attribute", get_attribute)
    monkeypatch.setattr(cuda_driver, "_get_range", get_range)
    monkeypatch.setattr(cuda_driver, "current", lambda device: nullcontext())
    owner, reader = torch.device("cuda", 1), CPU  # this machine has no GPU
    with pytest.raises(cuda_driver.DriverError, match="is on cuda:2, and the message says cuda:1"):
        cuda_driver.as_tensor(memory.data_ptr(), 2, 8, reader, owner)
    lies_on[0] = 1
    view = cuda_driver.as_tensor(memory.data_ptr(), 2, 8, reader, owner)
    memory += 1
    assert torch.equal(view, memory[2:])  # it is no copy
    for part in ((3, 8), (0, 11), (-1, 4)):
        with pytest.raises(cuda_driver.DriverError, match="the allocation has 10"):
            cuda_driver.as_tensor(memory.data_ptr(), *part, reader, owner)


def test_a_mapping_whose_owner_has_let_the_buffer_go_is_not_read_again():
    sender = Sender(weights_of(1))
    source = SharedMemorySource(CPU)
    message = sender.announce(0)
    source.read(message.layout, message.source.handles)
    sender.buffer.close()
    with pytest.raises(MappingFailed, match="has released this buffer"):
        source.read(message.layout, message.source.handles)
    source.close()


def test_a_buffer_that_comes_back_as_another_one_is_refused():
    sender = Sender(weights_of(1))
    source = SharedMemorySource(CPU)
    message = sender.announce(0)
    [handle] = message.source.handles
    source.read(message.layout, [handle])
    with pytest.raises(MappingFailed, match="is mapped already, and not as it is announced now"):
        source.read(message.layout, [msgspec.structs.replace(handle, size_bytes=handle.size_bytes - 1)])
    assert source.read(message.layout, [handle]).layout is message.layout
    source.close()


def test_two_buffers_of_a_gpu_never_have_one_handle(monkeypatch):
    """An allocation that is freed and made again may have the address, and the handle, of the one before it."""
    event = SimpleNamespace(record=lambda stream: None, ipc_handle=lambda: b"e" * 64)
    monkeypatch.setattr(torch.cuda, "Event", lambda interprocess: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.zeros(*size, dtype=torch.uint8))
    monkeypatch.setattr(cuda_driver, "export_memory", lambda pointer, device: (b"h" * 64, 0))
    monkeypatch.setattr(ipc, "device_uuid", lambda device: "GPU-here")
    first, second = (SharedBuffer(10, torch.device("cuda", 0)).handle() for _ in range(2))
    assert isinstance(first, MemoryHandle)
    assert first.handle == second.handle
    assert first != second


@pytest.fixture
def dialect():
    bench = Bench(staging="none")
    yield LmdeployDialect(SimpleNamespace(receiver=bench.engine, scheduler=None))
    bench.close()


@pytest.fixture
def slots():
    made = make_slots(1, 4096, CPU, {"ring"})
    yield made
    for slot in made:
        slot.close()


class Payloads:
    """A bucket of one tensor, as LMDeploy's own trainer would send it."""

    def __init__(self, slot) -> None:
        weights = {"o.weight": weights_of(3)["o.weight"]}
        self.layout = plan_buckets(specs_of(weights), bucket_bytes=4096, packing=Packing())[0]
        Bucket(self.layout, slot.data).view(self.layout.slots[0]).copy_(weights["o.weight"])
        [self.memory] = slot.share(opens=0, ring_opens=1).ring

    def request(self, *, handle: bool = True, clone: bool = False, dtype: str = "float32", event: bytes = b""):
        [slot] = self.layout.slots
        entry = namespace(
            [
                ("name", text(slot.spec.name)),
                ("shape", integers(slot.spec.shape)),
                ("dtype", name("torch", dtype)),
                ("start_idx", integer(0)),
                ("end_idx", integer(slot.spec.numel)),
                ("numel", integer(slot.spec.numel)),
            ]
        )
        content = [("metadata", listing([entry])), ("require_clone", boolean(clone))]
        if handle:
            content.append(("flattened_tensor", reduced_storage(self.memory, "float32")))
        if event:
            content.append(("event_ipc_handle", raw(event)))
        payload = base64.b64encode(pickled(mapping(content))).decode()
        return UpdateParams(serialized_named_tensors=payload, load_format="flattened_bucket")


def test_the_dialect_reads_no_copy_that_nobody_fills(dialect, slots):
    payloads = Payloads(slots[0])
    dialect.update_params(payloads.request(clone=True), half=False)
    with pytest.raises(ValueError, match="has no handle, and the buffer here is a stale copy"):
        dialect.update_params(payloads.request(handle=False), half=False)
    dialect.update_params(payloads.request(clone=False), half=False)
    dialect.update_params(payloads.request(handle=False), half=False)


def test_the_dialect_reads_no_buffer_as_another_dtype(dialect, slots):
    payloads = Payloads(slots[0])
    dialect.update_params(payloads.request(), half=False)
    with pytest.raises(ValueError, match=r"o.weight is torch.int32, but the buffer was opened as torch.float32"):
        dialect.update_params(payloads.request(handle=False, dtype="int32"), half=False)


def test_the_dialect_passes_over_no_event(dialect, slots):
    payloads = Payloads(slots[0])
    with pytest.raises(ValueError, match="event of a GPU"):
        dialect.update_params(payloads.request(event=b"e" * 64), half=False)
