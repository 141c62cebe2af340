"""Kernels read what was derived of a waiting version after its commit, and not before."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.helpers.fp8_layers import Layer, Method, Recorders, Replays, loaded, quantised, stand_in_for_vllm
from tests.helpers.mapped import HostMapper
from weightcast.plugins.vllm import derivation
from weightcast.plugins.vllm.derivation import Derivation, why_not_ahead
from weightcast.plugins.vllm.start_up import Budget
from weightcast.receiver import staging as staging_of
from weightcast.receiver.staging import StagingSet


@contextmanager
def together(recorders: Sequence[Any]) -> Generator[None]:
    yield


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch)
    monkeypatch.setattr(derivation, "side_by_side", together)


class Model:
    """Three layers, the staging set of what is loaded, and the derivation with its second set."""

    def __init__(
        self, make: Any = Replays, *, written: Sequence[str] = ("weight", "bias"), may_move: bool = False
    ) -> None:
        self.weights = [torch.randn(4, 6).bfloat16() for _ in range(3)]
        pairs = [quantised(weight, Method(), f"layers.{number}") for number, weight in enumerate(self.weights)]
        self.layers: list[Layer] = [layer for layer, _ in pairs]
        self.quantised = [found for _, found in pairs]
        residents = {f"{found.name}.{key}": found.loaded[key] for found in self.quantised for key in written}
        self.staging = StagingSet(residents, "device", keep_storage=True, may_move=may_move)
        self.derivation = Derivation(self.quantised)
        self.derivation.add_second_set(self.staging, in_order=False, may_move=may_move)
        self.recorders: list[Any] = [Recorders(make) for _ in range(2)]
        self.derivation.record(self.recorders)  # type: ignore[arg-type]  stand-ins

    def receive(self, *, ahead: bool = True) -> list[torch.Tensor]:
        """Other weights arrive and wait."""
        self.staging.begin()
        weights = [torch.randn(4, 6).bfloat16() for _ in self.layers]
        for found, weight in zip(self.quantised, weights, strict=True):
            self.staging.target(f"{found.name}.weight").copy_(weight)
            if f"{found.name}.bias" in self.staging.lives:
                self.staging.target(f"{found.name}.bias").copy_(weight[:, 0])
            else:
                found.loaded["bias"].data.copy_(weight[:, 0])
        if ahead:
            self.derivation.run_ahead()
        return weights

    def commit(self) -> int:
        """Returns the number of layers that were derived while the engine stood still."""
        before = self.launched()
        self.staging.flip()
        self.derivation.run()
        return self.launched() - before

    def undo(self) -> int:
        before = self.launched()
        self.staging.undo()
        self.derivation.run()
        return self.launched() - before

    def launched(self) -> int:
        return sum(made.launched for recorder in self.recorders for made in recorder.made if made)

    def serves(self, weights: Sequence[torch.Tensor]) -> bool:
        """True if all that kernels hold is what the method makes of these weights."""
        wanted = [loaded(weight, Method())[0] for weight in weights]
        return all(
            torch.equal(layer.weight.view(torch.uint8), other.weight.view(torch.uint8))
            and torch.equal(layer.quant_method.kernel.scale, other.weight_scale)
            and torch.equal(layer.bias, other.bias)
            for layer, other in zip(self.layers, wanted, strict=True)
        )


def test_a_commit_finds_what_kernels_read_ready() -> None:
    model = Model()
    held = [tensor.data_ptr() for layer in model.layers for tensor in layer.parameters()]
    for _ in range(3):
        before, weights = model.weights, model.receive()
        assert model.serves(before), "what waits is not served"
        assert model.commit() == 0
        assert model.serves(weights)
        for found in model.quantised:
            found.check()
        model.weights = weights
    assert [tensor.data_ptr() for layer in model.layers for tensor in layer.parameters()] == held


def test_an_undo_brings_back_what_kernels_read() -> None:
    model = Model()
    for _ in range(2):
        model.receive()
        model.commit()
        assert model.undo() == 0
        assert model.serves(model.weights)
    weights = model.receive()
    assert model.commit() == 0
    assert model.serves(weights)


def test_a_version_that_was_not_derived_ahead_is_derived_at_its_commit() -> None:
    model = Model()
    first = model.receive()
    model.commit()
    second = model.receive(ahead=False)
    assert model.commit() == 3
    assert model.serves(second)
    assert model.undo() == 3
    assert model.serves(first)


def test_what_was_derived_for_a_version_that_was_given_up_is_not_used() -> None:
    model = Model()
    model.receive()  # and no commit
    weights = model.receive(ahead=False)
    assert model.commit() == 3
    assert model.serves(weights)
    model.receive()
    weights = model.receive()
    assert model.commit() == 0
    assert model.serves(weights)


def test_staging_in_other_memory_is_derived_at_the_commit() -> None:
    model = Model()
    model.staging.free()
    model.staging.allocate()
    weights = model.receive()
    assert model.commit() == 3
    assert model.serves(weights)


@pytest.fixture
def mapper(monkeypatch: pytest.MonkeyPatch) -> HostMapper:
    found = HostMapper()
    monkeypatch.setattr(staging_of, "mapper_of", lambda device: found)
    return found


def falls_asleep(model: Model, *, discard: bool) -> None:
    """As the worker: vLLM's own sleep comes between the two."""
    if not discard:
        model.staging.store()
    model.staging.free()
    model.derivation.fall_asleep(discard=discard)
    model.staging.let_go()
    model.derivation.let_go()


def wakes(model: Model) -> None:
    for sleeper in (model.staging, model.derivation):
        sleeper.restore()
    model.staging.allocate()
    model.derivation.wake()


