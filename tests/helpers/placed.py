"""Moves a process to another host, or out of reach of another's memory, as far as the process can tell.

All of it needs root.  They act on the calling process alone and on those that it starts.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.helpers.harness import Engine, serve
from tests.helpers.hosts import Host, enter

OTHER_BOOT_ID = "00000000-1111-2222-3333-444444444444"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS
_NEW_NAMES = 0x4000000  # CLONE_NEWUTS
_SYS_PTRACE = 19
_CAPABILITIES_V3 = 0x20080522


def _can_move() -> bool:
    command = f"mount --make-rprivate / && mount --bind /dev/null {_BOOT_ID}"
    return (
        os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True).returncode
    )


needs_root = pytest.mark.skipif(not _can_move(), reason="no mount namespaces here, which need root")


def move_to_another_host() -> None:
    """Gives this process a mount namespace in which the host has another boot id."""
    _call("unshare", _NEW_MOUNTS)
    _change_boot_id(OTHER_BOOT_ID)


def move_to_host_a() -> None:
    """Gives this process another host's boot id and name; it and processes of other such hosts cannot map memory."""
    _move_to_host("host-a", lacks=0)  # CAP_CHOWN


def move_to_host_b() -> None:
    """As ``move_to_host_a``."""
    _move_to_host("host-b", lacks=3)  # CAP_FOWNER


def move_to_host_c() -> None:
    """As ``move_to_host_a``."""
    _move_to_host("host-c", lacks=4)  # CAP_FSETID


def _move_to_host(name: str, *, lacks: int) -> None:
    _call("unshare", _NEW_MOUNTS | _NEW_NAMES)
    _change_boot_id(str(uuid.uuid5(uuid.NAMESPACE_DNS, name)))
    socket.sethostname(name)
    # Memory of a process with a capability that this one lacks cannot be mapped without CAP_SYS_PTRACE.
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    has = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable; the first 32 and the others
    _call("capget", header, has)
    assert has[1] & 1 << lacks, f"root lacks capability {lacks} already"
    for kind in range(3):
        has[kind] &= ~(1 << lacks | 1 << _SYS_PTRACE)
    _call("capset", header, has)


def _change_boot_id(boot_id: str) -> None:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"{boot_id}\n")
        file.flush()
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", file.name, _BOOT_ID], check=True)
    assert Path(_BOOT_ID).read_text().strip() == boot_id


def _call(function: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), function)


class PlacedEngine(Engine):
    """A toy engine whose process was placed first: ``move_to_another_host``, ``become_another_user`` and so on."""

    def __init__(self, place: Callable[[], None], *args: str, port: int = 0) -> None:
        self.args = ("--local", *args)
        self._launch(_serve_placed, place, ["--seed", "0", "--port", str(port), *self.args])


class SpreadEngine(Engine):
    """A toy engine with a rank on each of some hosts, which may come several times; its server is on the first."""

    def __init__(self, *places: Host, options: Sequence[str] = ()) -> None:
        self.address = places[0].address
        self.args = (f"--host={self.address}", f"--tp={len(places)}", *options)
        spread = ["--places", *(place.write() for place in places)]
        self._launch(_serve_placed, partial(enter, places[0]), ["--seed", "0", *self.args, *spread])


def _serve_placed(place: Callable[[], None], argv: list[str], ready: Connection) -> None:
    place()
    serve(argv, ready)
