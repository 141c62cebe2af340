"""An invitation of the other trainer ranks to a group of all trainer ranks and all engine ranks."""

from __future__ import annotations

import msgspec


class Invited(msgspec.Struct, frozen=True, kw_only=True):
    """The rendezvous of a group; trainer ranks keep their own numbers in it, and engine ranks follow.

    Attributes:
        group: Name of the group.
        host: Address of the head's store.
        port: Port of the head's store.
        token: Prefix of the store's keys.
        world_size: Number of members.
    """

    group: str
    host: str
    port: int
    token: str
    world_size: int
