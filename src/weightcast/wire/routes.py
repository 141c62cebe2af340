"""A route: a copy from a box of a source tensor to a strided region of a resident parameter.

Routes are what an engine's loader does, written down: which part of which Hugging Face tensor ends
where.  They are data, so they can be recorded once, checked for coverage, replayed and read back.
All numbers are in elements.
"""

from __future__ import annotations

import msgspec

from weightcast.wire.box import Box


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """A strided region of a tensor's storage, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One copy.

    Attributes:
        source: Name of the source tensor.
        box_offset: First index of the copied box in the source, one number for each dimension.
        box_shape: Extent of the box, likewise.
        parameter: Name of the resident parameter or buffer.
        region: Where the box lies in the parameter's storage, its dimensions in the source's order.
    """

    source: str
    box_offset: tuple[int, ...]
    box_shape: tuple[int, ...]
    parameter: str
    region: Region

    @property
    def box(self) -> Box:
        """The part of the source that is copied."""
        return Box(offset=self.box_offset, shape=self.box_shape)
