"""A flip by mapping: addresses stay, contents change places, and whatever fails or moves, no parameter is mixed up."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.helpers.mapped import HostMapper
from tests.unit.receiver.test_staging import bits, residents, write
from weightcast.receiver import mapped_set, staging
from weightcast.receiver.staging import StagingSet


@pytest.fixture
def mapper(monkeypatch):
    found = HostMapper()
    monkeypatch.setattr(staging, "mapper_of", lambda device: found)
    monkeypatch.setattr(staging, "_ONE_LAUNCH", {"cpu"})  # for the rest, as on a GPU
    return found


def staged(live: dict[str, torch.Tensor]) -> StagingSet:
    return StagingSet(live, "device", keep_storage=True, may_move=True)


def takes_another_version(stage: StagingSet, live: dict[str, torch.Tensor]) -> None:
    new = write(stage, live)
    stage.flip()
    assert bits(live) == new


def test_contents_change_places_and_addresses_stay(mapper):
    live = residents()
    old = bits(live)
    objects = {name: id(tensor) for name, tensor in live.items()}
    stage = staged(live)
    assert bits(live) == old
    assert {name: id(tensor) for name, tensor in live.items()} == objects
    assert stage.mapped_bytes >= live["matrix"].nbytes + live["half"].nbytes
    addresses, number = {name: tensor.data_ptr() for name, tensor in live.items()}, stage.look(forms=True)
    for version in range(5):
        old = bits(live)
        new = write(stage, live)
        assert bits(live) == old != new
        stage.flip()
        assert bits(live) == new
        if version % 2:
            for _ in range(2):  # a second undo does nothing
                stage.undo()
                assert bits(live) == old
        assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses
        assert stage.look(forms=True) == number


def test_what_something_else_refers_to_stays_where_it_is(mapper):
    live = residents()
    view, kept = live["matrix"][3:5], live["half"].untyped_storage()
    before = {name: tensor.data_ptr() for name, tensor in live.items()}
    stage = staged(live)
    moved = {name for name, tensor in live.items() if tensor.data_ptr() != before[name]}
    assert moved == {"transposed", "scalar", "flags"}
    takes_another_version(stage, live)
    assert torch.equal(view, live["matrix"][3:5])
    assert kept.data_ptr() == live["half"].data_ptr()


@pytest.mark.parametrize("at", range(4))
def test_a_flip_that_fails_while_it_maps_is_undone(mapper, at):
    live = residents()
    old = bits(live)
    stage = staged(live)
    write(stage, live)
    mapper.fail_at = at

    def once(address: int, size_bytes: int, memory: int) -> None:
        if mapper.fail_at == -1:  # only one call fails
            mapper.fail_at = None
        HostMapper.map(mapper, address, size_bytes, memory)

    mapper.map = once
    if at < 2:
        with pytest.raises(RuntimeError, match="the driver refuses"):
            stage.flip()
        assert stage.torn
    else:
        stage.flip()
    mapper.fail_at = None
    stage.undo()
    assert not stage.torn
    assert bits(live) == old
    takes_another_version(stage, live)


def test_an_undo_that_failed_can_be_repeated(mapper):
    live = residents()
    old = bits(live)
    stage = staged(live)
    write(stage, live)
    mapper.fail_at = 1
    for attempt in (stage.flip, stage.undo):  # one range has no memory, and nothing may read it
        with pytest.raises(RuntimeError, match="the driver refuses"):
            attempt()
        assert stage.torn
    mapper.fail_at = None
    stage.undo()
    assert not stage.torn
    assert bits(live) == old


def test_freed_memory_comes_back_at_the_same_addresses(mapper):
    live = residents()
    stage = staged(live)
    new = write(stage, live)
    stage.flip()
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    stage.free()
    assert len(mapper.live) == 1  # that of the live parameters
    assert bits(live) == new
    stage.allocate()
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses
    takes_another_version(stage, live)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("flips", [0, 1])
def test_live_parameters_sleep_without_memory_and_wake_at_the_same_addresses(mapper, monkeypatch, stored, flips):
    monkeypatch.setattr(mapped_set, "_STORED_AT_ONCE", HostMapper.granularity)  # several parts
    live = residents()
    stage = staged(live)
    for _ in range(flips):
        write(stage, live)
        stage.flip()
    old, addresses = bits(live), {name: tensor.data_ptr() for name, tensor in live.items()}
    size_bytes = stage.mapped_bytes
    if stored:
        stage.store()
    stage.free()
    assert stage.let_go() == size_bytes
    assert not mapper.live
    assert stage.let_go() == 0  # it sleeps already
    assert stage.look() is not None  # reads no parameter
    stage.restore()
    assert (bits(live) == old) is stored
    stage.restore()  # a second call does nothing
    stage.allocate()
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses
    assert len(mapper.live) == 2
    old, new = bits(live), write(stage, live)
    stage.flip()
    assert bits(live) == new
    stage.undo()
    assert bits(live) == old


def test_parameters_sleep_on_where_there_is_no_memory_to_wake(mapper, monkeypatch):
    live = residents()
    stage = staged(live)
    old = bits(live)
    stage.store()
    stage.free()
    stage.let_go()

    def create(size_bytes: int) -> int:
        raise torch.OutOfMemoryError("there is no more")

    with monkeypatch.context() as crowded:
        crowded.setattr(mapper, "create", create)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="no more"):
                stage.restore()
            assert not mapper.live
    stage.restore()
    stage.allocate()
    assert bits(live) == old
    takes_another_version(stage, live)


def test_parameters_that_a_failed_flip_left_without_memory_are_stored(mapper):
    live = residents()
    old = bits(live)
    stage = staged(live)
    write(stage, live)
    mapper.fail_at = 1
    for attempt in (stage.flip, stage.store):
        with pytest.raises(RuntimeError, match="the driver refuses"):
            attempt()
    mapper.fail_at = None
    stage.store()
    stage.free()
    stage.let_go()
    stage.restore()
    assert bits(live) == old


def test_what_parameters_have_left_is_freed_before_their_second_copies_are_made(mapper):
    live = torch.randn(5, 3)
    before = live.data_ptr()
    seen: list[tuple[bool, int]] = []
    stage = StagingSet(
        {"alone": live},
        "device",
        keep_storage=True,
        may_move=True,
        after_move=lambda: seen.append((live.data_ptr() == before, len(mapper.live))),
    )
    assert seen == [(False, 1)]
    assert stage.mapped_bytes


def test_an_engine_that_moves_its_weights_away_gets_all_memory_back(mapper):
    live = residents()
    stage = staged(live)
    stage.free()
    for tensor in live.values():  # to the host, and back to memory of torch's own
        tensor.data = tensor.data.clone()
    gc.collect()
    assert not mapper.live
    assert not mapper.places
    stage.allocate()
    assert len(mapper.live) == 2
    old, new = bits(live), write(stage, live)
    stage.flip()
    assert bits(live) == new
    stage.undo()
    assert bits(live) == old


@pytest.mark.parametrize("when", ["before the flip", "after the flip"])
def test_parameters_that_the_engine_moved_are_exchanged_where_they_lie_now(mapper, when):
    live = residents()
    stage = staged(live)
    old, new = bits(live), write(stage, live)
    number = stage.look()

    def move() -> None:
        for name in ("half", "flags"):
            live[name].data = live[name].data.clone()

    if when == "before the flip":
        move()
        assert stage.look() != number
    stage.flip()
    assert bits(live) == new
    if when == "after the flip":
        move()
    stage.undo()
    assert bits(live) == old
    takes_another_version(stage, live)
    assert not stage.mapped_bytes


def test_all_memory_is_freed_with_the_last_tensor(mapper):
    live = residents()
    stage = staged(live)
    write(stage, live)
    stage.flip()
    del stage
    gc.collect()
    assert len(mapper.live) == 2
    live.clear()
    gc.collect()
    assert not mapper.live
    assert not mapper.places


def test_too_little_memory_is_an_error_and_parameters_keep_their_contents(mapper, monkeypatch):
    live = residents()
    old = bits(live)
    made = []

    def create(size_bytes: int) -> int:
        if made:
            raise torch.OutOfMemoryError("there is no more")
        made.append(HostMapper.create(mapper, size_bytes))
        return made[0]

    monkeypatch.setattr(mapper, "create", create)
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        staged(live)
    assert bits(live) == old


def test_elements_that_no_update_writes_keep_their_values(mapper):
    live = {"padded": torch.arange(12.0).view(4, 3)}
    stage = staged(live)
    for version in range(3):
        stage.target("padded")[:3].fill_(version)
        stage.flip()
        assert live["padded"].tolist() == [[version] * 3] * 3 + [[9.0, 10.0, 11.0]]


def test_parameters_made_in_inference_mode_stay_so(mapper):
    with torch.inference_mode():
        live = {"made there": torch.nn.Parameter(torch.randn(5, 3), requires_grad=False)}
    live["made here"] = torch.randn(3)
    stage = staged(live)
    assert [tensor.is_inference() for tensor in live.values()] == [True, False]
    with torch.inference_mode():
        takes_another_version(stage, live)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("device", {"keep_storage": True}),
        ("host", {"keep_storage": True, "may_move": True}),
        ("none", {"keep_storage": True, "may_move": True}),
    ],
)
def test_nothing_moves_unasked_or_where_it_is_of_no_use(mapper, place, options):
    live = residents()
    before = {name: tensor.data_ptr() for name, tensor in live.items()}
    stage = StagingSet(live, place, **options)
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == before
    assert not stage.mapped_bytes
    assert not mapper.live


def test_a_cpu_has_no_mapper():
    live = residents()
    assert not staged(live).mapped_bytes
