"""Many streams of a server in one process that does nothing else, so that their times are the server's.

    python -m benchmarks.engine_streams http://127.0.0.1:30000 --engine sglang --streams 32 --tokens 256

Each stream sends one request after another.  The word ``steady`` is printed when each of them has got tokens.  A line
on the standard input, or its end, lets the running requests finish and sends no more; then one line of JSON follows:
for every request when it was sent, when each message came, how it ended and how many tokens it got.  Times are those of
``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_STEADY = 16
_FINISH_S = 60.0
_DATA = b"data: {"


@dataclass
class Request:
    """One request.

    Attributes:
        sent: When it was sent.
        times: When each message came.
        finish: The engine's reason for the end; empty if none was given.
        tokens: Tokens that came; for vLLM, messages with tokens.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    finish: str = ""
    tokens: int = 0


def _of_sglang(prompt: list[int], tokens: int, _: str) -> tuple[str, dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return "/generate", {"input_ids": prompt, "sampling_params": sampling}


def _of_vllm(prompt: list[int], tokens: int, model: str) -> tuple[str, dict[str, Any]]:
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return "/v1/completions", {"model": model, "prompt": prompt, **sampling}


def _of_lmdeploy(prompt: list[int], tokens: int, _: str) -> tuple[str, dict[str, Any]]:
    sampling = {"temperature": 0.0, "top_k": 1, "max_tokens": tokens, "ignore_eos": True}
    return "/generate", {"input_ids": prompt, **sampling}


_REQUESTS = {"sglang": _of_sglang, "vllm": _of_vllm, "lmdeploy": _of_lmdeploy}


class _Stream:
    """One connection at a time, read as it comes and taken apart at its end."""

    def __init__(self, url: str, number: int, tokens: int, engine: str, model: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = parts.hostname, parts.port
        self._engine = engine
        prompt = [100 + (31 * number + 7 * place) % 390 for place in range(32)]
        path, asked = _REQUESTS[engine](prompt, tokens, model)
        body = json.dumps(asked | {"stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._bytes = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        self.requests: list[Request] = []
        self.socket: socket.socket | None = None

    def send(self) -> None:
        self.socket = socket.create_connection(self._address, timeout=30)
        self.socket.sendall(self._bytes)
        self.requests.append(Request(time.monotonic()))
        self._last = b""

    def read(self) -> bool:
        """Takes in what has come; False at the end of the answer."""
        assert self.socket is not None
        request = self.requests[-1]
        try:
            came = self.socket.recv(1 << 20)
        except OSError as error:
            request.finish, came = type(error).__name__, b""
        if came:
            now, carried = time.monotonic(), self._last[-(len(_DATA) - 1) :]
            request.times += [now] * (carried + came).count(_DATA)
            self._last += came
            # The last message is all that is taken apart.
            begin = self._last.rfind(_DATA)
            self._last = self._last[begin:] if begin >= 0 else self._last[-(1 << 16) :]
            return True
        self.socket.close()
        self.socket = None
        if self._last.startswith(_DATA) and not request.finish:
            said = json.loads(self._last[len(_DATA) - 1 : self._last.find(b"\n")])
            if self._engine == "vllm":
                request.tokens = len(request.times)
                request.finish = str(next(iter(said.get("choices", [])), {}).get("finish_reason") or "")
            else:
                meta = said.get("meta_info", {})
                request.tokens = int(meta.get("completion_tokens", 0))
                request.finish = str((meta.get("finish_reason") or {}).get("type") or "")
            if "error" in said:
                request.finish = f"error: {said['error']}"[:200]
        elif not request.finish:
            request.finish = f"no message: {self._last[:200].decode(errors='replace')}"
        return False


def _run(url: str, streams: Sequence[_Stream]) -> None:
    for stream in streams:
        stream.send()
    stopping, steady, deadline = False, False, float("inf")
    while any(stream.socket is not None for stream in streams) and time.monotonic() < deadline:
        reading = {stream.socket.fileno(): stream for stream in streams if stream.socket is not None}
        told = [] if stopping else [sys.stdin.fileno()]
        ready, _, _ = select.select([*reading, *told], [], [], 1.0)
        for found in ready:
            if found in told:
                stopping, deadline = True, time.monotonic() + _FINISH_S
            elif not reading[found].read() and not stopping:
                reading[found].send()
        if not steady and all(
            len(stream.requests) > 1 or len(stream.requests[0].times) >= _STEADY for stream in streams
        ):
            steady = True
            print("steady", flush=True)


class Load:
    """The streams, seen from another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.requests: list[Request] = []

    def wait_steady(self, timeout_s: float) -> None:
        """Waits until every stream has got tokens.

        Raises:
            RuntimeError: That did not happen in time.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        said = self._process.stdout.readline() if ready else ""
        if said.strip() != "steady":
            raise RuntimeError(f"the streams got no tokens within {timeout_s:g} s: {said!r}")

    def stop(self) -> None:
        """Lets what runs finish, and takes in ``requests``."""
        out, _ = self._process.communicate("stop\n", timeout=_FINISH_S + 30)
        self.requests = [Request(**request) for request in json.loads(out.splitlines()[-1])]


@contextmanager
def load(
    url: str, *, streams: int, tokens: int, engine: str = "sglang", models: Sequence[str] = ("m",)
) -> Generator[Load]:
    """Streams of a server while the body runs, which calls ``Load.stop``; vLLM's take turns with ``models``."""
    command = [sys.executable, str(Path(__file__).resolve()), url, f"--engine={engine}"]
    command += [f"--streams={streams}", f"--tokens={tokens}", f"--models={','.join(models)}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Load(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def gaps(requests: Sequence[Request], begin: float, end: float) -> dict[str, Any]:
    """Compares the times that clients saw during an update with those of the same requests before it.

    Args:
        requests: All of them.
        begin: When the update began.
        end: When it was over for the clients.

    Returns:
        Seconds: ``longest`` time between two messages of one request, which began ``longest_from`` after ``begin``;
        ``first`` token of requests sent or waiting in that time; and of the time before ``usual`` (the mean of a
        request, median of them), ``usual_longest`` and ``usual_first``.  The requests are counted by how they ended.
    """
    between = [pair for request in requests for pair in pairwise(request.times)]
    firsts = [(request.sent, request.times[0]) for request in requests if request.times]
    during = [(later - earlier, earlier) for earlier, later in between if later >= begin and earlier <= end]
    longest_s, longest_from = max(during, default=(0.0, begin))
    before = [later - earlier for earlier, later in between if later < begin]
    # Not the median of the gaps: messages that are read together have none between them.
    runs = [[at for at in request.times if at < begin] for request in requests]
    steps = [(run[-1] - run[0]) / (len(run) - 1) for run in runs if len(run) >= _STEADY]
    ends: dict[str, int] = {}
    for request in requests:
        ends[request.finish or "none"] = ends.get(request.finish or "none", 0) + 1
    return {
        "longest_s": round(longest_s, 4),
        "longest_from_s": round(longest_from - begin, 4),
        "first_s": round(
            max((first - sent for sent, first in firsts if first >= begin and sent <= end), default=0.0), 4
        ),
        "usual_s": round(statistics.median(steps), 5) if steps else None,
        "usual_longest_s": round(max(before, default=0.0), 4),
        "usual_first_s": round(max((first - sent for sent, first in firsts if first < begin), default=0.0), 4),
        "requests": len(requests),
        "ended": ends,
        "tokens": sum(request.tokens for request in requests),
    }


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time as the clients saw it.

    Attributes:
        begin: When it began, and ``end``: when it ended.
        longest_s: Longest time between two messages of one request that touches it.
        joined: Requests that got their first token in it, or at the end of a step that began in it: their prompts were
            read in a step that others waited for.
    """

    begin: float
    end: float
    longest_s: float
    joined: int


def compare(
    requests: Sequence[Request],
    updates: Sequence[tuple[float, float]],
    during: tuple[float, float],
    *,
    allowed_s: float,
    busy: Sequence[tuple[float, float]] = (),
    settle_s: float = 0.2,
) -> dict[str, Any]:
    """Compares what clients saw in each update with windows of the same length in the same run without an update.

    A longer gap than ``allowed_s`` beyond a step is an update's own only if no window without an update has one that is
    as long.  Windows in which new requests joined are compared with such windows, and others with others.  Where
    requests joined, the step is the one that read their prompts: the longest gap of such windows without an update.

    Args:
        requests: All of them.
        updates: Beginning and end of each update.
        during: Beginning and end of the time in which all streams ran.
        allowed_s: Longest time that an update may add to a step.
        busy: Other work on the engine's device or in the engine, such as a step of training or ``connect``.
        settle_s: Time after an update that counts as no window without one.

    Returns:
        Seconds: ``step_s``, ``limit_s`` (a step and ``allowed_s``); for the windows of the updates and for as many
        without one (``beside``), evenly chosen, and for ``all_beside``: ``median_s``, ``max_s``, each ``longest_s`` and
        what ``joined``.  ``reading_limit_s`` is the limit where requests joined.  ``ours`` has the numbers of the
        updates, from 0, that made a gap beyond their limit.

    Raises:
        ValueError: No window without an update is left.
    """
    longest = max(end - begin for begin, end in updates)
    step_s = _step_s(requests, *during)
    # A message comes a step after the moment that delayed it.
    seen = _windows(requests, [(begin, end + step_s) for begin, end in updates])
    taken = [(begin, end + settle_s) for begin, end in (*updates, *busy)]
    found = _windows(requests, _between(during, taken, longest + step_s))
    if not found:
        raise ValueError("there is no window without an update to compare with")
    limit_s = step_s + allowed_s
    alone = max((window.longest_s for window in found if not window.joined), default=0.0)
    reading = max((window.longest_s for window in found if window.joined), default=step_s) + allowed_s
    limits = [max(limit_s, reading if window.joined else alone) for window in seen]
    ours = [number for number, window in enumerate(seen) if window.longest_s > limits[number]]
    count = min(len(seen), len(found))
    evenly = [found[(2 * number + 1) * len(found) // (2 * count)] for number in range(count)]
    return {
        "step_s": round(step_s, 5),
        "limit_s": round(limit_s, 5),
        "reading_limit_s": round(max(limit_s, reading), 5),
        "updates": _row(seen),
        "beside": _row(evenly),
        "all_beside": _row(found),
        "ours": ours,
    }


def _row(windows: Sequence[Window]) -> dict[str, Any]:
    gaps_ = [window.longest_s for window in windows]
    return {
        "count": len(windows),
        "median_s": round(statistics.median(gaps_), 4) if gaps_ else None,
        "max_s": round(max(gaps_), 4) if gaps_ else None,
        "longest_s": [round(gap, 4) for gap in gaps_],
        "joined": [window.joined for window in windows],
    }


def _step_s(requests: Sequence[Request], begin: float, end: float) -> float:
    """Median over the requests of the mean time between two messages."""
    runs = [[at for at in request.times if begin <= at <= end] for request in requests]
    means = [(run[-1] - run[0]) / (len(run) - 1) for run in runs if len(run) >= _STEADY]
    return statistics.median(means) if means else 0.0


def _between(
    during: tuple[float, float], busy: Sequence[tuple[float, float]], length: float
) -> list[tuple[float, float]]:
    """Stretches of one length, one after the other, outside of the busy times."""
    found: list[tuple[float, float]] = []
    at, last = during
    for begin, end in (*sorted(busy), (last, last)):
        while at + length <= min(begin, last):
            found.append((at, at + length))
            at += length
        at = max(at, end)
    return found


def _windows(requests: Sequence[Request], spans: Sequence[tuple[float, float]]) -> list[Window]:
    between = [pair for request in requests for pair in pairwise(request.times)]
    firsts = [request.times[0] for request in requests if request.times]
    found: list[Window] = []
    for begin, end in spans:
        touching = [(earlier, later) for earlier, later in between if later >= begin and earlier <= end]
        # A step that reads prompts may begin in a window and end after it.
        over = max((later for _, later in touching), default=end)
        longest_s = max((later - earlier for earlier, later in touching), default=0.0)
        found.append(Window(begin, end, longest_s, sum(begin <= first <= max(end, over) for first in firsts)))
    return found


def main() -> int:
    """Runs the streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--engine", choices=sorted(_REQUESTS), default="sglang")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--models", default="m", help="vLLM's names of models or adapters; the streams take turns")
    args = parser.parse_args()
    models = args.models.split(",")
    streams = [
        _Stream(args.url, number, args.tokens, args.engine, models[number % len(models)])
        for number in range(args.streams)
    ]
    _run(args.url, streams)
    requests = [request for stream in streams for request in stream.requests]
    print(json.dumps([vars(request) for request in requests]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
