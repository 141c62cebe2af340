"""Child processes of the demo: each has its own session and log file, and none survives the demo."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from weightcast.errors import DeadlineExceeded, EngineFailure

_GRACE_S = 15.0
_POLL_S = 0.05


class ChildFailed(EngineFailure):
    """A process ended with an error; ``tails`` has the last log lines of each failed process, by name."""

    def __init__(self, message: str, *, tails: Mapping[str, str], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.tails = dict(tails)


class Child:
    """One running process and its log."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        if process.stdout is not None:
            threading.Thread(target=_pump, args=(process.stdout, self.lines), daemon=True, name=name).start()

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs.

        The process is not reaped, so its id is not reused before ``Children.close``.
        """
        if self.process.returncode is not None:
            return self.process.returncode
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def tell(self, line: bytes) -> None:
        """Writes one line to the stdin of a child started with ``piped``, and closes it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the child has died, which ``Children.check`` reports
            self.process.stdin.write(line + b"\n")
            self.process.stdin.close()

    def tail(self, *, lines: int = 20) -> str:
        """Returns the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Children:
    """All processes of one mode; a context manager that ends every one of them.

    A process has fifteen seconds to end; then its whole session is killed.  If this process is itself killed, a reaper
    does the same.
    """

    def __init__(self, log_folder: Path) -> None:
        """Starts the reaper; ``log_folder`` gets a file ``NAME.log`` for each child and is created if missing."""
        log_folder.mkdir(parents=True, exist_ok=True)
        self._log_folder = log_folder
        self._running: list[Child] = []
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "weightcast.lab.demo.reaper"], stdin=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str], piped: bool = False) -> Child:
        """Starts one process.

        Args:
            env: Complete environment of the process.
            piped: Keep stdin for ``Child.tell`` and stdout for ``Children.read_line``; otherwise the log gets stdout.
        """
        log = self._log_folder / f"{name}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else stream,
                stderr=stream,
                env=dict(env),
                start_new_session=True,
            )
        self._tell_reaper(f"+{process.pid}")
        child = Child(name, process, log)
        self._running.append(child)
        return child

    def check(self) -> None:
        """Raises ``ChildFailed`` if a child has ended with an error."""
        failed = [child for child in self._running if child.exit_code not in (None, 0)]
        if failed:
            raise ChildFailed(
                ", ".join(f"{child.name} {_how(child.exit_code or 0)}" for child in failed),
                tails={child.name: child.tail() for child in failed},
                hint=f"their logs are in {self._log_folder}",
            )

    def read_line(self, child: Child, *, waiting_for: str, timeout_s: float) -> bytes | None:
        """Returns the next line that a child started with ``piped`` writes, or None if it has closed its stdout.

        Raises:
            ChildFailed: This or another child ended with an error.
            DeadlineExceeded: The child wrote no line in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(queue.Empty):
                return child.lines.get(timeout=_POLL_S)
            self.check()
        raise DeadlineExceeded(
            who=child.name, waiting_for=waiting_for, timeout_s=timeout_s, hint=f"see the logs in {self._log_folder}"
        )

    def wait(self, children: Sequence[Child], *, timeout_s: float) -> None:
        """Waits until these children have ended.

        Raises:
            ChildFailed: A child ended with an error.
            EngineFailure: A child did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        while any(child.exit_code is None for child in children):
            self.check()
            if time.monotonic() > deadline:
                names = ", ".join(child.name for child in children if child.exit_code is None)
                raise EngineFailure(f"{names}: still running {timeout_s:g} s after the last step")
            time.sleep(_POLL_S)
        self.check()

    def close(self) -> None:
        """Ends every child, youngest first, and the reaper; a second call has no effect."""
        for child in self._running:
            child.process.terminate()  # only the leader: an engine ends its own ranks
        deadline = time.monotonic() + _GRACE_S
        while self._running:
            child = self._running[-1]
            while child.exit_code is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            # The leader's id is not reused before it is reaped, so this kills only its own session.
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            self._tell_reaper(f"-{child.process.pid}")
            self._running.pop()
        if self._reaper.stdin is not None and not self._reaper.stdin.closed:
            with suppress(BrokenPipeError):
                self._reaper.stdin.close()
            self._reaper.wait()

    def _tell_reaper(self, line: str) -> None:
        if self._reaper.stdin is not None:
            with suppress(BrokenPipeError):
                self._reaper.stdin.write(f"{line}\n".encode())
                self._reaper.stdin.flush()


def _pump(stream: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    with suppress(ValueError):  # ``Children.close`` closed it while a grandchild still had the other end open
        for line in stream:
            lines.put(line)
    lines.put(None)


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
