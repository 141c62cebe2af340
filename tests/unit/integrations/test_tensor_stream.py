"""Streams of named tensors over a real gloo group, each member on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from weightcast.comm.rendezvous import Rendezvous
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.errors import ConfigError, VerificationFailed, WireError
from weightcast.integrations.tensor_stream import StreamMessage, StreamReceiver, StreamSender

TIMEOUT_S = 60.0
BUCKET_BYTES = 4096


@contextmanager
def group(size: int = 3) -> Iterator[list[UpdateGroup]]:
    store = Rendezvous(host="127.0.0.1", timeout_s=TIMEOUT_S)

    def join(rank: int) -> UpdateGroup:
        if rank:
            return UpdateGroup.join(
                host=store.host,
                port=store.port,
                name="stream",
                token="0" * 32,
                rank=rank,
                world_size=size,
                device=torch.device("cpu"),
                timeout_s=TIMEOUT_S,
            )
        return UpdateGroup(
            store=store.visit,
            name="stream",
            token="0" * 32,
            rank=0,
            world_size=size,
            device=torch.device("cpu"),
            address=store.host,
            timeout_s=TIMEOUT_S,
        )

    with ThreadPoolExecutor(size) as pool:
        members = list(pool.map(join, range(size)))
    try:
        yield members
    finally:
        for member in members:
            member.close()
        store.close()


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(37, 101),  # larger than a bucket: cut into rows
        "norm": torch.randn(16, dtype=torch.bfloat16),
        "scale": torch.randn(()),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(8, 24).t(),
        "ids": torch.arange(11),
        "last": torch.randn(3, 5, 7).half(),
    }


def send(member: UpdateGroup, streams: list[tuple[dict[str, torch.Tensor], int | None]], **options: Any) -> None:
    sender = StreamSender(member, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, **options)
    for tensors, version in streams:
        send_all(sender, tensors, version)


def send_all(sender: StreamSender, tensors: dict[str, torch.Tensor], version: int | None = 1) -> None:
    for name, tensor in tensors.items():
        sender.put(name, tensor)
    sender.end(version)


def receive(member: UpdateGroup, count: int) -> list[tuple[dict[str, torch.Tensor], int | None]]:
    receiver = StreamReceiver(member, timeout_s=TIMEOUT_S)
    found: list[tuple[dict[str, torch.Tensor], int | None]] = []
    for _ in range(count):
        tensors: dict[str, torch.Tensor] = {}
        while (bucket := receiver.read()) is not None:
            tensors |= {name: tensor.clone() for name, tensor in bucket}
        found.append((tensors, receiver.version))
    return found


def run(members: list[UpdateGroup], sends: Callable[[], Any], receives: Callable[[UpdateGroup], Any]) -> list[Any]:
    """Runs all members at once; returns what the receivers return and raises their errors before the sender's."""
    with ThreadPoolExecutor(len(members)) as pool:
        sending = pool.submit(sends)
        receiving = [pool.submit(receives, member) for member in members[1:]]
        found = [future.result(2 * TIMEOUT_S) for future in receiving]
        sending.result(2 * TIMEOUT_S)
    return found


def test_every_receiver_gets_every_tensor_of_every_stream() -> None:
    streams = [(weights(1), 4), (weights(2), None), (weights(3), 6)]
    with group() as members:
        found = run(members, lambda: send(members[0], streams), lambda member: receive(member, 3))
    for streams_found in found:
        for (sent, version), (got, said) in zip(streams, streams_found, strict=True):
            assert said == version
            assert list(got) == list(sent)
            for name, tensor in sent.items():
                assert got[name].dtype == tensor.dtype
                torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)


def test_floats_are_cast_on_the_wire() -> None:
    sent = weights(1)
    with group(2) as members:
        [[(got, _)]] = run(
            members,
            lambda: send(members[0], [(sent, 1)], wire_dtype=torch.bfloat16),
            lambda member: receive(member, 1),
        )
    for name, tensor in sent.items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        torch.testing.assert_close(got[name], expected, rtol=0, atol=0)
        assert got[name].dtype == expected.dtype


def test_changed_bytes_are_found_and_named() -> None:
    class Flipping(StreamSender):
        def _start(self, data: torch.Tensor) -> None:
            if data.data_ptr() in {buffer.data_ptr() for buffer in self._buffers} and self._index == 1:
                data[0] ^= 1
            super()._start(data)

    def sends() -> None:
        sender = Flipping(members[0], bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
        with pytest.raises(GroupFailed):
            send_all(sender, weights(1))

    with group(2) as members:
        with pytest.raises(VerificationFailed, match="embed") as caught:
            run(members, sends, lambda member: receive(member, 1))
        assert caught.value.names == ("embed",)


def test_missing_tensors_are_an_error() -> None:
    class Forgetful(StreamSender):
        def _tell(self, message: StreamMessage) -> None:
            super()._tell(message if message.layout else StreamMessage(index=message.index, tensors=8, version=1))

    def sends() -> None:
        send_all(Forgetful(members[0], bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S), weights(1))

    with group(2) as members, pytest.raises(WireError, match="the stream had 8 tensors, and 7 arrived"):
        run(members, sends, lambda member: receive(member, 1))


def test_sender_learns_that_a_receiver_gave_up() -> None:
    gone = threading.Event()

    def sends() -> None:
        assert gone.wait(TIMEOUT_S)
        send(members[0], [(weights(1), 1)])

    def receives(member: UpdateGroup) -> None:
        member.abort("a rollout worker failed")
        gone.set()

    with group(2) as members, pytest.raises(GroupFailed):
        run(members, sends, receives)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], "no tensors"),
        ([("a", torch.zeros(4)), ("a", torch.zeros(4))], "a comes twice"),
        ([("wide", torch.zeros(2, 2000))], "one row of wide has 8000 bytes"),
    ],
)
def test_streams_that_cannot_be_sent_are_refused(tensors: list[tuple[str, torch.Tensor]], words: str) -> None:
    with group(2) as members:
        sender = StreamSender(members[0], bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)

        def sends() -> None:
            for name, tensor in tensors:
                sender.put(name, tensor)
            sender.end()

        with pytest.raises(ConfigError, match=words):
            sends()
