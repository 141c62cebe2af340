"""The kernels of experts that a batch of some size needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LARGEST = 16384
EXPERTS_OF_A_TOKEN = (1, 2, 6, 8)


def variants(sizes: Any, config: Callable[[int], object]) -> set[object]:
    """The kernels that these batches launch: Triton compiles one anew if 16 divides an argument or stops to."""
    return {(config(size), size * experts % 16 == 0, experts) for size in sizes for experts in EXPERTS_OF_A_TOKEN}
