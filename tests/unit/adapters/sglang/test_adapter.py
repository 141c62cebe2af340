"""The SGLang adapter, detection and payload without SGLang: requests and answers as data."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from tests.helpers.sglang_globals import GLOBALS
from weightcast.adapters.sglang.adapter import SglangAdapter
from weightcast.adapters.sglang.detect import SglangKind
from weightcast.adapters.sglang.payload import bucket_payload
from weightcast.comm.ipc import host_id
from weightcast.comm.run_steps import EngineRequest
from weightcast.comm.shared_buckets import Shared, TorchMemory
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import Delivery, Invitation
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import DTYPES, BucketLayout, TensorSlot, TensorSpec, plan_buckets
from weightcast.wire.messages import Commit, Join, Open, Owner
from weightcast.wire.plans import UpdateTables

URL = "http://127.0.0.1:30000"
SERVER = {"version": "0.5.23", "tp_size": 2, "dp_size": 1, "pp_size": 1, "device": "cpu", "random_seed": 7}
BARE = {"disable_radix_cache": True}
MODEL = {"served_model_name": "tiny", "weight_version": "12"}
SPEC = TensorSpec(name="model.norm.weight", dtype="bfloat16", shape=(4, 2))
LAYOUT = BucketLayout(index=0, slots=(TensorSlot(spec=SPEC, offset_bytes=0, num_rows=4),), size_bytes=16)
Result = TypeVar("Result")
Answers = dict[str, Any]


def talk(
    steps: Generator[EngineRequest, bytes, Result], answers: Answers | Callable[[EngineRequest], Any]
) -> tuple[list[EngineRequest], Result]:
    """Answers each request: a number is a refusal with that status, anything else the body; the default is {}."""
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
        plan=UpdateTables((SPEC,), ()),
        **fields,
    )


def paths(asked: list[EngineRequest]) -> list[str]:
    return [request.path for request in asked]


@pytest.mark.parametrize(("capability", "ipc"), [(None, False), ((9, 0), True), ((10, 0), False)])
def test_fp8_goes_into_sglang_in_blocks_where_its_scales_have_the_form_that_was_sent(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, ipc: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    def specs(suffix: str) -> list[TensorSpec]:
        weight = TensorSpec(name="l.o_proj.weight", dtype="float8_e4m3fn", shape=(4, 4))
        return [SPEC, weight, TensorSpec(name=weight.name + suffix, dtype="float32", shape=(1, 1))]

    adapter = SglangAdapter(recognised())
    adapter.check(specs("_scale_inv"), delivery="folder", bucket_bytes=1 << 20)
    if ipc:
        adapter.check(specs("_scale_inv"), delivery="memory", bucket_bytes=1 << 20)
    refused: tuple[Delivery, ...] = ("group",) if ipc else ("memory", "group")
    for delivery in refused:
        with pytest.raises(ConfigError, match=r"another form of fp8 scales.*: l\.o_proj\.weight; nothing"):
            adapter.check(specs("_scale_inv"), delivery=delivery, bucket_bytes=1 << 20)
    for delivery in ("memory", "group", "folder"):
        with pytest.raises(
            ConfigError, match=r"one scale for a tensor, channel or group .*: l\.o_proj\.weight; nothing"
        ):
            adapter.check(specs("_scale"), delivery=delivery, bucket_bytes=1 << 20)


def test_a_language_model_without_the_vision_tower_is_refused_by_a_server_that_encodes_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "0")
    info = recognised(model={"has_image_understanding": True})
    tower = TensorSpec(name="model.visual.blocks.0.attn.proj.weight", dtype="bfloat16", shape=(4, 4))
    adapter = SglangAdapter(info)
    adapter.check([SPEC, tower], delivery="memory", bucket_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"no tensor of the update belongs to a vision tower") as caught:
        adapter.check([SPEC], delivery="memory", bucket_bytes=1 << 20)
    assert "match=REGEX" in str(caught.value.hint)
    SglangAdapter(recognised()).check([SPEC], delivery="memory", bucket_bytes=1 << 20)


@pytest.mark.parametrize("value", [None, "100", ""])
def test_a_cache_of_encoded_images_that_no_flush_reaches_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("SGLANG_VLM_CACHE_SIZE_MB", raising=False)
    if value is not None:
        monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", value)
    tower = TensorSpec(name="model.visual.blocks.0.attn.proj.weight", dtype="bfloat16", shape=(4, 4))
    with pytest.raises(ConfigError, match="no flush reaches that cache") as caught:
        SglangAdapter(recognised(model={"has_image_understanding": True})).check(
            [SPEC, tower], delivery="memory", bucket_bytes=1 << 20
        )
    assert "SGLANG_VLM_CACHE_SIZE_MB=0" in str(caught.value.hint)
    SglangAdapter(recognised()).check([SPEC, tower], delivery="memory", bucket_bytes=1 << 20)


DRAFT = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/models/draft", "model_path": "/models/a"}


def test_a_draft_model_is_kept_and_named() -> None:
    info = recognised(DRAFT)
    assert info.transports == ("ipc", "broadcast"), "the others would load the model's weights into the draft"
    assert any("its draft model is not updated" in hazard for hazard in info.hazards)
    adapter = SglangAdapter(info)
    asked, _ = talk(adapter.open(opening(verify="resident")), {})
    asked += talk(adapter.bucket("a" * 32, LAYOUT, group="g", shared=()), {})[0]
    chosen = {request.path: json.loads(request.body or b"{}").get("selector") for request in asked}
    wanted = ("/weights_checker", "/begin_weight_update", "/update_weights_from_distributed")
    assert {path: chosen[path] for path in wanted} == dict.fromkeys(wanted, "target")
    _, ack = talk(adapter.commit(Commit(session="a" * 32)), {})
    assert ack.not_updated == ("the draft model",)


def test_a_version_that_loads_updates_into_its_draft_takes_none() -> None:
    info = recognised(DRAFT | {"version": "0.5.17"})
    assert info.transports == ()
    assert "would load an update into its draft model too" in info.message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"weight_cache_mode": "daemon"}, "--weight-cache-mode must be off"),
        ({"enable_lmcache": True}, "keep results of the old weights"),
        ({"quantization": "fp8"}, "does not compute the scales"),
        ({"dp_size": 2}, "dp_size must be 1"),
    ],
)
def test_a_draft_lifts_no_other_refusal(more: Answers, words: str) -> None:
    info = recognised(DRAFT | more)
    assert info.transports == ()
    assert words in info.message


@pytest.mark.parametrize(
    ("server", "hazards"),
    [
        ({"speculative_algorithm": "NGRAM"}, 0),
        ({"speculative_algorithm": None}, 0),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/a", "model_path": "/a"}, 1),
        ({"speculative_algorithm": "NEXTN", "speculative_draft_model_path": None}, 1),
    ],
)
def test_mtp_layers_get_what_the_checkpoint_has(server: Answers, hazards: int) -> None:
    info = recognised(server)
    assert len(info.hazards) == hazards
    assert all("does not tell whether an update has written them" in hazard for hazard in info.hazards)
    asked, ack = talk(SglangAdapter(info).open(opening()), {})
    assert not any("selector" in json.loads(request.body or b"{}") for request in asked)
    assert ack.not_updated == ()


class TestRecognising:
    def test_server_is_described_by_its_answers(self) -> None:
        info = recognised()
        assert (info.kind, info.engine, info.model, info.version) == ("sglang", "sglang 0.5.23", "tiny", 12)
        assert (info.tp_size, info.staging, info.host_id, info.paused) == (2, "none", host_id(), False)
        assert info.sizes == "tp 2"
        assert recognised({"dp_size": 2, "ep_size": 2}).sizes == "tp 2, dp 2, ep 2"
        assert [rank.device for rank in info.ranks] == ["cpu", "cpu"]
        assert info.transports == ("ipc", "broadcast", "disk")

    def test_server_is_described_by_other_answers(self) -> None:
        assert recognised(model={"weight_version": "default"}).version is None
        assert recognised({"device": "cuda"}).ranks[0].device == "cuda"
        assert recognised(url="http://10.0.3.7:30000").host_id == "host:10.0.3.7"
        assert recognised(ready=503).paused
        assert not recognised(ready=404).paused  # older ones have no such route

    def test_restart_changes_the_incarnation(self) -> None:
        assert recognised().incarnation == recognised().incarnation
        assert recognised().incarnation != recognised({"random_seed": 8}).incarnation
        once, again = ({"startup_time": {"load_weight": 0.2, "tokenizer_e2e": seconds}} for seconds in (4.1, 4.2))
        assert recognised(once).incarnation == recognised(once).incarnation != recognised(again).incarnation
        assert recognised().tells_version
        assert not recognised(model={"weight_version": ""}).tells_version

    @pytest.mark.parametrize("version", ["0.5.17", "0.5.20"])
    def test_server_that_flushes_only_without_requests_refuses_pauses_that_keep_them(self, version: str) -> None:
        refused = recognised({"version": version}).no_pause
        assert set(refused) == {"retract", "in_place", "wait"}
        for words in refused.values():
            assert 'pause="abort", or start SGLang with --disable-radix-cache' in words
        assert recognised({"version": version} | BARE).no_pause == {}

    @pytest.mark.parametrize("version", ["0.5.21", "0.5.23", "0.6.0", "unknown"])
    def test_server_that_flushes_while_requests_wait_refuses_only_in_place(self, version: str) -> None:
        assert set(recognised({"version": version}).no_pause) == {"in_place"}
        assert recognised({"version": version} | BARE).no_pause == {}

    @pytest.mark.parametrize(
        "name",
        [
            "hicache_storage_backend",
            "enable_lmcache",
            "enable_flexkv",
            "enable_mm_global_cache",
            "enable_streaming_session",
        ],
    )
    def test_cache_that_no_flush_reaches_is_refused(self, name: str) -> None:
        info = recognised({name: "file"})
        assert info.transports == ()
        assert f"--{name.replace('_', '-')}" in info.message

    @pytest.mark.parametrize(
        ("server", "words"), [({"dp_size": 2}, "dp_size must be 1"), ({"pp_size": 2}, "pp_size must be 1")]
    )
    def test_data_and_pipeline_parallel_servers_take_only_disk(self, server: Answers, words: str) -> None:
        info = recognised(server)
        assert info.transports == ("disk",)
        assert words in info.message

    def test_weights_shared_between_servers_are_refused(self) -> None:
        info = recognised({"weight_cache_mode": "client"})
        assert info.transports == ()
        assert "--weight-cache-mode" in info.message

    def test_two_different_keys_are_refused(self) -> None:
        info = recognised({"api_key": "one", "admin_api_key": "other"})
        assert info.transports == ()
        assert "--admin-api-key" in info.message
        for keys in ({"api_key": "one"}, {"admin_api_key": "one"}, {"api_key": "one", "admin_api_key": "one"}):
            assert recognised(keys).transports

    def test_quantisation_at_load_time_is_refused(self) -> None:
        quantised = recognised({"quantization": "fp8"})
        assert (quantised.transports, "quantised already" in quantised.message) == ((), True)
        assert recognised({"quantization": "fp8", "load_format": "flash_rl"}).message == ""

    def test_older_route_names_are_tried(self) -> None:
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
    def test_other_servers_are_not_taken_for_sglang(self, answers: Answers) -> None:
        assert talk(SglangKind().recognise(URL), answers)[1] is None

    def test_wrong_key_is_a_refusal(self) -> None:
        with pytest.raises(TargetRejected):
            talk(SglangKind().recognise(URL), {"/server_info": 401})


class TestPreflight:
    def test_nccl_environment_must_agree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter = SglangAdapter(recognised({"device": "cuda"}))
        monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
        with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE") as caught:
            adapter.check([SPEC], delivery="group", bucket_bytes=100)
        assert "NCCL_CUMEM_ENABLE=0" in str(caught.value.hint)
        adapter.check([SPEC], delivery="memory", bucket_bytes=100)
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
        adapter.check([SPEC], delivery="group", bucket_bytes=100)
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
        SglangAdapter(recognised()).check([SPEC], delivery="group", bucket_bytes=100)

    def test_bucket_offsets_are_in_bytes_without_gaps(self) -> None:
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
    def test_requests_of_an_update_by_broadcast(self) -> None:
        adapter = SglangAdapter(recognised())
        asked, ack = talk(adapter.open(opening()), {})
        assert paths(asked) == ["/pause_generation", "/flush_cache?timeout=5", "/begin_weight_update"]
        assert json.loads(asked[0].body) == {"mode": "abort"}
        assert ack.ok
        join = Join(
            session="s", group="g", host="h", port=1, token="", first_rank=3, world_size=5, backend="nccl",
            timeout_s=1.0,
        )  # fmt: skip
        invitation = Invitation(join=join, bucket_bytes=9)
        asked, _ = talk(adapter.join(invitation), {})
        assert (asked[0].path, json.loads(asked[0].body)["rank_offset"]) == ("/init_weights_update_group", 3)
        asked, _ = talk(adapter.bucket("s", LAYOUT, group="g", shared=()), {})
        body = json.loads(asked[0].body)
        assert (body["names"], body["dtypes"], body["shapes"]) == (["model.norm.weight"], ["bfloat16"], [[4, 2]])
        assert (body["flush_cache"], body["load_format"]) == (False, "flattened_bucket")
        asked, ack = talk(adapter.commit(Commit(session="a" * 32)), {})
        assert paths(asked) == [
            "/end_weight_update",
            "/update_weight_version",
            "/continue_generation",
        ]
        assert json.loads(asked[1].body) == {"new_version": "13", "abort_all_requests": False}
        # By default SGLang empties torch's cache here, before any request goes on.
        assert json.loads(asked[2].body) == {"torch_empty_cache": False}
        assert (ack.version, ack.ranks) == (13, 2)
        asked, _ = talk(adapter.leave("g"), {"/destroy_weights_update_group": 400})
        assert paths(asked) == ["/destroy_weights_update_group"]
        assert talk(adapter.leave("g"), {})[0] == []

    def test_server_without_sessions_is_asked_once(self) -> None:
        adapter = SglangAdapter(recognised(BARE))
        old: Answers = {"/begin_weight_update": 404, "/update_weight_version": 404}
        for expected in (["/pause_generation", "/begin_weight_update"], ["/pause_generation"]):
            assert paths(talk(adapter.open(opening()), old)[0]) == expected
            asked, _ = talk(adapter.commit(Commit(session="a" * 32)), old)
            assert "/end_weight_update" not in paths(asked)
            assert paths(asked)[-1] == "/continue_generation"

    def test_open_session_of_a_dead_trainer_is_ended_first(self) -> None:
        answers = iter([{}, 400, {}, {}])
        asked, _ = talk(SglangAdapter(recognised(BARE)).open(opening()), lambda _: next(answers))
        assert paths(asked)[1:] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]

    @pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
    def test_pause_modes(self, pause: str) -> None:
        asked, _ = talk(SglangAdapter(recognised()).open(opening(pause=pause)), {})
        assert json.loads(asked[0].body) == {"mode": pause}

    def test_pause_wait_loads_an_empty_list_until_requests_have_ended(self) -> None:
        for refusal in ({}, 400):  # a server with sessions has none open, and says so when its requests have ended
            answers = {"/update_weights_from_tensor": refusal}
            asked, _ = talk(SglangAdapter(recognised()).open(opening(pause="wait")), answers)
            assert paths(asked)[:3] == ["/update_weights_from_tensor", "/pause_generation", "/flush_cache"]
            body = json.loads(asked[0].body)
            [payload] = set(body["serialized_named_tensors"])
            assert len(body["serialized_named_tensors"]) == 2
            assert pickle.loads(base64.b64decode(payload)) == []
            assert body["flush_cache"] is False
            assert json.loads(asked[1].body) == {"mode": "retract"}
        with pytest.raises(TargetRejected):
            talk(SglangAdapter(recognised()).open(opening(pause="wait")), {"/update_weights_from_tensor": 500})

    @pytest.mark.parametrize("pause", ["abort", "retract", "wait"])
    def test_refused_flush_fails_the_update_before_any_weight_changes(self, pause: str) -> None:
        adapter = SglangAdapter(recognised())
        with pytest.raises(TargetRejected, match="does not flush its prefix cache") as caught:
            talk(adapter.open(opening(pause=pause)), {"/flush_cache": 400})
        assert "--disable-radix-cache" in str(caught.value.hint)
        asked, ack = talk(adapter.abort("s", "why"), {})
        assert (paths(asked), ack.state) == (["/continue_generation"], "serving")

    @pytest.mark.parametrize("pause", ["abort", "retract", "in_place", "wait"])
    def test_server_without_prefix_cache_is_not_flushed(self, pause: str) -> None:
        adapter = SglangAdapter(recognised(BARE))
        asked, _ = talk(adapter.open(opening(pause=pause)), {"/flush_cache": 400})
        more, _ = talk(adapter.commit(Commit(session="a" * 32)), {"/flush_cache": 400})
        assert not [path for path in paths([*asked, *more]) if path.startswith("/flush_cache")]

    def test_unchanged_checksum_after_changed_weights_is_a_failure(self) -> None:
        adapter = SglangAdapter(recognised())
        same = {"/weights_checker": {"ranks": [{}, {}], "per_engine_checksum": "1" * 64}}
        talk(adapter.open(opening(verify="resident")), same)
        adapter.expect_change(False)
        _, ack = talk(adapter.commit(Commit(session="a" * 32)), same)
        assert "as before" in ack.message
        talk(adapter.open(opening(verify="resident")), same)
        talk(adapter.bucket("s", LAYOUT, group="g", shared=()), {})
        adapter.expect_change(True)
        with pytest.raises(WireError, match="took none of the new weights"):
            talk(adapter.commit(Commit(session="a" * 32)), same)
        asked, ack = talk(adapter.abort("s", "why"), {})
        assert (asked, ack.state) == ([], "quarantined")

    def test_names_of_a_bare_backbone_that_change_nothing_are_a_failure(self) -> None:
        """Equal weights change nothing either, but their names would fit."""
        same = dict.fromkeys(["model.norm.weight", "model.layers.0.mlp.gate_up_proj.weight", "lm_head.weight"], "0")
        said = {"/weights_checker": {"ranks": [{"checksums": same}] * 2, "per_engine_checksum": "1" * 64}}

        def commit(*names: str) -> Ack:
            adapter = SglangAdapter(recognised())
            specs = [TensorSpec(name=name, dtype="bfloat16", shape=(4, 2)) for name in names]
            adapter.check(specs, delivery="memory", bucket_bytes=1 << 20)
            talk(adapter.open(opening(verify="resident")), said)
            return talk(adapter.commit(Commit(session="a" * 32)), said)[1]

        with pytest.raises(WireError, match=r"no tensor norm\.weight, .* it has model\.norm\.weight"):
            commit("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight", "norm.weight")
        for names in (["model.norm.weight"], ["lm_head.weight", "norm.weight"], ["model.language_model.norm.weight"]):
            assert "as before: the weights are the same, or it took none" in commit(*names).message

    def test_checksums_before_and_after_are_compared(self) -> None:
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

    def test_tensors_that_kept_their_values_and_were_not_sent_are_named(self) -> None:
        """SGLang skips names that it does not know, and an update without a head leaves the head as it is."""
        names = [f"model.layers.0.{part}" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.experts.0.up_proj")]
        specs = [TensorSpec(name=f"{name}.weight", dtype="bfloat16", shape=(4, 2)) for name in (*names, "model.norm")]
        layer = "language_model.layers.0"
        stays = ["lm_head.weight", "language_model.norm.weight", f"{layer}.self_attn.qkv_proj.weight"]
        stays += [f"{layer}.mlp.experts.w13_weight", f"{layer}.mlp.gate.weight"]
        changes = [f"{layer}.self_attn.o_proj.weight", "scale"]

        def said(value: str) -> Answers:
            ranks = [{"checksums": dict.fromkeys(stays, "0") | dict.fromkeys(changes, value)}] * 2
            return {"/weights_checker": {"ranks": ranks, "per_engine_checksum": value * 64}}

        adapter = SglangAdapter(recognised())
        adapter.check(specs, delivery="memory", bucket_bytes=1 << 20)
        talk(adapter.open(opening(verify="resident")), said("1"))
        _, ack = talk(adapter.commit(Commit(session="a" * 32)), said("2"))
        assert "5 of its 7 tensors are as before" in ack.message
        assert ack.message.endswith("no name that was sent fits 2 of these: language_model.layers.0.mlp.gate.weight, "
                                    "lm_head.weight")  # fmt: skip
        _, ack = talk(adapter.open(opening(verify="resident")), said("3"))
        _, ack = talk(adapter.commit(Commit(session="a" * 32)), said("3"))
        assert "as before: the weights are the same" in ack.message

    def test_abort_resumes_before_a_bucket_and_stays_paused_after_one(self) -> None:
        adapter = SglangAdapter(recognised())
        talk(adapter.open(opening()), {})
        asked, ack = talk(adapter.abort("s", "why"), {})
        assert (paths(asked), ack.state) == (["/end_weight_update", "/continue_generation"], "serving")
        talk(adapter.open(opening()), {})
        talk(adapter.bucket("s", LAYOUT, group="g", shared=()), {})
        asked, ack = talk(adapter.abort("s", "why"), {"/end_weight_update": 400})
        assert (paths(asked), ack.state) == (["/end_weight_update"], "quarantined")
        # An update that ends before its first bucket does not resume a half-written engine.
        talk(adapter.open(opening()), {})
        asked, ack = talk(adapter.abort("s", "why"), {})
        assert (paths(asked), ack.state) == (["/end_weight_update"], "quarantined")
        talk(adapter.open(opening()), {})
        talk(adapter.bucket("s", LAYOUT, group="g", shared=()), {})
        talk(adapter.commit(Commit(session="a" * 32)), {})
        talk(adapter.open(opening()), {})
        assert talk(adapter.abort("s", "why"), {})[1].state == "serving"

    def test_engine_found_paused_resumes_only_after_a_whole_update(self) -> None:
        adapter = SglangAdapter(msgspec.structs.replace(recognised(), paused=True))
        talk(adapter.open(opening()), {})
        asked, ack = talk(adapter.abort("s", "why"), {})
        assert (paths(asked), ack.state) == (["/end_weight_update"], "quarantined")

    def test_disk_update_opens_no_session(self) -> None:
        adapter = SglangAdapter(recognised(BARE))
        adapter.check([SPEC], delivery="folder", bucket_bytes=100)
        assert paths(talk(adapter.open(opening()), {})[0]) == ["/weights_checker", "/pause_generation"]
        asked, _ = talk(adapter.load_folder("s", "/f"), {})
        # Rank 0 answers for itself; the folder must stay until the others have read it too.
        assert paths(asked) == ["/update_weights_from_disk", "/weights_checker"]
        assert json.loads(asked[0].body) == {"model_path": "/f", "flush_cache": False}
        assert "/end_weight_update" not in paths(talk(adapter.commit(Commit(session="a" * 32)), {})[0])
        with pytest.raises(TargetRejected):  # nothing has moved
            talk(adapter.open(opening()), {"/weights_checker": 404})
        one = SglangAdapter(recognised({"tp_size": 1} | BARE))
        one.check([SPEC], delivery="folder", bucket_bytes=100)
        assert paths(talk(one.open(opening()), {})[0]) == ["/pause_generation"]
        assert paths(talk(one.load_folder("s", "/f"), {})[0]) == ["/update_weights_from_disk"]

    def test_score_returns_log_probabilities_of_the_prompt(self) -> None:
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
    def test_payload_names_only_globals_of_the_list(self) -> None:
        host = TorchMemory(kind="shm", device="cpu", size_bytes=4096, handle=b"/torch_1", manager=b"/m")
        allowed = GLOBALS | {f"torch {dtype}" for dtype in DTYPES}
        for item in (host, memory("11111111-2222", b"h")):
            found = names_in(bucket_payload(LAYOUT, item))
            assert "types SimpleNamespace" in found
            assert found <= allowed

    def test_payload_keeps_numbers_and_names(self) -> None:
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
        with pytest.raises(ConfigError, match="on GPU uuid-9 of rank 0"):
            talk(adapter.bucket("s", LAYOUT, group=None, shared=shared), {})
