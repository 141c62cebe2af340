"""The launches with which a GPU quantises a bucket: they hold while the bucket's weights lie where they lay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weightcast.digest.copies import Flat, copy_all
from weightcast.exporters.fp8_formats import Fp8Format
from weightcast.exporters.held_parts import Watched
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout

if TYPE_CHECKING:
    from weightcast.exporters.quantise_kernel import Launches


class ScaleCopy(NamedTuple):
    """Some of a bucket's scales, and where they go in the bucket, both in elements from the first one on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    out_dtype: torch.dtype
    out_stride: tuple[int, ...]
    out_offset: int

    @staticmethod
    def of(scales: torch.Tensor, out: torch.Tensor, bucket: Bucket) -> ScaleCopy:
        """The copy of a view of the bucket's scales to a view of the bucket."""
        first = (out.data_ptr() - bucket.data.data_ptr()) // out.element_size()
        offset = int(scales.storage_offset())
        return ScaleCopy(tuple(scales.shape), scales.stride(), offset, out.dtype, out.stride(), first)


class QuantiseSteps:
    """The launches of one bucket.

    Attributes:
        layout: The bucket's layout.
        wanted: First and end index, in the grid's dimension 0, of the scales that the bucket needs, by source.
        measuring: Measures all of the bucket's weights; None if that is not known, or other means are needed too.
    """

    def __init__(self, layout: BucketLayout, wanted: Mapping[int, tuple[int, int]], watched: Watched) -> None:
        self.layout = layout
        self.wanted = wanted
        self.measuring: Launches | None = None
        self._watched = watched
        self._place: object = None
        self._key: object = None
        self._encoding: Launches | None = None
        self._copies: Sequence[ScaleCopy] = ()

    def look(self) -> None:
        """Forgets everything if a weight has moved."""
        place = self._watched.now().place
        if place is not self._place:
            self._place = place
            self.measuring = self._encoding = self._key = None
            self._copies = ()

    def remember(self, key: object, encoding: Launches, copies: Sequence[ScaleCopy]) -> None:
        """Keeps what writes the boxes that ``key`` stands for: see ``held_parts.Batch``."""
        self._key, self._encoding, self._copies = key, encoding, copies

    def write(self, key: object, bucket: Bucket, scales: torch.Tensor, form: Fp8Format) -> bool:
        """Writes these boxes as they were written before; False if that is not known.

        Args:
            scales: All scales of the bucket, float32, one-dimensional.
        """
        if self._encoding is None or key is not self._key:
            return False
        self._encoding.encode(scales.data_ptr(), bucket.data.data_ptr())
        flat = Flat(bucket.data)
        copy_all(
            [
                flat.region(one.out_dtype, one.shape, one.out_stride, one.out_offset, as_bits=False)
                for one in self._copies
            ],
            [form.stored(scales.as_strided(one.shape, one.stride, one.offset)) for one in self._copies],
        )
        return True
