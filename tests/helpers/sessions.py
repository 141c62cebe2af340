"""The trainer's side of a session, as messages: what a receiver is told in a test."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from tests.helpers.models import Weights, fill, specs_of
from weightcast.comm.ipc import SharedBuffer
from weightcast.digest.definition import model_digest
from weightcast.digest.sent import CastSums, Sent, SentDigests, casts_of
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import IpcSource, Source
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, plan_buckets
from weightcast.wire.messages import Abort, Announce, Close, Commit, Message, Open, Owner
from weightcast.wire.plans import UpdateTables


def announce(session: str, layout: BucketLayout, source: Source) -> Announce:
    """The message about a bucket, with a plan that has it alone."""
    plan = UpdateTables(
        tuple({slot.spec.name: slot.spec for slot in layout.slots}.values()), [layout] * (layout.index + 1)
    )
    return Announce(session=session, plan=plan, bucket=layout.index, source=source)


class Sender:
    """One session over shared memory."""

    def __init__(self, weights: Weights, *, version: int = 1, bucket_bytes: int = 200, **changes: Any) -> None:
        self.weights = weights
        self.session = secrets.token_hex(16)
        settings: dict[str, Any] = {
            "owner": Owner(host="here", pid=1),
            "timeout_s": 5.0,
            "lease_s": 60.0,
            "pause": "abort",
            "verify": "resident",
        }
        settings |= changes
        specs = tuple(specs_of(weights))
        self.layouts = plan_buckets(specs, bucket_bytes=bucket_bytes, packing=Packing(alignment_bytes=16))
        settings = {"plan": UpdateTables(specs, self.layouts)} | settings
        self.open = Open(session=self.session, version=version, **settings)
        self.buffer = SharedBuffer(bucket_bytes, torch.device("cpu"))
        weakref.finalize(self, self.buffer.close)

    def announce(self, index: int, *, layout: BucketLayout | None = None) -> Announce:
        """Fill the buffer with a bucket and say so."""
        layout = layout or self.layouts[index]
        fill(Bucket(layout, self.buffer.data), self.weights)
        return announce(self.session, layout, IpcSource(handles=(self.buffer.handle(),)))

    def close(self, buckets: int | None = None, *, by_name: bool = True) -> Close:
        count = len(self.layouts) if buckets is None else buckets
        return Close(session=self.session, buckets=count, by_name=by_name)

    def commit(self, expected: Mapping[str, str] | None = None, *, proven: bool = False) -> Commit:
        """With ``proven``, what is kept must be what is sent; else it must have the expected digests, if any."""
        expected = self.digests()[1] if proven else expected
        return Commit(session=self.session, digest=model_digest(expected) if expected else "")

    def abort(self, reason: str = "") -> Abort:
        return Abort(session=self.session, reason=reason)

    def transfer(self) -> list[Message]:
        """Messages from Open to Close.  Each must be applied before the next one is made; so this is a generator."""
        yield self.open
        for index in range(len(self.layouts)):
            yield self.announce(index)
        yield self.close()

    def digests(self, kept: Mapping[str, str] | None = None) -> tuple[dict[str, str], dict[str, str]]:
        """Digests that must be received, and digests that must be kept in the dtypes given (the wire's by default)."""
        dtypes = dict(kept or {})
        specs = [msgspec.structs.replace(spec, dtype=dtypes.get(spec.name, spec.dtype)) for spec in self.open.specs]
        found = self.sent(specs)
        return found.received, found.kept(specs)

    def sent(self, kept: Sequence[TensorSpec] = ()) -> Sent:
        """The digests of what is sent, for an engine that keeps these."""
        sent = SentDigests(CastSums(casts_of(self.open.specs, [kept])))
        for index in range(len(self.layouts)):
            self.announce(index)
            sent.add(Bucket(self.layouts[index], self.buffer.data))
        return sent.finish()
