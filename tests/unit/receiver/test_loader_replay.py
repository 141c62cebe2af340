"""Copies are worked out once for each bucket: what makes the loader think again, and what it must not hold on to."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers.replayed import CPU, SHAPE, SPECS, update
from weightcast.lab.bench.synthetic import Pattern, SyntheticEngine
from weightcast.receiver.loader import Loader


@pytest.mark.parametrize("place", ["device", "host", "none"])
def test_every_update_is_right_whatever_changes_between_them(place: str) -> None:
    engine = SyntheticEngine(SHAPE, CPU)
    loader = Loader(engine, load_weights=engine.load_weights, expected=SPECS)
    loader.stage(place)  # type: ignore[arg-type]
    # Other cuts under the same numbers of buckets, other buffers, other places within them, a flip between each two.
    for version, (size, shift) in enumerate([(4096, 0), (4096, 0), (9000, 64), (4096, 128), (1 << 20, 0), (4096, 2)]):
        engine.poison(Pattern(CPU), version)
        update(loader, version, bucket_bytes=size, shift=shift)
        assert engine.wrong(Pattern(CPU), version) == []


def test_parameters_that_have_moved_are_written_where_they_are_now() -> None:
    engine = SyntheticEngine(SHAPE, CPU)
    loader = Loader(engine, load_weights=engine.load_weights, expected=SPECS)
    update(loader, 1, bucket_bytes=4096)
    before = [parameter.data for parameter in engine.parameters()]
    for parameter in engine.parameters():
        parameter.data = torch.zeros_like(parameter.data)
    update(loader, 2, bucket_bytes=4096)
    assert engine.wrong(Pattern(CPU), 2) == []
    for parameter, old in zip(engine.parameters(), before, strict=True):
        parameter.data = old
    assert engine.wrong(Pattern(CPU), 1) == []


def test_nothing_that_an_engine_gives_back_is_kept_alive() -> None:
    engine = SyntheticEngine(SHAPE, CPU)
    loader = Loader(engine, load_weights=engine.load_weights, expected=SPECS)
    loader.stage("device")
    update(loader, 1, bucket_bytes=4096)
    waiting = [StorageWeakRef(loader.staging.target(name).untyped_storage()) for name in loader.residents]
    assert not any(storage.expired() for storage in waiting)
    loader.staging.free()
    gc.collect()
    assert all(storage.expired() for storage in waiting)
