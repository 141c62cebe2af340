"""A group across two worlds where a member is a process that stops, is killed or ends."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

import psutil
import pytest
import torch

from tests.helpers.clock import PATIENCE_S, wait_until
from tests.unit.comm import test_update_group
from tests.unit.comm.test_update_group import CPU, LONG_S, fails, receive
from weightcast.comm.group_moves import Move
from weightcast.comm.rendezvous import Rendezvous
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.errors import DeadlineExceeded

party = test_update_group.party  # a fixture

GIVES_UP = """
import sys, threading
import torch
import torch.distributed as dist
from weightcast.comm.rendezvous import Rendezvous
from weightcast.comm.update_group import GroupFailed, UpdateGroup

where, timeout_s, CPU = sys.argv[1], 3.0, torch.device("cpu")
place = Rendezvous(host="127.0.0.1", timeout_s=timeout_s)
cancelled = threading.Event()
threading.Timer(0.2, cancelled.set).start()
same = {"name": "g", "token": "t", "device": CPU, "timeout_s": timeout_s, "cancelled": cancelled}
if where == "inside torch":  # another member came, and died then
    dist.PrefixStore("weightcast/t", place.store).set("here/0/2", "1")
try:
    if where != "head":
        UpdateGroup.join(host="127.0.0.1", port=place.port, rank=1, world_size=2, **same)
    else:
        UpdateGroup(store=place.store, address="127.0.0.1", rank=0, world_size=2, **same)
except GroupFailed as error:
    print(error)
"""


@pytest.mark.parametrize("where", ["head", "member", "inside torch"])
def test_process_that_cancelled_a_rendezvous_ends_cleanly(where):
    # A thread that comes out of torch while the interpreter ends would abort the process.
    done = subprocess.run([sys.executable, "-c", GIVES_UP, where], capture_output=True, text=True, timeout=600)
    assert done.stdout == "group g: the rendezvous was cancelled\n"
    assert "terminate" not in done.stderr
    assert done.returncode == 0


def _be_a_member(port: int, token: str, world_size: int) -> None:
    group = UpdateGroup.join(
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


def _be_a_stopped_head(token: str, port: Connection) -> None:
    store = Rendezvous(host="127.0.0.1", timeout_s=LONG_S)
    port.send(store.port)
    group = UpdateGroup(
        store=store.visit,
        name="g",
        token=token,
        rank=0,
        world_size=2,
        device=CPU,
        address="127.0.0.1",
        timeout_s=LONG_S,
        tells=b"",
    )
    assert group.alive
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_member_that_listens_for_aborts_does_not_wait_for_a_store_that_is_stopped():
    context = multiprocessing.get_context("forkserver")
    token = secrets.token_hex(16)
    ours, theirs = context.Pipe()
    head = context.Process(target=_be_a_stopped_head, args=(token, theirs), daemon=True)
    head.start()
    try:
        assert ours.poll(PATIENCE_S)
        group = UpdateGroup.join(
            host="127.0.0.1",
            port=ours.recv(),
            name="g",
            token=token,
            rank=1,
            world_size=2,
            device=CPU,
            timeout_s=LONG_S,
            tells=b"",
        )
        wait_until(lambda: psutil.Process(head.pid).status() == psutil.STATUS_STOPPED, "the head to be stopped")
        works = group.start_moves((), [Move(0, torch.zeros(8, dtype=torch.uint8))])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(group.finish_moves, works, what="bucket 3", timeout_s=2.0)
            try:
                with pytest.raises(DeadlineExceeded, match="waited 2 s for bucket 3"):
                    waiting.result(PATIENCE_S)
            finally:
                head.kill()  # else the pool would wait for a thread that waits for the head
    finally:
        head.kill()
        head.join()
        head.close()
