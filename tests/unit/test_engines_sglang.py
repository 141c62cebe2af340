"""What is said to SGLang, step by step, with answers made up here; and the bytes of its envelope."""

from __future__ import annotations

import base64
import json
import pickletools
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import msgspec
import pytest

from weightcast.comm.ipc import host_id
from weightcast.comm.share import Shared, TorchMemory
from weightcast.engines.sglang.adapter import SglangAdapter
from weightcast.engines.sglang.envelope import GLOBALS, bucket_payload
from weightcast.engines.sglang.kind import SglangKind
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import EngineRequest, Invitation
from weightcast.wire.layout import DTYPES, BucketLayout, TensorSlot, TensorSpec, plan_buckets
from weightcast.wire.messages import Commit, EngineInfo, Open, Owner

URL = "http://127.0.0.1:30000"
SERVER = {"version": "0.5.23", "tp_size": 2, "dp_size": 1, "pp_size": 1, "device": "cpu", "random_seed": 7}
MODEL = {"served_model_name": "tiny", "weight_version": "12"}
SPEC = TensorSpec(name="model.norm.weight", dtype="bfloat16", shape=(4, 2))
LAYOUT = BucketLayout(index=0, slots=(TensorSlot(spec=SPEC, offset_bytes=0, num_rows=4),), size_bytes=16)
Result = TypeVar("Result")
Answers = dict[str, Any]


def talk(
    steps: Generator[EngineRequest, bytes, Result], answers: Answers | Callable[[EngineRequest], Any]
) -> tuple[list[EngineRequest], Result]:
    """Answer each request: a number is a refusal with that status, anything else the body; what is not there is {}."""
    asked: list[EngineRequest] = []
    try:
        request = next(steps)
        while True:
            asked.append(request)
            answer = answers(request) if callable(answers) else answers.get(request.path.partition("?")[0], {})
            if isinstance(answer, int):
                request = steps.throw(TargetRejected("no", url=URL, status=answer))
            else:
                request = steps.send(json.dumps(answer).encode())
    except StopIteration as end:
        return asked, end.value


def recognised(server: Answers = {}, model: Answers = {}, *, url: str = URL, ready: Any = None) -> EngineInfo:  # noqa: B006
    answers = {"/server_info": SERVER | server, "/model_info": MODEL | model, "/ready": ready or {}}
    _, info = talk(SglangKind().recognise(url), answers)
    assert info is not None
    return info


def opening(**changes: Any) -> Open:
    fields: dict[str, Any] = {"pause": "abort", "verify": "none"} | changes
    return Open(
        session="a" * 32,
        owner=Owner(host="h", pid=1),
        version=13,
        timeout_s=30.0,
        lease_s=90.0,
        specs=(SPEC,),
        **fields,
    )


def paths(asked: list[EngineRequest]) -> list[str]:
    return [request.path for request in asked]


class TestRecognising:
    def test_what_follows_from_the_answers(self) -> None:
        info = recognised()
        assert (info.kind, info.engine, info.model, info.version) == ("sglang", "sglang 0.5.23", "tiny", 12)
        assert (info.tp_size, info.staging, info.host_id, info.paused) == (2, "none", host_id(), False)
        assert info.sizes == "tp 2"
        assert recognised({"dp_size": 2, "ep_size": 2}).sizes == "tp 2, dp 2, ep 2"
        assert [rank.device for rank in info.ranks] == ["cpu", "cpu"]
        assert info.transports == ("ipc", "broadcast", "disk")

    def test_other_answers(self) -> None:
        assert recognised(model={"weight_version": "default"}).version is None
        assert recognised({"device": "cuda"}).ranks[0].device == "cuda"
        assert recognised(url="http://10.0.3.7:30000").host_id == "host:10.0.3.7"
        assert recognised(ready=503).paused
        assert not recognised(ready=404).paused  # older ones have no such route

    def test_a_start_is_told_from_another(self) -> None:
        assert recognised().ranks == recognised().ranks
        assert recognised().ranks != recognised({"random_seed": 8}).ranks

    @pytest.mark.parametrize(
        ("server", "words"), [({"dp_size": 2}, "dp_size must be 1"), ({"pp_size": 2}, "pp_size must be 1")]
    )
    def test_parallel_in_a_way_that_only_a_folder_reaches(self, server: Answers, words: str) -> None:
        info = recognised(server)
        assert info.transports == ("disk",)
        assert words in info.message

    def test_shared_weights_are_not_touched(self) -> None:
        info = recognised({"weight_cache_mode": "client"})
        assert info.transports == ()
        assert "--weight-cache-mode" in info.message

    def test_quantised_while_loading(self) -> None:
        assert "quantised already" in recognised({"quantization": "fp8"}).message
        assert recognised({"quantization": "fp8", "load_format": "flash_rl"}).message == ""

    def test_older_names_of_its_routes(self) -> None:
        older = {"/server_info": 404, "/model_info": 404, "/get_server_info": SERVER, "/get_model_info": MODEL}
        _, info = talk(SglangKind().recognise(URL), older)
        assert info is not None
        assert info.version == 12

    @pytest.mark.parametrize(
        "answers",
        [
            {"/server_info": 404, "/get_server_info": 404},
            {"/server_info": {"vllm_config": {"tp_size": 2}}},
            {"/server_info": ["tp_size"]},
            {"/server_info": SERVER, "/model_info": 404, "/get_model_info": 405},
            {"/server_info": 500},
        ],
    )
    def test_what_is_none(self, answers: Answers) -> None:
        assert talk(SglangKind().recognise(URL), answers)[1] is None

    def test_a_wrong_key_is_said(self) -> None:
        with pytest.raises(TargetRejected):
            talk(SglangKind().recognise(URL), {"/server_info": 401})


