"""How a trainer asks an engine with our receiver for a place for one LoRA adapter.

``POST /weightcast/adapters`` takes an ``AdapterRequest``.  The answer is an ``EngineInfo`` of the adapter, whose own
version, digest and sessions are below ``/weightcast/adapters/NAME`` from then on, at the same routes as the model's.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta

from weightcast.errors import ConfigError
from weightcast.wire.fields import decoded
from weightcast.wire.layout import TensorSpec

ADAPTERS = "/weightcast/adapters"
KIND = "native-adapter"  # of the description of an adapter, ``EngineInfo.kind``
MAX_REQUEST_BYTES = 64 << 20

AdapterName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]


class AdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter that a trainer wants to update.

    Attributes:
        config: Content of PEFT's ``adapter_config.json``.
        specs: A and B of each adapted module.  B has its scale in it already.
    """

    name: AdapterName
    config: dict[str, Any]
    specs: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=1 << 20)]


_decoder = msgspec.json.Decoder(AdapterRequest)


def adapter_request(name: str, config: dict[str, Any], specs: tuple[TensorSpec, ...]) -> AdapterRequest:
    """Makes a request; raises ConfigError if an engine cannot serve an adapter under this name."""
    try:
        return msgspec.convert(
            {"name": name, "config": config, "specs": [msgspec.to_builtins(spec) for spec in specs]}, AdapterRequest
        )
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"adapter={name!r}: {error}", hint="use letters, digits, dots, dashes and underscores, 128 at most"
        ) from None


def decode_adapter_request(data: bytes) -> AdapterRequest:
    """Decodes a request and checks every field; raises WireError if the bytes are no such request."""
    return decoded(_decoder.decode, data, "a request for an adapter")


def adapter_path(name: str) -> str:
    """The path below which an adapter has its routes."""
    return f"{ADAPTERS}/{quote(name, safe='')}"
