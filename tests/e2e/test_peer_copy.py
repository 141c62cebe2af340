"""Engines that copy the weights of a peer: real engines in processes of their own, with a relay between them.

The late engine never starts on the weights that it ends with.  The relay stops a transfer at one chunk, so that a test
can act in the middle of it without a clock.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.engines import Engine, completion, engines, weightcast
from tests.helpers.harness import wait_for
from tests.helpers.server_events import lines_of
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater, copy_from_peer
from weightcast.errors import ConfigError, TargetRejected, TargetsFailed, VerificationFailed, WeightcastError
from weightcast.update import peer_copy

COUNT = 8
PROMPTS = [[5], [17, 301, 44, 8], list(range(100, 140))]
WIDE = 40_000  # rows of an embedding of 15 MiB: several chunks for each rank
KEY = "sesame"
OnChunk = Callable[[int, bytes], bytes]


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Two engines for each size, on checkpoint A, and models with other weights."""

    peers: dict[int, Engine]
    late: dict[int, Engine]
    models: list[Any]
    first: Path
    version: int = 0

    def update(self, tp: int) -> int:
        """Gives the peer weights that no engine of its size has; returns their version."""
        self.version += 1
        model = self.models[self.version % len(self.models)]
        with WeightUpdater.connect(model, [self.peers[tp].url], timeout_s=PATIENCE_S) as updater:
            assert updater.update(version=self.version).ok
        return self.version


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("peers")
    models = [tiny_model(root / str(seed), seed=seed, vocab_size=WIDE) for seed in range(4)]
    tiny_tokenizer(root / "0")
    with engines(root / "0", root, {}, {}, {"tp": 2}, {"tp": 2}) as (one, late_one, two, late_two):
        yield Fleet(peers={1: one, 2: two}, late={1: late_one, 2: late_two}, models=models[1:], first=root / "0")


