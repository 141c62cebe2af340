"""Processes of a soak: starts them, exchanges lines of JSON with them, kills them, and counts the leftovers.

Each process leads a session of its own, so that the processes it leaves behind can be found.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from weightcast.errors import DeadlineExceeded, EngineFailure

_STOP_S = 20.0


class Reaper:
    """Ends the processes of the soak if this process is killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weightcast.lab.demo.reaper"], stdin=subprocess.PIPE, start_new_session=True
        )

    def tell(self, line: str) -> None:
        """Sends ``+PID`` to add a process or ``-PID`` to remove it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the reaper; no process is left for it to end."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


class Running:
    """One process that prints JSON documents, each starting on a new line."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, reaper: Reaper) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        # Torch records its last 2000 collectives, nearly 1 KiB each; over hundreds of updates that looks like a leak.
        env["TORCH_FR_BUFFER_SIZE"] = "0"
        self.name = name
        self.log = log
        self._reaper = reaper
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=env,
                start_new_session=True,
            )
        reaper.tell(f"+{self.process.pid}")
        assert self.process.stdout is not None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self.process.stdout, self._lines), daemon=True, name=name).start()

    @property
    def pid(self) -> int:
        """Process id, which is also the session id."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    def tell(self, document: Any) -> None:
        """Writes one line of JSON to the process's stdin; does nothing if it is dead."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(document) + b"\n")
            self.process.stdin.flush()

    def hear(self, *, waiting_for: str, timeout_s: float) -> bytes:
        """Returns the next document that the process prints.

        Raises:
            EngineFailure: The process has ended.
            DeadlineExceeded: The process printed nothing in time.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(who=self.name, waiting_for=waiting_for, timeout_s=timeout_s) from None
        if line is None:
            self._lines.put(None)
            raise EngineFailure(f"{self.name} ended before it printed {waiting_for}", hint=f"see {self.log}")
        return line

    def kill(self) -> None:
        """Sends SIGKILL to the process alone; its children must end by themselves."""
        with suppress(ProcessLookupError):
            self.process.kill()

    def bury(self) -> int:
        """Waits for the end of a killed or stopped process and kills the rest of its session.

        Returns:
            Number of processes of the session that outlived it by more than five seconds.
        """
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + 5.0
        while (left := session_of(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._reaper.tell(f"-{self.pid}")
        return len(left)

    def stop(self) -> int:
        """Sends SIGTERM, then does as ``bury``."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.bury()


def session_of(leader: int) -> list[psutil.Process]:
    """Returns the living processes of a session."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _pump(stream: IO[bytes], documents: queue.SimpleQueue[bytes | None]) -> None:
    document = b""
    with suppress(ValueError):  # closed by ``bury``
        for line in stream:
            document += line
            with suppress(msgspec.DecodeError):  # more lines follow
                msgspec.json.decode(document)
                documents.put(document)
                document = b""
    documents.put(None)
