"""A group across two worlds: bytes go round, and no wait lasts longer than it may, whoever dies.

Members are threads here, and a process where one must be killed.
"""

from __future__ import annotations

import gc
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.helpers.clock import PATIENCE_S, Clock, wait_until
from weightcast.comm import rendezvous
from weightcast.comm import update_group as module
from weightcast.comm.rendezvous import Rendezvous
from weightcast.comm.update_group import GroupFailed, UpdateGroup, backend_for, local_address_towards
from weightcast.errors import DeadlineExceeded

CPU = torch.device("cpu")
LONG_S = 1000.0  # longer than a test may take: what ends before has been ended


class Party:
    """Rank 0 and who joins it."""

    def __init__(self, world_size: int, timeout_s: float = LONG_S) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self.token = secrets.token_hex(16)
        self.store = Rendezvous(host="127.0.0.1", timeout_s=timeout_s)
        self.pool = ThreadPoolExecutor(world_size + 1)

    def head(self, **kwargs) -> UpdateGroup:
        settings = {"token": self.token, "timeout_s": self.timeout_s, "world_size": self.world_size} | kwargs
        return UpdateGroup(store=self.store.store, name="g", rank=0, device=CPU, address="127.0.0.1", **settings)

    def join(self, rank: int, **kwargs) -> UpdateGroup:
        settings = {"token": self.token, "timeout_s": self.timeout_s, "world_size": self.world_size} | kwargs
        return UpdateGroup.join(host="127.0.0.1", port=self.store.port, name="g", rank=rank, device=CPU, **settings)

    def meet(self) -> list[UpdateGroup]:
        joins = [self.pool.submit(self.join, rank) for rank in range(1, self.world_size)]
        return [self.head(), *(join.result() for join in joins)]


@pytest.fixture
def party():
    parties: list[Party] = []

    def make(*args, **kwargs) -> Party:
        parties.append(Party(*args, **kwargs))
        return parties[-1]

    yield make
    for made in parties:
        made.pool.shutdown(wait=False)


def receive(group: UpdateGroup, size: int, timeout_s: float = LONG_S) -> torch.Tensor:
    data = torch.zeros(size, dtype=torch.uint8)
    group.broadcast(data, what="bucket 3", timeout_s=timeout_s)
    return data


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_go_round(party, world_size):
    made = party(world_size)
    head, *others = made.meet()
    assert all(group.alive for group in (head, *others))
    for size in (1, 1000, 3_000_000):
        data = torch.randint(256, (size,), dtype=torch.uint8)
        arriving = [made.pool.submit(receive, group, size) for group in others]
        head.broadcast(data, what="bucket 3", timeout_s=LONG_S)
        assert all(torch.equal(one.result(), data) for one in arriving)
    for group in (head, *others):
        group.close()
        group.close()
        assert not group.alive
    assert not dist.is_initialized()


def fails(future: Future, kind: type[Exception] = GroupFailed) -> str:
    with pytest.raises(kind) as caught:
        future.result(timeout=PATIENCE_S)
    return str(caught.value)


def test_an_abort_ends_the_waits_of_every_member(party):
    made = party(3)
    head, first, second = made.meet()
    waiting = [made.pool.submit(receive, group, 100) for group in (first, second)]
    time.sleep(0.1)
    assert not any(one.done() for one in waiting)
    head.abort("a bucket was refused")
    head.abort("again")
    for one in waiting:
        assert "group g" in fails(one)
    with pytest.raises(GroupFailed, match="a bucket was refused"):
        head.broadcast(torch.zeros(3, dtype=torch.uint8), what="x", timeout_s=1)
    for group in (head, first, second):
        assert not group.alive
        group.close()  # does not wait for what never came


def test_a_member_that_aborts_ends_the_heads_wait_too(party):
    made = party(2)
    head, member = made.meet()
    big = torch.zeros(50_000_000, dtype=torch.uint8)  # more than the sockets hold
    sending = made.pool.submit(head.broadcast, big, what="bucket 3", timeout_s=LONG_S)
    time.sleep(0.1)
    member.abort("the engine shuts down")
    fails(sending)
    assert not head.alive


