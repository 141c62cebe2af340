"""Shared memory, mapped by another process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import msgspec
import pytest
import torch

from tests.helpers.clock import PATIENCE_S
from tests.unit.comm import test_ipc
from weightcast.comm.ipc import Mapping, SharedBuffer
from weightcast.wire.bucket_sources import MemoryHandle

buffer = test_ipc.buffer  # a fixture


def _read_elsewhere(handle_bytes: bytes, pipe) -> None:
    mapping = Mapping(msgspec.json.decode(handle_bytes, type=MemoryHandle))
    pipe.send(mapping.data.tolist())
    pipe.recv()
    pipe.send(mapping.data.unique().tolist())


def test_another_process_maps_it(buffer):
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read_elsewhere, args=(msgspec.json.encode(buffer.handle()), theirs))
    process.start()
    try:
        assert ours.poll(PATIENCE_S)
        assert ours.recv() == buffer.data.tolist()
        buffer.data.fill_(3)
        ours.send("look again")
        assert ours.poll(PATIENCE_S)
        assert ours.recv() == [3]
    finally:
        process.join(PATIENCE_S)
        process.close()
        ours.close()
        theirs.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_a_buffer_and_the_same_user_can():
    buffer = SharedBuffer(4096, torch.device("cpu"))
    path = f"/proc/{os.getpid()}/fd/{buffer.handle().fd}"
    code = f"open({path!r}, 'r+b')"
    same = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    # Another user may have no access to the interpreter of a virtual environment.
    other = subprocess.run(
        ["/bin/sh", "-c", f"exec 3<{path}"],
        capture_output=True,
        text=True,
        timeout=600,
        user=65534,
        group=65534,
        extra_groups=[],
    )
    assert same.returncode == 0, same.stderr
    assert other.returncode != 0
    assert "ermission denied" in other.stderr
    buffer.close()
