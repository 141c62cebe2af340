"""An engine without a server, for tests of sessions: ranks in this process, and hooks that fail when told to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from tests.helpers.clock import PATIENCE_S
from tests.helpers.models import FusedModel, differing, specs_of, state, weights_of
from tests.helpers.sessions import Sender
from weightcast.comm.rendezvous import Rendezvous
from weightcast.errors import EngineFailure
from weightcast.receiver import WeightReceiver
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.session import SessionHandler
from weightcast.receiver.staging import StagingPlace
from weightcast.watch.sessions import SessionWatcher
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.messages import Join, Message


class Ranks:
    """All ranks in this process, one after the other; one may be told to fail."""

    def __init__(self, receivers: Sequence[WeightReceiver]) -> None:
        self.receivers = list(receivers)
        self.tp_size = len(self.receivers)
        self.broken = ""

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        if self.broken == type(message).__name__ or self.broken == "all":
            raise EngineFailure("rank 1 was killed", ranks=[1], hint="restart the engine")
        return [receiver.apply(message) for receiver in self.receivers]

    def run(self, command: bytes) -> bytes:
        return command

    def interrupt(self, reason: str) -> None:
        for receiver in self.receivers:
            receiver.interrupt(reason)

    def pids(self) -> Sequence[int]:
        return [0] * self.tp_size

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


class Hooks:
    """Remembers what was asked, fails when told to."""

    def __init__(self) -> None:
        self.paused = False
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] in self.failing:
            raise self.failing[name.split()[0]]

    def pause(self, mode: str, timeout_s: float) -> None:
        self._call(f"pause {mode}")
        self.paused = True

    def stop_waiting(self) -> None:
        pass

    def resume(self) -> None:
        self._call("resume")
        self.paused = False

    def drop_caches(self) -> None:
        assert self.paused
        self._call("drop_caches")

    def set_version(self, version: int) -> None:
        assert self.paused
        self._call(f"set_version {version}")


class Bench:
    """An engine of one or two ranks with the weights of version 0."""

    def __init__(
        self,
        *,
        staging: StagingPlace = "device",
        tp_size: int = 1,
        keep_storage: bool = False,
        watchers: Sequence[SessionWatcher] = (),
        ranks: type[Ranks] = Ranks,
    ) -> None:
        self.models = [FusedModel(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
        weights = weights_of(0)
        with torch.no_grad():
            for model in self.models:
                model.load_weights(weights.items())
        self.ranks = ranks(
            [
                WeightReceiver(
                    model,
                    load_weights=model.load_weights,
                    expected=specs_of(weights),
                    tp_rank=rank,
                    tp_size=tp_size,
                    staging=staging,
                    keep_storage=keep_storage,
                )
                for rank, model in enumerate(self.models)
            ]
        )
        self.hooks = Hooks()
        facts = EngineFacts(
            engine="test 1",
            model="m",
            host_id="h",
            ranks=tuple(RankInfo(rank=rank, pid=1, device="cpu") for rank in range(tp_size)),
            staging=staging,
            transports=("ipc", "broadcast"),
            specs=tuple(specs_of(weights)),
        )
        self.engine = SessionHandler(self.ranks, self.hooks, facts, watchers=watchers)

    def close(self) -> None:
        self.engine.close()
        self.ranks.close()

    def tell(self, message: Message) -> Ack:
        ack = self.engine.apply(message)
        assert ack.ok, ack.error
        return ack

    def refuse(self, message: Message) -> str:
        before = self.engine.info()
        ack = self.engine.apply(message)
        assert not ack.ok
        assert ack.error
        assert ack.state == before.state == self.engine.state
        assert self.engine.info() == before
        return ack.error

    def transfer(self, sender: Sender) -> Ack:
        ack = None
        for message in sender.transfer():
            ack = self.tell(message)
        assert ack is not None
        return ack

    def update(self, version: int, **changes) -> Ack:
        sender = Sender(weights_of(version), version=version, **changes)
        self.transfer(sender)
        return self.tell(sender.commit(sender.digests()[1]))

    def serves(self, version: int) -> bool:
        """Every rank has exactly the weights of the version."""
        for rank, model in enumerate(self.models):
            wanted = FusedModel(tp_rank=rank, tp_size=len(self.models))
            with torch.no_grad():
                wanted.load_weights(weights_of(version).items())
            if differing(model, state(wanted)):
                return False
        return True


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(**kwargs) -> Bench:
        made.append(Bench(**kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


_place = Rendezvous(host="127.0.0.1", timeout_s=PATIENCE_S)


def meeting(**changes) -> Join:
    """With somebody who does not come."""
    fields = {
        "group": "g",
        "host": "127.0.0.1",
        "port": _place.port,
        "token": "ab" * 16,
        "first_rank": 1,
        "world_size": 2,
        "backend": "gloo",
        "timeout_s": 1000.0,
    }
    return Join(**fields | changes)


def in_thread(engine: SessionHandler, message: Message) -> tuple[threading.Thread, list[Ack]]:
    acks: list[Ack] = []
    thread = threading.Thread(target=lambda: acks.append(engine.apply(message)))
    thread.start()
    return thread, acks
