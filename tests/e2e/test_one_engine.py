"""A balancer before two engines, which gives each new connection to the next one, is not taken for one engine."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.engines import Engine, engines, push, weightcast
from tests.helpers.tiny import tiny_model
from weightcast import Target, WeightUpdater
from weightcast.errors import ConfigError

SETTINGS: dict[str, dict[str, object]] = {
    "sglang": {"dialect": "sglang", "staging": "none", "device": "cpu"},
    "native": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        tiny_model(root / name, seed=seed)
    return [root / "a", root / "b"]


@pytest.fixture(scope="module", params=SETTINGS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(kind: str, folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    settings = SETTINGS[kind]
    with engines(folders[0], tmp_path_factory.mktemp("logs"), settings, settings) as found:
        yield found


def _pump(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def balancer(members: Sequence[Engine]) -> Iterator[str]:
    """The URL of a balancer of connections, as of a Kubernetes Service."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    ends: list[socket.socket] = [listener]

    def serve() -> None:
        with suppress(OSError):
            for member in itertools.cycle(members):
                near, _ = listener.accept()
                ends.append(near)
                far = socket.create_connection(("127.0.0.1", int(member.url.rpartition(":")[2])))
                ends.append(far)
                for ways in ((near, far), (far, near)):
                    threads.append(threading.Thread(target=_pump, args=ways))
                    threads[-1].start()

    accepting = threading.Thread(target=serve)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in (accepting, *threads):
            thread.join()
        for end in ends:
            end.close()


def test_two_engines_under_one_url_are_refused_by_name(kind: str, pair: list[Engine], folders: list[Path]) -> None:
    with balancer(pair) as url:
        for _ in range(2):  # whichever engine comes first
            told = weightcast("push", folders[1], "--to", url, "--version", "1", "--engine", kind)
            assert told.returncode == 2, told.stdout + told.stderr
            assert f"error: {url} leads to more than one engine" in told.stderr
            assert "one URL must be one engine" in told.stderr
            assert "hint: name each engine by its own address" in told.stderr
        with pytest.raises(ConfigError, match="leads to more than one engine"):
            WeightUpdater.connect(
                load_file(folders[1] / "model.safetensors"), targets=[Target(url, engine=kind)], timeout_s=60.0
            )
        examined = weightcast("doctor", url, "--engine", kind)
        assert examined.returncode == 1
        assert f"fail one engine {url} leads to more than one engine" in " ".join(examined.stdout.split())
    row = push(folders[1], pair, 1, "--engine", kind)["targets"]  # each by its own URL
    assert [one["status"] for one in row] == ["serving", "serving"]
    told = weightcast("doctor", pair[0].url, "--engine", kind)
    assert "ok one engine new connections reach the same one" in " ".join(told.stdout.split())


def test_a_target_that_comes_later_is_looked_at_too(kind: str, pair: list[Engine], folders: list[Path]) -> None:
    weights = load_file(folders[0] / "model.safetensors")
    with (
        balancer(pair) as url,
        WeightUpdater.connect(weights, targets=[Target(pair[0].url, engine=kind)], timeout_s=60.0) as updater,
    ):
        with pytest.raises(ConfigError, match="leads to more than one engine"):
            updater.retarget([Target(url, engine=kind)])
        assert updater.update(version=2).targets[0].url == pair[0].url  # the old targets stay
