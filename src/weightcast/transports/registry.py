"""All transports.

A new transport is one file with a ``SPEC``, one entry here and its name in ``config.TransportName``.
"""

from __future__ import annotations

from weightcast.transports import broadcast, checkpoint_engine, direct, disk, ipc
from weightcast.transports.spec import SpecName, TransportSpec

# In the order in which ``transport="auto"`` tries them.
TRANSPORTS: tuple[TransportSpec, ...] = (
    direct.SPEC,
    ipc.SPEC,
    broadcast.SPEC,
    disk.SPEC,
    checkpoint_engine.SPEC,
    direct.RDMA,
)


def spec_of(name: SpecName) -> TransportSpec:
    """Returns the registration of a transport."""
    return next(spec for spec in TRANSPORTS if spec.name == name)
