"""Weight messages beside the steps of an engine have a stream of their own, behind what was written before."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from tests.helpers.messages import ANNOUNCE, OPEN
from weightcast.receiver.beside_steps import OwnStream
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Commit, Message, Readback

GPU = torch.device("cuda", 1)


class Driver:
    """Stands in for CUDA: streams, and which one is current while a receiver works."""

    def __init__(self) -> None:
        self.current = "default"
        self.said: list[str] = []

    def Stream(self, device: torch.device) -> Any:
        assert device == GPU
        self.said.append("new stream")
        return self

    def default_stream(self, device: torch.device) -> str:
        assert device == GPU
        return "default"

    def wait_stream(self, other: str) -> None:
        self.said.append(f"behind {other}")

    @contextmanager
    def stream(self, stream: object) -> Generator[None]:
        assert stream is self
        self.current = "own"
        yield
        self.current = "default"

    def apply(self, message: Message) -> RankAck:
        self.said.append(f"{type(message).__name__} on {self.current}")
        return RankAck(rank=0, ok=True)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for name in ("Stream", "default_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(driver, name))
    return driver


def test_a_message_sees_what_was_written_before_and_a_bucket_waits_for_no_step(driver: Driver) -> None:
    stream, receiver = OwnStream(GPU), cast("Any", driver)
    for message in (OPEN, ANNOUNCE, Commit(session=OPEN.session), Readback()):
        assert stream.apply(receiver, message).ok
    assert driver.said == [
        "new stream",
        *("behind default", "Open on own"),
        "Announce on own",
        *("behind default", "Commit on own"),
        *("behind default", "Readback on own"),
    ]
    assert driver.current == "default"
