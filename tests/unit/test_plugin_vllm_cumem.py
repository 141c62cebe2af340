"""Parameters that moved, in the books of a stand-in of vLLM's allocator: they sleep, wake, switch, and none is lost."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.mapped import HostMapper
from tests.unit.test_staging import bits, residents, write
from weightcast.plugins.vllm import cumem
from weightcast.plugins.vllm.cumem import CumemOwner, owner_for
from weightcast.receiver import staging
from weightcast.receiver.staging import Staging

DEVICE = torch.device("cuda:0")  # a name in the books; the memory is the host's


@dataclass
class AllocationData:
    handle: tuple[int, int, int, int]
    tag: str
    cpu_backup_tensor: Any = None
    is_asleep: bool = False


class Allocator:
    """As vLLM's: sleeps by its books, and wakes behind the same addresses with other memory."""

    def __init__(self, module: Module) -> None:
        self.pointer_to_data: dict[int, AllocationData] = {}
        self._module = module

    def _python_free_callback(self, address: int) -> tuple[int, int, int, int]:
        return self.pointer_to_data.pop(address).handle

    def sleep(self, *, keep: bool) -> None:
        for address, data in self.pointer_to_data.items():
            if keep:
                data.cpu_backup_tensor = ctypes.string_at(address, data.handle[1])
            self._module.unmap_and_release(data.handle)
            data.is_asleep = True

    def wake_up(self) -> None:
        for address, data in self.pointer_to_data.items():
            self._module.create_and_map(data.handle)
            data.is_asleep = False
            if data.cpu_backup_tensor is not None:
                ctypes.memmove(address, data.cpu_backup_tensor, data.handle[1])
                data.cpu_backup_tensor = None


class Module:
    """As ``vllm.device_allocator.cumem``, whose C code reads and writes handles where an entry says."""

    AllocationData = AllocationData

    def __init__(self, mapper: HostMapper) -> None:
        self._mapper = mapper
        self.allocator = Allocator(self)
        self.CuMemAllocator = SimpleNamespace(get_instance=lambda: self.allocator)

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        _, size_bytes, address, place = handle
        self._mapper.unmap(address, size_bytes)
        self._mapper.destroy(ctypes.c_uint64.from_address(place).value)

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        _, size_bytes, address, place = handle
        memory = self._mapper.create(size_bytes)
        self._mapper.map(address, size_bytes, memory)
        ctypes.c_uint64.from_address(place).value = memory


@pytest.fixture
def mapper(monkeypatch: pytest.MonkeyPatch) -> HostMapper:
    found = HostMapper()
    monkeypatch.setattr(staging, "mapper_of", lambda device: found)
    monkeypatch.setattr(staging, "_EXCHANGED_BYTES", {"cpu": 1 << 30})  # the rest in one launch, as on a GPU
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    return found


@pytest.fixture
def module(mapper: HostMapper, monkeypatch: pytest.MonkeyPatch) -> Module:
    found = Module(mapper)
    monkeypatch.setattr(cumem.importlib, "import_module", lambda name: found)
    return found


def staged(live: dict[str, torch.Tensor], owner: CumemOwner | None) -> Staging:
    assert owner is not None
    return Staging(live, "device", keep_storage=True, may_move=True, owner=owner)


