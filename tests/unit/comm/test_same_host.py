"""A server at an address of this host is on this host, whether the address is loopback or not."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from weightcast.adapters.lmdeploy import detect as lmdeploy
from weightcast.adapters.sglang import detect as sglang
from weightcast.comm import ipc
from weightcast.comm.ipc import host_id, host_id_of

OWN = ("10.0.3.7", "127.0.0.1")


class Probe:
    """A datagram socket of a host with these addresses; no packet is sent."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, there: tuple[str, int]) -> None:
        self.there = there[0]

    def getsockname(self) -> tuple[str, int]:
        return (self.there if self.there in OWN else OWN[0]), 40000


def look_up(name: str, port: int, **_: object) -> list[tuple[Any, ...]]:
    addresses = {"node-3": "10.0.3.7", "node-4": "10.0.3.8", "localhost": "127.0.0.1"}
    if name.startswith("gone"):
        raise socket.gaierror("no such name")
    return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (addresses.get(name, name), port))]


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc.socket, "socket", Probe)
    monkeypatch.setattr(ipc.socket, "getaddrinfo", look_up)


def of_sglang(url: str) -> str:
    return sglang.describe(url, {"version": "0.5.23", "tp_size": 1}, {"model_path": "m"}, paused=False).host_id


def of_lmdeploy(url: str) -> str:
    status = {"device_uuids": ["GPU-a"], "worker_ranks": [0]}
    return lmdeploy.describe(url, "m", False, status, {}, 400, {}).host_id


@pytest.mark.parametrize("found", [host_id_of, of_sglang, of_lmdeploy])
@pytest.mark.parametrize(
    ("name", "here"),
    [("10.0.3.7", True), ("node-3", True), ("localhost", True), ("10.0.3.8", False), ("node-4", False)],
)
def test_server_at_its_nodes_own_address_is_on_this_host(found: Any, name: str, here: bool) -> None:
    assert found(f"http://{name}:30000") == (host_id() if here else f"host:{name}")


def test_name_that_does_not_resolve_is_another_host() -> None:
    assert host_id_of("http://gone:30000") == "host:gone"
