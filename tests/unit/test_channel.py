"""Because of whom a group failed."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightcast.comm.group import GroupFailed
from weightcast.errors import TargetLost, TargetRejected
from weightcast.transports.channel import Channel

REFUSED = TargetRejected("http://a: Failed to initialize custom process group", url="http://a", status=400)
LOST = TargetLost("http://b: did not join in time", url="http://b")


def future(error: Exception) -> Future[None]:
    made: Future[None] = Future()
    made.set_exception(error)
    return made


def culprit(meeting: Any, *, answered: int) -> BaseException:
    """Of two engines, the first of which has refused and the second of which was lost."""
    links: Any = [SimpleNamespace(url=error.url) for error in (REFUSED, LOST)]
    channel = Channel(
        links, meeting=meeting, device=torch.device("cpu"), host="127.0.0.1", bucket_bytes=1, timeout_s=0.1
    )
    posts = [future(REFUSED), future(LOST)]
    try:
        return channel._culprit(GroupFailed("cancelled"), posts, "a bucket", posts[:answered])
    finally:
        channel.close()


@pytest.mark.parametrize(("answered", "blamed"), [(0, LOST), (1, REFUSED)])
def test_a_stock_engine_that_refuses_after_we_gave_up_is_not_blamed(answered: int, blamed: Exception) -> None:
    assert culprit("torch", answered=answered) is blamed


def test_an_engine_of_ours_says_by_its_status_whether_it_is_to_blame() -> None:
    assert culprit("weightcast", answered=1) is REFUSED
