"""The second set: a flip exchanges, an undo brings back what was moved, and what no update writes keeps its value."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.torn import FailingCopy, tear
from weightcast.errors import ConfigError
from weightcast.receiver import exchanges, staging
from weightcast.receiver.staging import StagingSet, choose_place

CPU = torch.device("cpu")


def residents() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "matrix": torch.nn.Parameter(torch.randn(7, 5), requires_grad=False),
        "half": torch.nn.Parameter(torch.randn(9).to(torch.bfloat16)),
        "transposed": torch.nn.Parameter(torch.randn(4, 6).t(), requires_grad=False),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "tail of a larger one": torch.randn(10)[4:8],
        "with gaps": torch.randn(9, 8)[2:7, 1:6],
        "every other one": torch.randn(5, 9)[:, ::2],
    }


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        for name, tensor in tensors.items()
    }


@pytest.fixture(params=["device", "host"])
def place(request, monkeypatch):
    monkeypatch.setattr(exchanges, "_CHUNK_BYTES", 16)  # several chunks for tensors this small
    return request.param


@pytest.fixture(params=["device", "device that keeps storage", "host"])
def make(request, monkeypatch):
    monkeypatch.setattr(exchanges, "_CHUNK_BYTES", 16)
    return lambda live: StagingSet(live, request.param.split()[0], keep_storage="keeps" in request.param)


class Operations(TorchDispatchMode):
    """Remembers what is done to tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def write(stage: StagingSet, names) -> dict[str, bytes]:
    new = {}
    for name in names:
        target = stage.target(name)
        value = (
            torch.ones_like(target) if target.dtype == torch.bool else (torch.randn(target.shape) * 5).to(target.dtype)
        )
        target.detach().copy_(value)
        new[name] = value
    return bits(new)


def test_live_parameters_do_not_change_before_the_flip(place):
    live = residents()
    objects = {name: id(tensor) for name, tensor in live.items()}
    old = bits(live)
    stage = StagingSet(live, place)
    assert stage.staged
    new = write(stage, live)
    assert bits(live) == old
    stage.flip()
    assert bits(live) == new
    assert new != old
    assert {name: id(tensor) for name, tensor in live.items()} == objects
    assert live["half"].requires_grad


def test_undo_restores_the_old_version_bit_for_bit_and_a_second_one_does_nothing(make):
    live = residents()
    old = bits(live)
    stage = make(live)
    stage.undo()
    assert bits(live) == old
    write(stage, live)
    stage.flip()
    assert bits(live) != old
    for _ in range(2):
        stage.undo()
        assert bits(live) == old
    new = write(stage, live)
    stage.flip()
    assert bits(live) == new


@pytest.mark.parametrize("half", [False, True])
def test_a_flip_that_fails_in_any_copy_is_undone(make, half):
    live = residents()
    old = bits(live)
    stage = make(live)
    for at in range(1 << 30):
        new = write(stage, live)
        with FailingCopy(at, half=half) as fault:
            try:
                stage.flip()
            except torch.OutOfMemoryError:
                assert stage.torn
        if not fault.failed:
            break
        stage.undo()
        assert not stage.torn
        assert bits(live) == old
    assert bits(live) == new
    assert at > 50 or not stage.moves_contents


@pytest.mark.parametrize("after", range(8))
def test_a_flip_that_fails_between_parameters_is_undone(make, after):
    live = residents()
    old = bits(live)
    stage = make(live)
    write(stage, live)
    tear(stage, after=after)
    with pytest.raises(torch.OutOfMemoryError):
        stage.flip()
    assert (bits(live) == old) == (after == 0)
    stage.undo()
    assert bits(live) == old


def test_an_undo_that_failed_can_be_repeated(make):
    live = residents()
    old = bits(live)
    stage = make(live)
    write(stage, live)
    tear(stage, after=4, times=2)
    for attempt in (stage.flip, stage.undo):
        with pytest.raises(torch.OutOfMemoryError):
            attempt()
        assert stage.torn
    stage.undo()
    assert bits(live) == old


def test_flip_does_not_touch_memory_between_a_parameters_elements(make):
    whole = torch.arange(90.0)
    live = {"with gaps": whole[:81].view(9, 9)[2:7, 1:6]}
    others = torch.ones(90, dtype=torch.bool)
    others[:81].view(9, 9)[2:7, 1:6] = False
    stage = make(live)
    stage.target("with gaps").fill_(-1)
    whole[others] *= 100
    stage.flip()
    assert live["with gaps"].unique().tolist() == [-1]
    assert torch.equal(whole[others], torch.arange(90.0)[others] * 100)
    stage.undo()
    assert torch.equal(whole[others], torch.arange(90.0)[others] * 100)
    assert torch.equal(live["with gaps"], torch.arange(81.0).view(9, 9)[2:7, 1:6])


def test_a_flip_and_its_undo_allocate_nothing(make):
    live = residents()
    stage = make(live)
    write(stage, live)
    with Operations() as operations:
        stage.flip()
        stage.undo()
    views = {"detach", "view.dtype", "view", "as_strided", "slice.Tensor"}
    assert {name.removeprefix("aten.").removesuffix(".default") for name in operations.seen} <= {"copy_", *views}


