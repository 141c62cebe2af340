"""The LMDeploy adapter and detection without LMDeploy: requests and answers as data."""

from __future__ import annotations

import base64
import json
import pickletools
from typing import Any

import msgspec
import pytest

from tests.helpers.lmdeploy_requests import SPECS, opened, opening, talk
from weightcast.adapters.lmdeploy.adapter import LmdeployAdapter
from weightcast.adapters.lmdeploy.detect import LmdeployKind, describe
from weightcast.adapters.lmdeploy.payload import END, bucket_payload
from weightcast.comm.run_steps import EngineRequest
from weightcast.comm.shared_buckets import Shared, TorchMemory
from weightcast.errors import ConfigError, DeadlineExceeded, TargetRejected, WireError
from weightcast.lab.dialects.unpickled import Named, read
from weightcast.protocols import Invitation
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import BucketLayout, TensorSlot, TensorSpec, plan_buckets
from weightcast.wire.messages import Close, Commit, Join

SPECS += [TensorSpec(name="h", dtype="bfloat16", shape=(3,))]
GPUS = ("aa", "bb")
DONE = b'{"success": true, "message": "done"}'
RAY = 400


def info(ranks: int = 2, devices: tuple[str, ...] = GPUS) -> EngineInfo:
    status = {
        "device_type": "cuda",
        "device_uuids": [f"GPU-{uuid}" for uuid in devices[:ranks]],
        "worker_ranks": list(range(ranks)),
    }
    return describe("http://127.0.0.1:1", "m", False, status, None, RAY, {})


def memory(device: str = "aa", *, first_byte: int = 0, **changes: Any) -> TorchMemory:
    fields: dict[str, Any] = {"kind": "cuda", "device": device, "size_bytes": 2048, "handle": b"H" + device.encode()}
    fields |= {"offset_bytes": 512, "ref_counter": b"/r", "ref_counter_offset": 3, "event": b"E", "event_sync": True}
    return TorchMemory(**fields | {"first_byte": first_byte, "turn": b"turn"} | changes)


def shared(*, first_byte: int = 0, **changes: Any) -> list[Shared]:
    """Two trainer ranks, each with a buffer on its GPU and a handle for each of two openers."""
    return [Shared(ring=tuple(memory(gpu, first_byte=first_byte, **changes) for _ in range(2))) for gpu in GPUS]


def layouts() -> list[BucketLayout]:
    return plan_buckets(SPECS, bucket_bytes=256, packing=LmdeployAdapter.packing)


def payloads(request: EngineRequest) -> list[dict[str, Any]]:
    body = json.loads(request.body)
    assert request.path == "/update_weights"
    return [read(base64.b64decode(item)) for item in body["serialized_named_tensors"]]


def test_open_puts_the_engine_to_sleep_and_wakes_only_weights() -> None:
    assert opened(LmdeployAdapter(info())) == ["/is_sleeping", "/sleep?level=1", "/wakeup?tags=weights"]


def test_pauses_other_than_abort_are_refused_by_name() -> None:
    _, found = recognised(**SERVER)
    assert found is not None
    assert set(found.no_pause) == {"retract", "in_place", "wait"}
    assert all("sleep" in words and 'pause="abort"' in words for words in found.no_pause.values())


def test_start_time_in_metrics_shows_a_restart() -> None:
    first, again, other, silent = (
        recognised(**SERVER | {"metrics": metrics})[1]
        for metrics in (
            b"process_start_time_seconds 1.70000000013e+09\n",
            b"process_start_time_seconds 1.70000000013e+09\n",
            b"process_start_time_seconds 1.70000000099e+09\n",
            404,
        )
    )
    assert first is not None
    assert again is not None
    assert other is not None
    assert silent is not None
    assert first.incarnation == again.incarnation != other.incarnation
    assert first.shows_restart
    assert not silent.shows_restart
    assert not silent.tells_version
    assert "--disable-metrics" in silent.message


def test_buckets_have_one_dtype_and_whole_tensors_end_to_end() -> None:
    found = layouts()
    assert [[slot.spec.name for slot in layout.slots] for layout in found] == [["w0", "w1"], ["w2", "w3"], ["h"]]
    assert all(layout.size_bytes == sum(slot.size_bytes for slot in layout.slots) for layout in found)