class TestPreflight:
    def test_the_environment_must_agree_for_nccl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter = SglangAdapter(recognised({"device": "cuda"}))
        monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
        with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE") as caught:
            adapter.check([SPEC], transport="broadcast", bucket_bytes=100)
        assert "NCCL_CUMEM_ENABLE=0" in str(caught.value.hint)
        adapter.check([SPEC], transport="ipc", bucket_bytes=100)
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
        adapter.check([SPEC], transport="broadcast", bucket_bytes=100)
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
        SglangAdapter(recognised()).check([SPEC], transport="broadcast", bucket_bytes=100)

    def test_buckets_are_what_its_arithmetic_expects(self) -> None:
        specs = [
            TensorSpec(name=name, dtype=dtype, shape=shape)
            for name, dtype, shape in (("a", "uint8", (3,)), ("b", "float32", (2,)), ("c", "bfloat16", (5,)))
        ]
        for layout in plan_buckets(specs, bucket_bytes=64, packing=SglangAdapter.packing):
            end = 0
            for slot in layout.slots:
                assert slot.whole
                assert slot.offset_bytes == end
                assert end % slot.spec.torch_dtype.itemsize == 0
                end = slot.end_bytes


class TestAnUpdate:
    def test_by_broadcast(self) -> None:
        adapter = SglangAdapter(recognised())
        asked, ack = talk(adapter.open(opening()), {})
        assert paths(asked) == ["/pause_generation", "/begin_weight_update"]
        assert json.loads(asked[0].body) == {"mode": "abort"}
        assert ack.ok
        invitation = Invitation(
            session="s", group="g", host="h", port=1, token="", first_rank=3, world_size=5, backend="nccl",
            bucket_bytes=9, timeout_s=1.0,
        )  # fmt: skip
        asked, _ = talk(adapter.join(invitation), {})
        assert (asked[0].path, json.loads(asked[0].body)["rank_offset"]) == ("/init_weights_update_group", 3)
        asked, _ = talk(adapter.bucket("s", LAYOUT, group="g", shared=()), {})
        body = json.loads(asked[0].body)
        assert (body["names"], body["dtypes"], body["shapes"]) == (["model.norm.weight"], ["bfloat16"], [[4, 2]])
        assert (body["flush_cache"], body["load_format"]) == (False, "flattened_bucket")
        asked, ack = talk(adapter.commit(Commit(session="a" * 32)), {})
        assert paths(asked) == [
            "/end_weight_update",
            "/flush_cache",
            "/update_weight_version",
            "/continue_generation",
        ]
        assert json.loads(asked[2].body) == {"new_version": "13", "abort_all_requests": False}
        assert (ack.version, ack.ranks) == (13, 2)
        asked, _ = talk(adapter.leave("g"), {"/destroy_weights_update_group": 400})
        assert paths(asked) == ["/destroy_weights_update_group"]
        assert talk(adapter.leave("g"), {})[0] == []

    def test_a_server_without_sessions_is_asked_once(self) -> None:
        adapter = SglangAdapter(recognised())
        old: Answers = {"/begin_weight_update": 404, "/update_weight_version": 404}
        for expected in (["/pause_generation", "/begin_weight_update"], ["/pause_generation"]):
            assert paths(talk(adapter.open(opening()), old)[0]) == expected
            asked, _ = talk(adapter.commit(Commit(session="a" * 32)), old)
            assert "/end_weight_update" not in paths(asked)
            assert paths(asked)[-1] == "/continue_generation"

    def test_a_session_of_somebody_who_is_gone_is_ended_first(self) -> None:
        answers = iter([{}, 400, {}, {}])
        asked, _ = talk(SglangAdapter(recognised()).open(opening()), lambda _: next(answers))
        assert paths(asked)[1:] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]

    @pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
    def test_pause_modes(self, pause: str) -> None:
        asked, _ = talk(SglangAdapter(recognised()).open(opening(pause=pause)), {})
        assert json.loads(asked[0].body) == {"mode": pause}

    def test_wait_is_waiting_for_a_moment_without_requests(self) -> None:
        asked, _ = talk(SglangAdapter(recognised()).open(opening(pause="wait")), {})
        assert paths(asked)[:2] == ["/flush_cache?timeout=25", "/pause_generation"]
        with pytest.raises(TargetRejected) as caught:
            talk(SglangAdapter(recognised()).open(opening(pause="wait")), {"/flush_cache": 400})
        assert any("retract" in note for note in caught.value.__notes__)

    def test_a_cache_that_cannot_be_flushed_is_said_or_fails(self) -> None:
        for pause, fine in (("in_place", True), ("abort", False)):
            adapter = SglangAdapter(recognised())
            talk(adapter.open(opening(pause=pause)), {})
            if fine:
                _, ack = talk(adapter.commit(Commit(session="a" * 32)), {"/flush_cache": 400})
                assert "keep their cache" in ack.message
            else:
                with pytest.raises(TargetRejected):
                    talk(adapter.commit(Commit(session="a" * 32)), {"/flush_cache": 400})

    def test_its_own_checksums(self) -> None:
        adapter = SglangAdapter(recognised())
        said = {"ranks": [{}, {}], "per_engine_checksum": "1" * 64}
        _, ack = talk(adapter.open(opening(verify="resident")), {"/weights_checker": said})
        assert ack.checksum == "1" * 64
        said = {"ranks": [{}, {}], "per_engine_checksum": "2" * 64}
        _, ack = talk(adapter.commit(Commit(session="a" * 32)), {"/weights_checker": said})
        assert ack.checksum == "2" * 64
        assert "over 2 ranks went from 1111111111111111 to 2222222222222222" in ack.message
        # One rank of two is no answer for both; nor is a server without the route.
        for answer in ({"ranks": [{}], "per_engine_checksum": "3" * 64}, 404, 400):
            _, ack = talk(SglangAdapter(recognised()).open(opening(verify="resident")), {"/weights_checker": answer})
            assert ack.checksum == ""

    def test_abort_before_a_bucket_goes_on_and_after_one_stays_paused(self) -> None:
        adapter = SglangAdapter(recognised())
        talk(adapter.open(opening()), {})
        asked, ack = talk(adapter.abort("s", "why"), {})
        assert (paths(asked), ack.state) == (["/end_weight_update", "/continue_generation"], "serving")
        talk(adapter.open(opening()), {})
        talk(adapter.bucket("s", LAYOUT, group="g", shared=()), {})
        asked, ack = talk(adapter.abort("s", "why"), {"/end_weight_update": 400})
        assert (paths(asked), ack.state) == (["/end_weight_update"], "quarantined")
        # An update that ends before its first bucket does not let go on what an earlier one has half written.
        talk(adapter.open(opening()), {})
        asked, ack = talk(adapter.abort("s", "why"), {})
        assert (paths(asked), ack.state) == (["/end_weight_update"], "quarantined")
        talk(adapter.open(opening()), {})
        talk(adapter.bucket("s", LAYOUT, group="g", shared=()), {})
        talk(adapter.commit(Commit(session="a" * 32)), {})
        talk(adapter.open(opening()), {})
        assert talk(adapter.abort("s", "why"), {})[1].state == "serving"

    def test_who_was_left_paused_by_somebody_else_goes_on_after_a_whole_update_only(self) -> None:
        adapter = SglangAdapter(msgspec.structs.replace(recognised(), paused=True))
        talk(adapter.open(opening()), {})
        asked, ack = talk(adapter.abort("s", "why"), {})
        assert (paths(asked), ack.state) == (["/end_weight_update"], "quarantined")

    def test_by_folder_there_is_no_session(self) -> None:
        adapter = SglangAdapter(recognised())
        adapter.check([SPEC], transport="disk", bucket_bytes=100)
        assert paths(talk(adapter.open(opening()), {})[0]) == ["/weights_checker", "/pause_generation"]
        asked, _ = talk(adapter.load_folder("s", "/f"), {})
        # Rank 0 answers for itself; the folder must stay until the others have read it too.
        assert paths(asked) == ["/update_weights_from_disk", "/weights_checker"]
        assert json.loads(asked[0].body) == {"model_path": "/f", "flush_cache": False}
        assert "/end_weight_update" not in paths(talk(adapter.commit(Commit(session="a" * 32)), {})[0])
        with pytest.raises(TargetRejected):  # nothing has moved
            talk(adapter.open(opening()), {"/weights_checker": 404})
        one = SglangAdapter(recognised({"tp_size": 1}))
        one.check([SPEC], transport="disk", bucket_bytes=100)
        assert paths(talk(one.open(opening()), {})[0]) == ["/pause_generation"]
        assert paths(talk(one.load_folder("s", "/f"), {})[0]) == ["/update_weights_from_disk"]

    def test_scores(self) -> None:
        said = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-1.5, 7, None]]}}
        assert talk(SglangAdapter(recognised()).score([5, 6, 7]), {"/generate": said})[1] == [-0.5, -1.5]
        for wrong in ({}, {"meta_info": {}}, {"meta_info": {"input_token_logprobs": [[None, 5, None]]}}):
            with pytest.raises(WireError):
                talk(SglangAdapter(recognised()).score([5, 6, 7]), {"/generate": wrong})


