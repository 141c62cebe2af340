"""Messages, answers and descriptions as JSON with a schema, never pickle.

Each class is on the wire as it is written, but for the fields with tables (``_TABLES``): these have the tables' names,
and a further field, ``tables``, has those tables that the other end has not been sent before.  Every decoder checks
every field.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import chain
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weightcast.errors import WireError
from weightcast.runtime.gc_pause import gc_paused
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.blobs import KEPT, Blob, BlobKind, Blobs, hash_of
from weightcast.wire.bucket_sources import Source
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.fields import MAX_BUCKETS, PlanHash, decoded
from weightcast.wire.held import PARTS
from weightcast.wire.layout import MAX_TENSORS, TensorSpec
from weightcast.wire.messages import Announce, Message, Open, Prepare, Verbatim
from weightcast.wire.plans import PLAN

MAX_MESSAGE_BYTES = 256 << 20  # specs of 2**20 tensors with long names stay below

_encoder = msgspec.json.Encoder()
_source: msgspec.json.Decoder[Source] = msgspec.json.Decoder(Source)
_specs = msgspec.json.Decoder(Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)])
_SOURCE = BlobKind("source", _encoder.encode, _source.decode)
_SPECS = BlobKind("table of specs", _encoder.encode, _specs.decode)
# The fields that are tables; a list is a tuple of tables.
_TABLES: dict[type[msgspec.Struct], dict[str, BlobKind[Any] | list[BlobKind[Any]]]] = {
    Open: {"plan": PLAN},
    Prepare: {"plan": PLAN, "sources": [_SOURCE]},
    Announce: {"plan": PLAN, "source": _SOURCE},
    RankAck: {"parts": PARTS},
    EngineInfo: {"specs": _SPECS},
}
_TableNames = Annotated[tuple[PlanHash, ...], Meta(max_length=MAX_BUCKETS)]
_Raws = Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_BUCKETS + 1)]


def _form(kind: type[msgspec.Struct]) -> Any:
    """Returns the class as it is on the wire."""
    fields: list[Any] = [("tables", _Raws | msgspec.UnsetType, msgspec.UNSET)]
    for field in msgspec.structs.fields(kind):
        if (table := _TABLES[kind].get(field.name)) is not None:
            fields.append((field.name, _TableNames if isinstance(table, list) else PlanHash))
        elif field.required:
            fields.append((field.name, field.type))
        elif field.default is msgspec.NODEFAULT:
            fields.append((field.name, field.type, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.name, field.type, field.default))
    tag = kind.__struct_config__.tag
    return msgspec.defstruct(kind.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=tag)


_FORMS = {kind: _form(kind) for kind in _TABLES}
_KINDS = {form: kind for kind, form in _FORMS.items()}
# Made at import: msgspec inspects a class when its decoder is made, and two threads that do so at once crash.
_decoder = msgspec.json.Decoder(_FORMS[Open] | _FORMS[Prepare] | _FORMS[Announce] | Verbatim)
_infos = msgspec.json.Decoder(_FORMS[EngineInfo])
_acks = msgspec.json.Decoder(Ack)
_rank_acks = msgspec.json.Decoder(_FORMS[RankAck])
_ANSWER = "an answer of a weightcast receiver"


def _blobs(message: msgspec.Struct) -> dict[str, list[Blob[Any]]]:
    """The tables of a message, by field."""
    found: dict[str, list[Blob[Any]]] = {}
    for field, kind in _TABLES.get(type(message), {}).items():
        value = getattr(message, field)
        if isinstance(kind, list):
            found[field] = [KEPT.encoded(kind[0], one) for one in value]
        else:
            found[field] = [KEPT.encoded(kind, value)]
    return found


def names_of(message: msgspec.Struct) -> list[str]:
    """The names of all tables of a message; empty if its class has none."""
    return [blob.name for blobs in _blobs(message).values() for blob in blobs]


def specs_name(info: EngineInfo) -> str:
    """The name of an engine's table of specs."""
    return KEPT.encoded(_SPECS, info.specs).name


def encode(message: msgspec.Struct, known: Container[str] = ()) -> bytes:
    """Encodes any of the classes above as JSON; ``known`` has the names of tables that the other end has."""
    kind = type(message)
    if kind not in _TABLES:
        return _encoder.encode(message)
    fields: dict[str, Any] = {name: getattr(message, name) for name in kind.__struct_fields__}
    tables: dict[str, msgspec.Raw] = {}
    for field, blobs in _blobs(message).items():
        names = [blob.name for blob in blobs]
        fields[field] = names if isinstance(_TABLES[kind][field], list) else names[0]
        tables |= {blob.name: msgspec.Raw(blob.encoded) for blob in blobs if blob.name not in known}
    return _encoder.encode(_FORMS[kind](**fields, tables=tuple(tables.values()) or msgspec.UNSET))


def _read(decoder: msgspec.json.Decoder[Any], data: bytes | bytearray | memoryview, kept: Blobs) -> Any:
    """Decodes a message and puts its tables in the place of their names."""
    with gc_paused():  # tables of tensors and parts are many new objects
        form = decoder.decode(data)
        kind = _KINDS.get(type(form))
        if kind is None:
            return form
        fields: dict[str, Any] = {name: getattr(form, name) for name in kind.__struct_fields__}
        came = {} if form.tables is msgspec.UNSET else {hash_of(raw): raw for raw in map(bytes, form.tables)}
        named = {field: getattr(form, field) for field in _TABLES[kind]}
        all_names = (names if isinstance(names, tuple) else (names,) for names in named.values())
        unnamed = came.keys() - set(chain.from_iterable(all_names))
        if unnamed:
            raise ValueError(f"it brings the table {unnamed.pop()} and does not name it")
        for field, table in _TABLES[kind].items():
            if isinstance(table, list):
                fields[field] = tuple(kept.take(table[0], name, came.get(name)) for name in named[field])
            else:
                fields[field] = kept.take(table, named[field], came.get(named[field]))
        return kind(**fields)


def decode_ack(data: bytes) -> Ack:
    """Decodes an engine's answer; raises WireError if the bytes are none."""
    return decoded(_acks.decode, data, _ANSWER)


def decode_rank_ack(data: bytes, kept: Blobs = KEPT) -> RankAck:
    """Decodes an engine rank's answer; WireError if the bytes are none, or name a table that ``kept`` does not have."""
    return decoded(lambda data: _read(_rank_acks, data, kept), data, _ANSWER)


def decode_info(data: bytes) -> EngineInfo:
    """Decodes an engine's description of itself.

    WireError if the bytes are none; UnknownBlob if they name specs that this process does not have.
    """
    return decoded(lambda data: _read(_infos, data, KEPT), data, _ANSWER)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decodes a trainer's message and checks every field; WireError names the field that is wrong.

    UnknownBlob says that it names a table that this process does not have.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"the message has {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        return _read(_decoder, data, KEPT)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a weightcast message: {error}") from None