def test_handle_is_sent_again_only_for_another_buffer_size_or_dtype() -> None:
    adapter = LmdeployAdapter(info())
    opened(adapter)
    first, second, halves = layouts()
    seen: list[bool] = []

    def post(layout: BucketLayout, **changes: Any) -> list[dict[str, Any]]:
        asked, _ = talk(adapter.bucket("s", layout, group=None, shared=shared(**changes)), b"null")
        found = payloads(asked[0])
        seen.append("flattened_tensor" in found[0])
        assert all(("flattened_tensor" in item) == ("event_ipc_handle" in item) == seen[-1] for item in found)
        return found

    post(first)
    entries = post(second, first_byte=512)[0]["metadata"]
    # Indices are elements of the whole storage, in which the second buffer starts at byte 512.
    assert [(entry.state["start_idx"], entry.state["end_idx"]) for entry in entries] == [(128, 160), (160, 192)]
    post(first)
    post(halves)
    post(halves)
    post(halves, size_bytes=4096)
    post(halves, size_bytes=4096, handle=b"other")
    post(halves, size_bytes=4096, handle=b"other", turn=b"another event")
    assert seen == [True, False, False, True, False, True, True, True]
    asked, _ = talk(adapter.commit(Commit(session="s")), b"null", b"")
    assert json.loads(asked[0].body) == {"serialized_named_tensors": [END, END], "finished": True}
    assert asked[1].path == "/wakeup?tags=kv_cache"
    opened(adapter)
    post(halves, size_bytes=4096, handle=b"other", turn=b"another event")
    assert seen[-1]  # the commit has unmapped everything


def test_refused_bucket_is_not_remembered_as_mapped() -> None:
    adapter = LmdeployAdapter(info())
    opened(adapter)
    first = layouts()[0]
    with pytest.raises(TargetRejected):
        talk(adapter.bucket("s", first, group=None, shared=shared()), 500)
    asked, _ = talk(adapter.bucket("s", first, group=None, shared=shared()), b"null")
    assert "flattened_tensor" in payloads(asked[0])[0]


def test_each_rank_gets_torchs_handle_to_the_buffer_on_its_gpu() -> None:
    adapter = LmdeployAdapter(info(devices=("bb", "aa")))  # not in the order of the trainer's ranks
    opened(adapter)
    asked, _ = talk(adapter.bucket("s", layouts()[0], group=None, shared=shared()), b"null")
    for payload, gpu in zip(payloads(asked[0]), ("bb", "aa"), strict=True):
        function, arguments = payload["flattened_tensor"]
        assert str(function) == "torch.multiprocessing.reductions.rebuild_cuda_tensor"
        assert arguments == (
            Named("torch", "Tensor"),
            (512,),
            (1,),
            0,
            Named("torch.storage", "TypedStorage"),
            Named("torch", "float32"),
            0,
            b"H" + gpu.encode(),
            2048,
            512,
            False,
            b"/r",
            3,
            b"E",
            True,
        )
        assert payload["event_ipc_handle"] == b"turn"
        assert payload["require_clone"] is False  # a copy would be read again and again


def test_gpu_without_a_trainer_rank_is_a_config_error() -> None:
    adapter = LmdeployAdapter(info(devices=("aa", "cc")))
    opened(adapter)
    with pytest.raises(ConfigError, match="on GPU cc of rank 1"):
        talk(adapter.bucket("s", layouts()[0], group=None, shared=shared()))


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([(SPECS[0], 0, 0, 4), (SPECS[4], 128, 0, 3)], "one dtype"),
        ([(SPECS[0], 0, 0, 2)], "whole tensors"),
        ([(SPECS[0], 2, 0, 4)], "whole element"),
        ([(SPECS[0], 2000, 0, 4)], "ends at byte 2128 of a buffer of 2048"),
    ],
)
def test_unreadable_buckets_are_refused(slots: list[tuple[TensorSpec, int, int, int]], words: str) -> None:
    # Checks that hold under -O too: dtype, wholeness, alignment, capacity.
    made = tuple(
        TensorSlot(spec=spec, offset_bytes=offset, first_row=row, num_rows=rows) for spec, offset, row, rows in slots
    )
    layout = BucketLayout(index=0, slots=made, size_bytes=made[-1].end_bytes)
    with pytest.raises(ConfigError, match=words):
        bucket_payload(layout, memory(), handle=True)


def test_payloads_name_only_torch_and_plain_namespaces() -> None:
    payload = base64.b64decode(bucket_payload(layouts()[0], memory(), handle=True))
    found = [argument for opcode, argument, _ in pickletools.genops(payload) if opcode.name == "GLOBAL"]
    modules = {str(argument).split(" ")[0] for argument in found}
    assert modules == {"torch", "torch.storage", "torch.multiprocessing.reductions", "types"}
    assert read(base64.b64decode(END)) == []


