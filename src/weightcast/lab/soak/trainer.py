"""The trainer of a soak: ``python -m weightcast.lab.soak.trainer MODEL BUCKET_BYTES TIMEOUT_S``.

The trainer reads one ``Order`` per line of stdin and answers with one ``Outcome`` per line of stdout.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Literal

import msgspec
import torch

from weightcast import Target, WeightUpdater
from weightcast.comm.http import Client
from weightcast.comm.ipc import SharedBuffer
from weightcast.digest.definition import model_digest
from weightcast.errors import TargetRejected, UpdateFailed, WeightcastError
from weightcast.lab.soak.versions import Versions
from weightcast.report import TargetReport
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import IpcSource
from weightcast.wire.codec import decode_info, encode
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets
from weightcast.wire.messages import Abort, Announce, Close, Commit, Open, Owner

Pause = Literal["abort", "retract", "in_place", "wait"]
Transport = Literal["ipc", "broadcast"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One update that the trainer shall run.

    Attributes:
        abort_at: Share of the bytes, from 0 to 1, after which to abort; None completes the update.
        corrupt: Flip one bit of one bucket after its digest was taken, for the first engine only.
    """

    version: int
    urls: list[str]
    transport: Transport
    pause: Pause
    abort_at: float | None = None
    corrupt: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one order.

    Attributes:
        rows: One row for each engine, if the update ran.
        error: Reason why the update failed; empty if it succeeded.
        noticed: For a corrupted update: True if the engine refused it.
    """

    rows: tuple[TargetReport, ...] = ()
    error: str = ""
    noticed: bool = False


class GaveUp(Exception):
    """Raised to abort an update at the point that the order names."""


class Trainer:
    """A model and its updaters: one for each transport and pause mode, made on first use."""

    def __init__(self, folder: Path, *, bucket_bytes: int, timeout_s: float) -> None:
        self._versions = Versions(folder)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._updaters: dict[tuple[str, str], tuple[WeightUpdater, list[str]]] = {}
        self._abort_at: float | None = None

    def obey(self, order: Order) -> Outcome:
        """Runs an order; failures of the update become an ``Outcome``."""
        try:
            self._versions.set(order.version)
            if order.corrupt:
                return Outcome(noticed=self._corrupt(order))
            self._abort_at = order.abort_at
            return Outcome(rows=self._updater(order).update(version=order.version).targets)
        except UpdateFailed as error:
            return Outcome(rows=error.report.targets, error=str(error))
        except (WeightcastError, GaveUp) as error:
            return Outcome(error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Closes the updaters."""
        for updater, _ in self._updaters.values():
            updater.close()

    def _updater(self, order: Order) -> WeightUpdater:
        key = (order.transport, order.pause)
        known = self._updaters.get(key)
        if known is not None and known[1] == order.urls:
            return known[0]
        if known is not None:
            known[0].retarget(order.urls)
            self._updaters[key] = (known[0], order.urls)
            return known[0]
        updater = WeightUpdater.connect(
            self._versions.model,
            order.urls,
            transport=order.transport,
            pause=order.pause,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            on_failure="quarantine",
            progress=self._progress,
        )
        self._updaters[key] = (updater, order.urls)
        return updater

    def _progress(self, sent: int, total: int) -> None:
        if self._abort_at is not None and sent >= self._abort_at * total:
            raise GaveUp("as ordered")

    def _corrupt(self, order: Order) -> bool:
        """Runs a session by hand with one bit of one bucket flipped; True if the engine refuses to serve it."""
        tensors = {name: parameter.detach() for name, parameter in self._versions.model.named_parameters()}
        client = Client(Target(order.urls[0]), timeout_s=self._timeout_s)
        buffer: SharedBuffer | None = None
        try:
            specs = decode_info(client.get_json("/weightcast/info")).specs
            layouts = plan_buckets(specs, bucket_bytes=self._bucket_bytes, packing=Packing())
            buffer = SharedBuffer(max(layout.size_bytes for layout in layouts), torch.device("cpu"))
            session = secrets.token_hex(16)
            opened = Open(
                session=session,
                owner=Owner(host="soak", pid=0),
                version=order.version,
                timeout_s=self._timeout_s,
                lease_s=4 * self._timeout_s,
                pause=order.pause,
                verify="resident",
                specs=specs,
            )
            _, lease = client.open_lease("/weightcast/open", encode(opened))
            try:
                for layout in layouts:
                    bucket = Bucket(layout, buffer.data)
                    for slot, view in bucket.views():
                        tensor = tensors[slot.spec.name]
                        view.copy_(tensor.narrow(0, slot.first_row, slot.num_rows) if tensor.dim() else tensor)
                    if layout.index == order.version % len(layouts):
                        buffer.data[layout.slots[order.version % len(layout.slots)].offset_bytes] ^= 1
                    source = IpcSource(handles=(buffer.handle(),))
                    client.post_json(
                        "/weightcast/apply", encode(Announce(session=session, layout=layout, source=source))
                    )
                client.post_json("/weightcast/apply", encode(Close(session=session, buckets=len(layouts))))
                client.post_json("/weightcast/apply", encode(Commit(session=session, digest=self._expected(specs))))
            except TargetRejected as error:
                client.post_json("/weightcast/apply", encode(Abort(session=session, reason="as ordered")))
                return "differs from what was sent" in str(error)
            finally:
                lease.close()
            return False
        finally:
            client.close()
            if buffer is not None:
                buffer.close()

    def _expected(self, specs: tuple[TensorSpec, ...]) -> str:
        digests = self._versions.digests(self._versions.current)
        return model_digest({spec.name: digests[spec.name] for spec in specs})


def main() -> None:
    """Runs orders until stdin ends."""
    torch.set_num_threads(1)
    trainer = Trainer(Path(sys.argv[1]), bucket_bytes=int(sys.argv[2]), timeout_s=float(sys.argv[3]))
    orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
    try:
        sys.stdout.write("{}\n")
        sys.stdout.flush()
        for line in sys.stdin:
            sys.stdout.write(msgspec.json.encode(trainer.obey(orders.decode(line))).decode() + "\n")
            sys.stdout.flush()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
