"""What was sent, digested on the trainer's device while it is sent.

Engines may keep a tensor in another dtype than the one that travels; what they keep is compared in theirs.
So a digest is taken in the wire's dtype (for what is received) and in each dtype that an engine keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sums import RepeatedTotals, piece_of, sums_of_slots
from weightcast.wire.digest import RepeatedSums, add_partial, as_unsigned, finish, partial_sums, sha256_digest
from weightcast.wire.layout import DTYPES, BucketLayout, TensorSlot, TensorSpec

_CAST_BYTES = 16 << 20


class Repeated:
    """What the digests of one update have in common with those of the next."""

    def __init__(self) -> None:
        self.sums = RepeatedSums()
        self.totals = RepeatedTotals()


class SentDigests:
    """Digests of one update.  Sums stay on the device until ``finish``."""

    def __init__(
        self, kept: Iterable[Mapping[str, str]] = (), *, sha256: bool = False, repeated: Repeated | None = None
    ) -> None:
        """Nothing yet.

        Args:
            kept: For each engine, the dtype that it keeps, by tensor name.
            sha256: Digest what is received with SHA-256 as well.
            repeated: Of earlier updates, which had the same buckets in the same places.
        """
        self._dtypes: dict[str, set[str]] = {}
        for table in kept:
            for name, dtype in table.items():
                self._dtypes.setdefault(name, set()).add(dtype)
        self._sha256 = sha256
        self._hashed: dict[str, str] = {}
        self._sums: list[tuple[BucketLayout, torch.Tensor]] = []
        self._cast: list[tuple[TensorSpec, str, torch.Tensor]] = []
        self._repeated = repeated or Repeated()

    def add(self, bucket: Bucket) -> None:
        """Digest a filled bucket."""
        if self._sha256:
            self._hashed |= {slot.spec.name: sha256_digest(view) for slot, view in bucket.views() if slot.whole}
        self._sums.append((bucket.layout, sums_of_slots(bucket, self._repeated.sums)))
        for slot in bucket.layout.slots:
            for dtype in self._dtypes.get(slot.spec.name, set()) - {slot.spec.dtype}:
                self._add_cast(slot, bucket.view(slot), dtype)

    def finish(self) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        """Wait for the sums.

        Returns:
            By tensor name: the digest of what engines receive, and for each dtype the digest of what they keep.
        """
        found = self._repeated.totals.digests(self._sums)
        kept = {
            slot.spec.name: {slot.spec.dtype: found[slot.spec.name]}
            for layout, _ in self._sums
            for slot in layout.slots
        }
        totals: dict[tuple[str, str], int] = {}
        specs: dict[str, TensorSpec] = {}
        values = torch.cat([sums for _, _, sums in self._cast]).tolist() if self._cast else []
        for (spec, dtype, _), value in zip(self._cast, values, strict=True):
            specs[spec.name] = spec
            totals[spec.name, dtype] = add_partial(totals.get((spec.name, dtype), 0), as_unsigned(value))
        for (name, dtype), total in totals.items():
            kept[name][dtype] = finish(total, dtype=DTYPES[dtype], shape=specs[name].shape)
        return found | self._hashed, kept

    def _add_cast(self, slot: TensorSlot, view: torch.Tensor, dtype: str) -> None:
        """In rows of at most 16 MiB, so that no cast copy counts against the memory ceiling."""
        if not slot.spec.shape:
            pieces = [piece_of(slot, view.to(DTYPES[dtype]), 0)]
            self._cast.append((slot.spec, dtype, partial_sums(pieces)))
            return
        row_bytes = max(1, slot.spec.row_bytes // slot.spec.torch_dtype.itemsize * DTYPES[dtype].itemsize)
        step = max(1, _CAST_BYTES // row_bytes)
        for row in range(0, max(slot.num_rows, 1), step):
            part = view[row : row + step].to(DTYPES[dtype])
            sums = partial_sums([piece_of(slot, part, slot.first_row + row)])
            self._cast.append((slot.spec, dtype, sums))
