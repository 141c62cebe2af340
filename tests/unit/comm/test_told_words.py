"""Words that members of a group tell each other: read once each, however many members say the same."""

from __future__ import annotations

import datetime

import pytest
import torch.distributed as dist

from weightcast.comm import told_words
from weightcast.comm.rendezvous import with_token

KINDS = [bytes([kind]) * 50_000 for kind in range(4)]


class Counting:
    """A store that counts what is asked of it and how many bytes it gives."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.gets = self.read_bytes = self.written_bytes = 0

    def get(self, key: str) -> bytes:
        found = self._store.get(key)
        self.gets += 1
        self.read_bytes += len(found)
        return found

    def set(self, key: str, value: str | bytes) -> None:
        self.written_bytes += len(value)
        self._store.set(key, value)  # type: ignore[arg-type]

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get(keys)


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=60))


def group_of(server: dist.TCPStore, trainers: int, engines: int, token: str) -> tuple[Counting, list[bytes]]:
    """A store in which all members have told their words: trainers nothing, engine ranks one of a few texts."""
    store = Counting(with_token(server, token))
    words = [b""] * trainers + [KINDS[rank % len(KINDS)] for rank in range(engines)]
    for rank, one in enumerate(words):
        told_words.tell(store, rank, one)  # type: ignore[arg-type]
    told_words.publish(store, len(words))  # type: ignore[arg-type]
    return store, words


@pytest.mark.parametrize("engines", [1, 3, 8, 500])
def test_every_member_reads_what_each_has_told(server, engines):
    store, words = group_of(server, 3, engines, "a")
    assert list(told_words.read(store, range(3, 3 + engines))) == words[3:]
    assert list(told_words.read(store, [0, 3 + engines - 1])) == [b"", words[-1]]


def test_what_a_member_reads_and_writes_does_not_grow_with_the_members(server):
    asked = []
    for engines in (8, 64, 2_000):
        store, _ = group_of(server, 2, engines, f"of {engines}")
        whole = sum(map(len, KINDS))
        assert store.written_bytes < whole + 100 * engines  # all members together
        found = told_words.read(store, range(2, 2 + engines))
        assert len({id(one) for one in found}) == len(KINDS)
        asked.append(store.gets)
        assert store.read_bytes < whole + 200 + 4 * engines
    assert asked == [1 + len(KINDS)] * 3


def test_words_that_are_not_what_their_name_says_are_refused(server):
    store, words = group_of(server, 1, 2, "changed")
    name = with_token(server, "changed").get("words/1").decode()
    store.set(f"text/{name}", words[1][:-1])
    with pytest.raises(ValueError, match=name):
        told_words.read(store, [1])