def test_broadcast_ends_with_a_request_of_its_own() -> None:
    adapter = LmdeployAdapter(info())
    opened(adapter)
    join = Join(
        session="s", group="g", host="10.0.0.1", port=9, token="t", first_rank=3, world_size=5, backend="nccl",
        timeout_s=1.0,
    )  # fmt: skip
    invitation = Invitation(join=join, bucket_bytes=1)
    asked, _ = talk(adapter.join(invitation), DONE)
    assert json.loads(asked[0].body) == {
        "master_address": "10.0.0.1",
        "master_port": 9,
        "rank_offset": 3,
        "world_size": 5,
        "group_name": "g",
        "backend": "nccl",
    }
    asked, _ = talk(adapter.bucket("s", layouts()[0], group="g", shared=()), DONE)
    assert json.loads(asked[0].body) == {
        "names": ["w0", "w1"],
        "dtypes": ["float32", "float32"],
        "shapes": [[4, 8], [4, 8]],
        "group_name": "g",
        "load_format": "flattened_bucket",
        "finished": False,
    }
    talk(adapter.close(Close(session="s", buckets=1)))
    asked, ack = talk(adapter.commit(Commit(session="s")), DONE, b"")
    assert [request.path for request in asked] == ["/update_weights_from_distributed", "/wakeup?tags=kv_cache"]
    body = json.loads(asked[0].body)
    assert (body["names"], body["finished"], body["group_name"]) == ([], True, "g")
    assert (ack.version, ack.state, ack.ranks) == (7, "serving", 2)
    asked, _ = talk(adapter.leave("g"), DONE)
    assert json.loads(asked[0].body) == {"group_name": "g"}


def refusal(words: str) -> TargetRejected:
    return TargetRejected(words, url="u", status=400)


def test_leaving_a_group_that_the_engine_does_not_have_succeeds() -> None:
    asked, ack = talk(LmdeployAdapter(info()).leave("g"), refusal("group 'g' not initialized"))
    assert ([request.path for request in asked], ack.ok) == (["/destroy_weights_update_group"], True)


def test_failed_destroy_of_a_group_comes_out_of_leave() -> None:
    with pytest.raises(TargetRejected, match="Failed to destroy"):
        talk(LmdeployAdapter(info()).leave("g"), refusal("Failed to destroy weights update group 'g': no"))
    with pytest.raises(TargetRejected):
        talk(LmdeployAdapter(info()).leave("g"), 500)


def test_refused_sleep_after_a_broken_update_is_repeated_by_leave_and_comes_out_of_it() -> None:
    adapter = LmdeployAdapter(info())
    opened(adapter)
    talk(adapter.bucket("s", layouts()[0], group=None, shared=shared()), b"null")
    _, ack = talk(adapter.abort("s", "why"), 500)
    assert ack.state == "quarantined"
    with pytest.raises(TargetRejected):
        talk(adapter.leave(None), 500)
    asked, _ = talk(adapter.leave(None), b"")
    assert [request.path for request in asked] == ["/sleep?level=1"]
    assert talk(adapter.leave(None))[0] == []


def test_completed_update_after_a_refused_sleep_leaves_nothing_to_unmap() -> None:
    adapter = LmdeployAdapter(info())
    opened(adapter)
    talk(adapter.bucket("s", layouts()[0], group=None, shared=shared()), b"null")
    talk(adapter.abort("s", "why"), 500)
    talk(adapter.open(opening()), b'{"is_sleeping": true}', 404, b"")
    talk(adapter.bucket("s", layouts()[0], group=None, shared=shared()), b"null")
    talk(adapter.commit(Commit(session="s")), b"null", b"")
    assert talk(adapter.leave(None))[0] == []


def test_success_is_read_from_the_body_not_the_status() -> None:
    adapter = LmdeployAdapter(info())
    opened(adapter)
    with pytest.raises(WireError, match="no room"):
        talk(adapter.bucket("s", layouts()[0], group="g", shared=()), b'{"success": false, "message": "no room"}')


