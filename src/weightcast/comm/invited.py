"""An invitation of the other trainer ranks to a group of all trainer ranks and all engine ranks."""

from __future__ import annotations

import msgspec


class Invited(msgspec.Struct, frozen=True, kw_only=True):
    """The rendezvous of a group; trainer ranks keep their own numbers in it, and engine ranks follow.

    ``token`` is the prefix of the keys in the head's store, which listens at ``host`` and ``port``.  The group is made
    anew if another one failed before bucket number ``begun``: it gets the buckets from number ``first`` on.  ``reads``
    names for each engine rank the host whose trainer ranks' memory it reads, so that these send it nothing; it is empty
    for a rank that gets all in messages, and there are no entries if all do.
    """

    group: str
    host: str
    port: int
    token: str
    world_size: int
    first: int = 0
    begun: int = 0
    reads: tuple[str, ...] = ()
