import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.unit.ranks import Ranks
from weightcast.comm.local import Move, TrainerGroup, _Launch
from weightcast.errors import ConfigError, TrainerRankFailed

pytestmark = pytest.mark.deadlines

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def three():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture
def doomed():
    """Ranks that a test may kill or stop."""
    ranks = Ranks(3)
    yield ranks
    for process in ranks.processes:
        process.kill()
    ranks.close()


# -- alone


def test_alone_it_needs_no_process_group():
    group = TrainerGroup.connect(CPU, timeout_s=5)
    assert (group.rank, group.world_size, group.is_head, group.receivers) == (0, 1, True, (0,))
    assert group.broadcast_bytes(b"x") == b"x"
    assert group.gather_bytes(b"y") == [b"y"]
    assert group.all_gather_bytes(b"z") == [b"z"]
    group.barrier("nothing")
    group.move([], [], what="nothing")
    group.close()
    group.close()


@pytest.mark.parametrize("ranks", [(), (1,), (-1,)])
def test_receivers_must_be_ranks(ranks):
    group = TrainerGroup.connect(CPU, timeout_s=5)
    with pytest.raises(ConfigError):
        group.receivers = ranks


# -- together


def exchange_messages() -> None:
    group = TrainerGroup.connect(CPU, timeout_s=20)
    for size in (0, 1, 7, 8, 5000, 3_000_000):
        payload = bytes([group.rank + 1]) * size
        assert group.broadcast_bytes(payload if group.is_head else None) == b"\x01" * size
        gathered = group.gather_bytes(payload)
        assert gathered == ([bytes([r + 1]) * size for r in range(3)] if group.is_head else None)
        assert group.all_gather_bytes(payload[: size * group.rank]) == [
            bytes([r + 1]) * min(size, size * r) for r in range(3)
        ]
    group.barrier("the end")
    group.close()
    group.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer's own group is alive
    assert total.item() == 3


def test_messages_reach_every_rank(three):
    three.run(exchange_messages)


def move_tensors() -> None:
    group = TrainerGroup.connect(CPU, timeout_s=20)
    world, rank = group.world_size, group.rank
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn):
        # Two messages for each pair, one of them a scalar, posted in a different order of peers on every rank.
        peers = [(rank + step) % world for step in range(1, world)]
        got = {(peer, part): torch.zeros((5, 3) if part else (), dtype=dtype) for peer in peers for part in (0, 1)}
        sends = [
            Move(peer, torch.full((5, 3) if part else (), rank + part + 1).to(dtype))
            for peer in peers
            for part in (0, 1)
        ]
        receives = [Move(peer, got[peer, part]) for peer in reversed(peers) for part in (0, 1)]
        group.move(sends, receives, what="numbers")
        for (peer, part), tensor in got.items():
            expected = torch.full(tensor.shape, peer + part + 1).to(dtype)
            assert torch.equal(tensor.to(torch.float32), expected.to(torch.float32))
    group.close()


def test_tensors_move_between_all_pairs(three):
    three.run(move_tensors)


def barrier_with_strangers() -> str:
    group = TrainerGroup.connect(CPU, timeout_s=10)
    try:
        group.barrier("update 7" if group.rank != 1 else "update 8")
    except TrainerRankFailed as error:
        return str(error)
    finally:
        group.close()
    return ""


def test_ranks_that_meet_for_different_reasons_are_told(three):
    for text in three.run(barrier_with_strangers):
        assert "trainer rank 1 came for 'update 8'" in text


def one_aborts() -> tuple[str, str, float]:
    group = TrainerGroup.connect(CPU, timeout_s=60)
    begin = time.monotonic()
    said = []
    for _ in range(2):
        try:
            if group.rank == 2:
                group.abort("the engine said no")
                group.abort("again")
            group.move([], [Move((group.rank + 1) % 3, torch.zeros(8))], what="bucket 4")
        except TrainerRankFailed as error:
            said.append(str(error))
    group.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3
    return said[0], said[1], time.monotonic() - begin


def test_abort_ends_every_wait_on_every_rank_and_leaves_the_trainers_group(three):
    for first, second, seconds in three.run(one_aborts):
        # Rank 0 waits for rank 1, which waits for rank 2: the blame has to travel.
        assert "trainer rank 2 gave up: the engine said no" in first
        assert second == first
        assert seconds < 30  # far below the deadline of 60 s: nobody waited for it


def test_a_new_group_can_be_connected_after_an_abort(three):
    three.run(one_aborts)
    three.run(exchange_messages)


