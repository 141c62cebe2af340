"""A group of all trainer ranks and engine ranks: messages between the two sides, and what ends them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers.clock import PATIENCE_S
from weightcast.comm import update_group
from weightcast.comm.group_moves import Move, call_apart, start_moves
from weightcast.comm.rendezvous import Rendezvous
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.errors import DeadlineExceeded

CPU = torch.device("cpu")
LONG_S = 1000.0  # longer than a test may take: a wait that ends before has been ended


class Sides:
    """Two trainer ranks (0 and 1) and two engine ranks (2 and 3); each is a thread."""

    def __init__(self) -> None:
        self.store = Rendezvous(host="127.0.0.1", timeout_s=60.0)
        self.pool = ThreadPoolExecutor(8)
        token = secrets.token_hex(16)

        def member(rank: int) -> UpdateGroup:
            words = b"" if rank < 2 else f"rank {rank} wants this".encode()
            if rank == 0:
                return UpdateGroup(
                    store=self.store.visit,
                    name="g",
                    token=token,
                    rank=0,
                    world_size=4,
                    device=CPU,
                    address="127.0.0.1",
                    timeout_s=60.0,
                    tells=words,
                )
            return UpdateGroup.join(
                host="127.0.0.1",
                port=self.store.port,
                name="g",
                token=token,
                rank=rank,
                world_size=4,
                device=CPU,
                timeout_s=60.0,
                tells=words,
            )

        self.members = list(self.pool.map(member, range(4)))

    def each(self, act: Callable[[int, UpdateGroup], object]) -> list:
        """Runs ``act`` for all members at once."""
        return list(self.pool.map(act, range(4), self.members))

    def close(self) -> None:
        for member in self.members:
            member.close()
        self.store.close()
        self.pool.shutdown()


@pytest.fixture
def sides() -> Iterator[Sides]:
    found = Sides()
    yield found
    found.close()


def filled(value: int, size_bytes: int) -> torch.Tensor:
    return torch.full((size_bytes,), value, dtype=torch.uint8)


def test_trainer_ranks_hear_what_engine_ranks_want(sides):
    for rank in (0, 1):
        assert sides.members[rank].told((2, 3)) == [b"rank 2 wants this", b"rank 3 wants this"]


def test_every_trainer_rank_sends_every_engine_rank_its_own_bytes_batch_after_batch(sides):
    def act(rank: int, member: UpdateGroup) -> list[list[int]]:
        told = []
        for batch in range(3):
            if rank < 2:
                sends = [Move(peer, filled(batch * 50 + rank * 10 + peer, 1 << 16)) for peer in (2, 3)]
                sends += [Move(peer, filled(batch * 50 + rank * 10 + peer + 2, 3)) for peer in (2, 3)]
                works = member.start_moves(sends)
            else:
                large, small = ([torch.zeros(n, dtype=torch.uint8) for _ in range(2)] for n in (1 << 16, 3))
                receives = [Move(peer, large[peer]) for peer in (0, 1)] + [Move(peer, small[peer]) for peer in (0, 1)]
                works = member.start_moves((), receives)
            member.finish_moves(works, what="a batch", timeout_s=LONG_S)
            if rank >= 2:
                assert all(len(set(one.tolist())) == 1 for one in large)
                told.append([int(one[0]) for one in (*large, *small)])
        return told

    _, _, first, second = sides.each(act)
    assert first == [[b * 50 + value for value in (2, 12, 4, 14)] for b in range(3)]
    assert second == [[b * 50 + value for value in (3, 13, 5, 15)] for b in range(3)]


def test_a_wait_for_a_trainer_rank_that_sends_nothing_ends_at_its_deadline(sides):
    works = sides.members[2].start_moves((), [Move(1, torch.zeros(8, dtype=torch.uint8))])
    with pytest.raises(DeadlineExceeded, match="bucket 3"):
        sides.members[2].finish_moves(works, what="bucket 3", timeout_s=0.2)
    assert not sides.members[2].alive


def test_an_abort_of_the_head_reaches_a_trainer_rank_that_waits_for_an_engine_rank(sides):
    """It exchanges nothing with the head, and the engine rank lives."""
    works = sides.members[1].start_moves([Move(3, filled(1, 64 << 20))])
    waiting = sides.pool.submit(sides.members[1].finish_moves, works, what="bucket 0", timeout_s=LONG_S)
    sides.members[0].abort("an engine refused")
    with pytest.raises(GroupFailed, match=r"an engine refused|closed"):
        waiting.result(timeout=PATIENCE_S)


def test_an_abort_ends_the_receives_of_an_engine_rank(sides):
    begun = threading.Event()

    def receive() -> None:
        works = sides.members[2].start_moves((), [Move(peer, torch.zeros(8, dtype=torch.uint8)) for peer in (0, 1)])
        begun.set()
        sides.members[2].finish_moves(works, what="bucket 0", timeout_s=LONG_S)

    waiting = sides.pool.submit(receive)
    assert begun.wait(PATIENCE_S)
    sides.members[2].abort("the update was interrupted")
    with pytest.raises(GroupFailed):
        waiting.result(timeout=PATIENCE_S)
    with pytest.raises(GroupFailed):
        sides.members[2].start_moves((), [Move(0, torch.zeros(8, dtype=torch.uint8))])


# -- batches of NCCL, which are begun on threads of their own


class OnGpu:
    """The part of a member that tells it how to start messages; they go by gloo all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        self.blocked = threading.Event()
        self.holds_up = self.fails = False

        def start_apart(group, device, sends, receives, tags, look):
            return call_apart(lambda: self._start(group, sends, receives, tags), look)

        monkeypatch.setattr(update_group, "start_apart", start_apart)

    def _start(self, group, sends, receives, tags):
        self.threads.append(threading.get_ident())
        if self.holds_up:  # as NCCL does where the other member does not come
            self.blocked.wait(PATIENCE_S)
        if self.fails:
            raise RuntimeError("NCCL error: remote process exited\nand more lines")
        return start_moves(group, CPU, sends, receives, tags)