def test_abort_wakes_an_untouched_engine_and_leaves_a_half_written_one_asleep() -> None:
    adapter = LmdeployAdapter(info())
    opened(adapter)
    asked, ack = talk(adapter.abort("s", "why"), b"")
    assert ([request.path for request in asked], ack.state) == (["/wakeup"], "serving")
    opened(adapter)
    talk(adapter.bucket("s", layouts()[0], group=None, shared=shared()), b"null")
    asked, ack = talk(adapter.abort("s", "why"), b"")
    # Sleep unmaps our memory and keeps the engine from serving parts of two versions.
    assert ([request.path for request in asked], ack.state) == (["/sleep?level=1"], "quarantined")
    # An update that ends before its first bucket does not wake a half-written engine.
    talk(adapter.open(opening()), b'{"is_sleeping": true}', 404, b"")
    asked, ack = talk(adapter.abort("s", "why"))
    assert (asked, ack.state) == ([], "quarantined")
    asked, _ = talk(adapter.open(opening()), b'{"is_sleeping": true}', 404, b"")
    assert [request.path for request in asked][-1] == "/wakeup?tags=weights"
    talk(adapter.bucket("s", layouts()[0], group=None, shared=shared()), b"null")
    asked, ack = talk(adapter.commit(Commit(session="s")), b"null", b"")
    assert asked[-1].path == "/wakeup?tags=kv_cache"  # the adapter put it to sleep
    assert ack.message == ""


def test_engine_that_slept_before_the_update_is_left_asleep() -> None:
    adapter = LmdeployAdapter(info())
    talk(adapter.open(opening()), b'{"is_sleeping": true}', 404, b"")
    talk(adapter.bucket("s", layouts()[0], group=None, shared=shared()), b"null")
    asked, ack = talk(adapter.commit(Commit(session="s")), b"null")
    assert [request.path for request in asked] == ["/update_weights"]
    assert "asleep before" in ack.message


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["model.layers.0.mlp.up_proj.weight"], ()),
        (["model.language_model.layers.0.mlp.up_proj.weight"], ("the vision tower, if this server has one",)),
        (["model.language_model.norm.weight", "model.visual.blocks.0.attn.proj.weight"], ()),
        # A Qwen2, which may be the language model of a Qwen2-VL or Qwen2.5-VL.
        (["model.layers.0.self_attn.q_proj.bias"], ("the vision tower, if this server has one",)),
        (["model.layers.0.self_attn.q_proj.bias", "visual.blocks.0.attn.proj.weight"], ()),
        (["model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.o_proj.bias"], ()),
    ],
)
def test_a_vision_tower_that_is_not_sent_is_named(names: list[str], kept: tuple[str, ...]) -> None:
    adapter = LmdeployAdapter(info())
    specs = [TensorSpec(name=name, dtype="float32", shape=(4, 8)) for name in names]
    adapter.check(specs, delivery="memory", bucket_bytes=1 << 20)
    opened(adapter)
    _, ack = talk(adapter.commit(Commit(session="a" * 32)), b"{}")
    assert ack.not_updated == kept


def test_score_checks_that_the_tokens_are_the_given_ones() -> None:
    adapter = LmdeployAdapter(info())
    answer = {"text": "", "meta_info": {"input_token_logprobs": [[-1.5, 8], [-0.25, 9]]}}
    asked, values = talk(adapter.score([7, 8, 9]), msgspec.json.encode(answer))
    assert values == [-1.5, -0.25]
    body = json.loads(asked[0].body)
    assert (body["input_ids"], body["logprob_start_len"], body["max_tokens"]) == ([7, 8, 9], 0, 0)
    with pytest.raises(WireError, match="log-probabilities of other tokens") as caught:
        talk(adapter.score([7, 8]), b'{"meta_info": {"input_token_logprobs": null}}')
    assert "--logprobs-mode raw_logprobs" in (caught.value.hint or "")


# -- what it is


def recognised(**answers: Any) -> tuple[list[str], EngineInfo | None]:
    """Recognises a server that answers these paths; a number is a refusal."""
    steps = LmdeployKind().recognise("http://127.0.0.1:1")
    asked: list[str] = []
    try:
        request = next(steps)
        while True:
            asked.append(request.path)
            answer = answers.get(request.path.lstrip("/").replace("/", "_").split(".")[0], 404)
            if isinstance(answer, int):
                request = steps.throw(TargetRejected("no", url="u", status=answer))
            elif answer == "silence":
                request = steps.throw(DeadlineExceeded(who="u", waiting_for="it", timeout_s=5.0))
            else:
                request = steps.send(answer if isinstance(answer, bytes) else json.dumps(answer).encode())
    except StopIteration as end:
        return asked, end.value


