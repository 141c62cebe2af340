"""Recognises a server with our receiver by ``/weightcast/info``."""

from __future__ import annotations

from collections.abc import Generator

from weightcast.adapters.native.adapter import NativeAdapter
from weightcast.comm.run_steps import EngineRequest
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import Adapter
from weightcast.wire.messages import PROTOCOL, EngineInfo, decode_info


class NativeKind:
    """The reference engine, and every engine that runs our receiver as a plug-in."""

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
            raise ConfigError(f"{url}: the answer to /weightcast/info has another form: {error}") from None
        if info.protocol != PROTOCOL:
            raise ConfigError(
                f"{url} speaks protocol {info.protocol}, and this weightcast speaks {PROTOCOL}",
                hint="install the same version of weightcast on both sides",
            )
        return info

    def adapter(self, info: EngineInfo) -> Adapter:
        """As ``Kind.adapter``."""
        return NativeAdapter(info)
