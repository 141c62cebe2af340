"""How a server with our receiver is recognised: it has ``/weightcast/info``."""

from __future__ import annotations

from collections.abc import Generator

from weightcast.engines.native.adapter import NativeAdapter
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import Adapter, EngineRequest
from weightcast.wire.messages import PROTOCOL, EngineInfo, decode_info


class NativeKind:
    """The reference engine, and every engine that our receiver was plugged into."""

    name = "native"

    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """As ``Kind.recognise``."""
        try:
            body = yield EngineRequest(method="GET", path="/weightcast/info")
        except TargetRejected as error:
            if error.status in (404, 405):
                return None
            raise
        try:
            info = decode_info(body)
        except WireError as error:
            raise ConfigError(f"{url} answers /weightcast/info with something else: {error}") from None
        if info.protocol != PROTOCOL:
            raise ConfigError(
                f"{url} speaks protocol {info.protocol}, this weightcast speaks {PROTOCOL}",
                hint="install the same version of weightcast on both sides",
            )
        return info

    def adapter(self, info: EngineInfo) -> Adapter:
        """As ``Kind.adapter``."""
        return NativeAdapter(info)
