"""Recognises a vLLM server and the transports that it can use as it was started."""

from __future__ import annotations

from collections.abc import Generator

from weightcast.adapters.requests import JsonObject, if_there, json_object
from weightcast.adapters.stock import number_of, stock_info
from weightcast.adapters.vllm.adapter import VllmAdapter
from weightcast.adapters.vllm.server_info import CONFIG, DEV_MODE, OPEN_ROUTES, SERVER_INFO, Facts
from weightcast.comm.run_steps import EngineRequest
from weightcast.protocols import Kind, LoadMetrics
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.fields import shown
from weightcast.wire.vllm_versions import INSTALL_NEWER, too_old


class VllmKind(Kind):
    """Stock vLLM with its own weight transfer."""

    name = "vllm"
    speaks = VllmAdapter
    receiver_page = "docs/engines/vllm.md"
    load = LoadMetrics(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        tokens="vllm:generation_tokens_total",
    )

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """As ``Kind.recognise``."""
        version = yield from _version()
        if version is None:
            return None
        size = yield from _object("/get_world_size")
        if size is None:
            return (yield from self._without_dev_mode(url, version))
        facts = Facts.of((yield from if_there(SERVER_INFO)))
        weights = yield from _object("/weight_info")
        paused = yield from _object("/is_paused")
        model = yield from _model()
        count = int(size.get("world_size", 1))
        old = too_old(version)
        return stock_info(
            url,
            ["cpu" if facts.on_cpu else "cuda"] * count,
            kind=self.name,
            engine=f"vllm {version}",
            model=model,
            version=number_of((weights or {}).get("weight_version")),
            transports=() if old else facts.transports(),
            message=f"{old}: {INSTALL_NEWER}" if old else facts.advice(),
            paused=bool((paused or {}).get("is_paused")),
            dp_size=facts.dp_size,
            ep_size=count if facts.experts_apart else 1,
            instance=facts.instance[:200],
            tells_version=bool((weights or {}).get("weight_version")),
            no_pause=facts.no_pause(),
            hazards=facts.hazards(),
        )

    def _without_dev_mode(self, url: str, version: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """Describes a vLLM server that lacks the routes of an update; None if the server is not vLLM."""
        page = yield from _object("/openapi.json")
        paths = (page or {}).get("paths")
        if not isinstance(paths, dict) or not {"/v1/completions", "/tokenize"} <= paths.keys():
            return None
        model = yield from _model()
        old = too_old(version)
        message = f"{old}: {INSTALL_NEWER}" if old else f"{DEV_MODE} and {CONFIG}; {OPEN_ROUTES}"
        told = {"engine": f"vllm {version}", "model": model, "version": None, "message": message}
        return stock_info(url, ["cuda"], kind=self.name, transports=(), **told)


def _version() -> Generator[EngineRequest, bytes, str | None]:
    answer = yield from _object("/version")
    version = (answer or {}).get("version")
    return shown(version)[:100] if isinstance(version, str) else None


def _model() -> Generator[EngineRequest, bytes, str]:
    """``/v1/completions`` requires it."""
    models = (yield from _object("/v1/models")) or {}
    try:
        return shown(str(models["data"][0]["id"]))
    except (KeyError, IndexError, TypeError):
        return "unknown"


def _object(path: str) -> Generator[EngineRequest, bytes, JsonObject | None]:
    """The JSON object that a GET returns; None without such a route or object."""
    body = yield from if_there(EngineRequest(method="GET", path=path))
    return None if body is None else json_object(body)
