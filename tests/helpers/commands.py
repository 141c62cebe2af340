"""Command lines in processes of their own that need not import torch again.

Before ``python -m weightcast`` does anything, its imports take seconds of a processor; so do those of every rank that
an engine starts.  Hundreds of starts would be most of a test run on two cores.  Here a server that has imported
everything once forks for each, and an engine forks its ranks.  Everything else is as a shell would have it: a process
with arguments, environment, output, signals and an exit code of its own, running the program's own ``main``.  What
starting Python itself does (imports, the ranks' own start, the interpreter's end) is for the tests that use
``sys.executable``.
"""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import IO, Any, TextIO

import tests.helpers.fork_server  # it says what the server imports
from tests.helpers.forking import fork_children, fork_ranks
from tests.helpers.procs import Signals

COMMAND = "weightcast.__main__"


class _Fd:
    """An open file of this process, for one that is being started."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (reduction.DupFd(self.number),)


def _opened(sent: Any) -> int:
    return sent.detach()


class _Process(ForkServerProcess):
    """One that writes where this process writes when it starts it; the server may be another process's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._outputs: Any = _Fd(1), _Fd(2)

    def run(self) -> None:
        for place, number in enumerate(self._outputs, start=1):
            os.dup2(number, place)
            os.close(number)
        super().run()


class _Parent(_Process):
    """One whose own processes come from the same server.  Without that it would start another, which imports all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._server = tests.helpers.fork_server.address()

    def run(self) -> None:
        tests.helpers.fork_server.use_own(self._server)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


class _ContextOfParents(ForkServerContext):
    Process = _Parent


context = _Context()
parents = _ContextOfParents()


class Started(Signals):
    """The part of ``subprocess.Popen`` that tests use, for such a process.

    Attributes:
        args: The command.
        pid: Its process.
        stdout: What it writes, if a pipe was asked for.
        stderr: The same of its errors.
        returncode: None while it runs, as far as anybody has looked; negative for a signal.
    """

    def __init__(
        self,
        *args: str,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> None:
        """Start one.

        Args:
            args: A module that has a ``main``, and the arguments of the command.
            env: The process's whole environment; this process's by default.
            stdout: ``subprocess.PIPE``, an open file, or None to share this process's.
            stderr: The same.
        """
        self.args = args
        self.stdout, out = _output(stdout, 1)
        self.stderr, err = _output(stderr, 2)
        environment = dict(os.environ if env is None else env)
        self._process = context.Process(target=_run, args=(args, environment, _Fd(out), _Fd(err)))
        try:
            self._process.start()
        finally:
            os.close(out)
            os.close(err)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode


def run(*args: str, env: Mapping[str, str] | None = None, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Such a process from start to end, and all that it said; killed if it takes longer."""
    started = Started(*args, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stderr is not None
    said = {started.stdout.fileno(): b"", started.stderr.fileno(): b""}
    deadline = time.monotonic() + timeout_s
    with started.stdout, started.stderr:
        try:
            unread = list(said)
            while unread:
                ready = wait(unread, max(deadline - time.monotonic(), 0.0))
                if not ready:
                    raise subprocess.TimeoutExpired(args, timeout_s)
                for pipe in ready:
                    piece = os.read(pipe, 1 << 16)
                    said[pipe] += piece
                    if not piece:
                        unread.remove(pipe)
            code = started.wait(max(deadline - time.monotonic(), 0.1))
        finally:
            started.kill()
    return subprocess.CompletedProcess(args, code, *(text.decode(errors="replace") for text in said.values()))


def _output(wanted: int | IO[Any] | None, shared: int) -> tuple[TextIO | None, int]:
    """Returns the reader's end of a pipe, and the descriptor that the process writes to."""
    if wanted == subprocess.PIPE:
        reader, writer = os.pipe()
        return open(reader, encoding="utf-8", errors="replace"), writer
    return None, os.dup(shared if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno())


def _run(args: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> None:
    """The process."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.environ.clear()
    os.environ.update(environment)
    fork_ranks()
    fork_children()
    module, *rest = args
    sys.argv = [module, *rest]
    try:
        sys.exit(importlib.import_module(module).main())
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # which processes of multiprocessing leave out
