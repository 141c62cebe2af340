"""Keys, size limits, shared memory, and a second trainer that must not disturb the first."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message as AsgiMessage

from tests.helpers.models import weights_of
from tests.helpers.session_bench import Bench, meeting
from tests.helpers.sessions import Sender, announce
from weightcast.comm.http import Client
from weightcast.comm.ipc import Mapping, MappingFailed, SharedBuffer
from weightcast.config import Target
from weightcast.errors import (
    ConfigError,
    Refused,
    TargetLost,
    TargetRejected,
    TargetUnreachable,
    WeightcastError,
    WireError,
)
from weightcast.receiver import server as routes
from weightcast.receiver.api_keys import Keys, warn_if_open
from weightcast.receiver.server import weight_routes
from weightcast.receiver.sources.broadcast import GroupSource as GroupsOfARank
from weightcast.rollout.engine import RolloutEngine
from weightcast.rollout.server import build_app
from weightcast.rollout.text import TextTokenizer
from weightcast.update import diagnose
from weightcast.wire.bucket_sources import BroadcastSource, MemoryHandle
from weightcast.wire.codec import decode, decode_info, encode
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.fields import shown
from weightcast.wire.layout import MAX_GAP_BYTES, BucketLayout, TensorSlot, TensorSpec
from weightcast.wire.messages import MAX_GROUP, Leave, Open, Owner, Readback
from weightcast.wire.plans import UpdateTables

KEY = "k-0123456789"


class Call:
    """One request to an ASGI application; it records how much of the body was read."""

    def __init__(self, app: Any, method: str, path: str, body: list[bytes], headers: dict[str, str]) -> None:
        self.status = 0
        self.answer = b""
        self.chunks_read = 0
        self._body = iter(body)
        asyncio.run(app(self._scope(method, path, headers), self._receive, self._send))

    def _scope(self, method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": pairs,
            "root_path": "",
            "scheme": "http",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

    async def _receive(self) -> AsgiMessage:
        chunk = next(self._body, None)
        if chunk is None:
            return {"type": "http.disconnect"} if self.status else {"type": "http.request", "body": b""}
        self.chunks_read += 1
        return {"type": "http.request", "body": chunk, "more_body": True}

    async def _send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.answer += message.get("body", b"")


@pytest.fixture
def made() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def app(made: Bench) -> FastAPI:
    app = FastAPI()
    app.include_router(weight_routes(made.engine, score=lambda tokens: [-1.0] * (len(tokens) - 1)))
    return app


class _Quiet:
    """The part of a scheduler that the routes need."""

    failure = None
    version = 0

    def stats(self) -> Any:
        raise AssertionError("nobody may get this far")

    score = pause = resume = sleep = wake = stats


@pytest.fixture
def keyed(made: Bench) -> FastAPI:
    engine = RolloutEngine(scheduler=_Quiet(), text=TextTokenizer(), model="m", receiver=made.engine)  # type: ignore[arg-type]
    return build_app(engine, api_key=KEY)


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=3))
def test_only_the_whole_key_is_admitted(given, keys):
    ring = Keys(keys)
    assert ring.admit(f"Bearer {given}".encode()) == (given.strip() in keys) or given != given.strip()
    assert all(ring.admit(f"bearer {key}".encode()) for key in keys if key == key.strip())
    assert not any(ring.admit(wrong) for wrong in (b"", b"Bearer", b"Bearer ", f"Basic {keys[0]}".encode()))


def test_server_without_a_key_admits_every_request():
    assert Keys(()).admit(b"")
    assert not Keys(())


@pytest.mark.parametrize("given", ["", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY])
def test_every_route_but_health_asks_for_the_key(keyed, given):
    listed = [(method, path) for path, item in keyed.openapi()["paths"].items() for method in item if path != "/health"]
    assert ("post", "/weightcast/apply") in listed
    assert ("post", "/pause") in listed
    for method, path in [*listed, ("get", "/openapi.json"), ("post", "/nowhere")]:
        call = Call(keyed, method.upper(), path, [b"x"] * 5, {"authorization": given} if given else {})
        assert (path, call.status, call.chunks_read) == (path, 401, 0)
    assert Call(keyed, "GET", "/weightcast/info", [], {"authorization": f"Bearer {KEY}"}).status == 200


def test_key_that_no_header_can_carry_is_refused_and_not_printed():
    for key in ("", "a b", "a\nb", "é"):
        with pytest.raises(ConfigError) as caught:
            Target("http://h:1", api_key=key)
        assert not key or key not in str(caught.value)
    assert "secret" not in repr(Target("http://h:1", api_key="secret"))
    with pytest.raises(ConfigError) as caught:
        Target("http://user:secret@h:1")
    assert "secret" not in str(caught.value)


def test_requests_from_web_pages_are_refused(app):
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert Call(app, "POST", "/weightcast/apply", [encode(Leave())], headers).status == 403
        for path in ("info", "status"):
            assert Call(app, "GET", f"/weightcast/{path}", [], headers).status == 403
    assert Call(app, "POST", "/weightcast/apply", [encode(Leave())], {}).status == 200


def test_body_is_refused_once_it_is_too_large(app, monkeypatch):
    monkeypatch.setattr(routes, "_SPARE_BYTES", 10_000)
    monkeypatch.setattr(routes, "MAX_SCORE_BYTES", 10_000)
    for path in ("apply", "open", "score"):
        declared = Call(app, "POST", f"/weightcast/{path}", [b" " * 1000] * 100, {"content-length": "1000000"})
        assert (declared.status, declared.chunks_read) == (413, 0)
        drips = Call(app, "POST", f"/weightcast/{path}", [b" " * 1000] * 100, {})
        assert drips.status == 413
        assert drips.chunks_read < 30


def test_body_limit_admits_the_largest_valid_message(monkeypatch):
    # The largest valid message: every tensor in one bucket, the longest numbers.
    monkeypatch.setattr(routes, "_SPARE_BYTES", 4096)
    specs = tuple(TensorSpec(name=f"t{index}", dtype="bfloat16", shape=(1 << 20,)) for index in range(2000))
    slots = tuple(
        TensorSlot(spec=spec, offset_bytes=index << 21, first_row=0, num_rows=1 << 20)
        for index, spec in enumerate(specs)
    )
    layout = BucketLayout(index=0, slots=slots, size_bytes=2000 << 21)
    message = announce("0" * 32, layout, BroadcastSource(group="g"))
    sender = Sender(weights_of(1))
    open_ = msgspec.structs.replace(sender.open, plan=UpdateTables(specs, ()))

    class Engine:
        def info(self) -> Any:
            return msgspec.structs.replace(_info(), specs=specs)

    limit = routes._MessageLimit(Engine())()  # type: ignore[arg-type]
    assert decode(encode(message)) == message
    assert len(encode(message)) < limit < 4 * len(encode(message))
    assert len(encode(open_)) < limit


def test_score_requests_are_bounded(app):
    for tokens, status in (([1, 2], 200), ([1], 400), ([-1, 2], 400), ([1, 1 << 40], 400), ([1] * 5000, 400)):
        assert Call(app, "POST", "/weightcast/score", [msgspec.json.encode({"token_ids": tokens})], {}).status == status


def _bucket(*slots: tuple[int, int], size: int, names: str = "abc") -> BucketLayout:
    return BucketLayout(
        index=0,
        slots=tuple(
            TensorSlot(spec=TensorSpec(name=name, dtype="uint8", shape=(rows,)), offset_bytes=offset, num_rows=rows)
            for name, (offset, rows) in zip(names, slots, strict=False)
        ),
        size_bytes=size,
    )


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        (_bucket((0, 8), size=1 << 46), "only at"),
        (_bucket((0, 8), size=8 + MAX_GAP_BYTES + 1), "only at"),
        (_bucket((0, 8), (1 << 40, 8), size=(1 << 40) + 8), "there is nothing between"),
        (_bucket((1 << 40, 8), size=(1 << 40) + 8), "there is nothing between"),
        (_bucket((0, 8), (8, 8), size=16, names="aa"), "twice"),
    ],
)
def test_bucket_larger_than_its_tensors_is_refused(layout, word):
    message = announce("0" * 32, layout, BroadcastSource(group="g"))
    with pytest.raises(WireError, match=word):
        decode(encode(message))


def test_bucket_with_the_largest_allowed_gap_is_accepted():
    layout = _bucket((MAX_GAP_BYTES, 8), size=2 * MAX_GAP_BYTES + 8)
    assert decode(encode(announce("0" * 32, layout, BroadcastSource(group="g"))))


def _info(**changes: Any) -> EngineInfo:
    fields: dict[str, Any] = {
        "protocol": 1,
        "engine": "e",
        "model": "m",
        "state": "serving",
        "version": 1,
        "digest": None,
        "tp_size": 1,
        "host_id": "h",
        "ranks": (RankInfo(rank=0, pid=1, device="cpu"),),
        "staging": "host",
        "transports": ("ipc",),
        "specs": (),
    }
    return EngineInfo(**fields | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_size": 0},
        {"tp_size": 1 << 40},
        {"version": -1},
        {"model": "\x1b]0;owned\x07"},
        {"engine": "a\nb"},
        {"transports": ("x",) * 65},
        {"ranks": (RankInfo(rank=1 << 30, pid=1, device="cpu"),)},
        {"digest": "0" * 100},
    ],
    ids=str,
)
def test_engine_info_is_bounded(changes):
    assert decode_info(encode(_info())) == _info()
    with pytest.raises(WireError):
        decode_info(encode(_info(**changes)))


def test_control_characters_from_engines_are_not_shown():
    assert shown("a\x1b[2Jb\r\nc\x9bd") == "a\\x1b[2Jb c\\x9bd"
    assert shown("ü 漢") == "ü 漢"


def _memory(size: int, seals: bool = True) -> tuple[MemoryHandle, int]:
    token = "ab" * 16
    file = os.memfd_create(f"weightcast-{token}", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    if seals:
        import fcntl

        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return MemoryHandle(kind="shm", device="cpu", size_bytes=size, token=token, pid=os.getpid(), fd=file), file


def test_memory_that_could_be_truncated_is_not_mapped():
    handle, file = _memory(4096, seals=False)
    with pytest.raises(MappingFailed, match="not sealed"):
        Mapping(handle)
    os.close(file)
    buffer = SharedBuffer(4096, torch.device("cpu"))
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.handle().fd, 1)
    Mapping(buffer.handle()).close()
    buffer.close()


def test_memory_has_no_file_name_and_needs_its_token():
    buffer = SharedBuffer(4096, torch.device("cpu"))
    other = SharedBuffer(4096, torch.device("cpu"))
    for made in (buffer, other):
        assert os.readlink(f"/proc/self/fd/{made.handle().fd}").startswith("/memfd:")
    assert len(buffer.handle().token) == 32
    assert buffer.handle().token != other.handle().token
    with pytest.raises(MappingFailed, match="no such buffer"):
        Mapping(msgspec.structs.replace(buffer.handle(), token=other.handle().token))
    buffer.close()
    other.close()


def test_second_trainer_cannot_take_over_a_session(made):
    first, second = Sender(weights_of(1)), Sender(weights_of(2), version=2, owner=Owner(host="there", pid=2))
    made.tell(first.open)
    made.tell(first.announce(0))
    assert first.session not in encode(made.engine.info()).decode()
    assert "already being updated by process 1 on here" in made.refuse(second.open)
    # The second trainer may copy the first one's owner; only the id of the session counts.
    copied = Sender(weights_of(2), version=2)
    assert "already being updated" in made.refuse(copied.open)
    for message in (second.announce(0), second.announce(1), second.close(), second.commit(), meeting()):
        made.refuse(message)
    made.refuse(meeting(session=second.session))
    made.tell(second.abort())  # an unknown session: nothing happens
    made.engine.lease_lost(second.session)
    for index in range(1, len(first.layouts)):
        made.tell(first.announce(index))
    made.tell(first.close())
    made.tell(first.commit(first.digests()[1]))
    assert made.serves(1)


def test_other_trainers_cannot_make_an_engine_leave_a_group(made):
    sender = Sender(weights_of(1))
    made.tell(sender.open)
    layout = sender.layouts[0]
    message = announce(sender.session, layout, BroadcastSource(group="mine"))
    assert not made.engine.apply(message).ok  # no rank has joined, but the name belongs to this session now
    assert "uses the group mine" in made.refuse(Leave(group="mine"))
    made.tell(Leave(group="theirs"))
    made.tell(sender.abort())
    made.tell(Leave(group="mine"))


def test_living_group_cannot_be_replaced():
    groups = GroupsOfARank(torch.device("cpu"), threading.Event())

    class Living:
        alive = True

        def close(self) -> None:
            pass

    groups._groups["g"] = Living()  # type: ignore[assignment]
    with pytest.raises(Refused, match="group g here already"):
        groups.join(meeting(timeout_s=0.2), rank=0)
    Living.alive = False
    with pytest.raises(WeightcastError) as caught:
        groups.join(meeting(timeout_s=0.2), rank=0)
    assert not isinstance(caught.value, Refused)
    groups.close()


def test_size_of_a_group_is_bounded():
    groups = GroupsOfARank(torch.device("cpu"), threading.Event())
    with pytest.raises(Refused, match="no rank 3"):
        groups.join(meeting(first_rank=2, world_size=3), rank=1)
    for changes in ({"world_size": MAX_GROUP + 1}, {"first_rank": 0}, {"first_rank": MAX_GROUP}):
        with pytest.raises(WireError):
            decode(encode(meeting(**changes)))
    groups.close()


def test_owners_are_shown_without_control_characters(made):
    sender = Sender(weights_of(1), owner=Owner(host="a\x1b[2J\nb", pid=1))
    made.tell(sender.open)
    assert "a\\x1b[2J b" in (made.engine.info().session_owner or "")
    decode_info(encode(made.engine.info()))


def test_readback_needs_no_session_and_changes_nothing(made):
    before = made.engine.info()
    assert made.tell(Readback()).resident == made.tell(Readback()).resident
    assert made.engine.info() == before


def test_own_wire_has_no_pickle():
    # Stock engines demand pickles; weightcast writes them opcode by opcode and never executes one.
    here = Path(routes.__file__).parents[1]
    found = [
        f"{path.relative_to(here)}: {line}"
        for path in here.rglob("*.py")
        if here / "lab" not in path.parents  # the benchmark times other projects with their pickles
        for line in path.read_text().splitlines()
        if re.search(r"import (cloud)?pickle\b|ForkingPickler|torch\.load\(|object_list\(|gather_object\(", line)
    ]
    assert not found


def test_engine_does_not_reveal_the_id_of_an_open_session(made):
    sender = Sender(weights_of(1))
    answers = [made.tell(sender.open), made.tell(sender.announce(0)), made.engine.info()]
    answers.append(made.engine.apply(Sender(weights_of(2)).open))
    assert isinstance(sender.open, Open)
    assert not any(sender.session in encode(answer).decode() for answer in answers)


def test_vllms_endpoints_ask_for_vllms_keys(monkeypatch):
    from weightcast.plugins.vllm.endpoints import Endpoints

    endpoints = Endpoints()
    app = FastAPI()
    endpoints.attach_router(app)
    path = "/weightcast/info"
    for starting in (path, "/weightcast/status"):
        assert Call(app, "GET", starting, [], {}).status == 503  # the engine is still starting
    monkeypatch.setenv("VLLM_API_KEY", "other")
    monkeypatch.setattr(Endpoints, "_connect", lambda *_: None)
    parallel = Namespace(data_parallel_size=1)
    client = Namespace(generate=None, vllm_config=Namespace(parallel_config=parallel))
    asyncio.run(endpoints.init_state(client, Namespace(openai_serving_models=None), Namespace(api_key=[KEY])))
    for header in ("", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY[:-1]}"):
        for method, route in (
            ("GET", "info"),
            ("GET", "status"),
            ("POST", "apply"),
            ("POST", "open"),
            ("GET", "digests"),
        ):
            call = Call(app, method, f"/weightcast/{route}", [b"x"] * 3, {"authorization": header})
            assert (route, call.status, call.chunks_read) == (route, 401, 0)
    assert Call(app, "GET", path, [], {"authorization": f"Bearer {KEY}"}).status == 503
    assert Call(app, "GET", path, [], {"authorization": "Bearer other"}).status == 401  # vLLM's option goes before
    asyncio.run(endpoints.init_state(client, Namespace(openai_serving_models=None), Namespace(api_key=None)))
    assert Call(app, "GET", path, [], {"authorization": "Bearer other"}).status == 503


@pytest.mark.parametrize(
    ("host", "warns"),
    [
        ("127.0.0.1", False),
        ("127.8.0.1", False),
        ("localhost", False),
        ("LOCALHOST", False),
        ("::1", False),
        ("[::1]", False),
        ("::ffff:127.0.0.1", False),
        (None, True),
        ("", True),
        ("0.0.0.0", True),
        ("::", True),
        ("::ffff:10.0.0.3", True),
        ("10.0.0.3", True),
        ("localhost.example.org", True),
        ("engine-3", True),
    ],
)
def test_a_server_without_a_key_that_others_reach_warns_at_its_start(host, warns, caplog):
    warn_if_open([], host=host, port=8000, option="--api-key")
    words = "whoever reaches port 8000 can read and replace the weights; set --api-key"
    assert (words in caplog.text) == warns
    caplog.clear()
    warn_if_open(["key"], host=host, port=8000, option="--api-key")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("args", "warns"),
    [
        ({"api_key": None, "host": None}, True),
        ({"api_key": [KEY], "host": None}, False),
        ({"api_key": None, "host": "127.0.0.1"}, False),
        ({"api_key": None, "host": None, "uds": "/run/vllm"}, False),
        ({"api_key": None, "host": None, "ssl_cert_reqs": 2}, False),  # client certificates are required
    ],
)
def test_vllm_without_a_key_warns_at_its_start(args, warns, caplog, monkeypatch):
    from weightcast.plugins.vllm.endpoints import Endpoints

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(Endpoints, "_connect", lambda *_: None)
    client = Namespace(generate=None, vllm_config=Namespace(parallel_config=Namespace(data_parallel_size=1)))
    arguments = Namespace(port=8000, **args)
    asyncio.run(Endpoints().init_state(client, Namespace(openai_serving_models=None), arguments))
    assert ("whoever reaches port 8000" in caplog.text) == warns


def test_vllm_refuses_a_text_whose_letters_it_would_take_for_keys(monkeypatch):
    from weightcast.plugins.vllm.endpoints import Endpoints

    monkeypatch.setattr(Endpoints, "_connect", lambda *_: None)
    endpoints, app = Endpoints(), FastAPI()
    endpoints.attach_router(app)
    client = Namespace(generate=None, vllm_config=Namespace(parallel_config=Namespace(data_parallel_size=1)))
    with pytest.raises(ConfigError, match="api_key is a text, and vLLM would take each of its letters") as caught:
        asyncio.run(endpoints.init_state(client, Namespace(openai_serving_models=None), Namespace(api_key="secret")))
    assert caught.value.hint == 'give a list: api_key=["..."]'
    assert "secret" not in str(caught.value)
    assert Call(app, "GET", "/weightcast/info", [], {"authorization": "Bearer s"}).status == 503


def test_lmdeploys_routes_are_not_open_before_its_keys_are_known(monkeypatch):
    from weightcast.plugins.lmdeploy import server

    def serve(path, backend_config=None, server_name="127.0.0.1", server_port=23333, api_keys=None):
        return module.create_openai_router(Namespace(async_engine=None))

    served: list[Any] = []
    module = Namespace(serve=serve, create_openai_router=lambda _: "router", uvicorn=Namespace(run=None))
    engine = Namespace(ZMQMPEngine=Namespace())
    folder = "lmdeploy.pytorch.engine.mp_engine"
    for name in ("lmdeploy", "lmdeploy.serve", "lmdeploy.pytorch", "lmdeploy.pytorch.engine", folder):
        monkeypatch.setitem(sys.modules, name, Namespace())
    monkeypatch.setitem(sys.modules, f"{folder}.zmq_engine", engine)
    monkeypatch.setitem(sys.modules, "lmdeploy.serve.openai", Namespace(api_server=module))
    monkeypatch.setattr(server, "check_settings", lambda *_: None)
    monkeypatch.setattr(server, "add_routes", lambda router, engine, folder, keys: served.append(keys))
    server.patch("")
    with pytest.raises(ConfigError, match="the hook on serve did not take"):
        serve("m", api_keys=["a"])  # LMDeploy's own, as somebody has it who imported it before
    assert served == []
    config = Namespace(mp_engine_backend="mp")
    assert module.serve("m", backend_config=config, api_keys=["a"]) == "router"
    module.serve("m", backend_config=config)
    assert served == [["a"], []]


@pytest.mark.parametrize(
    ("answer", "level", "words"),
    [
        (TargetRejected("wrong key", url="u", status=401), "ok", "accepted"),
        (TargetRejected("not yours", url="u", status=403), "ok", "accepted"),
        (TargetRejected("loading", url="u", status=503), "warn", "cannot be told: without it, the engine answers: lo"),
        (TargetUnreachable("no answer", url="u"), "warn", "cannot be told: without it, the engine answers: no answer"),
        (TargetLost("reset", url="u"), "warn", "cannot be told: without it, the engine answers: reset"),
    ],
)
def test_doctor_says_that_a_key_was_accepted_only_if_the_engine_refuses_who_has_none(answer, level, words, monkeypatch):
    monkeypatch.setattr(diagnose, "ask", lambda *_: answer)
    check = diagnose._key(Client(Target("http://127.0.0.1:1", api_key=KEY), timeout_s=1.0))
    assert (check.name, check.level) == ("key", level)
    assert check.text.startswith(words)


def test_lmdeploy_tells_its_keys_and_warns_without_one(caplog, monkeypatch):
    from weightcast.plugins.lmdeploy import server

    monkeypatch.setattr(server, "check_settings", lambda *_: None)

    def serve(path, backend_config=None, server_name="0.0.0.0", server_port=23333, api_keys=None):
        return api_keys

    keys: list[list[str]] = []
    checked = server._checked(serve, "", keys.append)
    config = Namespace(mp_engine_backend="mp")
    assert checked("m", backend_config=config, api_keys=["a", "", "b"]) == ["a", "", "b"]
    assert keys == [["a", "b"]]
    assert caplog.text == ""
    checked("m", backend_config=config)
    assert keys == [["a", "b"], []]
    assert "listens on 0.0.0.0: whoever reaches port 23333" in caplog.text
    with pytest.raises(ConfigError, match="take each of its letters for a key"):
        checked("m", backend_config=config, api_keys="secret")
