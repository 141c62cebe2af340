"""Events reach every listener in order, whatever a listener does."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest

from tests.helpers.sessions import announce
from tests.helpers.watching import started, tell_session, trainer_events
from weightcast.config import TransportName
from weightcast.errors import ConfigError
from weightcast.receiver.session_events import SessionEvents
from weightcast.update.arguments import listeners_of
from weightcast.watch.events import Event, short
from weightcast.watch.listeners import Events
from weightcast.watch.sessions import Answered, SessionRecord, SessionWatcher
from weightcast.wire.answers import Ack
from weightcast.wire.bucket_sources import (
    BroadcastSource,
    ByRankSource,
    ExchangeSource,
    IpcSource,
    Leg,
    LegsSource,
    MappedSource,
    MemoryHandle,
    PartialBuffer,
    RankLegs,
    RanksMemory,
    RemoteBuffer,
    RemoteMemory,
    RemoteSource,
    ScatteredSource,
    Source,
)
from weightcast.wire.layout import BucketLayout


class Heard:
    """Remembers what it is told, and may refuse to be attached."""

    def __init__(self, log: list[object], *, fails: bool = False) -> None:
        self.log = log
        self.fails = fails

    def attach(self, events: Events) -> None:
        self.log.append(("attach", events.rank))
        if self.fails:
            raise ConfigError("no")

    def detach(self) -> None:
        self.log.append("detach")

    def __call__(self, event: object) -> None:
        self.log.append(event)


def test_a_listener_that_raises_stops_neither_the_update_nor_the_others(caplog):
    def breaks(event: object) -> None:
        raise ValueError("mine")

    log: list[object] = []
    events = Events([breaks, log.append])
    with caplog.at_level(logging.ERROR, "weightcast"):
        for event in trainer_events():
            events.emit(event)
    assert log == trainer_events()
    assert len(caplog.records) == len(log)
    assert all("ValueError: mine" in record.getMessage() for record in caplog.records)
    assert [bool(record.exc_info) for record in caplog.records] == [True] + [False] * (len(log) - 1)
    asks_for_fields = logging.Formatter("%(session)s %(version)s %(target)s %(message)s")
    assert asks_for_fields.format(caplog.records[-1]).startswith("None None None ")


def test_listeners_are_attached_once_and_detached_at_the_end():
    log: list[object] = []
    events = Events([Heard(log), print], rank=3)
    events.close()
    assert log == [("attach", 3), "detach"]


def test_a_listener_that_cannot_be_attached_fails_and_lets_go_of_the_others():
    log: list[object] = []
    with pytest.raises(ConfigError):
        Events([Heard(log), Heard(log, fails=True), Heard(log)])
    assert log == [("attach", 0), ("attach", 0), "detach"]


def test_events_come_one_at_a_time():
    inside, most = 0, 0

    def listen(event: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threading.Event().wait(0.001)
        inside -= 1

    events = Events([listen])
    threads = [threading.Thread(target=events.emit, args=(started(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_events_go_round_as_json():
    for event in trainer_events():
        assert msgspec.json.decode(msgspec.json.encode(event), type=Event) == event


def test_the_slowest_rank_counts():
    session = tell_session(SessionWatcher())
    assert session.phases() == pytest.approx({"wire": 0.2, "load": 0.3, "pause": 0.1})


def test_a_session_is_never_shown_whole():
    assert short("0123456789abcdef" * 2) == "01234567"


@pytest.mark.parametrize("bad", [5, [print, "x"], "x"])
def test_what_cannot_be_called_is_refused(bad):
    with pytest.raises(ConfigError, match="on_event"):
        listeners_of(bad)


def test_one_listener_several_and_none_are_taken():
    own = len(listeners_of(None))
    assert listeners_of(print)[own:] == (print,)
    assert listeners_of([print, repr])[own:] == (print, repr)


HANDLE = MemoryHandle(kind="shm", device="cpu", size_bytes=64)
REMOTE = RemoteMemory(
    agent="a", metadata=b"m", address=1, token=b"t" * 32, first_byte=0, size_bytes=64, owner="host (process 1)"
)
SOURCES = [
    ("ipc", IpcSource(handles=(HANDLE,))),
    ("direct", ScatteredSource(buffers=(PartialBuffer(handle=HANDLE, parts=()),))),
    ("direct", RemoteSource(buffers=(RemoteBuffer(memory=REMOTE, parts=()),))),
    ("direct", MappedSource(memories=(HANDLE,), parts=())),
    ("direct", ExchangeSource(group="g")),
    ("direct", LegsSource(ranks=(RankLegs(ranks=(0,), legs=(Leg(handle=HANDLE), Leg())),), group="g")),
    ("broadcast", BroadcastSource(group="g")),
    ("ipc+broadcast", ByRankSource(near=(RanksMemory(ranks=(0,), handles=(HANDLE,)),), group="g")),
]


@pytest.mark.parametrize(("name", "source"), SOURCES)
def test_a_bucket_is_told_with_the_transport_that_sent_it(name, source):
    told: list[Answered] = []

    class Heard(SessionWatcher):
        def answered(self, session: SessionRecord | None, answered: Answered) -> None:
            told.append(answered)

    state: Any = SimpleNamespace(state="serving", version=1, message="")
    message = announce("0" * 32, BucketLayout(index=0, size_bytes=64, slots=()), source)
    SessionEvents([Heard()], state).refused(message, Ack(ok=False), 1.0)
    assert told[-1].transport == name


def test_every_source_of_a_bucket_names_its_transport():
    assert {type(source) for _, source in SOURCES} == set(get_args(Source))
    names = {name for kind in get_args(Source) for name in kind.transport.split("+")}
    assert names <= set(get_args(TransportName))
