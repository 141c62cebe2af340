"""The loader's copies on a GPU keep every bit, also of what is no number."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.replayed import SHAPE, SPECS, update
from weightcast.lab.bench.synthetic import Pattern, SyntheticEngine
from weightcast.receiver.loader import Loader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("place", ["device", "host", "none"])
def test_random_bits_arrive_as_they_are(place: str) -> None:
    device = torch.device("cuda", 0)
    engine = SyntheticEngine(SHAPE, device)
    loader = Loader(engine, load_weights=engine.load_weights, expected=SPECS)
    loader.stage(place)  # type: ignore[arg-type]
    for version in (1, 2, 3):
        update(loader, version, bucket_bytes=1 << 16, device=device)
        assert engine.wrong(Pattern(device), version) == []
