"""Members that make the group as stock engines do, with nothing of ours in their process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from tests.helpers.clock import PATIENCE_S
from tests.helpers.harness import wait_for
from weightcast.comm.rendezvous import Rendezvous
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.errors import DeadlineExceeded

CPU = torch.device("cpu")
# Written from the engines' documented behaviour: rendezvous at tcp://, a prefix of the name, no default group.
MEMBER = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
port, rank, size, name, rounds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", rank, size, timeout=timedelta(seconds=60)))
group, _ = c10d._new_process_group_helper(
    size, rank, [], dist.Backend("gloo"), dist.PrefixStore(name, store), group_name=name,
    timeout=timedelta(seconds=60))
c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
for _ in range(rounds):
    data = torch.zeros(4, dtype=torch.bfloat16)
    dist.broadcast(data, src=0, group=group)
    print(data.float().tolist(), flush=True)
sys.stdin.read()
os._exit(0)  # torch's own end aborts now and then, when the others are quicker
"""


def member(store, rank, size, rounds):
    command = [sys.executable, "-c", MEMBER, str(store.port), str(rank), str(size), "g", str(rounds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


def head(place, size, timeout_s, **settings):
    settings = {"store": place.store} | settings
    return UpdateGroup(
        name="g",
        token="",
        rank=0,
        world_size=size,
        device=CPU,
        address="127.0.0.1",
        timeout_s=timeout_s,
        meeting="torch",
        **settings,
    )


def test_bytes_arrive_as_the_dtype_that_they_are():
    store = Rendezvous(host="127.0.0.1", timeout_s=100)
    members = [member(store, rank, 3, 2) for rank in (1, 2)]
    group = head(store, 3, 100)
    for factor in (1, 2):
        data = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16) * factor
        group.broadcast(data.view(torch.uint8), what="a bucket", timeout_s=100)
    answers = [process.communicate(timeout=PATIENCE_S)[0].split("\n")[:2] for process in members]
    assert answers == [["[1.0, 2.0, 3.0, 4.0]", "[2.0, 4.0, 6.0, 8.0]"]] * 2
    assert [process.returncode for process in members] == [0, 0]
    group.close()


def test_absent_torch_member_is_waited_for_only_until_the_deadline():
    store = Rendezvous(host="127.0.0.1", timeout_s=100)
    one = member(store, 1, 3, 1)
    try:
        with pytest.raises((DeadlineExceeded, GroupFailed)):
            head(store, 3, 3)
    finally:
        one.kill()
        one.communicate()


def test_closing_the_rendezvous_ends_the_waits_of_members():
    place = Rendezvous(host="127.0.0.1", timeout_s=100)
    waiting = member(place, 1, 3, 1)
    cancelled = threading.Event()
    try:
        wait_for(lambda: place.store.num_keys() > 0, "the member to come", timeout_s=60)
        threading.Timer(1.0, cancelled.set).start()
        with pytest.raises(GroupFailed, match="cancelled"):
            head(place, 3, 100, store=place.visit, cancelled=cancelled)
        place.close()
        # Its own deadline is 60 s away, and that of the thread which the head has left inside torch 100 s.
        assert waiting.wait(PATIENCE_S) != 0
    finally:
        waiting.kill()
        waiting.communicate()
