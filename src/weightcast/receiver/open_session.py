"""The session that is open, and the rules for which messages fit it, those of copies from a peer included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weightcast.errors import Refused
from weightcast.receiver.engine_state import EngineState
from weightcast.receiver.rank_answers import NOTHING_KEPT, Resident
from weightcast.wire.answers import Cause
from weightcast.wire.fields import shown
from weightcast.wire.layout import BucketLayout, TensorSpec
from weightcast.wire.messages import (
    Announce,
    Close,
    Commit,
    Fetch,
    Join,
    Leave,
    Message,
    Open,
    ReadChunk,
    Revert,
)

_TRAINER = 16  # digits of a session's id before those of its trainer


@dataclass(slots=True)
class OpenSession:
    """One update of the engine, from its Open to its Commit or Abort.

    Attributes:
        deadline: Monotonic time at which the lease ends.
        closed: True once every rank has said that everything arrived.
        not_updated: Parameters that no tensor of the update writes, by name.
        written: What the ranks have copied, from Close on.
        groups: Names of the process groups that broadcast its buckets.
        fetched: First Fetch of a session that copies from a peer; None if a trainer sends the weights.
    """

    open: Open
    deadline: float
    buckets: int = 0
    closed: bool = False
    failed: str = ""
    cause: Cause = "engine"
    ending: str = ""
    paused_at: float | None = None
    not_updated: tuple[str, ...] = ()
    written: Resident = NOTHING_KEPT
    groups: set[str] = field(default_factory=set[str])
    fetched: Fetch | None = None


class Announced:
    """The tensors that were announced at Open.  Layouts that passed the check are cached across updates."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = specs
        self._by_name = {spec.name: spec for spec in specs}
        self._good: dict[int, BucketLayout] = {}

    def check(self, layout: BucketLayout) -> None:
        """Refuses a layout of other tensors."""
        if self._good.get(layout.index) is layout:
            return
        for slot in layout.slots:
            if self._by_name.get(slot.spec.name) != slot.spec:
                raise Refused(f"bucket {layout.index}: {slot.spec.name} is not what was announced at Open")
        self._good[layout.index] = layout


def check_message(message: Message, current: OpenSession | None, committed: str) -> None:
    """Refuses a message that does not fit the open session, or does not fit because no session is open.

    ``committed`` is the id of the session that was committed last; empty if there is none.
    """
    if isinstance(message, Open) and current is not None and not current.ending:
        if current.open.session == message.session:
            raise Refused("this session is open already")
        raise Refused(f"already being updated by {owner(current.open)}", hint="wait for it to finish, or end it")
    if current is not None and not current.ending:
        # A sender that does not know the session's id must not change the groups that its buckets come by.
        if isinstance(message, Join) and not message.session:
            raise Refused(f"being updated by {owner(current.open)}", hint="join when the update has finished")
        if isinstance(message, Leave) and message.group in current.groups:
            raise Refused(f"{owner(current.open)} uses the group {message.group}", hint="end its update first")
    # A Join that names no session makes a group outside an update.
    named = message.session if isinstance(message, Join | Announce | Close | Commit | Revert | Fetch) else ""
    if committed and isinstance(message, Commit | Revert) and message.session == committed:
        return  # a committed session may still be asked about, and reverted
    if named and (current is None or current.open.session != named):
        raise Refused(
            "no such session: it was never opened, it was ended, or another trainer's is open",
            hint="if a balancer before several engines has this URL, give each engine's own: one URL is one engine",
        )


def same_trainer(one: str, other: str) -> bool:
    """True if two sessions, by their ids, are of the same updater."""
    return one[_TRAINER:] == other[_TRAINER:]


def check_idle(current: OpenSession | None) -> None:
    """Refuses while a session is open."""
    if current is not None:
        raise Refused(f"being updated by {owner(current.open)}", hint="wait for it to finish, or end it")


def owner(message: Open) -> str:
    """The trainer process that opened a session, in words."""
    return f"process {message.owner.pid} on {shown(message.owner.host)[:255]} (to version {message.version})"


def check_readable(message: ReadChunk, engine: EngineState, ranks: int, *, writing: bool) -> None:
    """Refuses to give weights that the engine does not serve, never proved or may be writing, or of a rank it lacks."""
    if message.rank >= ranks:
        raise Refused(
            f"there is no rank {message.rank}: this engine has {ranks}", hint="copy from an engine of its size"
        )
    if engine.state == "quarantined":
        raise Refused(f"this engine is quarantined: {engine.message}", hint="copy from another engine")
    if writing:
        raise Refused("an update writes into the live weights", hint="try again when it has finished")
    if (engine.version, engine.digest) != (message.version, message.digest):
        raise Refused(
            f"this engine serves version {engine.version} with the digest {engine.digest or 'not proven'}, "
            f"not version {message.version} with the digest {message.digest}",
            hint="start again with the version that it serves now",
        )


def check_fetch(message: Fetch, session: OpenSession) -> None:
    """Refuses a chunk that is not the session's next one, or whose session gets its weights otherwise."""
    opened = session.open
    if session.fetched is None and session.buckets:
        raise Refused("this session gets its weights from a trainer, not from a peer")
    if opened.verify not in ("resident", "behaviour"):
        raise Refused(f"a copy from a peer must be proven, and this session asks for verify={opened.verify!r}")
    first = session.fetched or message
    if (message.peer, message.version, message.digest) != (first.peer, opened.version, first.digest):
        raise Refused(f"this session copies version {opened.version} from {first.peer.url} only")
    if session.closed or message.index != session.buckets:
        raise Refused(f"chunk {message.index} came where chunk {session.buckets} was due")


def check_fetched(session: OpenSession, asked: str, specs: Sequence[TensorSpec]) -> None:
    """Refuses to switch to fetched weights whose digests do not add up to the peer's; ``asked`` is that in Commit."""
    fetched = session.fetched
    if fetched is None:
        return
    waiting = session.written.digest_of(specs)
    if not waiting == asked == fetched.digest:
        raise Refused(
            f"what was copied from {fetched.peer.url} has the digest {waiting or 'of an incomplete model'}, and the "
            f"peer proved {fetched.digest} for version {fetched.version}",
            hint="nothing was switched; copy again",
        )