def test_allocate_restores_freed_device_memory():
    live = residents()
    stage = StagingSet(live, "host")
    stage.free()
    stage.allocate()
    new = write(stage, live)
    stage.flip()
    assert bits(live) == new


def test_staging_works_over_many_updates(place):
    live = residents()
    stage = StagingSet(live, place)
    for _ in range(4):
        new = write(stage, live)
        stage.flip()
        assert bits(live) == new


def test_elements_that_no_update_writes_keep_their_values(place):
    # The padding of a vocabulary: rows that no source has.
    live = {"padded": torch.arange(12.0).view(4, 3)}
    stage = StagingSet(live, place)
    for version in range(3):
        stage.target("padded")[:3].fill_(version)
        stage.flip()
        assert live["padded"][3].tolist() == [9.0, 10.0, 11.0]
        assert live["padded"][:3].unique().tolist() == [version]


def test_without_staging_updates_write_to_the_live_set():
    live = residents()
    stage = StagingSet(live, "none")
    assert not stage.staged
    assert stage.target("matrix") is live["matrix"] is stage.live("matrix")
    old = bits(live)
    stage.flip()
    assert bits(live) == old


def test_place_is_chosen_by_free_memory(monkeypatch):
    assert choose_place("none", size_bytes=1 << 60, device=CPU) == "none"
    monkeypatch.setattr(staging, "free_host_bytes", lambda: 1000)
    assert choose_place("auto", size_bytes=100, device=CPU) == "device"
    assert choose_place("host", size_bytes=100, device=CPU) == "host"
    assert choose_place("auto", size_bytes=900, device=CPU) == "none"  # no room to breathe
    for asked in ("device", "host"):
        with pytest.raises(ConfigError, match="900 bytes"):
            choose_place(asked, size_bytes=900, device=CPU)


@pytest.fixture
def exchanging(monkeypatch):
    """Parameters without gaps are exchanged in one launch, as on a GPU."""
    monkeypatch.setattr(staging, "_ONE_LAUNCH", {"cpu"})
    live = residents()
    return live, StagingSet(live, "device")


def test_parameters_keep_their_addresses(exchanging):
    live, stage = exchanging
    before = {name: tensor.data_ptr() for name, tensor in live.items()}
    old, new = bits(live), write(stage, live)
    stage.flip()
    assert bits(live) == new
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == before
    stage.undo()
    assert bits(live) == old
    stage.undo()
    assert bits(live) == old


def test_exchanged_parameters_hold_what_was_written_over_many_updates(exchanging):
    live, stage = exchanging
    for version in range(6):
        old, new = bits(live), write(stage, live)
        stage.flip()
        assert bits(live) == new
        if version % 2:
            stage.undo()
            assert bits(live) == old


def test_an_exchange_is_undone_after_a_failure_behind_it(exchanging):
    live, stage = exchanging
    old = bits(live)
    write(stage, live)
    tear(stage, after=2, times=2)  # the first one is empty
    for attempt in (stage.flip, stage.undo):
        with pytest.raises(torch.OutOfMemoryError):
            attempt()
    stage.undo()
    assert bits(live) == old
    new = write(stage, live)
    stage.flip()
    assert bits(live) == new


@pytest.mark.parametrize("when", ["before the flip", "after the flip"])
def test_parameters_that_the_engine_moved_are_exchanged_where_they_lie_now(exchanging, when):
    live, stage = exchanging
    old, new = bits(live), write(stage, live)
    places = stage.look()

    def move() -> None:
        for name in ("half", "matrix", "flags"):
            live[name].data = live[name].data.clone()

    if when == "before the flip":
        move()
        assert stage.look() is not places
    stage.flip()
    assert bits(live) == new
    if when == "after the flip":
        move()
    stage.undo()
    assert bits(live) == old


def test_places_and_forms_stay_the_same_objects_until_something_moves(make):
    live = residents()
    stage = make(live)
    form, places = stage.form, stage.look(forms=True)
    for _ in range(3):
        stage.flip()
        stage.look(forms=True)
        assert stage.form is form
        if stage.moves_contents:
            assert stage.look() is places
    stage.free()
    assert stage.look() is not places  # weights may be read back meanwhile
    stage.allocate()
    assert stage.look() is not places


def test_another_dtype_in_the_same_memory_is_another_form(exchanging):
    live, stage = exchanging
    form, _ = stage.form, stage.look(forms=True)
    live["half"].data = live["half"].data.view(torch.float16)
    stage.look()
    assert stage.form is form
    stage.look(forms=True)
    assert stage.form is not form


@pytest.mark.parametrize("in_order", [True, False])
def test_a_flip_waits_for_its_exchange_unless_readers_come_behind_it_anyway(exchanging, monkeypatch, in_order):
    waited: list[bool] = []
    run = exchanges.MemoryExchange.run

    def noted(self: exchanges.MemoryExchange, *, wait: bool = True) -> None:
        waited.append(wait)
        run(self, wait=wait)

    monkeypatch.setattr(exchanges.MemoryExchange, "run", noted)
    live = {"norm": torch.ones(3)}
    stage = StagingSet(live, "device", keep_storage=True, in_order=in_order)
    stage.target("norm").fill_(2)
    stage.flip()
    assert live["norm"].tolist() == [2, 2, 2]
    stage.undo()
    assert live["norm"].tolist() == [1, 1, 1]
    assert waited == [not in_order] * 2