@pytest.fixture
def on_gpu(monkeypatch) -> Iterator[OnGpu]:
    found = OnGpu(monkeypatch)
    yield found
    found.blocked.set()


def start_on_gpu(member: UpdateGroup, sends: list[Move], timeout_s: float = LONG_S) -> list:
    """Starts messages as a member does whose device is a GPU."""
    device, member.device = member.device, torch.device("cuda", 0)
    before, member._timeout_s = member._timeout_s, timeout_s
    try:
        return member.start_moves(sends)
    finally:
        member.device, member._timeout_s = device, before


def test_a_batch_of_nccl_is_begun_on_a_thread_of_its_own(sides, on_gpu):
    data = torch.zeros(8, dtype=torch.uint8)
    receives = sides.members[2].start_moves((), [Move(0, data)])
    works = start_on_gpu(sides.members[0], [Move(2, filled(7, 8))])
    sides.members[0].finish_moves(works, what="bucket 0", timeout_s=LONG_S)
    sides.members[2].finish_moves(receives, what="bucket 0", timeout_s=LONG_S)
    assert data.tolist() == [7] * 8
    assert on_gpu.threads not in ([], [threading.get_ident()])


def test_a_batch_that_fails_says_so_where_it_was_wanted(sides, on_gpu):
    on_gpu.fails = True
    with pytest.raises(GroupFailed, match=r"group g: NCCL error: remote process exited$"):
        start_on_gpu(sides.members[0], [Move(2, filled(7, 8))])


def test_a_member_that_does_not_come_to_the_first_message_is_not_waited_for_without_end(sides, on_gpu):
    on_gpu.holds_up = True
    with pytest.raises(DeadlineExceeded, match="a connection to another member"):
        start_on_gpu(sides.members[0], [Move(2, filled(7, 8))], timeout_s=0.2)
    assert not sides.members[0].alive


def test_an_abort_elsewhere_ends_the_wait_for_the_first_message(sides, on_gpu):
    on_gpu.holds_up = True
    waiting = sides.pool.submit(start_on_gpu, sides.members[1], [Move(2, filled(7, 8))])
    sides.members[0].abort("an engine refused")
    with pytest.raises(GroupFailed, match=r"an engine refused|closed"):
        waiting.result(timeout=PATIENCE_S)
