"""A session of the receiver's wire, message by message, over shared memory of this host."""

from __future__ import annotations

import os
import secrets
import socket
from types import TracebackType
from typing import Any

import msgspec

from weightcast.adapters.native.adapter import NativeAdapter
from weightcast.comm.http import Lease
from weightcast.comm.ipc import SharedBuffer, device_of
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.definition import model_digest
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.conformance.engine import CheckpointName, EngineUnderTest
from weightcast.lab.conformance.result import NotApplicable
from weightcast.protocols import TO_HEAD
from weightcast.wire.answers import Ack
from weightcast.wire.bucket_sources import IpcSource
from weightcast.wire.codec import decode_ack, encode
from weightcast.wire.layout import plan_buckets
from weightcast.wire.messages import Abort, Announce, Close, Commit, Message, Open, Owner, Revert
from weightcast.wire.plans import UpdateTables


class RawSession:
    """One session to one checkpoint; leaving it closes the connection that is its lease.

    Attributes:
        open_message: The message that opens it.
    """

    def __init__(self, engine: EngineUnderTest, name: CheckpointName, **changes: Any) -> None:
        """Prepares the session without sending anything.

        Args:
            engine: The engine.
            name: The checkpoint.
            changes: Other values for fields of ``Open``.

        Raises:
            NotApplicable: The engine cannot be reached over shared memory by one buffer.
        """
        places = {rank.device for rank in engine.first.ranks}
        device = device_of(places.pop()) if len(places) == 1 else None
        if not engine.is_here or device is None:
            raise NotApplicable("it needs an engine whose ranks map one buffer of this host")
        self._engine = engine
        self._exporter = CheckpointExporter(engine.folders[name], device=device)
        layouts = plan_buckets(self._exporter.specs(), bucket_bytes=engine.bucket_bytes, packing=NativeAdapter.packing)
        group = TrainerGroup(device=device, timeout_s=engine.settings.timeout_s)
        self._buckets = self._exporter.plan(layouts, group, TO_HEAD)
        self._buffer = SharedBuffer(max(layout.size_bytes for layout in layouts), device)
        self._lease: Lease | None = None
        message = Open(
            session=secrets.token_hex(16),
            owner=Owner(host=socket.gethostname(), pid=os.getpid()),
            version=engine.next_version(),
            timeout_s=engine.settings.timeout_s,
            lease_s=4 * engine.settings.timeout_s,
            pause="abort",
            verify="resident",
            plan=UpdateTables(tuple(self._exporter.specs()), layouts),
        )
        self.open_message = msgspec.structs.replace(message, **changes)
        self._received: dict[str, str] = {}

    def __enter__(self) -> RawSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        self._buffer.close()
        self._exporter.close()

    @property
    def session(self) -> str:
        """Id of the session."""
        return self.open_message.session

    @property
    def num_buckets(self) -> int:
        """Number of buckets of the checkpoint."""
        return len(self._buckets)

    def open(self) -> Ack:
        """Opens the session and keeps its lease."""
        frame, self._lease = self._engine.client.open_lease("/weightcast/open", encode(self.open_message))
        return decode_ack(frame)

    def hang_up(self) -> None:
        """Closes the connection that is the lease, as the kernel does for a dead trainer."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def announcement(self, index: int) -> Announce:
        """Fills the buffer with a bucket and returns the message about it."""
        bucket = self._buckets[index]
        bucket.fill(self._buffer.data)
        source = IpcSource(handles=(self._buffer.handle(),))
        return Announce(session=self.session, plan=self.open_message.plan, bucket=index, source=source)

    def transfer(self, *, buckets: int | None = None) -> None:
        """Sends the first buckets, or all."""
        for index in range(self.num_buckets if buckets is None else buckets):
            self.send(self.announcement(index))

    def close(self) -> Ack:
        """Says that all buckets were sent."""
        ack = self.send(Close(session=self.session, buckets=self.num_buckets, by_name=True))
        self._received = ack.received
        return ack

    def commit(self, digest: str = "") -> Ack:
        """Makes the weights live; they must have this model digest, or that of what was received."""
        kept = {spec.name for spec in self._engine.info().specs}
        received = {name: digest for name, digest in self._received.items() if name in kept}
        return self.send(Commit(session=self.session, digest=digest or model_digest(received)))

    def revert(self) -> Ack:
        """Takes the commit back."""
        return self.send(Revert(session=self.session, reason="conformance"))

    def abort(self) -> Ack:
        """Ends the session."""
        return self.send(Abort(session=self.session, reason="conformance"))

    def send(self, message: Message) -> Ack:
        """Sends a message.

        Raises:
            TargetRejected: The engine refused.
        """
        return decode_ack(self._engine.client.post_json("/weightcast/apply", encode(message)))
