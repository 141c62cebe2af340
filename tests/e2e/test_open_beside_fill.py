"""A trainer with the whole model fills its first buckets while the engines open their sessions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.e2e.served import Served
from tests.helpers.clock import PATIENCE_S
from weightcast import WeightUpdater
from weightcast.errors import WeightcastError
from weightcast.lab.bench.synthetic import nested
from weightcast.watch.events import StepEnded
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Abort, Message, Open

COUNT = 16
SPECS = [TensorSpec(name=f"blocks.w{number}", dtype="float32", shape=(16, 64)) for number in range(COUNT)]


def weights() -> nn.Module:
    return nested({spec.name: nn.Parameter(torch.randn(spec.shape), requires_grad=False) for spec in SPECS})


class Gated(Served):
    """An engine whose ranks do not open a session before they may."""

    def __init__(self) -> None:
        super().__init__(SPECS)
        self.may_open, self.asked, self.waited = threading.Event(), threading.Event(), True
        apply = self.receiver.apply

        def gated(message: Message) -> Any:
            if isinstance(message, Open):
                self.asked.set()
                self.waited = self.may_open.wait(PATIENCE_S)
            return apply(message)

        self.receiver.apply = gated  # type: ignore[method-assign]


@pytest.fixture
def engine() -> Iterator[Gated]:
    found = Gated()
    yield found
    found.may_open.set()
    found.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "direct"])
def test_a_bucket_is_filled_before_an_engine_has_opened_its_session(engine, transport):
    model, filled = weights(), list[bool]()

    def hear(event: object) -> None:
        if isinstance(event, StepEnded) and event.step.phase == "gather" and not filled:
            filled.append(engine.asked.wait(PATIENCE_S))
            engine.may_open.set()

    with WeightUpdater.connect(model, engine.url, transport=transport, bucket_bytes=4096, on_event=hear) as updater:
        assert engine.differing(dict(model.named_parameters()))
        report = updater.update(version=1)
    assert (filled, engine.waited) == ([True], True)
    assert report.targets[0].proof == "resident"
    assert not engine.differing(dict(model.named_parameters()))


def test_a_session_is_ended_that_opens_after_the_trainer_has_failed(engine):
    model = weights()
    with WeightUpdater.connect(model, engine.url, transport="ipc", bucket_bytes=4096) as updater:
        good = model.blocks.w0.clone()
        model.blocks.w0.fill_(float("nan"))
        opening = threading.Timer(0.2, engine.may_open.set)  # so long the trainer waits for an answer, and no longer
        opening.start()
        with pytest.raises(WeightcastError, match="finite"):
            updater.update(version=1)
        opening.join()
        assert engine.waited
        assert isinstance(engine.heard[-1], Abort)
        assert engine.handler.info().state == "serving"
        model.blocks.w0.copy_(good)
        assert updater.update(version=2).targets[0].proof == "resident"
    assert not engine.differing(dict(model.named_parameters()))


def test_an_engine_that_refuses_to_open_fails_the_update_by_name(engine):
    model = weights()
    engine.may_open.set()
    with WeightUpdater.connect(model, engine.url, transport="ipc", bucket_bytes=4096) as updater:
        updater.update(version=1)
        engine.receiver.sleep(hint="it sleeps")
        with pytest.raises(WeightcastError, match="it sleeps") as caught:
            updater.update(version=2)
        assert engine.url in str(caught.value)
        engine.receiver.wake()
        assert updater.update(version=3).targets[0].proof == "resident"