def test_silence_ends_at_the_deadline_and_the_group_with_it(party):
    made = party(2)
    head, member = made.meet()
    with pytest.raises(DeadlineExceeded) as caught:
        receive(member, 100, timeout_s=0.2)
    assert caught.value.who == "group g"
    assert caught.value.waiting_for == "bucket 3"
    assert not member.alive
    with pytest.raises(GroupFailed, match=r"waited 0\.2 s"):
        receive(member, 100)
    member.close()
    head.close()


def test_a_look_between_may_give_up(party):
    made = party(2)
    head, member = made.meet()

    def refuse() -> None:
        raise ZeroDivisionError

    big = torch.zeros(50_000_000, dtype=torch.uint8)
    work = head.start_broadcast(big)
    with pytest.raises(ZeroDivisionError):
        head.finish(work, what="bucket", timeout_s=LONG_S, poll=refuse)
    head.abort("refused")
    fails(made.pool.submit(receive, member, len(big)))


# -- meeting


def test_absent_member_is_waited_for_only_until_the_deadline(party):
    made = party(3)
    with Clock().within(module) as clock:
        alone, heading = made.pool.submit(made.join, 1), made.pool.submit(made.head)
        wait_until(lambda: clock.polling == 2, "both to wait for the third")
        clock.move(LONG_S + 0.01)
        with pytest.raises(DeadlineExceeded, match=r"the rendezvous of all 3 members; missing \[2\]") as caught:
            heading.result(timeout=PATIENCE_S)
        # Before the real clock returns: its time is not past the deadline that this member has.
        with pytest.raises((DeadlineExceeded, GroupFailed)):
            alone.result(timeout=PATIENCE_S)
    assert "GLOO_SOCKET_IFNAME" in (caught.value.hint or "")
    assert made.store.absent(made.token, 3) == [2]
    assert made.store.absent(made.token, 4) == [1, 2, 3]  # nobody expects so many


def test_gloo_takes_the_interface_of_the_variable(party, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    for group in party(2).meet():
        group.close()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(GroupFailed, match="nosuch0"):
        party(1).head()


def test_rendezvous_listens_at_its_own_address_only():
    """127.0.0.2 is this host too: torch by itself would listen there as well."""
    place = Rendezvous(host="127.0.0.1", timeout_s=LONG_S)
    socket.create_connection(("127.0.0.1", place.port), timeout=LONG_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place.port), timeout=LONG_S)
    place.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", place.port), timeout=LONG_S)


def test_rendezvous_may_have_a_host_name():
    place = Rendezvous(host="localhost", timeout_s=LONG_S)
    place.store.set("key", "value")
    assert place.visit().get("key") == b"value"
    place.close()


def test_joining_without_a_listener_fails_at_once():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(GroupFailed, match=f"cannot reach the rendezvous at 127.0.0.1:{port}.*refused"):  # at once
        UpdateGroup.join(
            host="127.0.0.1", port=port, name="g", token="t", rank=1, world_size=2, device=CPU, timeout_s=LONG_S
        )


def test_joining_ends_soon_after_the_rendezvous_closes(party, monkeypatch):
    """The head closes the rendezvous between a member's first connection and torch's own one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        connect = socket.create_connection

        def connect_last(*args, **kwargs):
            made = connect(*args, **kwargs)
            listener.close()
            return made

        monkeypatch.setattr(rendezvous.socket, "create_connection", connect_last)
        monkeypatch.setattr(rendezvous, "_FIRST_TRY_S", 0.1)
        settings = {"name": "g", "token": "t", "rank": 1, "world_size": 2, "device": CPU, "timeout_s": LONG_S}
        joining = party(2).pool.submit(UpdateGroup.join, host="127.0.0.1", port=port, **settings)
        assert f"cannot reach the rendezvous at 127.0.0.1:{port}" in fails(joining)


def test_store_that_answers_late_is_waited_for(party, monkeypatch):
    """Torch's first tries are too short for this store, and later ones are longer."""
    monkeypatch.setattr(rendezvous, "_FIRST_TRY_S", 0.001)
    head, member = party(2).meet()
    assert head.alive
    assert member.alive
    head.close()
    member.close()


