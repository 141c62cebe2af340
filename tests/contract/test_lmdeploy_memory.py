"""LMDeploy's own agent reads our payloads: buckets in shared memory, a persistent buffer, the end of an update.

Two versions of LMDeploy, two ranks; the traps of its protocol are shown beside what we send.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engines.lmdeploy_server import PLAYED, lmdeploy
from tests.helpers.lmdeploy_requests import opened, talk
from weightcast.adapters.lmdeploy.adapter import LmdeployAdapter
from weightcast.adapters.lmdeploy.detect import describe
from weightcast.adapters.lmdeploy.payload import END, bucket_payload
from weightcast.comm import pickle_writer
from weightcast.comm.pickle_writer import mapping
from weightcast.comm.shared_buckets import SharedSlot, make_slots
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, TensorSpec, plan_buckets
from weightcast.wire.messages import Commit

pytestmark = [pytest.mark.engine, pytest.mark.short]

RANKS = 2
SPECS = [
    TensorSpec(name="first", dtype="float32", shape=(2, 3)),
    TensorSpec(name="second", dtype="float32", shape=(4,)),
    TensorSpec(name="small", dtype="bfloat16", shape=(5,)),
]


class Reader:
    """LMDeploy's agents in their own environment."""

    def __init__(self, version: str, log: Path) -> None:
        python, environment = lmdeploy(version)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, Path(__file__).parent / "lmdeploy_reader.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"ready {version}\n", log.read_text()[-3000:]

    def start(self, *, events: bool = True) -> None:
        """Starts agents that have read nothing yet, with or without support for events."""
        self.read({"events": events})

    def read(self, body: bytes | dict[str, Any], **more: Any) -> dict[str, Any]:
        """Sends a request and returns its effect."""
        request = json.loads(body) if isinstance(body, bytes) else body
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request | more) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()  # it has nothing to bring to an end
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(params=PLAYED, scope="module")
def readers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    made = Reader(request.param, tmp_path_factory.mktemp("reader") / "log")
    yield made
    made.close()


@pytest.fixture
def reader(readers: Reader) -> Reader:
    readers.start()
    return readers


@pytest.fixture
def slots() -> Iterator[list[SharedSlot]]:
    made = make_slots(2, 64, torch.device("cpu"), {"ring"})
    yield made
    for slot in made:
        slot.close()


def sender() -> LmdeployAdapter:
    status = {"device_type": "cpu"}
    adapter = LmdeployAdapter(describe("http://127.0.0.1:1", "m", False, status, {"tp_size": RANKS}, 400, {}))
    opened(adapter)
    return adapter


def layouts() -> list[BucketLayout]:
    return plan_buckets(SPECS, bucket_bytes=32, packing=LmdeployAdapter.packing)


def filled(slot: SharedSlot, layout: BucketLayout, value: float) -> Any:
    """Shared memory of the slot with one value in every tensor, and with an event, as on a GPU."""
    for _, view in Bucket(layout, slot.data).views():
        view.fill_(value)
    shared = slot.share(opens=0, ring_opens=RANKS)
    with_events = tuple(msgspec.structs.replace(memory, turn=b"event") for memory in shared.ring)
    return [msgspec.structs.replace(shared, ring=with_events)]


def request_of(adapter: LmdeployAdapter, layout: BucketLayout, shared: Any) -> bytes:
    asked, _ = talk(adapter.bucket("s", layout, group=None, shared=shared), b"null")
    return asked[0].body