@contextmanager
def relay(url: str, on_chunk: OnChunk) -> Iterator[str]:
    """Passes requests on to an engine; ``on_chunk`` gets each chunk and returns the bytes that arrive."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass(b"")

        def do_POST(self) -> None:
            self._pass(self.rfile.read(int(self.headers["content-length"])))

        def _pass(self, body: bytes) -> None:
            headers = {name: value for name, value in self.headers.items() if name.lower() == "authorization"}
            try:
                with httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
                    answer = client.request(self.command, url + self.path, content=body, headers=headers)
            except httpx.TransportError:
                self.close_connection = True
                return
            content = answer.content
            if self.path == "/weightcast/chunk" and answer.status_code == 200:
                content = on_chunk(json.loads(body)["index"], content)
            self.send_response(answer.status_code)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def at_first_chunk(do: Callable[[], object]) -> OnChunk:
    """Does something once, before the first chunk arrives."""
    waiting = [do]

    def on_chunk(index: int, data: bytes) -> bytes:
        if waiting:
            waiting.pop()()
        return data

    return on_chunk


class Streaming:
    """A client that streams one answer after the other, and counts what came."""

    def __init__(self, engine: Engine) -> None:
        self.events = 0
        self.failures: list[str] = []
        self._engine = engine
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Streaming:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def see_more(self, count: int = 5) -> None:
        seen = self.events
        wait_for(lambda: self.events >= seen + count or self.failures, "tokens of the peer", timeout_s=PATIENCE_S)

    def _run(self) -> None:
        body = completion([PROMPTS[1]], 32) | {"stream": True}
        while not self._over.is_set():
            try:
                with self._engine.client.stream("POST", self._engine.url + "/v1/completions", json=body) as reply:
                    reply.raise_for_status()
                    for line in lines_of(reply):
                        if '"finish_reason":"error"' in line or '"error"' in line:
                            self.failures.append(line)
                        self.events += line.startswith("data:")
            except httpx.HTTPError as error:
                self.failures.append(repr(error))


@contextmanager
def unchanged(engine: Engine) -> Iterator[None]:
    """Checks that an engine serves afterwards what it served before."""

    def served() -> tuple[object, ...]:
        info = engine.info()
        return info["version"], info["state"], info["digest"], engine.digests(), engine.greedy(PROMPTS, COUNT)

    before = served()
    assert before[1] == "serving"
    yield
    assert served() == before


def copy(engine: Engine, url: str, **options: Any) -> peer_copy.PeerCopy:
    return copy_from_peer(Target(engine.url), Target(url), timeout_s=PATIENCE_S, **options)


@pytest.mark.parametrize("tp", [1, 2])
def test_late_engine_serves_exactly_what_a_busy_peer_serves(fleet, tp):
    peer, late, version = fleet.peers[tp], fleet.late[tp], fleet.update(tp)
    assert late.greedy(PROMPTS, COUNT) != peer.greedy(PROMPTS, COUNT)
    before = late.info()["version"]
    with Streaming(peer) as load, relay(peer.url, at_first_chunk(load.see_more)) as url:
        load.see_more(1)
        done = copy(late, url)
        load.see_more()
    assert load.failures == []
    assert (done.version_before, done.version, done.attempts) == (before, version, 1)
    assert done.chunks > 1
    assert late.greedy(PROMPTS, COUNT) == peer.greedy(PROMPTS, COUNT)
    assert late.digests() == peer.digests()
    ours, theirs = late.info(), peer.info()
    assert (ours["version"], ours["digest"], ours["state"]) == (version, theirs["digest"], "serving")
    assert done.digest == theirs["digest"]
    assert done.proven == len(late.digests())
    assert peer.info()["version"] == version


def test_command_copies_once_and_then_says_that_nothing_is_to_do(fleet):
    peer, late, version = fleet.peers[1], fleet.late[1], fleet.update(1)
    for words in ("tensors proven", "already"):
        done = weightcast("catch-up", late.url, "--from", peer.url, timeout_s=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        assert f"serves version {version}" in done.stdout
        assert words in done.stdout
    assert late.digests() == peer.digests()


@pytest.mark.parametrize("guarded_by", ["caller", "engine"])
def test_flipped_bit_on_the_way_is_found_and_nothing_is_switched(fleet, monkeypatch, guarded_by):
    peer, late = fleet.peers[1], fleet.late[1]
    fleet.update(1)

    def flip(index: int, data: bytes) -> bytes:
        return data if index else bytes([data[0] ^ 1]) + data[1:]

    if guarded_by == "engine":  # a caller that compares nothing cannot make the engine switch
        monkeypatch.setattr(peer_copy._CopyAttempt, "_compare", lambda *_: None)
    with unchanged(late), relay(peer.url, flip) as url:
        with pytest.raises(WeightcastError, match=r"digest|differs") as caught:
            copy(late, url)
        assert url in str(caught.value)
        if guarded_by == "caller":
            assert isinstance(caught.value, VerificationFailed)
            assert caught.value.names == (min(late.digests()),)  # chunks are in the order of names
            assert "nothing was switched" in str(caught.value)


def test_peer_updated_during_a_copy_ends_it(fleet):
    peer, late, version = fleet.peers[1], fleet.late[1], fleet.update(1)
    words = rf"serves version {version + 1} .* not version {version} "
    with unchanged(late), relay(peer.url, at_first_chunk(lambda: fleet.update(1))) as url:
        with pytest.raises(TargetRejected, match=words) as caught:
            copy(late, url, attempts=1)
        assert url in str(caught.value)


def test_peer_updated_during_a_copy_is_copied_again(fleet):
    peer, late, version = fleet.peers[1], fleet.late[1], fleet.update(1)
    with relay(peer.url, at_first_chunk(lambda: fleet.update(1))) as url:
        done = copy(late, url)
    assert (done.version, done.attempts) == (version + 1, 2)
    assert late.info()["version"] == version + 1
    assert late.digests() == peer.digests()
    assert late.greedy(PROMPTS, COUNT) == peer.greedy(PROMPTS, COUNT)


def test_other_size_is_refused_by_name(fleet):
    fleet.update(1)
    with unchanged(fleet.late[2]), pytest.raises(ConfigError, match="it has tp 2, the peer has tp 1"):
        copy(fleet.late[2], fleet.peers[1].url)


def test_unproven_peer_wrong_key_and_killed_peer_change_nothing(fleet, tmp_path):
    late = fleet.late[1]
    with engines(fleet.first, tmp_path, {"api_key": KEY}) as (peer,), unchanged(late):
        guarded = Target(peer.url, api_key=KEY)
        with pytest.raises(ConfigError, match="never proven what it serves"):
            copy_from_peer(Target(late.url), guarded)
        with WeightUpdater.connect(fleet.models[0], [guarded], timeout_s=PATIENCE_S) as updater:
            assert updater.update(version=1_000).ok
        with pytest.raises(TargetRejected, match="401") as caught:
            copy_from_peer(Target(late.url), Target(peer.url, api_key="wrong"), timeout_s=PATIENCE_S)
        assert peer.url in str(caught.value)
        # The late engine's ranks use the caller's key: the first chunk comes, and then the peer is gone.
        came: list[int] = []

        def kill(index: int, data: bytes) -> bytes:
            came.append(index)
            peer.process.kill()
            return data

        with (
            relay(peer.url, kill) as url,
            pytest.raises(TargetRejected, match=f"chunk 1 did not come from the peer {url}"),
        ):
            copy_from_peer(Target(late.url), Target(url, api_key=KEY), timeout_s=PATIENCE_S)
        assert came == [0]


def test_next_peer_gives_when_the_first_dies_in_the_middle(fleet, tmp_path):
    late, version = fleet.late[1], fleet.update(1)
    with engines(fleet.first, tmp_path, {}) as (dying,):
        with WeightUpdater.connect(fleet.models[0], [dying.url], timeout_s=PATIENCE_S) as updater:
            assert updater.update(version=version).ok
        with relay(dying.url, at_first_chunk(dying.process.kill)) as url:
            done = weightcast(
                *("catch-up", late.url, "--from", url, "--from", fleet.peers[1].url, "--json"), timeout_s=PATIENCE_S
            )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["peer"], found["version"]) == (fleet.peers[1].url, version)
    assert len(found["passed_over"]) == 1
    assert f"chunk 1 did not come from the peer {url}" in found["passed_over"][0]
    assert late.digests() == fleet.peers[1].digests()


def test_every_peer_that_fails_is_named(fleet):
    fleet.update(1)
    fleet.update(2)
    with unchanged(fleet.late[1]), pytest.raises(TargetsFailed, match="the peer has tp 2") as caught:
        copy_from_peer(
            Target(fleet.late[1].url), [Target("http://127.0.0.1:9"), Target(fleet.peers[2].url)], timeout_s=PATIENCE_S
        )
    assert "127.0.0.1:9" in str(caught.value)


def test_an_engine_that_copied_takes_part_in_the_trainers_next_update(fleet, tmp_path):
    peer, late = fleet.peers[1], fleet.late[1]
    model = tiny_model(tmp_path / "trained", seed=91, vocab_size=WIDE)
    fleet.version += 1
    with WeightUpdater.connect(model, [peer.url], timeout_s=PATIENCE_S) as updater:
        assert updater.update(version=fleet.version).ok
        assert late.digests() != peer.digests()
        for parameter in model.parameters():
            parameter.data.add_(1)  # so the trainer itself could not send this version any more
        assert copy(late, peer.url).version == fleet.version
        assert late.digests() == peer.digests()

        assert updater.retarget([peer.url, late.url]) is None
        fleet.version += 1
        report = updater.update(version=fleet.version)
        assert [(row.status, row.version_before) for row in report.targets] == [("serving", fleet.version - 1)] * 2
        assert late.digests() == peer.digests()

        with pytest.raises(ConfigError, match="catch_up='peers' is unknown") as caught:
            updater.retarget([peer.url], catch_up="peers")  # type: ignore[arg-type]
        assert "copy_from_peer" in str(caught.value.hint)