@pytest.mark.parametrize("where", ["head", "member"])
def test_rendezvous_can_be_cancelled(party, where):
    made = party(2)
    cancelled = threading.Event()
    waits: dict[str, Callable[[], UpdateGroup]] = {
        "head": lambda: made.head(cancelled=cancelled),
        "member": lambda: made.join(1, cancelled=cancelled),
    }
    waiting = made.pool.submit(waits[where])
    time.sleep(0.2)
    assert not waiting.done()
    cancelled.set()
    assert "cancelled" in fails(waiting)


def test_strangers_do_not_meet(party):
    made = party(2)
    with Clock().within(module) as clock:
        stranger, heading = made.pool.submit(made.join, 1, token="another"), made.pool.submit(made.head)
        wait_until(lambda: clock.polling == 2, "both to wait")
        clock.move(LONG_S + 0.01)
        with pytest.raises(DeadlineExceeded):
            heading.result(timeout=PATIENCE_S)
        with pytest.raises((DeadlineExceeded, GroupFailed)):
            stranger.result(timeout=PATIENCE_S)


def test_groups_stand_side_by_side(party):
    first, second = party(2), party(2)
    a, b = first.meet(), second.meet()
    a[0].abort("over")
    data = torch.full((10,), 7, dtype=torch.uint8)
    arriving = second.pool.submit(receive, b[1], 10)
    b[0].broadcast(data, what="x", timeout_s=LONG_S)
    assert torch.equal(arriving.result(), data)


def test_nothing_is_left_behind(party):
    def footprint() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once() -> None:
        made = Party(2)
        head, member = made.meet()
        waiting = made.pool.submit(receive, member, 100)
        head.close()
        fails(waiting)
        member.close()
        made.pool.shutdown()

    once()
    time.sleep(0.2)
    before = footprint()
    for _ in range(5):
        once()
    wait_until(lambda: footprint() <= before, "threads and sockets to end")


def test_addresses_and_backends():
    assert local_address_towards("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(GroupFailed, match="no route"):
        local_address_towards("no-such-host.invalid", 80)
    assert backend_for(CPU) == "gloo"
    assert backend_for(torch.device("cuda", 0)) == "nccl"


class CountedStore:
    """A store that counts its operations and keys."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.asked = 0

    def __getattr__(self, name: str):
        def call(*arguments):
            self.asked += max(1, len(arguments[0])) if name == "check" else 1
            return getattr(self._store, name)(*arguments)

        return call


def test_a_members_cost_of_the_rendezvous_does_not_grow_with_the_members():
    costs = []
    for world_size in (2, 500):
        store = dist.HashStore()
        for rank in range(world_size - 1):
            store.add(f"here/{rank}/{world_size}", 1)
            store.add(f"arrived/{world_size}", 1)
        last = UpdateGroup.__new__(UpdateGroup)
        last.name, last.rank, last.world_size = "g", world_size - 1, world_size
        last._aborted = threading.Event()
        counted = CountedStore(store)
        last._meet(counted, time.monotonic() + PATIENCE_S, 30.0)  # type: ignore[arg-type]
        costs.append(counted.asked)
    assert costs[0] == costs[1] < 6


def test_a_member_that_comes_twice_counts_once():
    store = dist.HashStore()
    for rank, name in ((1, "first"), (1, "again"), (2, "other")):
        member = UpdateGroup.__new__(UpdateGroup)
        member.name, member.rank, member.world_size = name, rank, 3
        member._aborted = threading.Event()
        with pytest.raises(DeadlineExceeded, match="missing"):
            member._meet(store, time.monotonic(), 0.0)
    assert store.add("arrived/3", 0) == 2
    assert not store.check(["go/3"])
