"""A port for a server that binds it much later."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from weightcast.comm import ports


@pytest.mark.parametrize(
    ("system", "low", "high"),
    [
        ("32768\t60999\n", 20_000, 32_767),
        ("20500 60000", 60_001, 65_535),
        ("1024 65535", 20_000, 65_535),  # none is quiet: better than none
        ("nonsense", 20_000, 32_767),
    ],
)
def test_it_is_none_that_an_outgoing_connection_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str, low: int, high: int
) -> None:
    (tmp_path / "range").write_text(system)
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    assert all(low <= ports.quiet_port() <= high for _ in range(200))


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", ports.quiet_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_quiet", lambda: range(taken, taken + 2))
        assert {ports.quiet_port() for _ in range(20)} == {taken + 1}
        monkeypatch.setattr(ports, "_quiet", lambda: range(taken, taken + 1))
        with pytest.raises(OSError, match=f"no free port between {taken} and {taken} at 127.0.0.1") as caught:
            ports.quiet_port()
        assert caught.value.errno == errno.EADDRINUSE


def test_an_address_of_another_host_is_refused_at_once() -> None:
    with pytest.raises(OSError, match="assign requested address") as caught:
        ports.quiet_port("192.0.2.1")
    assert caught.value.errno == errno.EADDRNOTAVAIL
