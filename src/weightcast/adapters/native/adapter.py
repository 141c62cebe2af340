"""Adapter of an engine with our receiver; copy this one to write another."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Literal

import msgspec

from weightcast.adapters.receiver_messages import announce_of
from weightcast.comm.run_steps import EngineRequest, Steps
from weightcast.comm.shared_buckets import Shared
from weightcast.errors import TargetRejected, WireError
from weightcast.protocols import Adapter, Invitation, Meeting
from weightcast.wire.answers import UNKNOWN_PLAN
from weightcast.wire.bucket_sources import ExchangeSource
from weightcast.wire.codec import decode_ack, encode
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import BucketLayout, Packing
from weightcast.wire.messages import (
    Abort,
    Announce,
    Leave,
    Message,
    Open,
    Prepare,
)
from weightcast.wire.source_tables import name_of_source


class NativeAdapter(Adapter):
    """Sends the messages of ``wire.messages`` unchanged."""

    packing = Packing(alignment_bytes=256, one_dtype=False, slices=True)
    meeting: Meeting = "weightcast"
    in_flight = 2
    proves: frozenset[Literal["received", "resident"]] = frozenset(("received", "resident"))
    leased = True
    prepares = True
    reverts = True

    def __init__(self, info: EngineInfo, root: str = "") -> None:
        """The routes are below ``root``: the path of one LoRA adapter, or nothing for the engine's model."""
        super().__init__(info)
        self._root = root
        self._plan = ""  # hash of the plan of the session
        self._sent = ""  # hash of the plan that the engine took last
        self._sources: dict[int, str] = {}  # hash of each bucket's source that the engine took last

    def open(self, message: Open) -> Steps:
        """Starts a session; the open stream of the answer is its lease.

        The plan is named if the engine has it.  An engine that was restarted says that it does not.
        """
        self._plan = message.plan.hash if message.plan is not None else ""
        ack = yield from self._told("open", message, known=bool(self._plan) and self._plan == self._sent)
        self._sent = self._plan
        return ack

    def prepare(self, message: Prepare) -> Steps:
        """As ``Adapter.prepare``."""
        ack = yield from self._told("apply", message, known=message.plan.hash == self._sent)
        self._sent = message.plan.hash
        for index, source in enumerate(message.sources):
            self._sources[index] = name_of_source(source)
        return ack

    def join(self, invitation: Invitation) -> Steps:
        """Joins a group."""
        return self._apply(invitation.join)

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """Announces a bucket from a group or from memory.  Of memory, a source that the engine has is named.

        With a group, the next bucket may have been announced before an engine says that it has no such source, and a
        second request for this bucket would come after it.
        """
        message = announce_of(session, layout, group=group, shared=shared, plan=self._plan)
        name = name_of_source(message.source) if group is None else ""
        known = bool(name) and self._sources.get(layout.index) == name
        ack = yield from self._told("apply", message, known=known)
        self._sources[layout.index] = name
        return ack

    def messages(self, session: str, layouts: Sequence[BucketLayout], *, group: str) -> Steps:
        """As ``Adapter.messages``."""
        first, *following = layouts
        source = ExchangeSource(group=group)
        return self._apply(
            Announce(session=session, layout=first, following=tuple(following), source=source, plan=self._plan)
        )

    def _apply(self, message: Message) -> Steps:
        return self._told("apply", message, known=False)

    # Our receiver reads these as they are.
    fetch = close = commit = revert = _apply

    def abort(self, session: str, reason: str) -> Steps:
        """Ends the session; a staging engine keeps the old version."""
        return self._apply(Abort(session=session, reason=reason[:4096]))

    def leave(self, group: str | None) -> Steps:
        """Leaves the group, or unmaps buffers if ``group`` is None."""
        return self._apply(Leave(group=group))

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """As ``Adapter.score``."""
        reply = yield EngineRequest(
            path=f"{self._root}/weightcast/score", body=msgspec.json.encode({"token_ids": list(token_ids)})
        )
        try:
            return msgspec.json.decode(reply, type=dict[str, list[float]])["logprobs"]
        except (msgspec.MsgspecError, KeyError) as error:
            raise WireError(f"the answer to /weightcast/score has another form: {error}") from None

    def _told(self, route: str, message: Message, *, known: bool) -> Steps:
        """Sends a message.  If ``known``, it names its plan or source, which the engine may have lost since."""
        path, lease = f"{self._root}/weightcast/{route}", route == "open"
        if known:
            try:
                reply = yield EngineRequest(path=path, body=encode(message, named=True), lease=lease)
                return decode_ack(reply)
            except TargetRejected as error:
                self._sources.clear()
                if error.status != UNKNOWN_PLAN:
                    raise
        return decode_ack((yield EngineRequest(path=path, body=encode(message), lease=lease)))
