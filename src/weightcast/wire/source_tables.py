"""Encodes and decodes the sources of buckets, which are the same in update after update.

Where engine ranks read parts, a source describes each of them: tens of thousands, which take longer to decode than the
weights to copy.  So both ends keep large sources: encoded ones by identity, decoded ones by their bytes.
"""

from __future__ import annotations

import msgspec

from weightcast.runtime.lru import Lru
from weightcast.wire.bucket_sources import Source

_LEAST_BYTES = 1 << 12  # smaller ones are decoded as fast as they are found
_KEPT_BYTES = 128 << 20
_TIMES_ITS_BYTES = 8  # memory of a decoded source and its bytes

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Source] = msgspec.json.Decoder(Source)
_encoded: Lru[int, tuple[Source, bytes]] = Lru(_KEPT_BYTES)
_decoded: Lru[bytes, Source] = Lru(_KEPT_BYTES)


def encode_source(source: Source) -> msgspec.Raw:
    """Returns a source as JSON."""
    known = _encoded.get(id(source))
    if known is not None:
        return msgspec.Raw(known[1])
    data = _encoder.encode(source)
    if len(data) >= _LEAST_BYTES:
        # Kept alive, so that its id stays its own.
        _encoded.put(id(source), (source, data), _TIMES_ITS_BYTES * len(data))
    return msgspec.Raw(data)


def decode_source(raw: msgspec.Raw) -> Source:
    """Returns the source of its JSON: the same object for the same bytes, as long as it is kept.

    Raises:
        msgspec.MsgspecError: The bytes are no source; the text names the field.
    """
    data = bytes(raw)
    if len(data) < _LEAST_BYTES:
        return _decoder.decode(data)
    found = _decoded.get(data)
    if found is None:
        found = _decoder.decode(data)
        _decoded.put(data, found, _TIMES_ITS_BYTES * len(data))
    return found
