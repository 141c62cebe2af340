"""Adapter of an engine with our receiver; copy this one to write another."""

from __future__ import annotations

from collections.abc import Container, Generator, Sequence
from typing import Literal

import msgspec

from weightcast.adapters.bucket_sources import source_of
from weightcast.comm.run_steps import EngineRequest, Steps
from weightcast.comm.shared_buckets import Shared
from weightcast.errors import TargetRejected, WireError
from weightcast.protocols import Adapter, Invitation, Meeting
from weightcast.wire.answers import UNKNOWN_BLOB
from weightcast.wire.blobs import SentBlobs
from weightcast.wire.bucket_sources import ExchangeSource, Source, group_of
from weightcast.wire.codec import decode_ack, encode, names_of
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import BucketLayout, Packing
from weightcast.wire.messages import Abort, Announce, Leave, Message, Open, Prepare
from weightcast.wire.plans import UpdateTables


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
        self._plan = UpdateTables((), ())  # of the session
        self._sent = SentBlobs()  # tables that the engine has

    def open(self, message: Open) -> Steps:
        """Starts a session; the open stream of the answer is its lease."""
        self._plan = message.plan
        return self._told("open", message)

    def prepare(self, message: Prepare) -> Steps:
        """As ``Adapter.prepare``."""
        return self._told("apply", message)

    def join(self, invitation: Invitation) -> Steps:
        """Joins a group."""
        return self._apply(invitation.join)

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """Announces a bucket from a group or from memory."""
        return self._told("apply", self._announce(session, [layout], source_of(shared, group)))

    def messages(self, session: str, layouts: Sequence[BucketLayout], *, group: str) -> Steps:
        """As ``Adapter.messages``."""
        return self._told("apply", self._announce(session, layouts, ExchangeSource(group=group)))

    def _announce(self, session: str, layouts: Sequence[BucketLayout], source: Source) -> Announce:
        return Announce(
            session=session, plan=self._plan, bucket=layouts[0].index, following=len(layouts) - 1, source=source
        )

    def _apply(self, message: Message) -> Steps:
        return self._told("apply", message)

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

    def _told(self, route: str, message: Message) -> Steps:
        """Sends a message with the tables that the engine has not been sent, or with all if it says that it lacks one.

        With a group, the next bucket may have been announced before an engine says so, and a second request for this
        bucket would come after it.  So its source is always sent; the engine has the plan of its open session.
        """
        path, lease = f"{self._root}/weightcast/{route}", route == "open"
        once = isinstance(message, Announce) and group_of(message.source) is not None
        known: Container[str] = (self._plan.hash,) if once else self._sent
        names = names_of(message)
        try:
            reply = yield EngineRequest(path=path, body=encode(message, known), lease=lease)
        except TargetRejected as error:
            if once or error.status != UNKNOWN_BLOB or not any(name in known for name in names):
                raise
            self._sent.clear()
            reply = yield EngineRequest(path=path, body=encode(message), lease=lease)
        self._sent.add(names)
        return decode_ack(reply)
