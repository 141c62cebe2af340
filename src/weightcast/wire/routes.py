"""A route: a copy from a box of a source tensor to a strided region of a resident parameter.

Routes are what an engine's loader does, written down: which part of which Hugging Face tensor ends
where.  They are data, so they can be recorded once, checked for coverage, replayed and read back.
All numbers are in elements.
"""

from __future__ import annotations

import msgspec

from weightcast.wire.box import Box


class Region(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A strided region of a tensor's storage, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Route(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One copy, from a box of the source to a parameter or buffer.

    ``region`` is where the box lies in the parameter's storage, its dimensions in the source's order.
    """

    source: str
    box_offset: tuple[int, ...]
    box_shape: tuple[int, ...]
    parameter: str
    region: Region

    @property
    def box(self) -> Box:
        return Box(offset=self.box_offset, shape=self.box_shape)
