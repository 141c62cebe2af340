"""What the sender says it sent is what a whole tensor's digest is, whatever the buckets and the dtypes kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.models import buckets_of, weights_of
from weightcast.transports import digests
from weightcast.transports.digests import SentDigests
from weightcast.wire.digest import sha256_digest, tensor_digest

WEIGHTS = weights_of(4) | {"empty": torch.zeros(0, 5), "hollow": torch.zeros(5, 0)}


def sent(weights, *, bucket_bytes: int, kept=(), sha256: bool = False):
    found = SentDigests(kept, sha256=sha256)
    for bucket in buckets_of(weights, bucket_bytes=bucket_bytes):
        found.add(bucket)
        bucket.data.zero_()  # the sender's buffer is filled again
    return found.finish()


@settings(max_examples=40, deadline=None)
@given(st.integers(32, 3000))
def test_buckets_play_no_part(bucket_bytes):
    received, kept = sent(WEIGHTS, bucket_bytes=bucket_bytes)
    assert received == {name: tensor_digest(tensor) for name, tensor in WEIGHTS.items()}
    assert all(kept[name] == {str(tensor.dtype)[6:]: received[name]} for name, tensor in WEIGHTS.items())


def test_every_engine_gets_the_digest_of_what_it_keeps(monkeypatch):
    monkeypatch.setattr(digests, "_CAST_BYTES", 40)  # casts in several parts
    tables = [
        {"q.weight": "bfloat16", "norm.weight": "float32", "scale": "float16"},
        {"q.weight": "float32", "k.weight": "float16", "empty": "bfloat16", "not sent": "float32"},
    ]
    for bucket_bytes in (64, 4000):
        received, kept = sent(WEIGHTS, bucket_bytes=bucket_bytes, kept=tables)
        assert received["q.weight"] == tensor_digest(WEIGHTS["q.weight"])
        for table in tables:
            for name, dtype in table.items():
                if name in WEIGHTS:
                    assert kept[name][dtype] == tensor_digest(WEIGHTS[name].to(getattr(torch, dtype))), (name, dtype)
        assert set(kept["q.weight"]) == {"float32", "bfloat16"}


def test_sha256_where_a_tensor_travels_whole():
    received, _ = sent(WEIGHTS, bucket_bytes=4000, sha256=True)
    assert received == {name: sha256_digest(tensor) for name, tensor in WEIGHTS.items()}
    received, _ = sent(WEIGHTS, bucket_bytes=128, sha256=True)
    assert received["scale"] == sha256_digest(WEIGHTS["scale"])
    assert received["embed.weight"] == tensor_digest(WEIGHTS["embed.weight"])


@pytest.mark.parametrize("what", ["bit", "elements", "tensors"])
def test_any_change_changes_it(what):
    changed = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    names = {"q.weight"}
    if what == "bit":
        changed["q.weight"].view(torch.int32)[3, 5] ^= 1
    elif what == "elements":
        changed["q.weight"][0, 0], changed["q.weight"][7, 7] = WEIGHTS["q.weight"][7, 7], WEIGHTS["q.weight"][0, 0]
    else:
        changed["k.weight"], changed["v.weight"] = changed["v.weight"], changed["k.weight"]
        names = {"k.weight", "v.weight"}
    before, _ = sent(WEIGHTS, bucket_bytes=200)
    after, _ = sent(changed, bucket_bytes=200)
    assert {name for name in before if before[name] != after[name]} == names


def test_nothing_sent_is_nothing():
    assert SentDigests().finish() == ({}, {})