def test_every_bucket_is_read_from_one_mapping_between_waiting_and_recording(
    reader: Reader, slots: list[SharedSlot]
) -> None:
    adapter, (first, second, half) = sender(), layouts()
    answer = reader.read(request_of(adapter, first, filled(slots[0], first, 2.0)))
    assert answer["error"] == ""
    assert answer["calls"] == ["open", "event.open", "event.wait", "event.record"] * RANKS
    assert [sums["first"] for sums in answer["sums"]] == [12.0] * RANKS
    # The second buffer of the same storage needs no handle and has its own content.
    answer = reader.read(request_of(adapter, second, filled(slots[1], second, 3.0)))
    assert answer["calls"] == ["event.wait", "event.record"] * RANKS
    assert [sums["second"] for sums in answer["sums"]] == [12.0] * RANKS
    # The first buffer, filled anew, is read from the mapping and not from a copy.
    answer = reader.read(request_of(adapter, first, filled(slots[0], first, 5.0)))
    assert [sums["first"] for sums in answer["sums"]] == [30.0] * RANKS
    # Another dtype is another view of the storage: the handle comes again.
    answer = reader.read(request_of(adapter, half, filled(slots[1], half, 0.5)))
    assert answer["calls"] == ["open", "event.open", "event.wait", "event.record"] * RANKS
    assert [sums["small"] for sums in answer["sums"]] == [2.5] * RANKS
    assert answer["finished"] == [0] * RANKS
    asked, _ = talk(adapter.commit(Commit(session="s")), b"null", b"")
    answer = reader.read(asked[0].body)
    assert (answer["error"], answer["finished"], answer["mapped"]) == ("", [1] * RANKS, [False] * RANKS)
    # The next update starts with a handle, because nothing is mapped any more.
    opened(adapter)
    answer = reader.read(request_of(adapter, half, filled(slots[0], half, 1.0)))
    assert answer["error"] == ""
    assert [sums["small"] for sums in answer["sums"]] == [5.0] * RANKS


def test_the_end_is_a_list_without_a_load_format(reader: Reader) -> None:
    ours = {"serialized_named_tensors": [END] * RANKS, "finished": True}
    assert reader.read(ours)["error"] == ""
    wrong = reader.read(ours | {"load_format": "flattened_bucket"})
    assert wrong["error"].startswith("TypeError")
    assert wrong["finished"] == [1] * RANKS


def test_bucket_without_a_handle_is_refused_if_nothing_is_mapped(reader: Reader, slots: list[SharedSlot]) -> None:
    first = layouts()[0]
    memory = filled(slots[0], first, 1.0)[0].ring[0]
    body = {"serialized_named_tensors": [bucket_payload(first, memory, handle=False)] * RANKS}
    answer = reader.read(body, load_format="flattened_bucket")
    assert "flattened_tensor is not provided" in answer["error"]


def test_payload_without_clone_reads_the_mapping(reader: Reader, slots: list[SharedSlot]) -> None:
    first = layouts()[0]
    shared = filled(slots[0], first, 7.0)
    with_handle = opcodes_without_clone_word(bucket_payload(first, shared[0].ring[0], handle=True))
    flat = {"load_format": "flattened_bucket"}
    assert reader.read({"serialized_named_tensors": [with_handle] * RANKS} | flat)["sums"][0]["first"] == 42.0
    memory = filled(slots[0], first, 9.0)[0].ring[0]
    stale = reader.read({"serialized_named_tensors": [bucket_payload(first, memory, handle=False)] * RANKS} | flat)
    assert (stale["error"], stale["sums"][0]["first"]) == ("", 42.0)  # LMDeploy's default: silently the old ones
    adapter = sender()
    for value in (9.0, 11.0):
        answer = reader.read(request_of(adapter, first, filled(slots[0], first, value)))
        assert answer["sums"][0]["first"] == 6 * value


def test_reader_without_events_keeps_reading_a_stale_copy(reader: Reader, slots: list[SharedSlot]) -> None:
    # LMDeploy then copies what comes with a handle, and reads the copy for buckets that come without.  It can import
    # events on CUDA; for other devices the kind refuses this way (test_adapters_lmdeploy.py).
    adapter, first = sender(), layouts()[0]
    reader.start(events=False)
    reader.read(request_of(adapter, first, filled(slots[0], first, 1.0)))
    stale = reader.read(request_of(adapter, first, filled(slots[0], first, 2.0)))
    assert (stale["error"], stale["sums"][0]["first"]) == ("", 6.0)


def test_each_rank_reads_its_own_item(reader: Reader, slots: list[SharedSlot]) -> None:
    first = layouts()[0]
    payloads = [
        bucket_payload(first, filled(slots[rank], first, 1.0 + rank)[0].ring[rank], handle=True)
        for rank in range(RANKS)
    ]
    answer = reader.read({"serialized_named_tensors": payloads, "load_format": "flattened_bucket"})
    assert [sums["first"] for sums in answer["sums"]] == [6.0, 12.0]


def opcodes_without_clone_word(payload: str) -> str:
    """The same payload without the field ``require_clone``."""
    word = mapping([("require_clone", pickle_writer.boolean(False))])[2:-1]
    plain = base64.b64decode(payload)
    assert word in plain
    return base64.b64encode(plain.replace(word, b"")).decode()
