"""Asks a server with our receiver for a place for one LoRA adapter, and describes that adapter as a target."""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from weightcast.adapters.native.adapter import NativeAdapter
from weightcast.adapters.native.detect import described
from weightcast.comm.run_steps import EngineRequest
from weightcast.errors import ConfigError, TargetRejected
from weightcast.protocols import Adapter
from weightcast.wire.adapters import ADAPTERS, KIND, AdapterRequest, adapter_path
from weightcast.wire.engine_info import EngineInfo

_NO_ROUTE = (404, 405)
_REFUSED = 409


class NativeAdapterKind:
    """One LoRA adapter of an engine with our receiver."""

    name = KIND

    def __init__(self, request: AdapterRequest | None = None) -> None:
        self._request = request

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """As ``Kind.recognise``; the server gives the adapter a place, unless it has one."""
        assert self._request is not None
        try:
            yield EngineRequest(method="GET", path="/weightcast/status")
            body = yield EngineRequest(path=ADAPTERS, body=msgspec.json.encode(self._request))
        except TargetRejected as error:
            if error.status in _NO_ROUTE:
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
