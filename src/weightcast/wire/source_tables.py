"""Encodes and decodes the sources of buckets, which are the same in update after update.

Where engine ranks read parts, a source describes each of them: tens of thousands, which take longer to send and decode
than the weights to copy.  So both ends keep large sources: encoded ones by identity, decoded ones by their hash.  A
message to an engine that has a source names it.
"""

from __future__ import annotations

import msgspec

from weightcast.runtime.lru import Lru
from weightcast.wire.bucket_sources import Source
from weightcast.wire.plans import UnknownPlan, hash_of

_LEAST_BYTES = 1 << 12  # smaller ones are decoded as fast as they are found
_KEPT_BYTES = 128 << 20
_TIMES_ITS_BYTES = 8  # memory of a decoded source and its bytes

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Source] = msgspec.json.Decoder(Source)
_encoded: Lru[int, tuple[Source, bytes, str]] = Lru(_KEPT_BYTES)
_decoded: Lru[str, Source] = Lru(_KEPT_BYTES)


def encode_source(source: Source) -> msgspec.Raw:
    """Returns a source as JSON."""
    return msgspec.Raw(_encode(source)[0])


def name_of_source(source: Source) -> str:
    """The hash by which messages may name a source to an engine that has it; empty for a small one."""
    return _encode(source)[1]


def _encode(source: Source) -> tuple[bytes, str]:
    known = _encoded.get(id(source))
    if known is not None:
        return known[1:]
    data = _encoder.encode(source)
    name = hash_of(data) if len(data) >= _LEAST_BYTES else ""
    if name:
        # Kept alive, so that its id stays its own.
        _encoded.put(id(source), (source, data, name), _TIMES_ITS_BYTES * len(data))
    return data, name


def decode_source(raw: msgspec.Raw) -> Source:
    """The source of its JSON, the same object for the same bytes as long as it is kept; or a MsgspecError."""
    data = bytes(raw)
    if len(data) < _LEAST_BYTES:
        return _decoder.decode(data)
    name = hash_of(data)
    found = _decoded.get(name)
    if found is None:
        found = _decoder.decode(data)
        _decoded.put(name, found, _TIMES_ITS_BYTES * len(data))
    return found


def kept_source(name: str) -> Source:
    """A source that this process was sent; UnknownPlan if it was not, or others have taken its place."""
    found = _decoded.get(name)
    if found is None:
        raise UnknownPlan(f"this process does not have the source {name}; it must be sent in full")
    return found
