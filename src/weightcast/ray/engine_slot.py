"""An actor in each bundle of an engine.  It reserves the place; the engine's first one also runs the server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from weightcast.comm.http import Client
from weightcast.comm.ports import quiet_port
from weightcast.config import Target
from weightcast.errors import WeightcastError
from weightcast.ray.actors import NodePlace, place, remote
from weightcast.ray.engine_kinds import EngineKind

_DYING_S = 0.3
_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One health check of an engine; ``exit_code`` is None while the server runs.

    ``words``: the reason why the health path did not answer 200, or the last output of the server.
    """

    exit_code: int | None
    healthy: bool
    words: str

    @property
    def why(self) -> str:
        if self.exit_code is None:
            return self.words
        return f"it ended with exit code {self.exit_code}; its last output:\n{self.words}"


@remote
class EngineSlot:
    """Reserves one bundle of an engine; the engine's first slot also runs its server."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._health = ""
        self._log: IO[bytes] | None = None
        self._output: Tail | None = None  # used if there is no log file

    def place(self) -> NodePlace:
        """Returns the place of this actor."""
        return place()

    def start(
        self, kind: EngineKind, tp: int, gpus: Sequence[str], api_key: str | None, log_file: str | None, look_s: float
    ) -> str:
        """Starts the server and returns its URL, which does not answer yet."""
        host = place().address
        port = quiet_port(host)
        words = {"{host}": host, "{port}": str(port), "{tp}": str(tp)}
        command = [_fill(part, words) for part in kind.command]
        env = dict(os.environ) | dict(kind.env)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._log = Path(log_file).open("ab+") if log_file else None  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weightcast.ray.engine_supervisor", *command],
            stdin=subprocess.PIPE,
            stdout=self._log or subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
        )
        if self._process.stdout is not None:
            with self._process.stdout as pipe:
                self._output = Tail(pipe, num_bytes=_TAIL_BYTES)
        url = f"http://{host}:{port}"
        self._client = Client(Target(url, api_key=api_key), timeout_s=look_s)
        self._health = kind.health
        return url

    def look(self) -> Look:
        """Checks whether the server runs and answers."""
        assert self._process is not None
        assert self._client is not None
        words = ""
        if self._process.poll() is None:
            try:
                self._client.get_json(self._health)
            except WeightcastError as error:
                words = str(error)
                with suppress(subprocess.TimeoutExpired):  # a server that broke the connection may be about to end
                    self._process.wait(_DYING_S)
        code = self._process.poll()
        if code is not None:
            words = self._tail()
        return Look(exit_code=code, healthy=not words and code is None, words=words)

    def ask(self, requests: Sequence[tuple[str, bytes]], timeout_s: float) -> None:
        """Posts each body to its path in turn."""
        assert self._client is not None
        for path, body in requests:
            self._client.post_json(path, body, timeout_s=timeout_s)

    def stop(self) -> None:
        """Ends the server and waits until it is gone."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
        if self._client is not None:
            self._client.close()
        if self._log is not None:
            self._log.close()

    def _tail(self) -> str:
        if self._output is not None:
            return self._output.text(patience_s=_DYING_S)
        assert self._log is not None
        size = os.fstat(self._log.fileno()).st_size
        start = max(size - _TAIL_BYTES, 0)
        return os.pread(self._log.fileno(), _TAIL_BYTES, start).decode(errors="replace").strip()


def _fill(part: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        part = part.replace(word, value)
    return part


class Tail:
    """Reads a pipe to its end on a thread of its own and keeps the last bytes."""

    def __init__(self, pipe: IO[bytes], *, num_bytes: int) -> None:
        """Starts reading; only this object may read the pipe from now on."""
        self._end = os.dup(pipe.fileno())  # the caller may close the pipe while the thread reads
        self._num_bytes = num_bytes
        self._kept = bytearray()
        self._guard = threading.Lock()
        self._reading = threading.Thread(target=self._read, name="weightcast-tail", daemon=True)
        self._reading.start()

    def text(self, *, patience_s: float = 0.0) -> str:
        """Returns the last output, after ``patience_s`` at most: children of a dead process may still hold the pipe."""
        self._reading.join(patience_s)
        with self._guard:
            return self._kept.decode(errors="replace").strip()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._end, 1 << 16):
                with self._guard:
                    self._kept += chunk
                    del self._kept[: -self._num_bytes]
        finally:
            os.close(self._end)
