"""The vLLM adapters and detection without vLLM: requests and answers as data."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from weightcast.adapters.vllm.adapter import VllmAdapter
from weightcast.adapters.vllm.detect import VllmKind
from weightcast.adapters.vllm.payload import ipc_handles
from weightcast.adapters.vllm.server_info import Facts
from weightcast.comm.run_steps import EngineRequest, converse_on_loop
from weightcast.comm.shared_buckets import Shared, TorchMemory
from weightcast.config import PauseMode
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.runtime.deadline import Deadline
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import TensorSpec, plan_buckets
from weightcast.wire.messages import Close, Commit, Open, Owner
from weightcast.wire.plans import UpdateTables

SESSION = "0" * 32
SPECS = (TensorSpec(name="w", dtype="float32", shape=(4, 4)),)
EMPTY = hashlib.sha256(b"").hexdigest()
Answer = Any | Callable[[dict[str, Any]], Any]


class Server:
    """A fake server: answers by path, without the query; other paths get a 404."""

    def __init__(self, **routes: Answer) -> None:
        self.routes = routes
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    async def send(self, request: EngineRequest, limit: Deadline) -> bytes:
        self.asked.append(request.path)
        body = json.loads(request.body) if request.body else {}
        self.bodies.append(body)
        name = request.path.split("?")[0].strip("/").replace("/", "__").replace(".", "_")
        if name not in self.routes:
            raise TargetRejected("Not Found", url="u", status=404)
        answer = self.routes[name]
        answer = answer(body) if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    def ask(self, steps: Any) -> Any:
        client: Any = SimpleNamespace(target=SimpleNamespace(url="http://u"))
        return asyncio.run(converse_on_loop(client, steps, timeout_s=20.0, send=self.send))


def started(**config: Any) -> dict[str, Any]:
    """The /server_info of a server on a GPU."""
    return {
        "vllm_config": {"device_config": {"device": "cuda"}, "instance_id": "a1"} | config,
        "vllm_env": {"VLLM_ALLOW_INSECURE_SERIALIZATION": True},
    }


def a_server(info: Any, **more: Answer) -> Server:
    routes: dict[str, Answer] = {
        "version": {"version": "0.33.0"},
        "get_world_size": {"world_size": 2},
        "server_info": info,
        "weight_info": {"weight_version": "12"},
        "is_paused": {"is_paused": True},
        "v1__models": {"data": [{"id": "m"}]},
    }
    return Server(**(routes | more))


def opening(*, pause: PauseMode = "abort") -> Open:
    return Open(
        session=SESSION,
        owner=Owner(host="h", pid=1),
        version=13,
        timeout_s=5.0,
        lease_s=5.0,
        pause=pause,
        verify="resident",
        plan=UpdateTables(tuple(SPECS), ()),
    )


def refusal(words: str) -> TargetRejected:
    return TargetRejected(words, url="u", status=500)


@pytest.mark.parametrize(
    ("info", "transports", "words"),
    [
        (started(weight_transfer_config={"backend": "nccl"}), ("broadcast",), "--api-key does not cover"),
        (started(weight_transfer_config={"backend": "ipc"}), ("ipc",), "--api-key does not cover"),
        (
            started(weight_transfer_config={"backend": "ipc"}) | {"vllm_env": {"VLLM_ALLOW_INSECURE_SERIALIZATION": 0}},
            (),
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1",
        ),
        (started(), (), "--weight-transfer-config"),
        (
            started(weight_transfer_config={"backend": "sharded_rdt"}),
            (),
            "sharded_rdt, which weightcast does not support",
        ),
        (
            started(weight_transfer_config={"backend": "nccl"}, device_config={"device": "cpu"}),
            (),
            "nccl needs a GPU; on a CPU use weightcast's",
        ),
        (
            started(weight_transfer_config={"backend": "nccl"}, speculative_config={"method": "eagle"}),
            ("broadcast",),
            "draft model is not updated",
        ),
        (
            started(weight_transfer_config={"backend": "nccl"}, parallel_config={"enable_eplb": True}),
            (),
            "start vLLM without --enable-eplb",
        ),
        ({"vllm_config": "VllmConfig(model='m')"}, ("broadcast", "ipc"), "--api-key does not cover"),
    ],
)
def test_server_info_gives_transports_and_advice(info: Any, transports: tuple[str, ...], words: str) -> None:
    found = a_server(info).ask(VllmKind().recognise("http://127.0.0.1:1"))
    assert found is not None
    assert (found.engine, found.model, found.version, found.tp_size) == ("vllm 0.33.0", "m", 12, 2)
    assert (found.staging, found.paused, found.transports) == ("none", True, transports)
    assert words in found.message


def test_parallel_sizes_are_read_from_server_info() -> None:
    parallel = {"data_parallel_size": 2, "enable_expert_parallel": True}
    server = a_server(started(weight_transfer_config={"backend": "nccl"}, parallel_config=parallel))
    assert info_of(server).sizes == "tp 2, dp 2, ep 2"


def test_restarted_server_has_another_incarnation() -> None:
    first, again, other = (
        a_server(started(instance_id=number)).ask(VllmKind().recognise("http://127.0.0.1:1")) for number in "112"
    )
    assert first.incarnation == again.incarnation != other.incarnation


def test_server_without_dev_mode_is_recognised_and_advised() -> None:
    paths = {"/v1/completions": {}, "/tokenize": {}, "/version": {}}
    server = Server(version={"version": "0.33.0"}, openapi_json={"paths": paths}, v1__models={"data": [{"id": "m"}]})
    found = server.ask(VllmKind().recognise("http://example.invalid:1"))
    assert found.transports == ()
    assert "VLLM_SERVER_DEV_MODE=1" in found.message
    assert found.host_id == "host:example.invalid"


@pytest.mark.parametrize(
    "server",
    [
        Server(),
        Server(version=b"<html>"),
        Server(version={"version": 3}),
        Server(version={"version": "1"}, openapi_json={"paths": {"/version": {}}}),
        Server(version={"version": "1"}, openapi_json={"paths": []}),
        Server(version={"version": "1"}),
    ],
)
def test_other_servers_are_not_taken_for_vllm(server: Server) -> None:
    assert server.ask(VllmKind().recognise("http://127.0.0.1:1")) is None


@pytest.mark.parametrize("version", ["0.24.9", "0.15.1+cpu"])
def test_a_vllm_below_the_lowest_version_takes_no_update_and_is_told_both(version: str) -> None:
    info = started(weight_transfer_config={"backend": "nccl"})
    paths = {"/v1/completions": {}, "/tokenize": {}, "/version": {}}
    for server in (
        a_server(info, version={"version": version}),
        Server(version={"version": version}, openapi_json={"paths": paths}),
    ):
        found = info_of(server)
        assert found.transports == ()
        assert found.message == (
            f"vLLM {version} is older than 0.25, the lowest version that weightcast updates: install vLLM 0.25 or newer"
        )


@pytest.mark.parametrize("version", ["0.25.0", "1.0.0", "0.1.dev7"])
def test_the_lowest_version_and_development_versions_are_updated(version: str) -> None:
    info = started(weight_transfer_config={"backend": "nccl"})
    assert info_of(a_server(info, version={"version": version})).transports == ("broadcast",)


def info_of(server: Server) -> EngineInfo:
    return server.ask(VllmKind().recognise("http://127.0.0.1:1"))


def by_ipc(server: Server) -> VllmAdapter:
    adapter = VllmAdapter(info_of(server))
    adapter.check(SPECS, delivery="memory", bucket_bytes=1 << 20)
    return adapter


def test_in_place_pause_with_prefix_caching_is_refused() -> None:
    server = a_server(
        started(weight_transfer_config={"backend": "ipc"}, cache_config={"enable_prefix_caching": True}), pause={}
    )
    adapter = VllmAdapter(info_of(server))
    with pytest.raises(ConfigError, match="prefix caching"):
        server.ask(adapter.open(opening(pause="in_place")))
    assert not any(path.startswith("/pause") for path in server.asked)


def test_a_bucket_is_one_packed_chunk_of_an_update() -> None:
    server = a_server(
        started(weight_transfer_config={"backend": "ipc"}),
        pause={},
        init_weight_transfer_engine={},
        start_weight_update={},
        update_weights={},
        finish_weight_update={},
        resume={},
    )
    adapter = by_ipc(server)
    server.asked.clear()
    server.ask(adapter.open(opening()))
    (layout,) = plan_buckets(SPECS, bucket_bytes=1 << 20, packing=adapter.packing)
    memory = TorchMemory(kind="cuda", device="GPU-1", size_bytes=64, handle=b"h")
    server.ask(adapter.bucket(SESSION, layout, group=None, shared=[Shared(torch=(memory, memory))]))
    assert server.bodies[-1]["update_info"] | {"ipc_handles_pickled": ""} == {
        "names": ["w"],
        "dtype_names": ["float32"],
        "shapes": [[4, 4]],
        "tensor_sizes": [64],
        "ipc_handles_pickled": "",
    }
    server.ask(adapter.close(Close(session=SESSION, buckets=1)))
    ack = server.ask(adapter.commit(Commit(session=SESSION)))
    assert (ack.ok, ack.version) == (True, 13)
    assert server.asked[-1] == "/resume"


def test_init_refused_for_another_reason_is_not_repeated() -> None:
    server = a_server(
        started(weight_transfer_config={"backend": "ipc"}),
        pause={},
        init_weight_transfer_engine=refusal("Weight transfer not configured."),
    )
    adapter = by_ipc(server)
    with pytest.raises(TargetRejected, match="not configured"):
        server.ask(adapter.open(opening()))
    assert server.asked.count("/init_weight_transfer_engine") == 1


@pytest.mark.parametrize(
    ("version", "ranks", "accepts", "said"),
    [
        ("0.33.0", 2, {"packed": True}, [{"packed": True}]),
        ("0.25.1", 2, {}, [{}]),
        ("0.25.1", 1, {"packed": True}, [{}, {"packed": True}]),
        ("0.1.dev7", 1, {}, [{"packed": True}, {}]),
    ],
)
def test_init_form_of_the_version_is_tried_first(
    version: str, ranks: int, accepts: dict[str, Any], said: list[dict[str, Any]]
) -> None:
    heard: list[dict[str, Any]] = []

    def init(body: dict[str, Any]) -> dict[str, Any] | TargetRejected:
        heard.append(body["init_info"])
        return {} if body["init_info"] == accepts else refusal("Invalid init_info for IPCWeightTransferEngine")

    server = a_server(
        started(weight_transfer_config={"backend": "ipc"}),
        version={"version": version},
        get_world_size={"world_size": ranks},
        pause={},
        init_weight_transfer_engine=init,
        start_weight_update={},
    )
    adapter = by_ipc(server)
    server.ask(adapter.open(opening()))
    assert heard == said


def test_init_is_not_repeated_with_several_workers() -> None:
    server = a_server(
        started(weight_transfer_config={"backend": "ipc"}),
        pause={},
        init_weight_transfer_engine=refusal("Invalid init_info for IPCWeightTransferEngine"),
    )
    adapter = by_ipc(server)
    with pytest.raises(TargetRejected) as caught:
        server.ask(adapter.open(opening()))
    assert "restart it" in (caught.value.hint or "")
    assert server.asked.count("/init_weight_transfer_engine") == 1


def test_an_aborted_update_leaves_the_engine_paused_once_a_bucket_was_sent() -> None:
    server = a_server(
        started(weight_transfer_config={"backend": "ipc"}),
        is_paused={"is_paused": False},
        pause={},
        init_weight_transfer_engine={},
        start_weight_update={},
        update_weights={},
        finish_weight_update={},
        resume={},
    )
    adapter = by_ipc(server)
    server.ask(adapter.open(opening(pause="retract")))
    assert "/pause?mode=keep&clear_cache=true" in server.asked
    (layout,) = plan_buckets(SPECS, bucket_bytes=1 << 20, packing=adapter.packing)
    memory = TorchMemory(kind="cuda", device="GPU-1", size_bytes=64, handle=b"h")
    server.ask(adapter.bucket(SESSION, layout, group=None, shared=[Shared(torch=(memory, memory))]))
    assert server.ask(adapter.abort(SESSION, "no")).state == "quarantined"
    server.ask(adapter.open(opening()))
    assert server.ask(adapter.abort(SESSION, "no")).state == "quarantined"  # what was half written still is
    assert server.asked[-1] != "/resume"
    server.ask(adapter.open(opening()))
    server.ask(adapter.commit(Commit(session=SESSION)))
    server.ask(adapter.open(opening()))
    assert server.ask(adapter.abort(SESSION, "no")).state == "serving"
    assert server.asked[-1] == "/resume"


def test_score_returns_log_probabilities_of_the_prompt() -> None:
    logprobs = [None, {"6": {"logprob": -1.5}, "9": {"logprob": -0.1}}, {"7": {"logprob": -2.5}}]
    server = a_server(started(), v1__completions={"choices": [{"prompt_logprobs": logprobs}]})
    adapter = VllmAdapter(info_of(server))
    assert server.ask(adapter.score([5, 6, 7])) == [-1.5, -2.5]
    assert server.bodies[-1]["model"] == "m"
    with pytest.raises(WireError, match="no log-probabilities"):
        a_server(started(), v1__completions={"choices": []}).ask(adapter.score([5, 6]))


def test_host_memory_is_refused_for_backend_ipc() -> None:
    with pytest.raises(ConfigError, match="memory of a GPU only"):
        ipc_handles([Shared(torch=(TorchMemory(kind="shm", device="cpu", size_bytes=4, handle=b"/x"),))])


def test_missing_server_info_gives_default_facts() -> None:
    assert Facts.of(None) == Facts.of(b"[]") == Facts.of(b"{}") == Facts()


def test_prompt_lookup_does_not_count_as_draft_model() -> None:
    server = started(weight_transfer_config={"backend": "nccl"}, speculative_config={"method": "ngram"})
    assert "draft" not in info_of(a_server(server)).message


@pytest.mark.parametrize("group", ["g", None])
def test_refused_release_of_a_group_or_buffers_comes_out_of_leave(group: str | None) -> None:
    words = "Cannot release a trainer connection during a weight update"
    server = a_server(started(), shutdown_weight_transfer_engine=refusal(words))
    with pytest.raises(TargetRejected, match="during a weight update"):
        server.ask(VllmAdapter(info_of(server)).leave(group))


def test_leaving_a_vllm_without_the_release_route_succeeds() -> None:
    server = a_server(started())
    assert server.ask(VllmAdapter(info_of(server)).leave("g")).ok
    assert server.asked[-1] == "/shutdown_weight_transfer_engine"


def test_a_language_model_alone_is_refused_by_a_server_that_encodes_images() -> None:
    images = {"multimodal_config": {"limit_per_prompt": {}}}
    server = a_server(started(weight_transfer_config={"backend": "ipc"}, model_config=images))
    tower = TensorSpec(name="model.visual.blocks.0.attn.proj.weight", dtype="bfloat16", shape=(4, 4))
    adapter = VllmAdapter(info_of(server))
    adapter.check((*SPECS, tower), delivery="memory", bucket_bytes=1 << 20)
    with pytest.raises(ConfigError, match="no tensor of the update belongs to a vision tower"):
        adapter.check(SPECS, delivery="memory", bucket_bytes=1 << 20)
