"""An invitation of the other trainer ranks to a group of all trainer ranks and all engine ranks."""

from __future__ import annotations

import msgspec


class Invited(msgspec.Struct, frozen=True, kw_only=True):
    """The rendezvous of a group; trainer ranks keep their own numbers in it, and engine ranks follow.

    ``token`` is the prefix of the keys in the head's store, which listens at ``host`` and ``port``.  The group is made
    anew if another one failed before bucket number ``begun``: it gets the buckets from number ``first`` on.
    """

    group: str
    host: str
    port: int
    token: str
    world_size: int
    first: int = 0
    begun: int = 0
