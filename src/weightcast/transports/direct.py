"""Shards in memory that engines on this host map: nothing is gathered.  The receiver is ``receiver/sources/ipc.py``.

Each trainer rank copies its own parts of a bucket into its own buffer.  The head gathers the handles, with the parts
that each buffer has, and posts them.  An engine rank reads the parts that it keeps, from all buffers.
"""

from __future__ import annotations

from weightcast.errors import ConfigError
from weightcast.transports.ipc import IpcTransport
from weightcast.transports.spec import Placement, TransportSpec


class DirectTransport(IpcTransport):
    """Shares each trainer rank's shards with engines on the same host."""

    name = "direct"


def _check(placement: Placement) -> None:
    if placement.device.type != "cpu" or placement.devices != frozenset(("cpu",)):
        raise ConfigError(
            f"direct works on CPUs only so far; the trainer is on {placement.device}, the engines on "
            f"{', '.join(sorted(placement.devices))}",
            hint='use another transport: transport="auto"',
        )


SPEC = TransportSpec(
    name="direct",
    one_host=True,
    scattered=True,
    delivery="memory",
    sharing="weightcast",
    check=_check,
    build=lambda wiring: DirectTransport(wiring.links, timeout_s=wiring.config.timeout_s),
)
