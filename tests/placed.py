"""Moves an engine's process to another host, or out of reach of its trainer's memory, as far as the process can tell.

Both need root.  They act on the calling process alone and on those that it starts.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.harness import Engine, serve

OTHER_BOOT_ID = "00000000-1111-2222-3333-444444444444"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS
_NOBODY = 65534


def _can_move() -> bool:
    command = f"mount --make-rprivate / && mount --bind /dev/null {_BOOT_ID}"
    return (
        os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True).returncode
    )


needs_root = pytest.mark.skipif(not _can_move(), reason="no mount namespaces here, which need root")


def move_to_another_host() -> None:
    """Gives this process a mount namespace in which the host has another boot id."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"{OTHER_BOOT_ID}\n")
        file.flush()
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", file.name, _BOOT_ID], check=True)
    assert Path(_BOOT_ID).read_text().strip() == OTHER_BOOT_ID


def become_another_user() -> None:
    """Gives up root, so the kernel refuses this process the memory of the trainer's."""
    importlib.import_module("encodings.idna")  # Python loads it late, and its files may be readable for root alone
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


class PlacedEngine(Engine):
    """A toy engine whose process was placed first: ``move_to_another_host`` or ``become_another_user``."""

    def __init__(self, place: Callable[[], None], *args: str, port: int = 0) -> None:
        self.args = ("--local", *args)
        self._launch(_serve_placed, place, ["--seed", "0", "--port", str(port), *self.args])


def _serve_placed(place: Callable[[], None], argv: list[str], ready: Connection) -> None:
    place()
    serve(argv, ready)