def connect_where_torch_fails() -> str:
    def fail(**_: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer")

    made, dist.new_group = dist.new_group, fail
    try:
        TrainerGroup.connect(CPU, timeout_s=5)
    except TrainerRankFailed as error:
        return str(error)
    finally:
        dist.new_group = made
    return "no error"


def test_a_group_that_torch_cannot_make_is_an_error_of_ours(three):
    for words in three.run(connect_where_torch_fails):
        assert "could not make a gloo group within 5 s: Gloo connectFullMesh failed" in words
    three.run(exchange_messages)


# -- when a rank fails


def lose_rank_2(how: int, step: str, timeout_s: float) -> str:
    group = TrainerGroup.connect(CPU, timeout_s=timeout_s)
    group.barrier("start")
    if group.rank == 2:
        os.kill(os.getpid(), how)
    try:
        for _ in range(3):
            if step == "barrier":
                group.barrier("bucket 3")
            elif step == "gather":
                group.gather_bytes(b"x")
                group.broadcast_bytes(b"x")
            else:  # a ring: rank 1 waits for rank 2, rank 0 waits for rank 1
                sends = [Move((group.rank - 1) % 3, torch.zeros(1000))] if group.rank != 1 else []
                group.move(sends, [Move((group.rank + 1) % 3, torch.zeros(1000))], what="bucket 3")
    except TrainerRankFailed as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", ["barrier", "gather", "ring"])
def test_a_lost_rank_is_named_by_all_others(doomed, how, step):
    doomed.start(lose_rank_2, int(how), step, 3.0)
    for rank in (0, 1):
        assert doomed.answer(rank, timeout_s=60).startswith("trainer rank 2 "), rank


def lose_the_head() -> str:
    group = TrainerGroup.connect(CPU, timeout_s=3)
    group.barrier("start")
    if group.is_head:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier("bucket 3")
    except TrainerRankFailed as error:
        return str(error)
    return "no error"


def test_a_lost_head_is_named_though_the_store_is_lost_with_it(doomed):
    doomed.start(lose_the_head)
    for rank in (1, 2):
        text = doomed.answer(rank, timeout_s=60)
        assert text.startswith("trainer rank 0 ")
        assert "store" in text


def connect_in_a_second() -> tuple[str, float]:
    begin = time.monotonic()
    try:
        TrainerGroup.connect(CPU, timeout_s=1)
    except TrainerRankFailed as error:
        return str(error), time.monotonic() - begin
    return "no error", time.monotonic() - begin


def test_a_store_that_does_not_answer_is_not_waited_for(doomed):
    [head, *_] = doomed.run(os.getpid)  # all have joined, and rank 0 holds the store
    os.kill(head, signal.SIGSTOP)
    doomed.start(connect_in_a_second)
    for rank in (1, 2):
        text, seconds = doomed.answer(rank, timeout_s=20)
        assert text == "the job's store, which trainer rank 0 usually holds, did not answer within 1 s"
        assert seconds < 10
    os.kill(head, signal.SIGCONT)
    text, _ = doomed.answer(0, timeout_s=20)
    assert text.startswith("trainer ranks 1, 2 did not come")  # they had given up
    doomed.run(exchange_messages)  # all of them try again


def test_a_store_that_is_gone_is_named(doomed):
    [head, *_] = doomed.run(os.getpid)
    os.kill(head, signal.SIGKILL)
    doomed.processes[0].join(10)
    for rank in (1, 2):
        doomed.pipes[rank].send((connect_in_a_second, ()))
    for rank in (1, 2):
        text, _ = doomed.answer(rank, timeout_s=20)
        assert text.startswith("the job's store, which trainer rank 0 usually holds, is lost: "), text


def connect_without(absent: int) -> str:
    text = ""
    if dist.get_rank() != absent:
        try:
            TrainerGroup.connect(CPU, timeout_s=1)
        except TrainerRankFailed as error:
            text = str(error)
    dist.barrier()
    exchange_messages()  # all of them try again
    return text


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_does_not_connect_is_named_and_all_can_try_again(three, absent):
    for rank, text in enumerate(three.run(connect_without, absent)):
        assert text.startswith(f"trainer rank {absent} did not come") is (rank != absent)


def connect_without_the_last(late_s: float) -> str:
    text = ""
    if dist.get_rank() == 1:
        time.sleep(late_s)
    if dist.get_rank() != 2:
        text, _ = connect_in_a_second()
    dist.barrier()
    return text


def test_who_waits_longer_than_the_head_does_not_blame_the_head(three):
    for text in three.run(connect_without_the_last, 0.4)[:2]:
        assert text.startswith("trainer rank 2 did not come")


def test_what_is_to_come_after_a_launch_is_done_by_its_thread():
    inside, out = threading.Event(), threading.Event()
    done_by: list[str] = []

    def work() -> None:
        inside.set()
        assert out.wait(10)

    launch = _Launch(work)
    assert inside.wait(10)
    assert launch.afterwards(lambda: done_by.append(threading.current_thread().name))
    assert not done_by  # not under the thread's feet
    out.set()
    deadline = time.monotonic() + 10
    while not done_by:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert done_by == ["weightcast-nccl"]
    assert not launch.afterwards(lambda: done_by.append("too late"))
    assert done_by == ["weightcast-nccl"]


def test_nccl_is_launched_from_a_thread_and_waited_for(monkeypatch):
    waited: list[str] = []

    class Event:
        recorded = False

        def record(self, stream: object) -> None:
            self.recorded = True

        def query(self) -> bool:
            return self.recorded

    class Work:
        def wait(self) -> None:
            waited.append(threading.current_thread().name)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    group = TrainerGroup.connect(CPU, timeout_s=5)
    group._run_nccl(lambda: [Work(), Work()], "a test")
    assert waited == ["weightcast-nccl"] * 2
