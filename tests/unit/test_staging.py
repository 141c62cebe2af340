"""The second set: a flip exchanges, two flips do nothing, and what no update writes keeps its value."""

from __future__ import annotations

import pytest
import torch

from weightcast.errors import ConfigError
from weightcast.receiver import staging
from weightcast.receiver.staging import Staging, choose_place

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
    }


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        for name, tensor in tensors.items()
    }


@pytest.fixture(params=["device", "host"])
def place(request, monkeypatch):
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 16)  # several chunks for tensors this small
    return request.param


def write(stage: Staging, names) -> dict[str, bytes]:
    new = {}
    for name in names:
        target = stage.target(name)
        value = (
            torch.ones_like(target) if target.dtype == torch.bool else (torch.randn(target.shape) * 5).to(target.dtype)
        )
        target.detach().copy_(value)
        new[name] = value
    return bits(new)


def test_writes_stay_out_of_sight_until_the_flip(place):
    live = residents()
    objects = {name: id(tensor) for name, tensor in live.items()}
    old = bits(live)
    stage = Staging(live, place)
    assert stage.staged
    new = write(stage, live)
    assert bits(live) == old
    stage.flip()
    assert bits(live) == new
    assert new != old
    assert {name: id(tensor) for name, tensor in live.items()} == objects
    assert live["half"].requires_grad


def test_a_second_flip_undoes_the_first_bit_for_bit(place):
    live = residents()
    old = bits(live)
    stage = Staging(live, place)
    write(stage, live)
    stage.flip()
    stage.flip()
    assert bits(live) == old


def test_many_updates_in_turn(place):
    live = residents()
    stage = Staging(live, place)
    for _ in range(4):
        new = write(stage, live)
        stage.flip()
        assert bits(live) == new


def test_what_an_update_leaves_out_keeps_its_value(place):
    # The padding of a vocabulary: rows that no source has.
    live = {"padded": torch.arange(12.0).view(4, 3)}
    stage = Staging(live, place)
    for version in range(3):
        stage.target("padded")[:3].fill_(version)
        stage.flip()
        assert live["padded"][3].tolist() == [9.0, 10.0, 11.0]
        assert live["padded"][:3].unique().tolist() == [version]


def test_without_staging_the_live_ones_are_written():
    live = residents()
    stage = Staging(live, "none")
    assert not stage.staged
    assert stage.target("matrix") is live["matrix"] is stage.live("matrix")
    old = bits(live)
    stage.flip()
    assert bits(live) == old


def test_a_place_is_chosen_by_what_is_free(monkeypatch):
    assert choose_place("none", size_bytes=1 << 60, device=CPU) == "none"
    monkeypatch.setattr(staging, "_free_host_bytes", lambda: 1000)
    assert choose_place("auto", size_bytes=100, device=CPU) == "device"
    assert choose_place("host", size_bytes=100, device=CPU) == "host"
    assert choose_place("auto", size_bytes=900, device=CPU) == "none"  # no room to breathe
    for asked in ("device", "host"):
        with pytest.raises(ConfigError, match="900 bytes"):
            choose_place(asked, size_bytes=900, device=CPU)
