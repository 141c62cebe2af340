"""Reads of another process's memory through NIXL, also of one that stops, is killed or has gone."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from tests.helpers.commands import context
from tests.helpers.harness import wait_for
from tests.unit.comm import test_remote_memory
from tests.unit.comm.test_remote_memory import (
    CPU,
    LONG_S,
    needs_nixl,
    read,
)
from weightcast.comm.remote_memory import Arena
from weightcast.comm.remote_reads import Pull, RemoteReadFailed
from weightcast.errors import Refused
from weightcast.wire.bucket_sources import RemoteMemory
from weightcast.wire.pieces import Runs

reader = test_remote_memory.reader  # a fixture


def own(pipe: Connection, environment: dict[str, str]) -> None:
    """A process with two buffers of 1 MiB, the first full of ones and the second of twos."""
    os.environ.update(environment)
    arena = Arena(2, 1 << 20, CPU)
    for index in range(2):
        arena.slot(index).fill_(index + 1)
    pipe.send([msgspec.json.encode(arena.memory(index)) for index in range(2)])
    while (value := pipe.recv()) is not None:
        arena.slot(0).fill_(value)
        pipe.send("filled")
    arena.close()


class Owner:
    """Another process with memory."""

    def __init__(self, **environment: str) -> None:
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=own, args=(there, environment), daemon=True)
        self.process.start()
        there.close()
        assert self.pipe.poll(LONG_S)
        self.memories = [msgspec.json.decode(text, type=RemoteMemory) for text in self.pipe.recv()]

    def fill(self, value: int) -> None:
        self.pipe.send(value)
        assert self.pipe.poll(LONG_S)
        self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LONG_S)


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    started = Owner()
    yield started
    started.kill()


@needs_nixl
def test_prepared_reads_are_repeated_and_see_what_the_owner_has_written(owner, reader):
    runs = [(0, Runs(0, 16, 1024, 64)), (1024, Runs(5, 7, 7, 1))]
    first, second = Pull("a", owner.memories[0], runs), Pull("b", owner.memories[1], [(2048, Runs(0, 64, 64, 1))])
    for value in (7, 8):
        owner.fill(value)
        found = read(reader, first, second)
        assert found[:1031].tolist() == [value] * 1031
        assert found[2048:2112].tolist() == [2] * 64
    assert reader.prepared == 2
    read(reader, first, second, size_bytes=1 << 22)  # memory that grows is registered anew
    assert reader.prepared == 4


@needs_nixl
def test_threads_of_agents_sleep_while_there_is_nothing_to_read(owner, reader):
    # A thread that polls without a pause waits for a processor, but never sleeps.
    assert read(reader, Pull("a", owner.memories[1], [(0, Runs(0, 64, 64, 1))])).tolist()[:64] == [2] * 64
    for pid in (os.getpid(), owner.process.pid):
        awake = set(os.listdir(f"/proc/{pid}/task")) - {str(threading.get_native_id())}
        wait_for(lambda pid=pid, awake=awake: not _drop_sleeping(pid, awake), f"threads of {pid}: {awake} never sleep")


def _drop_sleeping(pid: int, threads: set[str]) -> set[str]:
    for thread in list(threads):
        try:
            state = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            state = "S"
        if state == "S":
            threads.discard(thread)
    return threads


@needs_nixl
def test_an_owner_that_was_killed_is_named_and_the_reader_goes_on(owner, reader):
    runs = [(0, Runs(0, 4096, 4096, 1))]
    dead = Owner()
    assert read(reader, Pull("dead", dead.memories[0], runs)).tolist() == [1] * 4096
    dead.kill()
    with pytest.raises(RemoteReadFailed, match=rf"reading from .*process {dead.process.pid}.* for bucket 3") as caught:
        read(reader, Pull("dead", dead.memories[0], runs))
    assert "UCX_NET_DEVICES" in str(getattr(caught.value, "__notes__", ""))
    assert read(reader, Pull("alive", owner.memories[1], runs)).tolist() == [2] * 4096


@needs_nixl
def test_a_read_that_failed_leaves_no_agent_behind_while_its_error_is_kept(owner, reader):
    runs = [(0, Runs(0, 4096, 4096, 1))]
    read(reader, Pull("alive", owner.memories[1], runs))
    reader.close()
    wait_for(lambda: not any(it.name == "weightcast-rdma-close" for it in threading.enumerate()), "it is not closed")
    files = len(os.listdir("/proc/self/fd"))
    dead = Owner()
    read(reader, Pull("dead", dead.memories[0], runs))
    assert len(os.listdir("/proc/self/fd")) > files + 4, "an agent has files"
    dead.kill()
    gc.disable()
    try:
        with pytest.raises(RemoteReadFailed) as caught:
            read(reader, Pull("dead", dead.memories[0], runs))
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= files + 4, "the agent keeps its files")
    finally:
        gc.enable()
    assert caught.value.__cause__ is not None


@needs_nixl
def test_an_owner_that_has_gone_before_the_first_read_is_named_at_the_connection(reader):
    dead = Owner()
    dead.kill()
    with pytest.raises(RemoteReadFailed, match=rf"connecting to .*process {dead.process.pid}"):
        read(reader, Pull("dead", dead.memories[0], [(0, Runs(0, 64, 64, 1))]))


@needs_nixl
def test_memory_that_does_not_begin_with_its_token_is_refused(owner, reader):
    other = msgspec.structs.replace(owner.memories[0], token=b"x" * 32)
    with pytest.raises(RemoteReadFailed, match="has other memory than it told"):
        read(reader, Pull("a", other, [(0, Runs(0, 64, 64, 1))]))


@needs_nixl
def test_memory_outside_the_registration_is_refused(owner, reader):
    with pytest.raises(RemoteReadFailed, match=r"failed while reading from .* for bucket 3"):
        read(reader, Pull("a", owner.memories[0], [(0, Runs(1 << 30, 64, 64, 1))]))


@needs_nixl
def test_a_stopped_owner_ends_the_read_at_its_deadline_and_an_interrupt_ends_it_at_once(owner, reader, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")  # needs the owner's help, so that a stopped owner is a silent network
    slow = Owner(UCX_TLS="tcp")
    read(reader, Pull("b", owner.memories[0], [(0, Runs(0, 64, 64, 1))]))  # starts NIXL, which may take a while
    assert slow.process.pid is not None
    os.kill(slow.process.pid, signal.SIGSTOP)
    pull = Pull("a", slow.memories[0], [(0, Runs(0, 4096, 4096, 1))])
    with pytest.raises(RemoteReadFailed, match=r"waited 0.5 s while connecting to .* for bucket 3"):
        read(reader, pull, timeout_s=0.5)
    with pytest.raises(Refused, match="interrupted"):
        read(reader, pull, interrupted=lambda: True)
    os.kill(slow.process.pid, signal.SIGCONT)
    assert read(reader, pull).tolist() == [1] * 4096
    slow.kill()
