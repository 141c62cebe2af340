"""``connect`` works out what updates need: engines map memory and hear the plan before the first update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.e2e.served import Served
from weightcast.comm import nixl
from weightcast.comm.ipc import SharedBuffer
from weightcast.lab.bench.synthetic import nested
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.wire import codec
from weightcast.wire.blobs import Blobs
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Open, Prepare

FEW = 64


def specs_of(count: int) -> list[TensorSpec]:
    return [TensorSpec(name=f"blocks.w{number}", dtype="bfloat16", shape=(8, 32)) for number in range(count)]


def weights(seed: int, count: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    return nested(
        {
            spec.name: nn.Parameter(torch.randn(spec.shape, generator=generator).bfloat16(), requires_grad=False)
            for spec in specs_of(count)
        }
    )


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)


def holds(served: Served, model: nn.Module) -> bool:
    return not served.differing(dict(model.named_parameters()))


def share(model: nn.Module) -> SharedBuffer:
    """Moves a module's parameters into memory that other processes can map, as memory of a GPU is."""
    buffer = SharedBuffer(sum(parameter.nbytes for parameter in model.parameters()), torch.device("cpu"))
    start = 0
    for parameter in model.parameters():
        end = start + parameter.nbytes
        parameter.data = buffer.data[start:end].view(parameter.dtype).view(parameter.shape).copy_(parameter.data)
        start = end
    return buffer


# On a CPU weights are checked part by part, which a GPU leaves out by default.
SHARDS = {"transport": "direct", "direct_by": "shards", "keep_mapped": True, "advanced": {"check_finite": False}}
BY_MEMORY = [
    pytest.param({"transport": "ipc"}, id="ipc"),
    pytest.param({"transport": "direct", "direct_by": "memory"}, id="direct by memory"),
    pytest.param(SHARDS, id="direct by shards"),
]
WAYS = [
    *BY_MEMORY,
    pytest.param({"transport": "broadcast"}, id="broadcast"),
    pytest.param({"transport": "direct", "direct_by": "messages"}, id="messages"),
    pytest.param({"transport": "direct", "direct_by": "relay"}, id="relay"),
    pytest.param(
        {"transport": "rdma"},
        id="rdma",
        marks=pytest.mark.skipif(bool(nixl.missing()), reason=nixl.missing()),
    ),
]


@pytest.mark.parametrize("verify", ["resident", "none"])
@pytest.mark.parametrize("way", WAYS)
def test_each_of_the_first_updates_arrives(way, verify):
    """The first finds everything new, the second writes the other set of weights, and the third repeats the first."""
    with closing(Served(specs_of(FEW))) as served, shared_model() as model:
        size_bytes = sum(parameter.nbytes for parameter in model.parameters())
        with connect_in_lab(model, served.url, bucket_bytes=size_bytes // 4, verify=verify, **way) as updater:
            for version in (1, 2, 3):
                train(model)
                assert not holds(served, model)
                report = updater.update(version=version)
                assert (report.buckets, report.targets[0].proof) == (1 if way is SHARDS else 4, verify)
                assert holds(served, model)


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "direct"])
def test_later_updates_send_nothing_for_each_tensor(transport):
    count = 4096
    served, model = Served(specs_of(count)), weights(1, count)
    try:
        sizes: list[int] = []
        with connect_in_lab(model, served.url, transport=transport, bucket_bytes=512 * count // 4) as updater:
            assert served.metered.size_bytes > 10 * count, "connect sends the tables, so this test can fail"
            for version in (1, 2, 3):
                train(model)
                before = served.metered.size_bytes
                assert updater.update(version=version).buckets == 4
                sizes.append(served.metered.size_bytes - before)
                assert holds(served, model)
        assert max(sizes[1:]) < 2 * count
    finally:
        served.close()


def test_an_engine_that_forgot_a_source_gets_it_again(monkeypatch):
    count = 4096
    served, model = Served(specs_of(count)), weights(1, count)
    try:
        with connect_in_lab(model, served.url, transport="direct", bucket_bytes=512 * count // 4) as updater:
            updater.update(version=1)
            monkeypatch.setattr(codec, "KEPT", Blobs())
            train(model)
            assert updater.update(version=2).targets[0].proof == "resident"
        assert holds(served, model)
    finally:
        served.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "direct"])
def test_an_engine_hears_the_plan_once_and_serves_what_it_served(transport):
    served = Served(specs_of(FEW))
    try:
        model = weights(1, FEW)
        with torch.no_grad():
            served.model.load_weights(weights(0, FEW).named_parameters())
        before = served.handler.info()
        with connect_in_lab(model, served.url, transport=transport, bucket_bytes=4096) as updater:
            assert not any(isinstance(message, Open) for message in served.heard)
            assert served.handler.info() == before
            assert holds(served, weights(0, FEW))
            updater.update(version=1)
            assert sum(isinstance(message, Prepare) for message in served.heard) == 1
        assert holds(served, model)
    finally:
        served.close()


