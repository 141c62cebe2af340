"""Servers of real engines that need not import the engine again: forked from a Python that has.

An import is fifteen seconds of a processor, and a file of tests starts up to six.  Everything else is as a shell would
have it: a process in a session of its own with arguments, environment, output, signals and an exit code, running the
engine's own ``__main__``.  With ``ENGINE_STARTS=python`` Python itself starts each of them; ``make engine-test`` does.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.helpers.procs import Signals

SERVER = Path(__file__).with_name("forkserver.py")


class Forked(Signals):
    """The part of ``subprocess.Popen`` that tests use, for such a process.

    Attributes:
        args: The command.
        pid: Its process.
        returncode: None while it runs, as far as anybody has looked; negative for a signal.
    """

    def __init__(self, args: Sequence[str], pid: int, status: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._read()
        assert self.returncode is not None
        return self.returncode

    def _read(self) -> None:
        self.returncode = int(os.read(self._status, 16) or -signal.SIGKILL)  # the server itself may be gone
        os.close(self._status)


class _Server:
    """One environment with some modules imported."""

    def __init__(self, python: Path, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-P", SERVER, str(theirs.fileno()), *modules],
                env=dict(env),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process, whose end is the server's
            )

    def start(self, argv: Sequence[str], env: Mapping[str, str], output: int, errors: int) -> tuple[int, int]:
        status, theirs = os.pipe()
        try:
            asked = json.dumps({"argv": list(argv), "env": dict(env)}).encode()
            socket.send_fds(self._requests, [asked], [output, errors, theirs])
        finally:
            os.close(theirs)
        said = self._requests.recv(64)
        assert said, f"{SERVER.name} ended with {self._process.wait()}; its words are above"
        return int(said), status

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


_servers: dict[tuple[Path, tuple[str, ...], str], _Server] = {}


def start(
    python: Path,
    argv: Sequence[str],
    *,
    modules: Sequence[str],
    env: Mapping[str, str],
    output: IO[Any],
    errors: IO[Any] | None = None,
) -> Forked | subprocess.Popen[bytes]:
    """Starts ``python -m MODULE ...``, ``python -c CODE ...`` or ``python SCRIPT ...``.

    Args:
        python: Of an engine's environment.
        argv: What follows it on the command line.
        modules: What the server has imported, in the environment of the first call with the same ``PYTHONPATH``.
        env: The process's whole environment.
        output: Where it writes.
        errors: Where it writes errors; the same place by default.
    """
    errors = output if errors is None else errors
    if os.environ.get("ENGINE_STARTS") == "python":
        return subprocess.Popen([python, *argv], stdout=output, stderr=errors, env=dict(env), start_new_session=True)
    key = python, tuple(modules), env["PYTHONPATH"]
    if key not in _servers:
        _servers[key] = _Server(python, modules, env)
        atexit.register(_servers[key].close)
    pid, status = _servers[key].start(argv, env, output.fileno(), errors.fileno())
    return Forked([str(python), *argv], pid, status)


def run(
    python: Path, argv: Sequence[str], *, modules: Sequence[str], env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Such a process from start to end, and all that it wrote."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start(python, argv, modules=modules, env=env, output=output, errors=errors)
        code = process.wait()
        texts: list[str] = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([str(python), *argv], code, *texts)