def memory(device: str, name: bytes) -> TorchMemory:
    return TorchMemory(kind="cuda", device=device, size_bytes=4096, handle=name, ref_counter=b"/c", event=b"e" * 64)


def names_in(payload: str) -> set[str]:
    return {
        str(argument)
        for opcode, argument, _ in pickletools.genops(base64.b64decode(payload))
        if opcode.name == "GLOBAL"
    }


class TestEnvelope:
    def test_it_names_what_the_decoder_knows_and_nothing_else(self) -> None:
        host = TorchMemory(kind="shm", device="cpu", size_bytes=4096, handle=b"/torch_1", manager=b"/m")
        allowed = GLOBALS | {f"torch {dtype}" for dtype in DTYPES}
        for item in (host, memory("11111111-2222", b"h")):
            found = names_in(bucket_payload(LAYOUT, item))
            assert "types SimpleNamespace" in found
            assert found <= allowed

    def test_numbers_and_names_survive(self) -> None:
        odd = TensorSpec(name="a" * 300, dtype="float32", shape=(1, 129, 70000))
        slot = TensorSlot(spec=odd, offset_bytes=1 << 40, num_rows=1)
        layout = BucketLayout(index=0, slots=(slot,), size_bytes=(1 << 40) + odd.size_bytes)
        arguments = [
            argument
            for _, argument, _ in pickletools.genops(base64.b64decode(bucket_payload(layout, memory("u", b"h"))))
        ]
        for expected in ("a" * 300, 70000, 129, 1 << 40, (1 << 40) + odd.size_bytes, odd.size_bytes, "u", b"h", b"/c"):
            assert expected in arguments

    def test_every_rank_gets_the_buffer_on_its_own_gpu(self) -> None:
        info = recognised({"device": "cuda"})
        ranks = tuple(msgspec.structs.replace(rank, device=f"uuid-{1 - rank.rank}") for rank in info.ranks)
        shared = [Shared(torch=(memory(f"uuid-{n}", b"%d-0" % n), memory(f"uuid-{n}", b"%d-1" % n))) for n in (0, 1)]
        for known, expected in ((ranks, [b"1-0", b"0-1"]), (info.ranks, [b"0-0", b"1-1"])):
            adapter = SglangAdapter(msgspec.structs.replace(info, ranks=known))
            asked, _ = talk(adapter.bucket("s", LAYOUT, group=None, shared=shared), {})
            for payload, handle in zip(json.loads(asked[0].body)["serialized_named_tensors"], expected, strict=True):
                assert handle in [argument for _, argument, _ in pickletools.genops(base64.b64decode(payload))]
        away = tuple(msgspec.structs.replace(rank, device="uuid-9") for rank in info.ranks)
        adapter = SglangAdapter(msgspec.structs.replace(info, ranks=away))
        with pytest.raises(WireError, match="rank 0 is on uuid-9"):
            talk(adapter.bucket("s", LAYOUT, group=None, shared=shared), {})
