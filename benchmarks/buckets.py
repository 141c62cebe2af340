"""Puts whole tensors together into the buckets of senders that are no code of ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

Named = tuple[str, torch.Tensor]


def buckets_of(tensors: Iterable[Named], size_bytes: int) -> Iterator[list[Named]]:
    """Yields lists of tensors, in order, with at most that many bytes, or of one larger tensor.

    Args:
        tensors: Name and tensor, of any shape and dtype.
        size_bytes: Most bytes of a list of several.
    """
    found: list[Named] = []
    held = 0
    for name, tensor in tensors:
        if found and held + tensor.nbytes > size_bytes:
            yield found
            found, held = [], 0
        found.append((name, tensor))
        held += tensor.nbytes
    if found:
        yield found
