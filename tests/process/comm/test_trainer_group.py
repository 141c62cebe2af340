"""The group of a job's trainer ranks, each a process: messages, waits, and ranks that die, stop or stay away."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.helpers.clock import PATIENCE_S, Clock, wait_until
from tests.helpers.ranks import Ranks
from tests.unit.comm.test_trainer_group import CPU
from weightcast.comm import trainer_failure, trainer_group
from weightcast.comm.trainer_group import Move, TrainerGroup
from weightcast.errors import TrainerRankFailed

pytestmark = pytest.mark.deadlines


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


def add_up_along(branches: int, sizes: list[int]) -> list[int] | str | None:
    """The sums on the head, or the error."""
    trainer_group._BRANCHES, before = branches, trainer_group._BRANCHES
    group = TrainerGroup.connect(CPU, timeout_s=PATIENCE_S)
    try:
        values = torch.arange(sizes[group.rank]) + (1 << 62)
        added = [group.add_up(values + number) for number in range(3)]
        group.barrier("the end")
        return added[2].tolist() if added[2] is not None else None
    except TrainerRankFailed as error:
        return str(error)
    finally:
        trainer_group._BRANCHES = before
        group.close()


@pytest.mark.parametrize("branches", [16, 1])
@pytest.mark.parametrize("size", [1, 5, 100_000])
def test_values_of_every_rank_are_added_up_on_the_head(three, branches, size):
    overflown = 3 * (1 << 62) - (1 << 64)
    right = [3 * number + 6 + overflown for number in range(size)]
    assert three.run(add_up_along, branches, [size] * 3) == [right, None, None]


@pytest.mark.parametrize("branches", [16, 1])
def test_a_rank_with_another_number_of_sums_is_named_by_all(three, branches):
    for text in three.run(add_up_along, branches, [7, 7, 6]):
        assert f"trainer rank 2 sent 6 sums, and trainer rank {0 if branches > 1 else 1} has 7" in text
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
            elif step == "sums":  # along a chain
                trainer_group._BRANCHES = 1
                group.add_up(torch.zeros(1000, dtype=torch.int64))
                group.broadcast_bytes(b"x")
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
        *(("SIGKILL", step) for step in ("barrier", "gather", "ring", "sums")),
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


def one_gives_up_and_all_meet_again(rank_that_fails: int) -> str:
    group = TrainerGroup.connect(CPU, timeout_s=20)
    for attempt in range(2):  # again and again
        if group.rank == rank_that_fails:
            group.abort(f"out of memory {attempt}")
        with pytest.raises(TrainerRankFailed, match=f"trainer rank {rank_that_fails} gave up: out of memory"):
            group.barrier("a step")
        assert group.failed
        group.renew()
        assert not group.failed
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
