"""Recognises an SGLang server by ``/server_info`` and ``/model_info``.

Older servers call these routes ``/get_server_info`` and ``/get_model_info``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator

import msgspec

from weightcast.adapters.requests import JsonObject, object_at
from weightcast.adapters.sglang.adapter import KEEPS_DRAFT, SglangAdapter
from weightcast.adapters.stock import TAKES_IMAGES, number_of, stock_info
from weightcast.comm.run_steps import EngineRequest
from weightcast.config import PauseMode
from weightcast.errors import TargetRejected
from weightcast.protocols import Kind, LoadMetrics
from weightcast.wire.engine_info import EngineInfo

# SGLang computes the scales of these formats when it starts; an update would leave the old scales.
_ONLINE = frozenset({"fp8", "w8a8_int8", "w8a8_fp8", "mxfp4"})
# From this version on a paused SGLang flushes while requests wait; before, it flushes only without requests.
_FLUSHES_WITH_REQUESTS_WAITING = (0, 5, 21)
# From this version on a request says which of the models it is for: the model or its draft.
_SELECTS_MODELS = (0, 5, 23)
_WITHOUT_DRAFT = frozenset({"NGRAM"})
# Each of these keeps cache of the old weights where no flush of the prefix cache was shown to reach it.
_OUTSIDE = {
    "hicache_storage_backend": "--hicache-storage-backend",
    "enable_lmcache": "--enable-lmcache",
    "enable_flexkv": "--enable-flexkv",
    "enable_streaming_session": "--enable-streaming-session",
    "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker",
    "enable_mm_global_cache": "--enable-mm-global-cache",
}


class SglangKind(Kind):
    """Unpatched SGLang."""

    name = "sglang"
    speaks = SglangAdapter
    receiver_page = "docs/engines/sglang-receiver.md"
    load = LoadMetrics(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        tokens="sglang:generation_tokens_total",
    )

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """As ``Kind.recognise``."""
        server = (yield from object_at("/server_info")) or (yield from object_at("/get_server_info"))
        # vLLM has a /server_info too; only SGLang's has `tp_size` at the top level.
        if server is None or not isinstance(server.get("tp_size"), int):
            return None
        model = (yield from object_at("/model_info")) or (yield from object_at("/get_model_info"))
        if model is None:
            return None
        paused = yield from _is_paused()
        return describe(url, server, model, paused=paused)


def describe(url: str, server: JsonObject, model: JsonObject, *, paused: bool) -> EngineInfo:
    """Describes a server by its ``/server_info`` and ``/model_info``; it is paused if its ``/ready`` answers 503."""
    tp_size = int(server["tp_size"])
    device = "cpu" if server.get("device") == "cpu" else "cuda"
    transports, messages = _usable_transports(server)
    weight_version = str(model.get("weight_version") or server.get("weight_version") or "")
    return stock_info(
        url,
        [device] * tp_size,
        engine=f"sglang {server.get('version', '?')}"[:200],
        model=str(model.get("served_model_name") or model.get("model_path") or "?")[:200],
        version=number_of(weight_version),
        transports=transports,
        message="; ".join(messages),
        paused=paused,
        kind="sglang",
        dp_size=int(server.get("dp_size") or 1),
        ep_size=int(server.get("ep_size") or 1),
        instance=_instance(server),
        tells_version=bool(weight_version),
        no_pause=_no_pause(server),
        hazards=_hazards(server, model),
    )


def _has_own_draft(server: JsonObject) -> bool:
    """Returns True for a draft model with a checkpoint of its own, and not for the model's own MTP layers."""
    algorithm = str(server.get("speculative_algorithm") or "")
    path = server.get("speculative_draft_model_path")
    return bool(algorithm) and algorithm.upper() not in _WITHOUT_DRAFT and path not in (None, server.get("model_path"))


def _hazards(server: JsonObject, model: JsonObject) -> tuple[str, ...]:
    found: list[str] = []
    if _has_own_draft(server):
        found.append(KEEPS_DRAFT)
    elif server.get("speculative_algorithm") and str(server["speculative_algorithm"]).upper() not in _WITHOUT_DRAFT:
        found.append(
            "its MTP layers are tensors of the model's checkpoint, and it does not tell whether an update has written "
            "them: answers stay right, and fewer of their tokens are accepted if not"
        )
    if model.get("has_image_understanding") is True:
        found.append(TAKES_IMAGES)
    return tuple(found)


