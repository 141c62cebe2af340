"""All transports.

A new transport is one file with a ``SPEC``, one entry here and its name in ``config.TransportName``.
"""

from __future__ import annotations

from weightcast.transports import broadcast, checkpoint_engine, direct, disk, ipc
from weightcast.transports.spec import TransportSpec

# In the order in which ``transport="auto"`` tries them.
TRANSPORTS: tuple[TransportSpec, ...] = (
    direct.SPEC,
    ipc.SPEC,
    broadcast.SPEC,
    disk.SPEC,
    checkpoint_engine.SPEC,
    direct.RDMA,
)
_MADE = {(one.name, one.variant): one for spec in (*TRANSPORTS, broadcast.BY_RANK) for one in (spec, *spec.variants)}


def spec_of(name: str, variant: str = "") -> TransportSpec:
    """Returns the registration of a transport, or of one of its variants."""
    return _MADE[name, variant]
