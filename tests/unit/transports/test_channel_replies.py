"""Replies to two buckets at once, whose threads come in any order."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
import torch

from tests.helpers.clock import PATIENCE_S
from weightcast.transports.channel import Channel


@pytest.mark.parametrize("order", [(20, 21), (21, 20)])
def test_a_bucket_waits_for_the_replies_to_the_one_two_before_in_whatever_order_they_were_noted(order):
    channel = Channel(
        [], meeting="weightcast", device=torch.device("cpu"), host="", bucket_bytes=1, timeout_s=1.0, in_flight=2
    )
    replies: dict[int, Future[None]] = {index: Future() for index in order}
    for index in order:
        channel._sent.expect(range(index, index + 1), [replies[index]])
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(channel._read_replies, 20)
        assert not wait([reading], timeout=0.2).done, "it must wait for bucket 20"
        replies[20].set_result(None)
        reading.result(PATIENCE_S)
    left = channel._sent.first()
    assert left is not None
    assert left.buckets == range(21, 22)
    assert len(channel._sent) == 1