def _instance(server: JsonObject) -> str:
    """A digest that differs from one start of the server to the next.

    It covers the random seed, which SGLang draws at each start, and the measured start-up times.  Older servers have no
    times; if the user fixes the seed of such a server, only the weight version tells two starts apart.
    """
    start = server.get("startup_time")
    if not start and server.get("random_seed") is None:
        return ""
    text = msgspec.json.encode([server.get("random_seed"), start], order="sorted")
    return hashlib.sha256(text).hexdigest()[:32]


def _no_pause(server: JsonObject) -> dict[PauseMode, str]:
    """Refused pause modes, with reasons: after these the prefix cache could give old results to later requests."""
    if server.get("disable_radix_cache") is True:
        return {}
    remedy = "start SGLang with --disable-radix-cache"
    version = str(server.get("version") or "")
    others = 'use pause="abort" or "retract"'
    refused: dict[PauseMode, str] = {}
    if _release(version) < _FLUSHES_WITH_REQUESTS_WAITING:
        others = 'use pause="abort"'
        why = (
            f"SGLang {version} does not flush its prefix cache while a request waits, and this pause makes requests "
            f"wait: they could get cache of the old weights; {others}, or {remedy}"
        )
        refused = {"retract": why, "wait": why}
    refused["in_place"] = (
        "SGLang does not flush its prefix cache while requests are paused in place, and would give cache of the old "
        f"weights to new requests; {others}, or {remedy}"
    )
    return refused


def _release(version: str) -> tuple[int, ...]:
    """The three numbers of a release; any other version counts as new, and ``open`` tries its flush first."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(number) for number in found.groups()) if found else _FLUSHES_WITH_REQUESTS_WAITING


def _usable_transports(server: JsonObject) -> tuple[tuple[str, ...], list[str]]:
    messages: list[str] = []
    keys = {key for name in ("api_key", "admin_api_key") if (key := server.get(name))}
    if len(keys) > 1:
        messages.append(
            "its --api-key and --admin-api-key differ, and it takes only the first for one part of its routes and only "
            "the second for the other: give both the same value, or set one of them"
        )
        return (), messages
    if int(server.get("dp_size") or 1) > 1:
        messages.append("dp_size must be 1 (one server for each replica)")
    if int(server.get("pp_size") or 1) > 1:
        messages.append("pp_size must be 1: pipeline stages would take the same ranks of a group")
    if _has_own_draft(server) and _release(str(server.get("version") or "")) < _SELECTS_MODELS:
        messages.append(
            "this version would load an update into its draft model too: use SGLang 0.5.23 or later, or start it "
            "without --speculative-draft-model-path"
        )
        return (), messages
    online = messages[:]
    if (server.get("weight_cache_mode") or "off") != "off":
        messages.append("--weight-cache-mode must be off: it shares the weights with other servers")
        return (), messages
    outside = [flag for name, flag in _OUTSIDE.items() if server.get(name)]
    if outside:
        messages.append(f"start it without {', '.join(outside)}: that cache would keep results of the old weights")
        return (), messages
    if server.get("quantization") in _ONLINE and server.get("load_format") != "flash_rl":
        messages.append(
            f"an update does not compute the scales of quantization={server['quantization']} anew: serve a checkpoint "
            "that is quantised already, without --quantization"
        )
        return (), messages
    if _has_own_draft(server):  # the other transports load into every model of the server
        return (() if online else ("ipc", "broadcast")), messages
    if online:
        return ("disk",), messages
    # The server does not tell whether checkpoint-engine is installed; a missing one fails at the first update.
    more = () if server.get("device") == "cpu" else ("checkpoint-engine",)
    return ("ipc", "broadcast", "disk", *more), messages


def _is_paused() -> Generator[EngineRequest, bytes, bool]:
    try:
        yield EngineRequest(method="GET", path="/ready")
    except TargetRejected as error:
        return error.status == 503
    return False
