"""Copies of one rank's weights from and to the same rank of another engine, chunk by chunk."""

from __future__ import annotations

from weightcast.errors import Refused
from weightcast.receiver.loader import Loader
from weightcast.receiver.resident_chunks import ResidentChunks
from weightcast.receiver.sources.peer import PeerSource
from weightcast.wire.messages import Fetch, ReadChunk


class PeerCopies:
    """One rank's copies, in both directions.

    Where a model computes with sources, the chunk after the last has the proof of what was computed from them.

    Attributes:
        taken: Number of chunks that came in this update.
    """

    def __init__(self, loader: Loader, *, rank: int, tp_size: int) -> None:
        self._loader = loader
        self._rank, self._tp_size = rank, tp_size
        self._peer = PeerSource()
        self._giving: tuple[object, ResidentChunks] | None = None  # of the live weights, and their form
        self._taking: ResidentChunks | None = None  # of this update
        self.taken = 0

    def give(self, message: ReadChunk) -> bytes:
        """Copies a chunk of the live weights; waits for the device.

        Raises:
            Refused: The engine that asks has another layout, there is no such chunk, or no proof of what is computed.
        """
        staging = self._loader.staging
        staging.look(forms=True)
        if self._giving is None or self._giving[0] is not staging.form:
            self._giving = staging.form, self.chunks()
        chunks = self._giving[1]
        if chunks.layout != message.layout:
            raise Refused(
                f"rank {self._rank} keeps its parameters in another layout than the engine that asks",
                hint="copy between engines of one kind and version, started on the same model with the same sizes",
            )
        if self._loader.computed and message.index == len(chunks):
            return self._loader.computing.tell()
        return chunks.read(message.index, staging.live)

    def total(self) -> int:
        """Number of chunks that this update fetches in all."""
        return len(self._own()) + bool(self._loader.computed)

    def read(self, message: Fetch, *, timeout_s: float) -> bytes:
        """Reads a chunk from the peer; raises ``EngineFailure`` if the peer does not give it."""
        return self._peer.read(message, rank=self._rank, layout=self._own().layout, timeout_s=timeout_s)

    def take(self, index: int, data: bytes) -> None:
        """Copies a peer's chunk into the staging set; raises ``Refused`` if its size is not that of this rank's own."""
        chunks, loader = self._own(), self._loader
        loader.touched = loader.touched or not loader.staging.staged
        if index == len(chunks):
            loader.computing.hear(data)
        else:
            chunks.write(index, data, loader.staging.target)
        self.taken = index + 1

    def missing(self) -> list[str]:
        """Source tensors that have not come, or not all of them, once some have."""
        lacking = self._own().sources(self.taken)
        return lacking or list(self._loader.computed if self.taken < self.total() else ())

    def end(self) -> None:
        """Ends an update and its connections; safe to call twice."""
        self._peer.close()
        self._taking, self.taken = None, 0

    def chunks(self) -> ResidentChunks:
        """The live weights as chunks, with the dtypes that the parameters have now."""
        loader = self._loader
        routes = [route for found in loader.routes.values() for route in found]
        return ResidentChunks([*routes, *loader.computing.places], loader.staging.live, tp_size=self._tp_size)

    def _own(self) -> ResidentChunks:
        """The chunks of this update; the parameters keep their dtypes until it is over."""
        if self._taking is None:
            self._taking = self.chunks()
        return self._taking