SERVER: dict[str, Any] = {
    "is_sleeping": {"is_sleeping": False},
    "v1_models": {"data": [{"id": "qwen", "owned_by": "lmdeploy"}]},
    "update_weights_from_ipc": {
        "ready": False,
        "device_type": "cuda",
        "checkpoint_engine_version": "0.4.2",
        "sleeping_tags": [],
        "device_uuids": ["GPU-bb", "GPU-aa"],
        "worker_ranks": [1, 0],
    },
    "distserve_engine_info": json.dumps({"tp_size": 4, "dp_size": 2}),
    "destroy_weights_update_group": 400,
    "metrics": b'# HELP x\nprocess_start_time_seconds 1.7e+09\nlmdeploy:cached_tokens_total{engine="0"} 0.0\n',
}


def test_server_is_described_by_the_answers_of_its_routes() -> None:
    asked, found = recognised(**SERVER)
    assert found is not None
    assert (found.kind, found.model, found.sizes, found.staging) == ("lmdeploy", "qwen", "tp 2, dp 2", "none")
    assert [rank.device for rank in found.ranks] == ["aa", "bb"]
    assert found.shows_restart
    assert found.transports == ("ipc", "broadcast", "checkpoint-engine")
    assert found.message == ""
    assert not any("update" in path and "destroy" not in path and "from_ipc" not in path for path in asked)


@pytest.mark.parametrize(
    ("changes", "transports", "words"),
    [
        ({"destroy_weights_update_group": 500}, ("checkpoint-engine",), "--distributed-executor-backend ray"),
        ({"destroy_weights_update_group": 501}, ("checkpoint-engine",), "--backend pytorch"),
        ({"update_weights_from_ipc": 404}, ("ipc", "broadcast"), ""),
        (
            {"update_weights_from_ipc": 404, "destroy_weights_update_group": 404},
            (),
            "use 0.16 or later",
        ),
        ({"metrics": b'lmdeploy:prefix_cache_hit_rate{engine="0"} 0.5\n'}, (), "--enable-prefix-caching"),
        ({"is_sleeping": {"is_sleeping": True}}, ("ipc", "broadcast", "checkpoint-engine"), "asleep"),
        (
            {"update_weights_from_ipc": SERVER["update_weights_from_ipc"] | {"device_type": "ascend"}},
            ("broadcast", "checkpoint-engine"),
            "on CUDA, not on ascend",
        ),
        (
            {
                "is_sleeping": {"is_sleeping": True},
                "update_weights_from_ipc": SERVER["update_weights_from_ipc"]
                | {"ready": True, "sleeping_tags": ["kv_cache", "weights"]},
            },
            ("checkpoint-engine",),
            "--empty-init",
        ),
    ],
)
def test_obstacles_are_reported_at_recognition(
    changes: dict[str, Any], transports: tuple[str, ...], words: str
) -> None:
    _, found = recognised(**SERVER | changes)
    assert found is not None
    assert found.transports == transports
    assert words in found.message


def test_server_with_busy_ranks_is_recognised() -> None:
    # Ranks that wait for a broadcast answer nothing else; the server does.
    _, found = recognised(**SERVER | {"update_weights_from_ipc": "silence", "destroy_weights_update_group": "silence"})
    assert found is not None
    assert (found.kind, found.transports, found.tp_size) == ("lmdeploy", ("ipc", "broadcast"), 2)
    with pytest.raises(DeadlineExceeded):
        recognised(**SERVER | {"is_sleeping": "silence"})


def test_without_uuids_ranks_are_counted_for_one_replica() -> None:
    _, found = recognised(**SERVER | {"update_weights_from_ipc": 404})
    assert found is not None
    assert [rank.device for rank in found.ranks] == ["cuda", "cuda"]  # tp 4 over dp 2: each replica has its own URL


@pytest.mark.parametrize(
    "changes",
    [
        {"is_sleeping": 404},
        {"is_sleeping": b"<html>"},
        {"v1_models": {"data": [{"id": "m", "owned_by": "vllm"}]}},
        {"v1_models": b"[]", "openapi": {"paths": {"/wake_up": {}, "/update_weights": {}}}},
    ],
)
def test_other_servers_are_not_taken_for_lmdeploy(changes: dict[str, Any]) -> None:
    _, found = recognised(**SERVER | changes)
    assert found is None


def test_wrong_key_is_a_refusal() -> None:
    with pytest.raises(TargetRejected):
        recognised(**SERVER | {"is_sleeping": 401})


def test_malformed_answers_are_wire_errors() -> None:
    adapter = LmdeployAdapter(info())
    with pytest.raises(WireError):
        talk(adapter.open(opening()), b"[]")
    with pytest.raises(WireError):
        talk(adapter.score([1, 2]), b"null")
    assert isinstance(talk(adapter.leave(None))[1], Ack)