def test_an_engine_that_cannot_take_the_plan_is_updated_all_the_same(caplog):
    served = Served(specs_of(FEW))
    try:
        model = weights(1, FEW)
        served.receiver.sleep()
        caplog.set_level("INFO", logger="weightcast.update.prepare")
        with connect_in_lab(model, served.url, transport="ipc") as updater:
            assert "asleep" in caplog.text
            served.receiver.wake()
            assert updater.update(version=1).targets[0].proof == "resident"
        assert holds(served, model)
    finally:
        served.close()


def test_what_one_trainer_has_prepared_is_not_in_the_way_of_another():
    served = Served(specs_of(FEW))
    try:
        model, other = weights(1, FEW), weights(2, FEW)
        with (
            connect_in_lab(model, served.url, transport="ipc", bucket_bytes=4096) as first,
            connect_in_lab(other, served.url, transport="ipc", bucket_bytes=8192) as second,
        ):
            first.update(version=1)
            assert holds(served, model)
            second.update(version=2)
            assert holds(served, other)
            train(model)
            assert first.update(version=3).targets[0].proof == "resident"
            assert holds(served, model)
    finally:
        served.close()


@pytest.mark.parametrize("way", BY_MEMORY)
def test_memory_that_moves_after_connect_is_found(way):
    served = Served(specs_of(FEW))
    model = weights(1, FEW)
    before = share(model)
    buffers = [before]
    try:
        with connect_in_lab(model, served.url, bucket_bytes=4096, **way) as updater:
            for parameter in served.model.parameters():
                parameter.data = parameter.data.clone()
            buffers.append(share(model))
            before.close()  # what engines have mapped is not what is sent
            train(model)
            assert updater.update(version=1).targets[0].proof == "resident"
            assert holds(served, model)
            path, _, last = "blocks.w3".rpartition(".")
            replaced = nn.Parameter(model.get_parameter("blocks.w3").data, requires_grad=False)
            setattr(model.get_submodule(path), last, replaced)
            train(model)
            assert updater.update(version=2).targets[0].proof == "resident"
        assert holds(served, model)
    finally:
        for buffer in buffers:
            buffer.close()
        served.close()


def mapped_files() -> int:
    """Number of mappings of shared buffers in this process, in which trainer and engine run."""
    return Path("/proc/self/maps").read_text().count("/memfd:weightcast-")


@contextmanager
def shared_model() -> Iterator[nn.Module]:
    """A trainer's module whose weights other processes can map."""
    model = weights(1, FEW)
    with closing(share(model)):
        yield model


@pytest.mark.parametrize("way", BY_MEMORY)
def test_an_engine_lets_go_of_a_trainer_that_never_sent(way):
    with closing(Served(specs_of(FEW))) as served, shared_model() as model:
        own = mapped_files()
        with connect_in_lab(model, served.url, bucket_bytes=4096, **way):
            assert mapped_files() > own
        assert mapped_files() == own


@pytest.mark.parametrize("way", BY_MEMORY)
def test_updates_map_nothing_that_connect_has_not_mapped(way):
    with closing(Served(specs_of(FEW))) as served, shared_model() as model:
        own = mapped_files()
        with connect_in_lab(model, served.url, bucket_bytes=4096, **way) as updater:
            connected = mapped_files()
            assert connected > own
            for version in (1, 2):
                train(model)
                updater.update(version=version)
                assert mapped_files() == connected
                assert holds(served, model)


@pytest.mark.parametrize("way", BY_MEMORY)
def test_an_engine_maps_again_what_it_was_told_to_unmap(way):
    with closing(Served(specs_of(FEW))) as served, shared_model() as model:
        own = mapped_files()
        with connect_in_lab(model, served.url, bucket_bytes=4096, **way) as updater:
            connected = mapped_files()
            updater.release()
            assert own <= mapped_files() < connected
            train(model)
            assert updater.update(version=1).targets[0].proof == "resident"
        assert holds(served, model)


@pytest.mark.parametrize("way", BY_MEMORY)
def test_targets_that_join_later_map_this_trainer_too(way):
    with closing(Served(specs_of(FEW))) as served, closing(Served(specs_of(FEW))) as late, shared_model() as model:
        own = mapped_files()
        with connect_in_lab(model, served.url, bucket_bytes=4096, **way) as updater:
            one = mapped_files() - own
            updater.retarget([served.url, late.url])
            assert mapped_files() - own > one
            train(model)
            report = updater.update(version=1)
            assert [row.proof for row in report.targets] == ["resident"] * 2
            assert holds(served, model)
            assert holds(late, model)
        assert mapped_files() == own
