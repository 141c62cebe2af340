import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.helpers.clock import PATIENCE_S, Clock, wait_until
from tests.helpers.ranks import Ranks
from weightcast.comm import trainer_failure
from weightcast.comm.ipc import host_id
from weightcast.comm.trainer_failure import FailureState, name_ranks
from weightcast.comm.trainer_group import Move, TrainerGroup
from weightcast.comm.trainer_tensors import NcclTensors, _Launch
from weightcast.errors import ConfigError, TrainerRankFailed

pytestmark = pytest.mark.deadlines

CPU = torch.device("cpu")
FOREVER_S = 1000.0  # longer than a test may take


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
    assert group.hosts == (host_id(),)
    group.barrier("nothing")
    group.move([], [], what="nothing")
    group.close()
    group.close()


@pytest.mark.parametrize("ranks", [(), (1,), (-1,)])
def test_receivers_must_be_ranks(ranks):
    group = TrainerGroup.connect(CPU, timeout_s=5)
    with pytest.raises(ConfigError):
        group.receivers = ranks


def test_ranks_are_named_with_their_hosts_where_there_are_several():
    hosts = ("trainer-a", "trainer-a", "trainer-b")
    assert name_ranks([2]) == "trainer rank 2"
    assert name_ranks([2], hosts) == "trainer rank 2 (host trainer-b)"
    assert name_ranks([0, 2], hosts) == "trainer ranks 0 (host trainer-a), 2 (host trainer-b)"


# -- together


def exchange_messages() -> None:
    group = TrainerGroup.connect(CPU, timeout_s=PATIENCE_S)
    for size in (0, 1, 7, 8, 5000, 3_000_000):
        payload = bytes([group.rank + 1]) * size
        assert group.broadcast_bytes(payload if group.is_head else None) == b"\x01" * size
        gathered = group.gather_bytes(payload)
        assert gathered == ([bytes([r + 1]) * size for r in range(3)] if group.is_head else None)
    group.barrier("the end")
    group.close()
    group.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer's own group is alive
    assert total.item() == 3


def test_messages_reach_every_rank(three):
    three.run(exchange_messages)


def move_tensors() -> None:
    group = TrainerGroup.connect(CPU, timeout_s=PATIENCE_S)
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
    group = TrainerGroup.connect(CPU, timeout_s=PATIENCE_S)
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


def one_aborts() -> tuple[str, str]:
    group = TrainerGroup.connect(CPU, timeout_s=FOREVER_S)  # only the abort ends a wait
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
    return said[0], said[1]


def test_abort_ends_every_wait_on_every_rank_and_leaves_the_trainers_group(three):
    for first, second in three.run(one_aborts):
        # Rank 0 waits for rank 1, which waits for rank 2: the blame has to travel.
        assert "trainer rank 2 gave up: the engine said no" in first
        assert second == first


def test_a_new_group_can_be_connected_after_an_abort(three):
    three.run(one_aborts)
    three.run(exchange_messages)


