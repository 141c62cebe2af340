"""Chains of engine ranks: who passes pieces on to whom, and that memory is not written while it is being sent."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.clock import wait_until
from tests.unit.update.test_exchange import Post, invited
from weightcast.comm.group_moves import Move, Relay, chains
from weightcast.comm.rendezvous import Rendezvous
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.receiver.shares import Shares
from weightcast.receiver.sources.broadcast import GroupSource
from weightcast.update.exchange import Exchange
from weightcast.wire.bucket_sources import BucketPart, ExchangeSource
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, plan_buckets
from weightcast.wire.messages import Join, Open, Owner
from weightcast.wire.pieces import WantedBox, encode_wanted
from weightcast.wire.plans import UpdateTables

CPU = torch.device("cpu")
SESSION = Open(
    session="s",
    owner=Owner(host="here", pid=1),
    version=1,
    timeout_s=1.0,
    lease_s=1.0,
    pause="abort",
    verify="received",
    plan=UpdateTables((), ()),
)
TOKEN = "ab" * 16
MEETS_S = 300.0


def test_ranks_that_want_the_same_are_a_chain_in_the_order_of_the_group():
    assert chains([b"left", b"right", b"left", b"right", b"left", b"whole"], 2) == [
        *(Relay(0, 4), Relay(0, 5)),
        *(Relay(2, 6), Relay(3, 0)),
        Relay(4, 0),
        Relay(0, 0),
    ]


@given(wanted=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=12), first=st.integers(1, 5))
def test_every_rank_is_in_one_chain_which_begins_at_the_trainer(wanted: list[bytes], first: int):
    places = dict(enumerate(chains(wanted, first), first))
    reached: Counter[int] = Counter()
    for rank, place in places.items():
        if place.upstream:
            assert places[place.upstream].downstream == rank
            continue
        while rank:  # along the chain
            reached[rank] += 1
            after = places[rank].downstream
            assert not after or wanted[after - first] == wanted[rank - first]
            rank = after
    assert reached == Counter(places.keys())
    assert sum(not place.upstream for place in places.values()) == len(set(wanted))


def test_trainer_ranks_send_to_the_first_of_each_chain():
    wanted = [encode_wanted({"w": (WantedBox((row, 0), (2, 8)),)}) for row in (0, 2, 0, 2, 0)]
    post = Post(2, wanted)
    end = Exchange(rank=0, num_trainers=2, device=CPU, timeout_s=1.0, chains=True)
    assert end.use({invited(post.world_size): cast(UpdateGroup, post)}) == {}
    assert sorted(end._cells["g"].kinds) == [2, 3]


class Groups:
    """One group, whose messages never end by themselves."""

    def __init__(self, relay: Relay) -> None:
        self.place = relay
        self.calls: list[str] = []

    def relay(self, name: str) -> Relay:
        return self.place

    def receive(self, name: str, receives: list[Move], passes: list[Move], *, what: str, timeout_s: float) -> Any:
        addresses = [data.data_ptr() for _, data in (*receives, *passes)]
        self.calls.append(f"{what} from {[peer for peer, _ in receives]} to {[peer for peer, _ in passes]}")
        return SimpleNamespace(what=what, addresses=addresses)

    def finish(self, passing: Any, *, timeout_s: float) -> None:
        self.calls.append(f"{passing.what} is sent")


class Copier:
    """The share of an engine rank that wants every byte."""

    def __init__(self) -> None:
        self.wanted: dict[str, Any] = {}

    def plan_exchange(self, layout: BucketLayout, parts: object) -> Any:
        message = SimpleNamespace(runs=[(0, layout.size_bytes)] if layout.size_bytes else [])
        return SimpleNamespace(size_bytes=layout.size_bytes, messages=[message], starts=[0], copies=None)


def shares_of(relay: Relay) -> tuple[Groups, Shares]:
    groups = Groups(relay)
    parts = ((BucketPart(0, (0,), (1,)),),)  # of every bucket, by the one trainer rank
    loader: Any = SimpleNamespace(
        copies={},
        plan=SimpleNamespace(parts=[parts] * 8),
        copier=Copier(),
        load_from=lambda *_, **__: None,
    )
    memory: Any = SimpleNamespace(close=lambda: None)
    return groups, Shares(loader, memory, cast(GroupSource, groups), CPU)


def bucket_of(index: int, size_bytes: int) -> BucketLayout:
    return BucketLayout(index=index, slots=(), size_bytes=size_bytes)


def take(shares: Shares, *sizes: int) -> None:
    for index, size in enumerate(sizes):
        source = ExchangeSource(group="g")
        shares.take(bucket_of(index, size), source, SESSION, interrupted=lambda: False)


def test_a_buffer_is_written_again_once_its_bucket_was_passed_on():
    groups, shares = shares_of(Relay(0, 4))
    take(shares, 8, 6, 0, 16)
    assert groups.calls == [
        "bucket 0 from [0] to [4]",
        "bucket 1 from [0] to [4]",
        "bucket 0 is sent",
        "bucket 2 from [] to []",  # nothing of it is wanted here, so nothing is waited for there
        "bucket 1 is sent",
        "bucket 3 from [0] to [4]",
    ]
    shares.trim()
    assert sorted(groups.calls[6:]) == ["bucket 2 is sent", "bucket 3 is sent"]
    assert not shares._rooms


def test_the_last_of_a_chain_receives_from_the_one_before_it_into_one_buffer():
    groups, shares = shares_of(Relay(3, 0))
    take(shares, 8, 6)
    assert [call for call in groups.calls if "from" in call] == ["bucket 0 from [3] to []", "bucket 1 from [3] to []"]
    assert len(shares._rooms) == 1


def test_memory_is_freed_although_the_next_rank_of_the_chain_has_died():
    groups, shares = shares_of(Relay(0, 4))
    take(shares, 8)

    def broken(passing: object, *, timeout_s: float) -> None:
        raise GroupFailed("the peer is gone")

    groups.finish = broken  # type: ignore[method-assign]
    shares.trim()
    assert not shares._rooms


def test_memory_of_a_failed_receive_is_not_received_into_again():
    groups, shares = shares_of(Relay(3, 0))
    into: list[torch.Tensor] = []

    def receive(name: str, receives: list[Move], *_: object, **__: object) -> None:
        into.append(receives[0].data)
        if len(into) == 1:
            raise GroupFailed("the peer is gone")

    groups.receive = receive  # type: ignore[method-assign]
    with pytest.raises(GroupFailed):
        take(shares, 8)
    take(shares, 8)
    assert into[0].data_ptr() != into[1].data_ptr()


class Chain:
    """A head and three engine ranks that want the same, as threads over gloo."""

    def __init__(self) -> None:
        [self.layout] = plan_buckets(
            [TensorSpec(name="w", dtype="uint8", shape=(64, 32))], bucket_bytes=1 << 12, packing=Packing()
        )
        words = encode_wanted({"w": (WantedBox((0, 0), (64, 32)),)})
        store = Rendezvous(host="127.0.0.1", timeout_s=MEETS_S)
        self.sources = [GroupSource(CPU, threading.Event()) for _ in range(3)]
        self.join = Join(
            group="g",
            host=store.host,
            port=store.port,
            token=TOKEN,
            first_rank=1,
            world_size=4,
            backend="gloo",
            timeout_s=MEETS_S,
            wants=True,
            relays=True,
        )
        with ThreadPoolExecutor(3) as pool:
            joins = [
                pool.submit(source.join, self.join, rank=rank, tells=words) for rank, source in enumerate(self.sources)
            ]
            self.head = UpdateGroup(
                store=store.visit,
                name="g",
                token=TOKEN,
                rank=0,
                world_size=4,
                device=CPU,
                address="127.0.0.1",
                timeout_s=MEETS_S,
                tells=b"",
            )
            self.head.set_relays(1)
            for join in joins:
                join.result(MEETS_S)

    def close(self) -> None:
        self.head.close()
        for source in self.sources:
            source.close()


@pytest.fixture
def chain():
    made = Chain()
    yield made
    made.close()


def test_what_the_head_sends_once_comes_to_every_rank(chain: Chain):
    places = [source.relay("g") for source in chain.sources]
    assert places == [Relay(0, 2), Relay(1, 3), Relay(2, 0)]
    num_buckets, size = 5, 2048
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(num_buckets)]

    def receive(rank: int) -> list[torch.Tensor]:
        source, place, found, passing = chain.sources[rank], places[rank], [], {}
        for number in range(num_buckets):
            data = torch.zeros(size, dtype=torch.uint8)
            passes = [Move(place.downstream, data)] if place.downstream else []
            what = f"bucket {number}"
            passing[number] = source.receive("g", [Move(place.upstream, data)], passes, what=what, timeout_s=MEETS_S)
            found.append(data)
        for one in passing.values():
            source.finish(one, timeout_s=MEETS_S)
        return found

    with ThreadPoolExecutor(3) as pool:
        receiving = [pool.submit(receive, rank) for rank in range(3)]
        for number, data in enumerate(sent):
            chain.head.finish_moves(chain.head.start_moves([Move(1, data)]), what=f"bucket {number}", timeout_s=MEETS_S)
        for found in receiving:
            assert all(torch.equal(a, b) for a, b in zip(found.result(MEETS_S), sent, strict=True))


def test_a_rank_that_waits_for_another_engine_can_be_interrupted(chain: Chain):
    source = chain.sources[2]
    data = torch.zeros(8, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.receive, "g", [Move(2, data)], what="bucket 0", timeout_s=MEETS_S)
        wait_until(lambda: source._reading is not None, "the wait for the rank before it")
        source.interrupt("the update is over")
        with pytest.raises(GroupFailed):
            waiting.result(MEETS_S)
