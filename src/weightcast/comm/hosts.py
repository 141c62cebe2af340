"""Is an address this host's?  Engines that know nothing of us do not say where they run."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from weightcast.comm.ipc import host_id


def host_id_of(url: str) -> str:
    """This host's ``host_id`` if the URL leads to this host, else ``"host:NAME"``.

    A server that is reached at an address of this host runs on it, if nothing forwards the port.
    """
    name = urlsplit(url).hostname or ""
    return host_id() if is_here(name) else f"host:{name}"


def is_here(name: str) -> bool:
    """True if the name is an address of this host: then a packet to it comes from it."""
    try:
        family, _, _, _, there = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            here = str(probe.getsockname()[0])
    except OSError:
        return False
    return here == str(there[0]) or here.startswith("127.")