def switched(stage: Staging, live: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The contents after another version was written and switched to."""
    old, new = bits(live), write(stage, live)
    assert bits(live) == old != new
    stage.flip()
    assert bits(live) == new
    return new


@pytest.mark.parametrize("flips", [0, 1, 2, 3])
def test_what_serves_sleeps_and_wakes_after_any_number_of_switches(mapper: HostMapper, module: Module, flips: int):
    live = residents()
    stage = staged(live, owner_for(DEVICE, mapper))
    assert len(module.allocator.pointer_to_data) == 1
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    for _ in range(flips):
        switched(stage, live)
    served = bits(live)
    for _ in range(2):
        stage.free()
        module.allocator.sleep(keep=True)
        assert mapper.live == {}, "all of it is freed"
        module.allocator.wake_up()
        stage.allocate()
        assert bits(live) == served
    switched(stage, live)
    stage.undo()
    assert bits(live) == served
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses
    assert stage.mapped_bytes, "it still switches by mapping"


def test_weights_that_a_sleep_drops_come_back_with_an_update(mapper: HostMapper, module: Module):
    live = residents()
    stage = staged(live, owner_for(DEVICE, mapper))
    switched(stage, live)
    stage.free()
    module.allocator.sleep(keep=False)
    module.allocator.wake_up()
    stage.allocate()
    new = write(stage, live)
    stage.flip()
    assert bits(live) == new
    switched(stage, live)


def test_a_switch_without_memory_behind_the_parameters_is_an_error(mapper: HostMapper, module: Module):
    live = residents()
    stage = staged(live, owner_for(DEVICE, mapper))
    served = bits(live)
    write(stage, live)
    module.allocator.sleep(keep=True)
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        stage.flip()
    module.allocator.wake_up()
    stage.undo()
    assert bits(live) == served
    switched(stage, live)


@pytest.mark.parametrize("at", [0, 1])
def test_a_switch_that_fails_half_way_leaves_the_books_right(mapper: HostMapper, module: Module, at: int):
    live = residents()
    stage = staged(live, owner_for(DEVICE, mapper))
    served = bits(live)
    write(stage, live)

    def once(address: int, size_bytes: int, memory: int) -> None:
        if mapper.fail_at == -1:  # only one call fails
            mapper.fail_at = None
        HostMapper.map(mapper, address, size_bytes, memory)

    mapper.fail_at, mapper.map = at, once  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the driver refuses"):
        stage.flip()
    stage.undo()
    assert bits(live) == served
    stage.free()
    module.allocator.sleep(keep=True)
    assert mapper.live == {}
    module.allocator.wake_up()
    stage.allocate()
    assert bits(live) == served
    switched(stage, live)


@pytest.mark.parametrize("asleep", [False, True])
def test_nothing_is_left_when_the_parameters_end(mapper: HostMapper, module: Module, asleep: bool):
    live = residents()
    stage = staged(live, owner_for(DEVICE, mapper))
    switched(stage, live)
    stage.free()
    if asleep:
        module.allocator.sleep(keep=False)
    live.clear()
    del stage
    gc.collect()
    assert module.allocator.pointer_to_data == {}
    assert (mapper.live, mapper.mapped, mapper.places) == ({}, {}, {})


def test_only_segments_of_weights_in_which_nothing_is_left_are_freed(
    mapper: HostMapper, module: Module, monkeypatch: pytest.MonkeyPatch
):
    owner = owner_for(DEVICE, mapper)
    assert owner is not None
    places = []
    for tag, asleep in (("weights", False), ("weights", False), ("weights", False), ("kv_cache", False)):
        size_bytes = 2 * mapper.granularity
        address, memory = mapper.reserve(size_bytes), mapper.create(size_bytes)
        mapper.map(address, size_bytes, memory)
        place = ctypes.c_uint64(memory)
        places.append(place)
        data = AllocationData((0, size_bytes, address, ctypes.addressof(place)), tag, is_asleep=asleep)
        module.allocator.pointer_to_data[address] = data
    first, used, awaited, cache = module.allocator.pointer_to_data
    size = {"total_size": 2 * mapper.granularity}
    segments = [
        {"address": first, "allocated_size": 0, "active_size": 0, **size},
        {"address": used, "allocated_size": 512, "active_size": 512, **size},
        {"address": awaited, "allocated_size": 0, "active_size": 512, **size},
        {"address": cache, "allocated_size": 0, "active_size": 0, **size},
        {"address": 12345, "allocated_size": 0, "active_size": 0, **size},  # of another pool
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    owner.release_left()
    assert owner.released_bytes == 2 * mapper.granularity
    assert list(module.allocator.pointer_to_data) == [used, awaited, cache]
    owner.release_left()
    assert owner.released_bytes == 2 * mapper.granularity, "torch still lists the segment"


def test_an_allocator_that_keeps_handles_elsewhere_is_not_used(
    mapper: HostMapper, module: Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def elsewhere(handle: tuple[int, int, int, int]) -> None:
        _, size_bytes, address, _ = handle
        mapper.map(address, size_bytes, mapper.create(size_bytes))

    monkeypatch.setattr(module, "create_and_map", elsewhere)
    with caplog.at_level("WARNING"):
        assert owner_for(DEVICE, mapper) is None
    assert "does not keep the handle of memory where it is expected" in caplog.text
    assert module.allocator.pointer_to_data == {}


@pytest.mark.parametrize("name", ["AllocationData", "create_and_map"])
def test_a_version_with_another_allocator_is_not_used(
    mapper: HostMapper, module: Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
):
    monkeypatch.delattr(Module, name)
    with caplog.at_level("WARNING"):
        assert owner_for(DEVICE, mapper) is None
    assert f"no {name}" in caplog.text
