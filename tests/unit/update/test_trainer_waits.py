"""How long the trainer's head waits for ranks that wait for engine ranks themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightcast.transports.link import margin_s
from weightcast.transports.plan import TargetPlan, UpdatePlan
from weightcast.update.bucket_stream import BucketStream
from weightcast.update.follower import Follower

TIMEOUT_S = 3.0


class Group:
    """The head's end of a group, which notes how long it waits for the others."""

    rank, world_size, hosts = 0, 2, ("", "")

    def __init__(self) -> None:
        self.limits_s: list[float] = []

    def broadcast_bytes(self, payload: bytes, *, timeout_s: float) -> bytes:
        self.limits_s.append(timeout_s)
        return payload

    def gather_bytes(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self.limits_s.append(timeout_s)
        return [payload, payload]


class FailedHead(Follower):
    """A head whose update has failed already."""

    leads = True
    failed = True  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(("buckets", "waits"), [(0, 2), (1, 1)])
def test_head_waits_longer_for_other_ranks_than_these_wait_for_an_engine_rank(buckets: int, waits: int) -> None:
    group = Group()
    layouts: list[Any] = [SimpleNamespace(slots=(), index=0)] * buckets
    parts: dict[str, Any] = {
        "exporter": SimpleNamespace(device=torch.device("cpu"), plan=lambda *_: []),
        "choice": UpdatePlan(targets=(TargetPlan(carriers=("group",), gathers=False),)),
        "group": group,
        "head": FailedHead(),
        "events": SimpleNamespace(),
        "specs": (),
    }
    stream = BucketStream(
        layouts=layouts, verifies=False, check_finite=False, wait_s=TIMEOUT_S, timeout_s=TIMEOUT_S, **parts
    )
    filling: Any = SimpleNamespace()
    assert not stream._send_each(filling, sums_buckets=False)
    assert group.limits_s == [pytest.approx(TIMEOUT_S + margin_s(TIMEOUT_S))] * waits
