"""A few thousand of the inputs of `make fuzz`, and a target that would notice."""

from __future__ import annotations

import logging
import random

import pytest

from tests.fuzz.decoders import plain
from tests.fuzz.inputs import HONEST, make
from tests.fuzz.target import Target
from tests.helpers.models import weights_of
from weightcast.wire import codec
from weightcast.wire.blobs import Blobs
from weightcast.wire.layout import BucketLayout


@pytest.fixture
def quiet() -> None:
    logging.getLogger("weightcast").setLevel(logging.CRITICAL)


def test_inputs_change_nothing(quiet):
    target = plain(4000, seed=1)
    try:
        counts = target.counts
        assert counts["inputs"] == 4000
        kinds = ("Open", "Join", "Announce", "Close", "Commit", "Abort", "Leave", "Readback", "Ack", "EngineInfo")
        assert all(counts[f"decoded {kind}"] > 5 for kind in kinds), counts
        assert counts["sessions"] > 5
        assert counts["refused"] > 50
    finally:
        target.close()


def test_the_same_seed_makes_the_same_inputs():
    first, second = random.Random(5), random.Random(5)
    assert [make(first) for _ in range(300)] == [make(second) for _ in range(300)]


def test_a_change_is_noticed(quiet):
    target = Target()
    try:
        target.check()
        target.bench.models[0].load_weights(weights_of(1).items())
        with pytest.raises(AssertionError):
            target.check()
    finally:
        target.close()


def test_an_error_of_another_kind_is_noticed(monkeypatch, quiet):
    def broken(layout: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(BucketLayout, "check", broken)
    monkeypatch.setattr(codec, "KEPT", Blobs())  # a plan that was checked before is known
    target = Target()
    try:
        announce = next(data for data in HONEST if b'"type":"announce"' in data)
        with pytest.raises(KeyError):
            target.feed(announce)
    finally:
        target.close()
