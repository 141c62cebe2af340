"""``connect`` works out what updates need: the first update calls no function once for each tensor.

Trainer and engine run in this process, with HTTP, shared memory and gloo between them.  Calls are counted and not
timed, so that a busy machine changes nothing.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType
from typing import Any

import pytest
import torch
import uvicorn
from fastapi import FastAPI
from torch import nn

from tests.clock import PATIENCE_S, wait_until
from tests.unit.session_bench import Hooks, Ranks
from weightcast import UpdateReport, WeightUpdater
from weightcast.comm.ipc import host_id
from weightcast.digest.transfers import prepare_kernels
from weightcast.lab.bench.shapes import _equal
from weightcast.lab.bench.synthetic import Engine, nested
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.peer_routes import peer_routes
from weightcast.receiver.rank import WeightReceiver
from weightcast.receiver.server import weight_routes
from weightcast.receiver.session import SessionHandler
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Message, Prepare

FEW, MANY = 64, 256


class Calls:
    """Counts the calls of weightcast's functions, in threads that start after it was made."""

    def __init__(self) -> None:
        self.counts: Counter[str] | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        counts = self.counts
        if counts is not None and event == "call":
            code = frame.f_code
            path = PurePath(code.co_filename)
            if "weightcast" in path.parts:
                counts[f"{path.parent.name}/{path.name}:{code.co_firstlineno} {code.co_name}"] += 1

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        self.counts = found = Counter[str]()
        sys.setprofile(self)
        try:
            yield found
        finally:
            sys.setprofile(None)
            self.counts = None


@pytest.fixture
def calls() -> Iterator[Calls]:
    prepare_kernels(torch.device("cpu"))
    found = Calls()
    threading.setprofile(found)
    yield found
    threading.setprofile(None)  # type: ignore[arg-type]  # typeshed wants a function


class Served:
    """A real receiver behind HTTP, in this process."""

    def __init__(self, count: int) -> None:
        self.shape = _equal("m", count, 4, 8)
        self.model = Engine(self.shape, torch.device("cpu"))
        specs = tuple(TensorSpec(name=place.name, dtype="bfloat16", shape=place.shape) for place in self.shape.places)
        self.receiver = WeightReceiver(self.model, load_weights=self.model.load_weights, expected=specs)
        self.heard: list[Message] = []
        ranks = Ranks([self.receiver])
        apply = ranks.apply

        def noting(message: Message, **options: Any) -> Any:
            self.heard.append(message)
            return apply(message, **options)

        ranks.apply = noting  # type: ignore[method-assign]
        facts = EngineFacts(
            engine="test 1",
            model="m",
            host_id=host_id(),
            ranks=(RankInfo(rank=0, pid=1, device="cpu"),),
            staging="device",
            transports=("ipc", "direct", "broadcast"),
            specs=specs,
        )
        self.handler = SessionHandler(ranks, Hooks(), facts)
        app = FastAPI()
        app.include_router(weight_routes(self.handler))
        app.include_router(peer_routes(lambda: self.handler))
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, "the server")

    def weights(self, seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        return nested(
            {
                place.name: nn.Parameter(torch.randn(place.shape, generator=generator).bfloat16(), requires_grad=False)
                for place in self.shape.places
            }
        )

    def holds(self, model: nn.Module) -> bool:
        sent = dict(model.named_parameters())
        return all(torch.equal(self.model.region(place), sent[place.name]) for place in self.shape.places)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self.handler.close()
        self.receiver.close()


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)


def counts_of(
    calls: Calls, count: int, transport: Any, **options: Any
) -> tuple[list[Counter[str]], list[UpdateReport]]:
    """The calls of ``connect`` and of three updates, and the reports of these."""
    served = Served(count)
    try:
        model = served.weights(1)
        found: list[Counter[str]] = []
        reports: list[UpdateReport] = []
        with calls.counted() as connecting:
            updater = WeightUpdater.connect(model, served.url, transport=transport, bucket_bytes=64 * count, **options)
        found.append(connecting)
        with updater:
            for version in (1, 2, 3):
                train(model)
                with calls.counted() as updating:
                    reports.append(updater.update(version=version))
                assert served.holds(model)
                found.append(updating)
        return found, reports
    finally:
        served.close()


# The places of the second set must be looked up, and pointers exchanged; each takes a fraction of a microsecond.
# Whoever waits looks again and again, however many tensors there are.
ALLOWED = "receiver/staging.py", "comm/", "runtime/"


def grown(few: Counter[str], many: Counter[str]) -> dict[str, int]:
    """Functions that are called more often for more tensors in as many buckets."""
    more = {name: count for name, count in many.items() if count - few[name] > (MANY - FEW) // 2}
    return {name: count for name, count in more.items() if not name.startswith(ALLOWED)}


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "direct"])
@pytest.mark.parametrize("verify", ["resident", "none"])
def test_no_update_calls_a_function_for_each_tensor(calls, transport, verify):
    few, few_reports = counts_of(calls, FEW, transport, verify=verify)
    many, many_reports = counts_of(calls, MANY, transport, verify=verify)
    assert [report.buckets for report in few_reports] == [report.buckets for report in many_reports] == [4, 4, 4]
    assert grown(few[0], many[0]), "connect looks at each tensor, so this test can fail"
    for version, (first, second) in enumerate(zip(few[1:], many[1:], strict=True), start=1):
        assert not grown(first, second), f"update {version}"


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "direct"])
def test_an_engine_hears_the_plan_once_and_serves_what_it_served(transport):
    served = Served(FEW)
    try:
        model = served.weights(1)
        with torch.no_grad():
            served.model.load_weights(served.weights(0).named_parameters())
        before = served.handler.info()
        with WeightUpdater.connect(model, served.url, transport=transport, bucket_bytes=4096) as updater:
            assert [type(message) for message in served.heard] == [Prepare]
            assert served.handler.info() == before
            assert served.holds(served.weights(0))
            updater.update(version=1)
            assert sum(isinstance(message, Prepare) for message in served.heard) == 1
        assert served.holds(model)
    finally:
        served.close()


def test_an_engine_that_cannot_take_the_plan_is_updated_all_the_same(caplog):
    served = Served(FEW)
    try:
        model = served.weights(1)
        served.receiver.sleep()
        caplog.set_level("INFO", logger="weightcast.update.prepare")
        with WeightUpdater.connect(model, served.url, transport="ipc") as updater:
            assert "asleep" in caplog.text
            served.receiver.wake()
            assert updater.update(version=1).targets[0].proof == "resident"
        assert served.holds(model)
    finally:
        served.close()


def test_what_one_trainer_has_prepared_is_not_in_the_way_of_another():
    served = Served(FEW)
    try:
        model, other = served.weights(1), served.weights(2)
        with (
            WeightUpdater.connect(model, served.url, transport="ipc", bucket_bytes=4096) as first,
            WeightUpdater.connect(other, served.url, transport="ipc", bucket_bytes=8192) as second,
        ):
            first.update(version=1)
            assert served.holds(model)
            second.update(version=2)
            assert served.holds(other)
            train(model)
            assert first.update(version=3).targets[0].proof == "resident"
            assert served.holds(model)
    finally:
        served.close()


def test_memory_that_moves_after_connect_is_found(calls):
    served = Served(FEW)
    try:
        model = served.weights(1)
        with WeightUpdater.connect(model, served.url, transport="ipc", bucket_bytes=4096) as updater:
            for parameter in (*model.parameters(), *served.model.parameters()):
                parameter.data = parameter.data.clone()
            train(model)
            assert updater.update(version=1).targets[0].proof == "resident"
        assert served.holds(model)
    finally:
        served.close()
