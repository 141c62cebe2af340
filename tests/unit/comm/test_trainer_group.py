import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.helpers.clock import PATIENCE_S, wait_until
from weightcast.comm import trainer_failure
from weightcast.comm.ipc import host_id
from weightcast.comm.trainer_failure import FailureState, name_ranks
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.comm.trainer_tensors import NcclTensors, _NcclCall
from weightcast.errors import TrainerRankFailed

pytestmark = pytest.mark.deadlines

CPU = torch.device("cpu")


# -- alone


def test_alone_it_needs_no_process_group():
    group = TrainerGroup.connect(CPU, timeout_s=5)
    assert (group.rank, group.world_size, group.is_head) == (0, 1, True)
    assert group.broadcast_bytes(b"x") == b"x"
    assert group.gather_bytes(b"y") == [b"y"]
    assert group.hosts == (host_id(),)
    group.barrier("nothing")
    group.move([], [], what="nothing")
    group.close()
    group.close()


def test_ranks_are_named_with_their_hosts_where_there_are_several():
    hosts = ("trainer-a", "trainer-a", "trainer-b")
    assert name_ranks([2]) == "trainer rank 2"
    assert name_ranks([2], hosts) == "trainer rank 2 (host trainer-b)"
    assert name_ranks([0, 2], hosts) == "trainer ranks 0 (host trainer-a), 2 (host trainer-b)"


# -- together


# -- when a rank fails


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


def test_act_after_a_launch_runs_on_its_thread():
    inside, out = threading.Event(), threading.Event()
    done_by: list[str] = []

    def work() -> None:
        inside.set()
        assert out.wait(PATIENCE_S)

    launch = _NcclCall(work)
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