@pytest.mark.parametrize("commits", [0, 1])
def test_the_second_set_sleeps_and_versions_are_derived_ahead_again(mapper: HostMapper, commits: int) -> None:
    model = Model(written=("weight",), may_move=True)
    assert model.derivation.outside_bytes > 0
    for _ in range(commits):
        model.weights = model.receive()
        model.commit()
    for discard in (False, True, False):
        falls_asleep(model, discard=discard)
        assert not mapper.live, "asleep it takes no memory"
        wakes(model)
        if not discard:
            assert model.serves(model.weights)
        model.weights = model.receive()
        assert model.commit() == 0, "derived ahead"
        assert model.serves(model.weights)


def test_what_was_derived_before_a_sleep_is_not_used_after_it(mapper: HostMapper) -> None:
    model = Model(written=("weight",), may_move=True)
    model.receive()  # and no commit
    falls_asleep(model, discard=False)
    wakes(model)
    weights = model.receive(ahead=False)
    assert model.commit() == 3
    assert model.serves(weights)


def test_without_room_for_the_second_set_layers_are_derived_at_the_commit_until_there_is(
    mapper: HostMapper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(written=("weight",), may_move=True)
    falls_asleep(model, discard=False)
    model.staging.restore()
    model.derivation.restore()
    model.staging.allocate()

    def create(size_bytes: int) -> int:
        raise torch.OutOfMemoryError("there is no more")

    with monkeypatch.context() as crowded:
        crowded.setattr(mapper, "create", create)
        model.derivation.wake()
        assert "derived at the commit for now: there is no more" in caplog.text
        weights = model.receive()
        assert model.commit() == 3
        assert model.serves(weights)
    weights = model.receive()
    assert model.commit() == 0
    assert model.serves(weights)


def test_a_sleep_that_moves_memory_ends_the_derivation_ahead(
    mapper: HostMapper, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(may_move=True)  # a bias, which a kernel holds too, cannot be mapped
    assert model.derivation.derives_ahead
    for discard in (False, True):
        falls_asleep(model, discard=discard)
        wakes(model)
        assert "as memory moved when vLLM woke up" in caplog.text
        weights = model.receive()
        assert model.commit() == 3
        assert model.serves(weights)


def test_an_exchange_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.receive()
    second: StagingSet = model.derivation._second
    [chunks] = second._exchanges
    whole = chunks._chunks

    def part() -> Any:
        for number, pair in enumerate(whole()):
            if number == 2:
                raise RuntimeError("the device has failed")
            yield pair

    monkeypatch.setattr(chunks, "_chunks", part)
    with pytest.raises(RuntimeError, match="the device has failed"):
        model.commit()
    monkeypatch.undo()
    stand_in_for_vllm(monkeypatch)
    monkeypatch.setattr(derivation, "side_by_side", together)
    model.undo()
    assert model.serves(model.weights)


class Wrong(Replays):
    """A recording that does nothing once it was tried."""

    def launch(self) -> bool:
        self.launched += 1
        return True


@pytest.mark.parametrize("how", ["nothing recorded", "another result", "disturbed"])
def test_what_comes_out_wrong_when_it_is_tried_is_derived_at_the_commit(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []

    def make(work: Any) -> Any:
        made.append(1)
        if len(made) <= 3:  # the recordings for the commit
            return Replays(work)
        return {"nothing recorded": None, "another result": Wrong(work), "disturbed": Replays(work)}[how]

    if how == "disturbed":

        @contextmanager
        def disturbing(recorders: Sequence[Any]) -> Generator[None]:
            yield
            if recorders and seconds:
                target = next(iter(seconds))
                target.view(torch.uint8).add_(1)

        seconds: list[torch.Tensor] = []
        original = Derivation._record_ahead

        def record(self: Derivation, lanes: Any) -> str:
            seconds.append(next(iter(self._second.targets.values())))
            return original(self, lanes)

        monkeypatch.setattr(Derivation, "_record_ahead", record)
        monkeypatch.setattr(derivation, "side_by_side", disturbing)
    caplog.set_level("INFO", logger="vllm.weightcast")
    model = Model(make)
    assert not model.derivation.derives_ahead
    assert "layers.0 cannot be derived ahead" in caplog.text
    weights = model.receive()
    assert model.commit() == 3
    assert model.serves(weights)


def test_a_parameter_that_no_update_writes_keeps_its_values() -> None:
    model = Model(written=("weight",))
    assert model.derivation.derives_ahead
    assert model.serves(model.weights)


def test_a_tensor_that_a_kernel_holds_too_is_there_once() -> None:
    _, found = quantised(torch.randn(4, 6).bfloat16(), Method())
    assert len(found.derived) == 3
    assert list(Derivation([found]).derived) == ["model.layer parameters.weight", "model.layer parameters.weight_scale"]


def test_a_second_set_needs_memory_and_tensors_that_share_none() -> None:
    weight = torch.zeros(64, 16)
    residents = {"weight": torch.zeros(4)}
    waiting = StagingSet(residents, "device")
    room = Budget(cache_bytes=1 << 20, least_bytes=0, fixed_bytes=None, host_bytes=1 << 30, on_host=False)
    none = Budget(cache_bytes=1 << 20, least_bytes=0, fixed_bytes=4095, host_bytes=1 << 30, on_host=False)
    assert why_not_ahead({"weight": weight}, waiting, room) == ""
    assert "beside a KV cache of a fixed size" in why_not_ahead({"weight": weight}, waiting, none)
    assert "share memory" in why_not_ahead({"weight": weight, "half": weight[:32]}, waiting, room)
    assert "do not wait on the device" in why_not_ahead({"weight": weight}, StagingSet(residents, "host"), room)
