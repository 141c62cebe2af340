"""On GPUs an answer means done: a commit may run on another thread, and so on another stream, than the copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers.models import FusedModel, specs_of, weights_of
from tests.helpers.sessions import Sender
from weightcast.receiver import WeightReceiver
from weightcast.receiver import shares as shares_module
from weightcast.runtime.streams import wait_for_streams

GPU, OTHER, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


@pytest.fixture
def waited(monkeypatch) -> list[torch.device]:
    """Devices whose current stream was waited for; this machine has no GPU."""
    found: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.synchronize: Callable[[], None] = lambda: found.append(device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return found


def test_each_device_is_waited_for_once_and_the_host_never(waited):
    wait_for_streams(GPU, CPU, OTHER, GPU)
    assert waited == [GPU, OTHER]


@pytest.mark.parametrize("verify", ["none", "received", "resident"])
def test_close_is_answered_when_the_copies_are_done(waited, verify):
    model = FusedModel()
    receiver = WeightReceiver(model, load_weights=model.load_weights, expected=specs_of(weights_of(1)))
    sender = Sender(weights_of(1), verify=verify)
    *transfer, close = (message for message in sender.transfer() if receiver_takes(receiver, message, waited))
    assert transfer
    assert close
    assert waited == [GPU]
    receiver._steps._device = CPU
    receiver.close()


def test_a_bucket_is_answered_when_its_own_device_is_done_too(monkeypatch):
    """A bucket in another GPU's memory is summed there, and the trainer may fill it again after the answer."""
    waited: list[torch.device] = []
    monkeypatch.setattr(shares_module, "wait_for_streams", lambda *devices: waited.extend(devices))
    model = FusedModel()
    receiver = WeightReceiver(model, load_weights=model.load_weights, expected=specs_of(weights_of(1)))
    sender = Sender(weights_of(1))
    assert receiver.apply(sender.open).ok
    receiver._steps._shares.device = rank = torch.device("cpu", 0)  # not the bucket's, which has no number
    waited.clear()
    ack = receiver.apply(sender.announce(0))
    assert ack.ok, ack.error
    assert waited == [rank, CPU]
    receiver.close()


def receiver_takes(receiver: WeightReceiver, message, waited: list[torch.device]) -> bool:
    """Apply a message; from the one after Open on, the rank believes that it runs on a GPU."""
    waited.clear()
    ack = receiver.apply(message)
    receiver._steps._device = GPU
    return ack.ok