def connect_where_torch_fails() -> str:
    def fail(**_: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer")

    made, dist.new_group = dist.new_group, fail
    try:
        TrainerGroup.connect(CPU, timeout_s=FOREVER_S)
    except TrainerRankFailed as error:
        return str(error)
    finally:
        dist.new_group = made
    return "no error"


def test_a_group_that_torch_cannot_make_is_an_error_of_ours(three):
    for words in three.run(connect_where_torch_fails):
        assert "could not make a gloo group within 1000 s: Gloo connectFullMesh failed" in words
    three.run(exchange_messages)


# -- when a rank fails


def lose_rank_2(how: int, step: str, timeout_s: float) -> str:
    group = TrainerGroup.connect(CPU, timeout_s=PATIENCE_S)
    group.barrier("start")
    group.timeout_s = timeout_s  # for what comes now; ranks of a busy machine start seconds apart
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


@pytest.mark.parametrize(
    ("how", "step"),
    [
        *(("SIGKILL", step) for step in ("barrier", "gather", "ring")),
        ("SIGSTOP", "ring"),
        # Each takes a whole deadline.
        *(pytest.param("SIGSTOP", step, marks=pytest.mark.wide) for step in ("barrier", "gather")),
    ],
)
def test_a_lost_rank_is_named_by_all_others(doomed, how, step):
    doomed.start(lose_rank_2, int(signal.Signals[how]), step, 6.0)
    for rank in (0, 1):
        assert doomed.answer(rank, timeout_s=PATIENCE_S).startswith("trainer rank 2 "), rank


def lose_the_head() -> str:
    group = TrainerGroup.connect(CPU, timeout_s=PATIENCE_S)
    group.barrier("start")
    group.timeout_s = 6.0
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
        text = doomed.answer(rank, timeout_s=PATIENCE_S)
        assert text.startswith("trainer rank 0 ")
        assert "store" in text


def connect_within(timeout_s: float) -> str:
    try:
        TrainerGroup.connect(CPU, timeout_s=timeout_s)
    except TrainerRankFailed as error:
        return str(error)
    return "no error"


def test_a_store_that_does_not_answer_is_not_waited_for(doomed):
    [head, *_] = doomed.run(os.getpid)  # all have joined, and rank 0 holds the store
    os.kill(head, signal.SIGSTOP)
    doomed.start(connect_within, 3.0)
    for rank in (1, 2):
        text = doomed.answer(rank, timeout_s=PATIENCE_S)
        assert text == "the job's store, which trainer rank 0 usually holds, did not answer within 3 s"
    os.kill(head, signal.SIGCONT)
    text = doomed.answer(0, timeout_s=PATIENCE_S)
    assert text.startswith("trainer ranks 1, 2 did not come")  # they had given up
    doomed.run(exchange_messages)  # all of them try again


class SlowStore(dist.HashStore):
    """A store that does not answer after so many calls, until it is told to."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.answers = answers
        self.goes_on = threading.Event()

    def add(self, key: str, value: int) -> int:
        self.answers -= 1
        if self.answers < 0:
            assert self.goes_on.wait(PATIENCE_S)
        return super().add(key, value)


def test_only_a_store_that_has_answered_before_gets_longer_than_the_deadline(monkeypatch):
    monkeypatch.setattr(trainer_failure, "_LAST_WORD_S", 10 * PATIENCE_S)
    silent, slow = SlowStore(answers=0), SlowStore(answers=1)
    with pytest.raises(TrainerRankFailed, match=r"did not answer within 0\.01 s"):
        trainer_failure.meet(silent, rank=1, world_size=2, timeout_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(trainer_failure.meet, slow, rank=1, world_size=2, timeout_s=0.01)
        try:
            wait_until(lambda: slow.answers < 0, "the second question")
            time.sleep(0.05)  # the deadline passes
        finally:
            slow.goes_on.set()
            silent.goes_on.set()
        assert meeting.result(PATIENCE_S) == ("weightcast/trainers/0", (0,))


def test_a_store_that_is_gone_is_named(doomed):
    [head, *_] = doomed.run(os.getpid)
    os.kill(head, signal.SIGKILL)
    doomed.processes[0].join(PATIENCE_S)
    for rank in (1, 2):
        doomed.pipes[rank].send((connect_within, (FOREVER_S,)))
    for rank in (1, 2):
        text = doomed.answer(rank, timeout_s=PATIENCE_S)
        assert text.startswith("the job's store, which trainer rank 0 usually holds, is lost: "), text


def connect_with_a_clock(present: list[int]) -> str:
    """Connects, and lets the deadline pass when all who are to be there are; the error."""
    store = dist.distributed_c10d._get_default_store()
    attempt = store.add("weightcast/trainers/attempts", 0) + (0 in present)  # the head counts one more
    here = [f"weightcast/trainers/{attempt}/here/{rank}" for rank in present] if 0 in present else []
    with Clock().within(trainer_failure) as clock, ThreadPoolExecutor(1) as pool:
        dist.barrier()  # all have looked at what the head will count
        connecting = pool.submit(connect_within, 1000.0)
        wait_until(lambda: clock.polling and store.check(here), "the others")
        clock.move(1001.0)
        return connecting.result()


def connect_without(absent: int) -> str:
    text = ""
    present = [rank for rank in range(3) if rank != absent]
    if dist.get_rank() == absent:
        dist.barrier()
    else:
        text = connect_with_a_clock(present)
    dist.barrier()
    exchange_messages()  # all of them try again
    return text


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_does_not_connect_is_named_and_all_can_try_again(three, absent):
    for rank, text in enumerate(three.run(connect_without, absent)):
        assert text.startswith(f"trainer rank {absent} did not come") is (rank != absent)


def connect_longer_than_the_head() -> str:
    """Rank 1 waits until the head has given up, and a little longer."""
    text = ""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    prefix = f"weightcast/trainers/{store.add('weightcast/trainers/attempts', 0) + 1}"
    dist.barrier()
    if rank != 2:
        with Clock().within(trainer_failure) as clock, ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(connect_within, 1000.0)
            wait_until(lambda: store.check([f"{prefix}/here/0", f"{prefix}/here/1"]), "both to be here")
            if rank == 1:
                wait_until(lambda: store.check([f"{prefix}/closed"]), "the head to give up")
            clock.move(1001.0)
            text = connecting.result()
    dist.barrier()
    return text


def test_a_rank_that_waits_longer_than_the_head_does_not_blame_the_head(three):
    for text in three.run(connect_longer_than_the_head)[:2]:
        assert text.startswith("trainer rank 2 did not come")


def test_act_after_a_launch_runs_on_its_thread():
    inside, out = threading.Event(), threading.Event()
    done_by: list[str] = []

    def work() -> None:
        inside.set()
        assert out.wait(PATIENCE_S)

    launch = _Launch(work)
    assert inside.wait(PATIENCE_S)
    assert launch.afterwards(lambda: done_by.append(threading.current_thread().name))
    assert not done_by  # not under the thread's feet
    out.set()
    wait_until(lambda: done_by, "the thread")
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
    failure = FailureState(rank=0, timeout_s=PATIENCE_S)
    tensors = NcclTensors(None, failure=failure, device=CPU, rank=0, world_size=1)
    tensors._run(lambda: [Work(), Work()], "a test")
    assert waited == ["weightcast-nccl"] * 2


# -- after a failure


def one_gives_up_and_all_meet_again(rank_that_fails: int) -> str:
    group = TrainerGroup.connect(CPU, timeout_s=20)
    group.receivers = (0, 2)
    for attempt in range(2):  # again and again
        if group.rank == rank_that_fails:
            group.abort(f"out of memory {attempt}")
        with pytest.raises(TrainerRankFailed, match=f"trainer rank {rank_that_fails} gave up: out of memory"):
            group.barrier("a step")
        assert group.failed
        group.renew()
        assert not group.failed
        assert group.receivers == (0, 2)
    gathered = group.gather_bytes(f"rank {group.rank}".encode())
    said = group.broadcast_bytes(b", ".join(gathered) if gathered is not None else None)
    got = torch.zeros(8)
    group.move(
        [Move((group.rank + 1) % 3, torch.full((8,), group.rank + 1.0))],
        [Move((group.rank - 1) % 3, got)],
        what="numbers",
    )
    group.close()
    return f"{said} {got[0].item()}"


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_meet_again_after_one_gave_up(three, rank):
    said = b"rank 0, rank 1, rank 2"
    assert three.run(one_gives_up_and_all_meet_again, rank) == [f"{said} {got}" for got in (3.0, 1.0, 2.0)]
