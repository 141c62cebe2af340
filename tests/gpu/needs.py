"""What a test needs of the machine."""

from __future__ import annotations

import pytest
import torch


def needs(count: int) -> pytest.MarkDecorator:
    """Skip the test on a machine with fewer GPUs."""
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
