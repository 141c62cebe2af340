"""Messages for engines that read the wire of our receiver, in whatever request each engine carries them."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.comm.shared_buckets import Shared
from weightcast.protocols import Invitation
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Announce, BroadcastSource, IpcSource, Join


def join_of(invitation: Invitation) -> Join:
    """Returns the message by which an engine joins a group."""
    return Join(
        session=invitation.session,
        group=invitation.group,
        host=invitation.host,
        port=invitation.port,
        token=invitation.token,
        first_rank=invitation.first_rank,
        world_size=invitation.world_size,
        backend=invitation.backend,
        timeout_s=invitation.timeout_s,
    )


def announce_of(session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Announce:
    """Returns the message that announces a bucket; the arguments are those of ``Adapter.bucket``."""
    if group is not None:
        return Announce(session=session, layout=layout, source=BroadcastSource(group=group))
    handles = tuple(item.memory for item in shared if item.memory is not None)
    return Announce(session=session, layout=layout, source=IpcSource(handles=handles))
