"""A model whose updates repeat the same buckets."""

from __future__ import annotations

import torch

from weightcast.lab.bench.shapes import model_shape
from weightcast.lab.bench.synthetic import Pattern, key_of
from weightcast.receiver.loader import Loader
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets

CPU = torch.device("cpu")


SHAPE = model_shape("tiny-moe")


SPECS = [TensorSpec(name=place.name, dtype="bfloat16", shape=place.shape) for place in SHAPE.places]


def update(loader: Loader, version: int, *, bucket_bytes: int, shift: int = 0, device: torch.device = CPU) -> None:
    """One update, bucket by bucket; ``shift`` moves the buckets within a larger buffer."""
    pattern = Pattern(device)
    numbers = {place.name: number for number, place in enumerate(SHAPE.places)}
    loader.begin()
    for layout in plan_buckets(SPECS, bucket_bytes=bucket_bytes, packing=Packing()):
        data = torch.zeros(layout.size_bytes + shift, dtype=torch.uint8, device=device)[shift:]
        bucket = Bucket(layout, data)
        for slot, view in bucket.views():
            row_words = slot.spec.row_bytes // 2
            pattern.fill(view, key=key_of(version, numbers[slot.spec.name]), first_word=slot.first_row * row_words)
        loader.load(bucket)
    assert loader.missing(SPECS) == []
    loader.live.commit()
