"""The sockets of checkpoint-engine's wire: for this user, and gone afterwards."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.clock import PATIENCE_S
from weightcast.comm.shared_buckets import TorchMemory
from weightcast.errors import ConfigError, TargetLost
from weightcast.transports.checkpoint_engine import CheckpointEngineCarrier
from weightcast.transports.session import LinkSession

zmq = pytest.importorskip("zmq")
NOBODY = 65534


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, with a name that leaves room for those of sockets; every user may enter it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


class Engine:
    """One rank of an engine: it connects to the address that it is told, as checkpoint-engine's worker does."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.over = threading.Event()
        self.heard: list[object] = []
        self.link: Any = SimpleNamespace(
            url="http://engine",
            session=LinkSession(),
            info=SimpleNamespace(ranks=[SimpleNamespace(rank=0, device="cpu")]),
            adapter=SimpleNamespace(handles=self.told),
            touch=lambda: None,
            ask=lambda kind, steps, timeout_s: asyncio.to_thread(self.over.wait, PATIENCE_S),
        )

    def told(self, addresses: dict[str, str]) -> None:
        self.addresses = addresses
        threading.Thread(target=self._serve, args=(zmq.Context(), addresses["GPU-cpu"]), daemon=True).start()

    def _serve(self, context: Any, address: str) -> None:
        end = context.socket(zmq.REP)
        end.connect(address)
        released = False
        while not self.over.is_set():
            self.heard.append(pickle.loads(end.recv()))
            end.send(b"")
            if self.heard[-1] is None and released:
                self.over.set()
            released = self.heard[-1] is None
        end.close()
        context.term()


def connect_as_nobody(path: str, pipe: Any) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(path)
    except PermissionError:
        pipe.send("refused")
    except OSError as error:
        pipe.send(repr(error))
    else:
        pipe.send("connected")


def test_an_engine_is_served_over_a_socket_that_other_users_cannot_reach(folder: Path) -> None:
    engine = Engine()
    transport = CheckpointEngineCarrier([engine.link], timeout_s=PATIENCE_S)
    [feed] = transport._feeds
    memory = TorchMemory(kind="shm", device="cpu", size_bytes=4, handle=b"/x")
    feed._begin([memory], "bucket 0")
    path = engine.addresses["GPU-cpu"].removeprefix("ipc://")
    [place] = folder.iterdir()
    assert Path(path).parent == place
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    if os.geteuid() == 0:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        stranger = context.Process(target=connect_as_nobody, args=(path, theirs))
        stranger.start()
        assert ours.poll(PATIENCE_S)
        assert ours.recv() == "refused"
        stranger.join(PATIENCE_S)
    feed.finish()
    assert len(engine.heard) == 3  # the handle, and twice nothing
    assert engine.heard[1:] == [None, None]
    transport.close()
    assert list(folder.iterdir()) == []


def test_the_sockets_of_a_killed_trainer_are_removed(folder: Path) -> None:
    code = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from weightcast.transports.checkpoint_engine import CheckpointEngineCarrier\n"
        "transport = CheckpointEngineCarrier([], timeout_s=5)\n"
        "print('up', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        CheckpointEngineCarrier([], timeout_s=5).close()
        assert len(list(folder.iterdir())) == 1  # its owner lives
        trainer.kill()
    CheckpointEngineCarrier([], timeout_s=5).close()
    assert list(folder.iterdir()) == []


def test_a_folder_whose_name_is_too_long_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 100}")
    with pytest.raises(ConfigError, match="too long for sockets") as caught:
        CheckpointEngineCarrier([], timeout_s=5)
    assert "TMPDIR" in (caught.value.hint or "")


def test_a_silent_engine_is_told_from_one_that_cannot_see_the_sockets(folder: Path) -> None:
    engine = Engine()
    engine.link.adapter = SimpleNamespace(handles=lambda addresses: None)
    transport = CheckpointEngineCarrier([engine.link], timeout_s=0.1)
    [feed] = transport._feeds
    with pytest.raises(TargetLost, match="no answer to bucket 0") as caught:
        feed._begin([TorchMemory(kind="shm", device="cpu", size_bytes=4, handle=b"/x")], "bucket 0")
    assert "must run as this user" in (caught.value.hint or "")
    engine.over.set()
    transport.close()
