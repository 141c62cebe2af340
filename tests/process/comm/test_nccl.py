"""NCCL by itself: the real binding, over a library of NCCL's interface for threads of one process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.clock import PATIENCE_S
from weightcast.comm import nccl
from weightcast.comm.nccl import UNIQUE_ID_BYTES, NcclGroup, new_unique_id
from weightcast.comm.update_group import GroupFailed
from weightcast.errors import ConfigError, DeadlineExceeded
from weightcast.transports.channel import Channel

CPU = torch.device("cpu")


class Lane:
    """A stream without a GPU: what was enqueued takes a few looks to be done."""

    pointer = 77

    @contextmanager
    def here(self) -> Generator[None]:
        yield

    def record(self) -> Slow:
        return Slow()


class Slow:
    def __init__(self) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 3


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The binding takes what the process has loaded under NCCL's name."""
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = Path(__file__).parents[2] / "helpers" / "fake_nccl.c"
    flags = ("-O1", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{path.name}")
    subprocess.run(["cc", *flags, "-o", path, source], check=True)
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


@pytest.fixture(autouse=True)
def on_a_cpu(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding compares a tensor's device with the communicator's, for which it would ask CUDA."""
    from nccl.core import Communicator

    monkeypatch.setattr(Communicator, "device", SimpleNamespace(device_id=CPU.index))
    monkeypatch.setattr(nccl, "CudaLane", lambda device: Lane())


def join(
    unique_id: bytes,
    rank: int,
    *,
    world_size: int = 2,
    timeout_s: float = 20.0,
    cancelled: threading.Event | None = None,
) -> NcclGroup:
    return NcclGroup(
        unique_id=unique_id,
        name="g",
        rank=rank,
        world_size=world_size,
        device=CPU,
        timeout_s=timeout_s,
        cancelled=cancelled,
    )


def in_threads(*calls: Callable[[], object]) -> list[Future[object]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def together(world_size: int = 2) -> list[NcclGroup]:
    unique_id = new_unique_id()
    calls = [lambda rank=rank: join(unique_id, rank, world_size=world_size) for rank in range(world_size)]
    return [future.result() for future in in_threads(*calls)]


def test_members_meet_by_an_id_and_get_what_rank_0_broadcasts() -> None:
    assert len(new_unique_id()) == UNIQUE_ID_BYTES
    assert new_unique_id() != new_unique_id()
    groups = together(3)
    for size in (1, 5000, 64):
        sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
        data = [sent.clone(), torch.zeros_like(sent), torch.zeros_like(sent)]
        calls = [
            lambda group=group, mine=mine: group.broadcast(mine, what="bucket 0", timeout_s=20.0)
            for group, mine in zip(groups, data, strict=True)
        ]
        for future in in_threads(*calls):
            future.result()
        assert all(torch.equal(mine, sent) for mine in data)
    assert all(group.alive for group in groups)
    groups[0].close()
    groups[0].close()
    assert not groups[0].alive
    with pytest.raises(GroupFailed, match="closed"):
        groups[0].start_broadcast(torch.zeros(1, dtype=torch.uint8))


def test_absent_nccl_member_is_not_waited_for() -> None:
    with pytest.raises(DeadlineExceeded, match="all 2 members"):
        join(new_unique_id(), 0, timeout_s=0.1)


def test_nccl_rendezvous_can_be_cancelled() -> None:
    cancelled = threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    with pytest.raises(GroupFailed, match="cancelled"):
        join(new_unique_id(), 0, cancelled=cancelled)


def test_a_peer_that_hangs_up_ends_the_wait_with_the_librarys_words() -> None:
    first, second = together()
    threading.Timer(0.05, lambda: second.abort("gone")).start()
    with pytest.raises(GroupFailed, match="remote process exited: peer hung up"):
        first.broadcast(torch.zeros(8, dtype=torch.uint8), what="bucket 1", timeout_s=20.0)
    assert not first.alive


def test_a_deadline_and_an_abort_end_a_broadcast() -> None:
    first, _ = together()
    with pytest.raises(DeadlineExceeded, match="bucket 4"):
        first.broadcast(torch.zeros(8, dtype=torch.uint8), what="bucket 4", timeout_s=0.05)
    assert not first.alive
    third, _ = together()
    threading.Timer(0.05, lambda: third.abort("somebody refused")).start()
    with pytest.raises(GroupFailed, match="somebody refused"):
        third.broadcast(torch.zeros(8, dtype=torch.uint8), what="bucket 4", timeout_s=20.0)


def test_a_refusal_that_is_seen_while_waiting_is_raised() -> None:
    first, _ = together()

    def look() -> None:
        raise GroupFailed("the target said no")

    started = time.monotonic()
    with pytest.raises(GroupFailed, match="said no"):
        first.finish(
            first.start_broadcast(torch.zeros(8, dtype=torch.uint8)), what="b", timeout_s=PATIENCE_S, poll=look
        )
    assert time.monotonic() - started < PATIENCE_S
    first.close()


def test_error_has_the_words_of_nccl() -> None:
    first, _ = together()
    first._lane.pointer = 78  # the library knows one stream
    with pytest.raises(GroupFailed, match=r"a broadcast of 8 bytes: InvalidArgument \(4\): invalid argument"):
        first.start_broadcast(torch.zeros(8, dtype=torch.uint8))
    assert not first.alive


def test_a_cut_id_is_refused_by_the_library() -> None:
    with pytest.raises(GroupFailed, match="invalid argument"):
        join(new_unique_id()[:-1] + b"\0", 0)


def test_without_the_binding_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(ConfigError, match="nccl4py cannot be imported") as caught:
        new_unique_id()
    assert "weightcast[nccl]" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="nccl4py cannot be imported"):  # before an engine has been asked for anything
        Channel([], meeting="nccl-id", device=CPU, host="127.0.0.1", bucket_bytes=1, timeout_s=1.0)


def test_an_nccl_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise RuntimeError('Failure finding "libnccl.so.2"')  # as the binding's loader does

    monkeypatch.setattr("nccl.bindings.nccl.get_version", missing)
    with pytest.raises(ConfigError, match="NCCL library was not found"):
        new_unique_id()
    monkeypatch.setattr("nccl.bindings.nccl.get_version", lambda: 22105)
    with pytest.raises(ConfigError, match="22105 is too old"):
        new_unique_id()
