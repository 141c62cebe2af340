"""Processes that a command of ours starts, forked from it: for a command that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tests.engines.forkserver import become
from tests.helpers.procs import Signals
from weightcast.lab.demo import children
from weightcast.receiver import executor


def fork_ranks() -> None:
    """From now on an engine of this process forks its ranks, where it would start Python for each."""
    executor.multiprocessing = InsteadOfSpawn("fork")  # type: ignore[attr-defined]


def fork_children() -> None:
    """From now on a demo of this process forks its trainers and engines, where it would start Python for each."""
    children.subprocess = _InsteadOfPopen  # type: ignore[attr-defined]


class InsteadOfSpawn:
    """``multiprocessing`` for a module that would start Python for each of its processes.

    Args:
        method: ``"fork"``, or ``"forkserver"`` for a process that has threads.
    """

    def __init__(self, method: str) -> None:
        self._method = method

    def get_context(self, method: str) -> Any:
        assert method in ("spawn", "fork")
        return multiprocessing.get_context(self._method)


class ForkedPython(Signals):
    """The part of ``subprocess.Popen`` that a demo uses, for ``python -m MODULE ...``.

    Attributes:
        pid: The process, a child of this one.
        returncode: None until it was waited for; negative for a signal.
        stdin: What it reads, if a pipe was asked for.
        stdout: What it writes, likewise.
    """

    _ours: list[IO[bytes]] = []  # noqa: RUF012  this process's ends of pipes, which are nothing to the next one

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int | IO[Any],
        stderr: IO[Any],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        assert start_new_session, "it leads a session of its own"
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        if stdin == subprocess.PIPE:
            to_read, to_write = os.pipe()
            self.stdin = os.fdopen(to_write, "wb")
        else:
            to_read = os.open(os.devnull, os.O_RDONLY)
        if stdout == subprocess.PIPE:
            reader, out = os.pipe()
            self.stdout = os.fdopen(reader, "rb")
        else:
            assert not isinstance(stdout, int)
            out = os.dup(stdout.fileno())
        err = os.dup(stderr.fileno())
        self._ours += [pipe for pipe in (self.stdin, self.stdout) if pipe is not None]
        self.pid = os.fork()
        if not self.pid:
            try:
                for inherited in list(weakref.finalize._registry):
                    inherited.detach()  # it would remove the folders of the process that it was
                for pipe in self._ours:
                    if not pipe.closed:
                        os.close(pipe.fileno())
                fork_ranks()
                sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put another in its place
                become({"argv": list(command[1:]), "env": dict(env)}, to_read, out, err)
            except Exception:  # noqa: BLE001  it must not go on as the process that it was
                traceback.print_exc()
            finally:
                os._exit(70)
        for number in (to_read, out, err):
            os.close(number)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class _InsteadOfPopen:
    """``subprocess`` for a module whose processes are of this package, but for those that import next to nothing."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    @staticmethod
    def Popen(command: Sequence[str], **options: Any) -> Any:
        if command[2] == "weightcast.lab.demo.reaper":
            return subprocess.Popen(command, **options)
        return ForkedPython(command, **options)
