"""The cache is bounded; equal tables are read once, and a bad table is never taken for a known one."""

from __future__ import annotations

import msgspec
import pytest

from tests.helpers.messages import ANNOUNCE, ANSWERS, OPEN, changed
from weightcast.errors import WireError
from weightcast.runtime.lru import Lru
from weightcast.wire.bucket_sources import BroadcastSource
from weightcast.wire.codec import decode, decode_info, encode
from weightcast.wire.engine_info import EngineInfo

INFO = next(answer for answer in ANSWERS if isinstance(answer, EngineInfo))


def test_least_recently_used_value_is_evicted_first():
    known: Lru[str, int] = Lru(10)
    for number, name in enumerate("abc"):
        known.put(name, number, 4)
        assert known.get("a") == 0
    assert [known.get(name) for name in "abc"] == [0, None, 2]
    known.put("a", 9, 4)
    assert known.get("a") == 0
    known.put("large", 5, 99)  # alone it may be larger
    assert [known.get(name) for name in ("a", "c", "large")] == [None, None, 5]


def test_specs_of_an_engine_are_decoded_once():
    first, again = (decode_info(encode(INFO)) for _ in range(2))
    assert first.specs is again.specs
    assert first.specs == INFO.specs


def test_an_object_in_the_place_of_another_is_not_taken_for_it():
    seen = set()
    for index in range(200):  # each is gone when the next is made, and may get its id
        source = BroadcastSource(group=f"{index:04}" * 16)
        seen.add(decode(encode(msgspec.structs.replace(ANNOUNCE, source=source))).source.group)
    assert len(seen) == 200


def test_a_bad_table_is_refused_every_time():
    bad = changed(ANNOUNCE, plan__buckets__0__1__0__1=1)
    for _ in range(3):
        with pytest.raises(WireError, match=r"up\.weight"):
            decode(bad)
    for _ in range(2):
        with pytest.raises(WireError):
            decode(changed(OPEN, plan__specs=[]))
