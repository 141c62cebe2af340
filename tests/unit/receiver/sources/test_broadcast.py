"""Receiving: the next broadcast is entered while a bucket is loaded, and nobody is left in one that never comes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from weightcast.comm.update_group import GroupFailed
from weightcast.errors import Refused
from weightcast.receiver.sources.broadcast import GroupSource
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, plan_buckets

CPU = torch.device("cpu")


class Group:
    """A member's end; what arrives is the number of the broadcast."""

    def __init__(self, name: str = "g") -> None:
        self.name = name
        self.alive = True
        self.calls: list[str] = []

    def start_broadcast(self, data: torch.Tensor, **_: object) -> torch.Tensor:
        self.calls.append(f"enter {len(data)}")
        return data

    def finish(self, work: Any, *, what: str, timeout_s: float, poll: object = None) -> None:
        if not self.alive:
            raise GroupFailed("aborted")
        self.calls.append(what)
        work.fill_(int(what.split()[-1]) + 1)

    def abort(self, why: str) -> None:
        self.alive = False

    def close(self) -> None:
        self.alive = False


def layouts(*sizes: int) -> list[BucketLayout]:
    """One bucket for each size."""
    found: list[BucketLayout] = []
    for index, size in enumerate(sizes):
        spec = TensorSpec(name=f"t{index}", dtype="uint8", shape=(size,))
        slots = plan_buckets([spec], bucket_bytes=size, packing=Packing())[0].slots
        found.append(BucketLayout(index=index, slots=slots, size_bytes=size))
    return found


def source_of(*groups: Group) -> GroupSource:
    source = GroupSource(CPU, threading.Event())
    source._groups |= {group.name: group for group in groups}  # type: ignore[dict-item]
    return source


def entered_early(*others: Group) -> tuple[Group, GroupSource, BucketLayout]:
    """The broadcast of its second bucket, which is returned, was entered while the first one was read."""
    group = Group()
    source = source_of(group, *others)
    first, second = layouts(8, 6)
    source.read(first, "g", timeout_s=1.0, next_bytes=6)
    return group, source, second


def test_source_enters_the_next_broadcast_before_it_returns_a_bucket():
    group = Group()
    source = source_of(group)
    first, second, third = layouts(8, 6, 7)
    one = source.read(first, "g", timeout_s=1.0, next_bytes=6)
    assert group.calls == ["enter 8", "bucket 0", "enter 6"]
    two = source.read(second, "g", timeout_s=1.0, next_bytes=7)
    assert group.calls[3:] == ["bucket 1", "enter 7"]
    assert one.data.data_ptr() != two.data.data_ptr()
    assert two.data[:6].tolist() == [2] * 6
    three = source.read(third, "g", timeout_s=1.0)
    assert group.calls[5:] == ["bucket 2"]
    assert three.data.data_ptr() == one.data.data_ptr()
    source.expect_nothing()
    assert group.alive


@pytest.mark.parametrize("next_bytes", [9, 0])
def test_source_enters_no_broadcast_without_memory_or_a_known_size(next_bytes):
    group = Group()
    source = source_of(group)
    source.read(layouts(8)[0], "g", timeout_s=1.0, next_bytes=next_bytes)
    assert group.calls == ["enter 8", "bucket 0"]


def test_broadcast_that_never_comes_ends_its_group():
    group, other = Group(), Group("other")
    source = source_of(group, other)
    source.read(layouts(8)[0], "g", timeout_s=1.0, next_bytes=8)
    source.expect_nothing()
    assert not group.alive
    assert other.alive
    with pytest.raises(Refused, match="not in group g"):
        source.read(layouts(8)[0], "g", timeout_s=1.0)


def test_another_trainer_that_leaves_does_not_end_a_broadcast_that_was_entered():
    other = Group("other")
    group, source, second = entered_early(other)
    source.leave("other")
    source.trim()
    assert not other.alive
    two = source.read(second, "g", timeout_s=1.0)
    assert group.calls == ["enter 8", "bucket 0", "enter 6", "bucket 1"]
    assert two.data[:6].tolist() == [2] * 6


def test_leaving_a_group_drops_its_broadcast():
    other = Group("other")
    group, source, second = entered_early(other)
    source.leave("g")
    assert not group.alive
    source.read(second, "other", timeout_s=1.0)
    assert other.calls == ["enter 6", "bucket 1"]


def test_bucket_that_differs_from_its_announcement_is_refused():
    group = Group()
    source = source_of(group)
    first, second = layouts(8, 5)
    source.read(first, "g", timeout_s=1.0, next_bytes=8)
    with pytest.raises(Refused, match=r"bucket 1 has 5 bytes.*8 bytes were announced"):
        source.read(second, "g", timeout_s=1.0)
    assert not group.alive
