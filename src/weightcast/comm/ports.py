"""Ports for servers that must be given a port number and bind it much later."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Linux's own default, and https://www.rfc-editor.org/rfc/rfc6335 section 6 for systems that do not say.
_DEFAULT_RANGE = (32768, 60999)
_LOWEST = 20_000  # lower ports are well known, or Ray gives them to its workers
_HIGHEST = 65_535
_ENOUGH = 1_000
_ATTEMPTS = 1_000


def quiet_port(host: str = "127.0.0.1") -> int:
    """Returns a free TCP port, at an address of this host, that the system gives to no outgoing connection.

    The system may give a port from ``bind(0)`` to the next connection of this host, and an engine binds its port half a
    minute after it got the number.  It raises OSError for an address of another host, or without a free port.
    """
    candidates = _quiet()
    for _ in range(_ATTEMPTS):
        port = random.SystemRandom().choice(candidates)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
    raise OSError(errno.EADDRINUSE, f"no free port between {candidates[0]} and {candidates[-1]} at {host}")


def _quiet() -> range:
    try:
        low, high = (int(word) for word in _RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = _DEFAULT_RANGE
    if low - _LOWEST >= _ENOUGH:
        return range(_LOWEST, low)
    if _HIGHEST - high >= _ENOUGH:
        return range(high + 1, _HIGHEST + 1)
    return range(_LOWEST, _HIGHEST + 1)  # none is quiet on this host
