"""How an SGLang server is recognised, and what it says of itself: ``/server_info`` and ``/model_info``.

Servers before the renaming have ``/get_server_info`` and ``/get_model_info``; what a server can do is asked of it,
never concluded from its version.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weightcast.comm.ipc import host_id
from weightcast.engines.sglang.adapter import SglangAdapter
from weightcast.errors import TargetRejected
from weightcast.protocols import Adapter, EngineRequest
from weightcast.wire.messages import PROTOCOL, EngineInfo, RankInfo

_HERE = frozenset({"127.0.0.1", "localhost", "::1"})
# Bits of a floating-point format that are made when weights are loaded: a hot update would leave the old scales.
_ONLINE = frozenset({"fp8", "w8a8_int8", "w8a8_fp8", "mxfp4"})
Answer = dict[str, Any]


class SglangKind:
    """SGLang, unpatched."""

    name = "sglang"

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """As ``Kind.recognise``."""
        server = yield from _either("/server_info", "/get_server_info")
        # vLLM has a /server_info too; only SGLang's is flat and has its tensor-parallel size under this name.
        if server is None or not isinstance(server.get("tp_size"), int):
            return None
        model = yield from _either("/model_info", "/get_model_info")
        if model is None:
            return None
        paused = yield from _is_paused()
        return describe(url, server, model, paused=paused)

    def adapter(self, info: EngineInfo) -> Adapter:
        """As ``Kind.adapter``."""
        return SglangAdapter(info)


def describe(url: str, server: Answer, model: Answer, *, paused: bool) -> EngineInfo:
    """What follows from a server's answers.

    Args:
        url: Where it is.
        server: Its ``/server_info``.
        model: Its ``/model_info``.
        paused: True if its ``/ready`` says that it generates nothing.
    """
    tp_size = int(server["tp_size"])
    device = "cpu" if server.get("device") == "cpu" else "cuda"
    # There is no process id in the answers; a start is told from another by its seed and how long it took.
    start = zlib.crc32(msgspec.json.encode([server.get("random_seed"), server.get("startup_time")], order="sorted"))
    transports, messages = _what_it_takes(server)
    host = urlsplit(url).hostname or ""
    weight_version = str(model.get("weight_version") or server.get("weight_version") or "")
    return EngineInfo(
        protocol=PROTOCOL,
        engine=f"sglang {server.get('version', '?')}"[:200],
        model=str(model.get("served_model_name") or model.get("model_path") or "?")[:200],
        state="serving",
        version=int(weight_version) if weight_version.isascii() and weight_version.isdigit() else None,
        digest=None,
        tp_size=tp_size,
        host_id=host_id() if host in _HERE else f"host:{host}"[:200],
        ranks=tuple(RankInfo(rank=rank, pid=start, device=device) for rank in range(tp_size)),
        staging="none",
        transports=transports,
        specs=(),
        message="; ".join(messages),
        paused=paused,
        kind="sglang",
        dp_size=int(server.get("dp_size") or 1),
        ep_size=int(server.get("ep_size") or 1),
    )


def _what_it_takes(server: Answer) -> tuple[tuple[str, ...], list[str]]:
    """Transports, and what stands in the way of the others."""
    messages: list[str] = []
    if int(server.get("dp_size") or 1) > 1:
        messages.append("dp_size must be 1 (one server for each replica; --enable-dp-attention is fine)")
    if int(server.get("pp_size") or 1) > 1:
        messages.append("pp_size must be 1: pipeline stages would take each other's place in a group")
    online = messages[:]
    if (server.get("weight_cache_mode") or "off") != "off":
        messages.append("--weight-cache-mode must be off: its weights are shared with other servers")
        return (), messages
    if server.get("quantization") in _ONLINE and server.get("load_format") != "flash_rl":
        messages.append(
            f"quantization={server['quantization']} that is made on loading is not made anew by an update: serve a "
            "checkpoint that is quantised already"
        )
    if online:
        return ("disk",), messages
    # Whether checkpoint-engine is installed there it says only when it is needed.
    more = () if server.get("device") == "cpu" else ("checkpoint-engine",)
    return ("ipc", "broadcast", "disk", *more), messages


def _either(path: str, older: str) -> Generator[EngineRequest, bytes, Answer | None]:
    """The JSON object behind one of two routes; None if neither has one."""
    for route in (path, older):
        try:
            body = yield EngineRequest(method="GET", path=route)
        except TargetRejected as error:
            if error.status in (404, 405):
                continue
            if error.status in (401, 403):
                raise
            return None
        try:
            answer = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return None
        return answer if isinstance(answer, dict) else None
    return None


def _is_paused() -> Generator[EngineRequest, bytes, bool]:
    try:
        yield EngineRequest(method="GET", path="/ready")
    except TargetRejected as error:
        return error.status == 503
    return False
