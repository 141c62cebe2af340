"""Recognises a server with our receiver by ``/weightcast/info``; asks it for a place for one LoRA adapter."""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from weightcast.adapters.native.adapter import NativeAdapter
from weightcast.adapters.requests import NO_ROUTE
from weightcast.comm.run_steps import EngineRequest
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import Adapter, Kind, LoadMetrics
from weightcast.wire.adapters import ADAPTERS, KIND, AdapterRequest, adapter_path
from weightcast.wire.codec import decode_info, specs_name
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.messages import PROTOCOL

_MAX_INFOS = 1 << 14
_REFUSED = 409


class NativeKind(Kind):
    """The reference engine, and every engine that runs our receiver as a plug-in."""

    name = "native"
    speaks = NativeAdapter
    has_receiver = True
    load = LoadMetrics(
        running="weightcast_requests_running",
        waiting="weightcast_requests_waiting",
        tokens="weightcast_generated_tokens_total",
    )

    def __init__(self) -> None:
        self._infos: dict[str, EngineInfo] = {}  # last description by URL: its specs need not come again

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """As ``Kind.recognise``."""
        known = self._infos.pop(url, None)
        table = specs_name(known) if known is not None else ""
        info = None
        while info is None:
            try:
                body = yield EngineRequest(method="GET", path=f"/weightcast/info{table and '?specs=' + table}")
            except TargetRejected as error:
                if error.status in NO_ROUTE:
                    return None
                raise
            try:
                info = described(url, "/weightcast/info", body)
            except ConfigError:
                if not table:
                    raise
                table = ""  # other specs have taken the place of these meanwhile
        if len(self._infos) >= _MAX_INFOS:
            self._infos.clear()
        self._infos[url] = info
        return info


def described(url: str, path: str, body: bytes) -> EngineInfo:
    """Decodes a description from our receiver; raises ConfigError for another form or another protocol."""
    try:
        info = decode_info(body)
    except WireError as error:
        raise ConfigError(f"{url}: the answer to {path} has another form: {error}") from None
    if info.protocol != PROTOCOL:
        raise ConfigError(
            f"{url} speaks protocol {info.protocol}, and this weightcast speaks {PROTOCOL}",
            hint="install the same version of weightcast on both sides",
        )
    return info


class NativeAdapterKind(Kind):
    """One LoRA adapter of an engine with our receiver."""

    name = KIND
    speaks = NativeAdapter
    has_receiver = True

    def __init__(self, request: AdapterRequest | None = None) -> None:
        self._request = request

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """As ``Kind.recognise``; the server gives the adapter a place, unless it has one."""
        assert self._request is not None
        try:
            yield EngineRequest(method="GET", path="/weightcast/status")
            body = yield EngineRequest(path=ADAPTERS, body=msgspec.json.encode(self._request))
        except TargetRejected as error:
            if error.status in NO_ROUTE:
                raise ConfigError(
                    f"{url} takes no LoRA adapter in memory; vLLM with weightcast's plug-in does",
                    hint="send the merged weights: connect without adapter=",
                ) from error
            if error.status == _REFUSED:
                raise ConfigError(f"nothing was sent: {error}") from error
            raise
        return described(url, ADAPTERS, body)

    def adapter(self, info: EngineInfo) -> Adapter:
        """As ``Kind.adapter``."""
        return NativeAdapter(info, adapter_path(info.model))
