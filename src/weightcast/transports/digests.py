"""What was sent, digested on the trainer's device while it is sent.

Engines may keep a tensor in another dtype than the one that travels; what they keep is compared in theirs.
So a digest is taken in the wire's dtype (for what is received) and in each dtype that an engine keeps.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import torch

from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sums import NOTHING, RepeatedTotals, Totals, piece_of, sums_of_slots
from weightcast.wire.digest import RepeatedSums, add_partial, as_unsigned, finish, partial_sums, sha256_digest, unequal
from weightcast.wire.layout import DTYPES, BucketLayout, TensorSlot, TensorSpec

_CAST_BYTES = 16 << 20


def casts_of(specs: Iterable[TensorSpec], kept: Iterable[Sequence[TensorSpec]]) -> dict[str, set[str]]:
    """The dtypes in which engines keep a tensor, other than the one in which it travels, by its name.

    Args:
        specs: What travels.
        kept: What each engine keeps.
    """
    sent = {spec.name: spec.dtype for spec in specs}
    found: dict[str, set[str]] = {}
    for table in kept:
        for spec in table:
            if spec.dtype != sent.get(spec.name, spec.dtype):
                found.setdefault(spec.name, set()).add(spec.dtype)
    return found


class Repeated:
    """What the digests of one update have in common with those of the next."""

    def __init__(self) -> None:
        self.sums = RepeatedSums()
        self.totals = RepeatedTotals()
        self._tables: list[Sequence[TensorSpec]] = []
        self._casts: dict[str, set[str]] = {}

    def casts(self, specs: Sequence[TensorSpec], kept: Iterable[Sequence[TensorSpec]]) -> dict[str, set[str]]:
        """As ``casts_of``; looked for once as long as the tables are the very same ones."""
        tables = [specs, *kept]
        if len(tables) != len(self._tables) or not all(map(operator.is_, tables, self._tables)):
            self._casts, self._tables = casts_of(specs, tables[1:]), tables
        return self._casts


class Sent:
    """Digests of what was sent.  Those of single tensors are made when they are first asked for, which is after engines
    have switched, if all is well.

    Attributes:
        of_all: One digest of all that engines receive, as they answer it; see ``Totals.of_all``.
        cast: Of what engines keep in another dtype than the one that travels, by tensor name and dtype.
    """

    def __init__(
        self,
        totals: Totals = NOTHING,
        *,
        hashed: Mapping[str, str] | None = None,
        cast: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """What was found.

        Args:
            totals: The fast digests of all; nothing without proof.
            hashed: SHA-256 by tensor name, where it was asked for.
            cast: See above.
        """
        self._totals = totals
        self.of_all = totals.of_all()
        self._hashed = hashed or {}
        self.cast = cast or {}

    def __bool__(self) -> bool:
        return bool(self._totals)

    @cached_property
    def fast(self) -> dict[str, str]:
        """By tensor name, without SHA-256: of what engines keep in the dtype that travels."""
        return self._totals.by_name()

    @cached_property
    def received(self) -> dict[str, str]:
        """Of what engines receive, by tensor name."""
        return {**self.fast, **self._hashed} if self._hashed else self.fast

    def kept(self, specs: Sequence[TensorSpec], *, without: Collection[str] = ()) -> dict[str, str]:
        """What an engine must keep, by tensor name; not to be written to.

        Args:
            specs: Its tensors, as it keeps them.
            without: Names of those that it cannot read back.
        """
        if not self.cast and not without and self.fast.keys() == {spec.name for spec in specs}:
            return self.fast
        return {
            spec.name: self.cast.get(spec.name, {}).get(spec.dtype) or self.fast[spec.name]
            for spec in specs
            if spec.name not in without
        }

    def kept_otherwise(self, specs: Sequence[TensorSpec], *, without: Collection[str] = ()) -> dict[str, str]:
        """The part of ``kept`` that an engine has not received so."""
        if not self._hashed and not self.cast:
            return {}
        kept = self.kept(specs, without=without)
        return {name: kept[name] for name in unequal(kept, self.received)}


class SentDigests:
    """Digests of one update.  Sums stay on the device until ``finish``."""

    def __init__(
        self,
        casts: Mapping[str, Collection[str]] | None = None,
        *,
        sha256: bool = False,
        repeated: Repeated | None = None,
    ) -> None:
        """Nothing yet.

        Args:
            casts: The dtypes in which engines keep a tensor, other than the one in which it travels, by its name.
            sha256: Digest what is received with SHA-256 as well.
            repeated: Of earlier updates, which had the same buckets in the same places.
        """
        self._casts = casts or {}
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
        for slot in bucket.layout.slots if self._casts else ():
            for dtype in self._casts.get(slot.spec.name, ()):
                self._add_cast(slot, bucket.view(slot), dtype)

    def finish(self) -> Sent:
        """Wait for the sums."""
        fast = self._repeated.totals.totals(self._sums)
        totals: dict[tuple[str, str], int] = {}
        specs: dict[str, TensorSpec] = {}
        values = torch.cat([sums for _, _, sums in self._cast]).tolist() if self._cast else []
        for (spec, dtype, _), value in zip(self._cast, values, strict=True):
            specs[spec.name] = spec
            totals[spec.name, dtype] = add_partial(totals.get((spec.name, dtype), 0), as_unsigned(value))
        cast: dict[str, dict[str, str]] = {}
        for (name, dtype), total in totals.items():
            cast.setdefault(name, {})[dtype] = finish(total, dtype=DTYPES[dtype], shape=specs[name].shape)
        return Sent(fast, hashed=self._hashed, cast=cast)

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
