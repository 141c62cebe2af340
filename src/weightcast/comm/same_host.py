"""Tells whether a URL leads to this host, for engines without weightcast, which do not report their host."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from weightcast.comm.ipc import host_id


def host_id_of(url: str) -> str:
    """Returns this host's ``host_id`` if the URL leads to this host, else ``"host:NAME"``.

    A server that is reached at an address of this host runs on it, if nothing forwards the port.
    """
    name = urlsplit(url).hostname or ""
    return host_id() if is_here(name) else f"host:{name}"


def is_here(name: str) -> bool:
    """Returns True for an address of this host: a packet to such an address also comes from it."""
    try:
        family, _, _, _, there = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            here = str(probe.getsockname()[0])
    except OSError:
        return False
    return here == str(there[0]) or here.startswith("127.")
