"""A group across two worlds: bytes go round, and no wait lasts longer than it may, whoever dies.

Members are threads here, and a process where one must be killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from weightcast.comm.group import GroupFailed, Rendezvous, WorldGroup, backend_for, local_address_towards
from weightcast.errors import DeadlineExceeded

CPU = torch.device("cpu")
LONG_S = 100.0  # longer than a test may take: what ends before has been ended

pytestmark = [pytest.mark.deadlines, pytest.mark.timeout(60)]


class Party:
    """Rank 0 and who joins it."""

    def __init__(self, world_size: int, timeout_s: float = LONG_S) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self.token = secrets.token_hex(16)
        self.store = Rendezvous(host="127.0.0.1", timeout_s=timeout_s)
        self.pool = ThreadPoolExecutor(world_size)

    def head(self, **kwargs) -> WorldGroup:
        settings = {"token": self.token, "timeout_s": self.timeout_s, "world_size": self.world_size} | kwargs
        return WorldGroup(store=self.store.store, name="g", rank=0, device=CPU, address="127.0.0.1", **settings)

    def join(self, rank: int, **kwargs) -> WorldGroup:
        settings = {"token": self.token, "timeout_s": self.timeout_s, "world_size": self.world_size} | kwargs
        return WorldGroup.join(host="127.0.0.1", port=self.store.port, name="g", rank=rank, device=CPU, **settings)

    def meet(self) -> list[WorldGroup]:
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


def receive(group: WorldGroup, size: int, timeout_s: float = LONG_S) -> torch.Tensor:
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
        future.result(timeout=30)
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


def test_who_does_not_come_is_not_waited_for_longer_than_asked(party):
    made = party(3, timeout_s=0.5)
    alone = made.pool.submit(made.join, 1)
    with pytest.raises(DeadlineExceeded, match=r"all 3 members to meet; missing \[2\]") as caught:
        made.head()
    assert "GLOO_SOCKET_IFNAME" in (caught.value.hint or "")
    assert made.store.absent(made.token, 3) == [2]
    assert made.store.absent(made.token, 4) == [1, 2, 3]  # nobody expects so many
    with pytest.raises((DeadlineExceeded, GroupFailed)):
        alone.result(timeout=30)


def test_the_meeting_place_is_at_its_own_address_only():
    """127.0.0.2 is this host too: torch by itself would listen there as well."""
    place = Rendezvous(host="127.0.0.1", timeout_s=LONG_S)
    socket.create_connection(("127.0.0.1", place.port), timeout=LONG_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place.port), timeout=LONG_S)
    place.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", place.port), timeout=LONG_S)


def test_a_meeting_place_may_have_a_name():
    place = Rendezvous(host="localhost", timeout_s=LONG_S)
    place.store.set("key", "value")
    assert place.visit().get("key") == b"value"
    place.close()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(GroupFailed, match=f"nothing to meet at 127.0.0.1:{port}.*refused"):  # at once
        WorldGroup.join(
            host="127.0.0.1", port=port, name="g", token="t", rank=1, world_size=2, device=CPU, timeout_s=LONG_S
        )


@pytest.mark.parametrize("where", ["head", "member"])
def test_a_meeting_can_be_cancelled(party, where):
    made = party(2)
    cancelled = threading.Event()
    waits: dict[str, Callable[[], WorldGroup]] = {
        "head": lambda: made.head(cancelled=cancelled),
        "member": lambda: made.join(1, cancelled=cancelled),
    }
    waiting = made.pool.submit(waits[where])
    time.sleep(0.2)
    assert not waiting.done()
    cancelled.set()
    assert "cancelled" in fails(waiting)


GIVES_UP = """
import sys, threading
import torch
import torch.distributed as dist
from weightcast.comm.group import GroupFailed, Rendezvous, WorldGroup

where, timeout_s, CPU = sys.argv[1], 1.5, torch.device("cpu")
place = Rendezvous(host="127.0.0.1", timeout_s=timeout_s)
cancelled = threading.Event()
threading.Timer(0.2, cancelled.set).start()
same = {"name": "g", "token": "t", "device": CPU, "timeout_s": timeout_s, "cancelled": cancelled}
if where == "inside torch":  # another member came, and died then
    dist.PrefixStore("weightcast/t", place.store).set("here/0/2", "1")
try:
    if where != "head":
        WorldGroup.join(host="127.0.0.1", port=place.port, rank=1, world_size=2, **same)
    else:
        WorldGroup(store=place.store, address="127.0.0.1", rank=0, world_size=2, **same)
except GroupFailed as error:
    print(error)
"""


@pytest.mark.parametrize("where", ["head", "member", "inside torch"])
def test_who_gave_a_meeting_up_ends_in_peace(where):
    # A thread that comes out of torch while the interpreter ends would abort the process.
    done = subprocess.run([sys.executable, "-c", GIVES_UP, where], capture_output=True, text=True, timeout=50)
    assert done.stdout == "group g: the meeting was cancelled\n"
    assert "terminate" not in done.stderr
    assert done.returncode == 0


def test_strangers_do_not_meet(party):
    made = party(2, timeout_s=0.7)
    stranger = made.pool.submit(made.join, 1, token="another")
    with pytest.raises(DeadlineExceeded):
        made.head()
    with pytest.raises((DeadlineExceeded, GroupFailed)):
        stranger.result(timeout=30)


def test_groups_stand_side_by_side(party):
    first, second = party(2), party(2)
    a, b = first.meet(), second.meet()
    a[0].abort("over")
    data = torch.full((10,), 7, dtype=torch.uint8)
    arriving = second.pool.submit(receive, b[1], 10)
    b[0].broadcast(data, what="x", timeout_s=LONG_S)
    assert torch.equal(arriving.result(), data)


def _be_a_member(port: int, token: str, world_size: int) -> None:
    group = WorldGroup.join(
        host="127.0.0.1", port=port, name="g", token=token, rank=1, world_size=world_size, device=CPU, timeout_s=LONG_S
    )
    with suppress(GroupFailed):
        receive(group, 100)


def test_a_member_that_is_killed_ends_the_waits_of_the_others(party):
    made = party(3)
    context = multiprocessing.get_context("forkserver")
    member = context.Process(target=_be_a_member, args=(made.store.port, made.token, 3), daemon=True)
    member.start()
    other = made.pool.submit(made.join, 2)
    head = made.head()
    waiting = made.pool.submit(receive, other.result(), 100_000_000)
    member.kill()
    member.join()
    member.close()
    with pytest.raises(GroupFailed):
        head.broadcast(torch.zeros(100_000_000, dtype=torch.uint8), what="bucket 3", timeout_s=LONG_S)
    head.abort("a member died")
    fails(waiting)


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
    deadline = time.monotonic() + 10
    while footprint() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert footprint() <= before


def test_addresses_and_backends():
    assert local_address_towards("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(GroupFailed, match="no route"):
        local_address_towards("no-such-host.invalid", 80)
    assert backend_for(CPU) == "gloo"
    assert backend_for(torch.device("cuda", 0)) == "nccl"
