"""Tables travel once to each rank and back, and a rank that lacks one gets the message again with all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import pytest

from tests.helpers.clock import PATIENCE_S
from weightcast.receiver.rank_connections import ConnectedRanks, serve_messages
from weightcast.wire import codec
from weightcast.wire.answers import RankAck
from weightcast.wire.blobs import Blobs
from weightcast.wire.held import HeldPart
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets
from weightcast.wire.messages import Message, Prepare
from weightcast.wire.plans import PLAN, UpdateTables

SPECS = tuple(TensorSpec(name=f"t{number}", dtype="float32", shape=(2, 4)) for number in range(100))


class Rank:
    """A rank that answers with one part of each tensor, and notes what it hears."""

    def __init__(self, number: int, met: threading.Barrier) -> None:
        self.number = number
        self.heard: list[Message] = []
        self._met = met
        self._parts = tuple(HeldPart(spec=spec, box_offset=(number, 0), box_shape=(1, 4)) for spec in SPECS)

    def apply(self, message: Message) -> RankAck:
        self.heard.append(message)
        self._met.wait(PATIENCE_S)  # as in a collective, which no rank leaves before all have come
        return RankAck(rank=self.number, parts=self._parts, sums=bytes(8 * len(SPECS)))

    def interrupt(self, reason: str) -> None:
        pass


class Ranks(ConnectedRanks):
    """Two ranks on threads of this process, with the sizes of the frames to each of them and of their answers."""

    def __init__(self) -> None:
        super().__init__()
        met = threading.Barrier(2)
        self.ranks = [Rank(number, met) for number in range(2)]
        for rank in self.ranks:
            ours, theirs = Pipe()
            self._control.append(ours)
            threading.Thread(
                target=serve_messages, args=(theirs, rank), kwargs={"rank": rank.number}, daemon=True
            ).start()

    def tell(self, message: Message) -> list[RankAck]:
        self.to_ranks: list[list[int]] = [[], []]
        self.from_ranks: list[int] = []
        return self._tell(message, PATIENCE_S)

    def _send_to(self, rank: int, connection: Any, payload: bytes) -> None:
        self.to_ranks[rank].append(len(payload))
        super()._send_to(rank, connection, payload)

    def _decode(self, reply: bytes) -> RankAck:
        self.from_ranks.append(len(reply))
        return super()._decode(reply)


@pytest.fixture
def ranks(monkeypatch) -> Iterator[Ranks]:
    monkeypatch.setattr(codec, "KEPT", Blobs())
    made = Ranks()
    yield made
    for connection in made._control:
        connection.close()


def preparation() -> Prepare:
    layouts = plan_buckets(SPECS, bucket_bytes=1 << 20, packing=Packing())
    return Prepare(plan=UpdateTables(SPECS, layouts), verify="none")


def test_tables_travel_once_to_each_rank_and_back(ranks):
    message = preparation()
    first = ranks.tell(message)
    assert all(size > 5_000 for [size] in ranks.to_ranks)
    assert all(size > 5_000 for size in ranks.from_ranks)
    again = ranks.tell(preparation())
    assert all(size < 500 for [size] in ranks.to_ranks)
    assert all(size < 3_000 for size in ranks.from_ranks)  # the sums alone
    assert [ack.parts[0].box_offset for ack in again] == [(0, 0), (1, 0)]
    assert all(one.parts is other.parts for one, other in zip(first, again, strict=True))
    assert all(rank.heard == [message, message] for rank in ranks.ranks)


def test_a_rank_that_lost_a_table_gets_the_whole_message_and_does_not_hang_the_others(ranks, monkeypatch):
    message, take, lost = preparation(), Blobs.take, threading.Event()
    ranks.tell(message)

    def takes(self: Blobs, kind: Any, name: str, encoded: bytes | None = None) -> Any:
        if kind is PLAN and encoded is None and not lost.is_set():
            lost.set()
            return take(Blobs(), kind, name)
        return take(self, kind, name, encoded)

    monkeypatch.setattr(Blobs, "take", takes)
    assert [ack.ok for ack in ranks.tell(message)] == [True, True]
    [_], [named, whole] = sorted(ranks.to_ranks, key=len)
    assert named < 500 < 5_000 < whole
    assert all(rank.heard == [message, message] for rank in ranks.ranks)
