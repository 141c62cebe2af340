"""Requirements of a GPU test on the machine; a test is skipped if one is not met."""

from __future__ import annotations

import pytest
import torch


def needs(count: int) -> pytest.MarkDecorator:
    """Skip the test on a machine with fewer GPUs."""
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
