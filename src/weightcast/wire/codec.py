"""Messages, answers and descriptions as JSON with a schema, never pickle.

Each class is on the wire as it is written, but for five: ``Open``, ``Prepare`` and ``Announce`` may name a plan,
``RankAck`` a table of parts, and the specs of ``EngineInfo`` are cached.  Every decoder checks every field.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weightcast.errors import WireError
from weightcast.runtime.gc_pause import gc_paused
from weightcast.runtime.lru import Lru
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.bucket_sources import group_of
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.fields import MAX_BUCKETS, PlanHash, decoded
from weightcast.wire.held import NOTHING_HELD, HeldForm, HeldTable, form_of, held_of
from weightcast.wire.layout import MAX_TENSORS, BucketLayout, TensorSpec
from weightcast.wire.messages import MAX_RUN, Announce, Message, Open, Prepare, Verbatim
from weightcast.wire.plans import hash_of, kept_plan, take_plan
from weightcast.wire.source_tables import decode_source, encode_source, kept_source, name_of_source

MAX_MESSAGE_BYTES = 256 << 20  # specs of 2**20 tensors with long names stay below


def _form(kind: type[msgspec.Struct], other: dict[str, Any]) -> Any:
    """Returns the class as it is on the wire, with other types of some fields; they are left out if they are unset."""
    same = [field for field in msgspec.structs.fields(kind) if field.name not in other]
    fields: list[Any] = [(f.name, f.type) if f.required else (f.name, f.type, f.default) for f in same]
    fields += [(name, what | msgspec.UnsetType, msgspec.UNSET) for name, what in other.items()]
    tag = kind.__struct_config__.tag
    return msgspec.defstruct(kind.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=tag)


def _with(kind: Any, message: Any, **other: Any) -> Any:
    """Returns a copy of a message as another class, with other fields."""
    return kind(**{name: getattr(message, name) for name in kind.__struct_fields__ if name not in other}, **other)


_Specs = Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
_BucketIndex = Annotated[int, Meta(ge=0, lt=MAX_BUCKETS)]
_Following = Annotated[int, Meta(ge=1, lt=MAX_RUN)]
_Raws = Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_BUCKETS)]
# Either the specs of an Open, or the hash of a plan, with the plan itself until the other end has it.
_OpenForm = _form(Open, {"specs": _Specs, "plan": PlanHash, "tables": msgspec.Raw})
_PrepareForm = _form(Prepare, {"plan": PlanHash, "tables": msgspec.Raw, "sources": _Raws})
_AnnounceForm = _form(
    Announce,
    {
        "layout": BucketLayout,
        "plan": PlanHash,
        "bucket": _BucketIndex,
        "following": _Following,  # their number
        "known_source": PlanHash,
        "source": msgspec.Raw,
    },
)
_RankForm = _form(RankAck, {"held": HeldForm})
# The specs as raw bytes, so that those in the cache are not decoded again; or their hash, if the other end has them.
_InfoForm = _form(EngineInfo, {"specs": msgspec.Raw, "table": PlanHash})

_encoder = msgspec.json.Encoder()
# Made at import: msgspec inspects a class when its decoder is made, and two threads that do so at once crash.
_decoder = msgspec.json.Decoder(_OpenForm | _PrepareForm | _AnnounceForm | Verbatim)
_infos = msgspec.json.Decoder(_InfoForm)
_acks = msgspec.json.Decoder(Ack)
_rank_acks = msgspec.json.Decoder(_RankForm)
_specs: msgspec.json.Decoder[tuple[TensorSpec, ...]] = msgspec.json.Decoder(
    Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
)
_ANSWER = "an answer of a weightcast receiver"

# An engine's description has the same specs in every update, and with many tensors they take longer to decode than the
# weights to send.  Both ends cache them: encoded ones by identity, decoded ones by their hash.
_TABLES_BYTES = 128 << 20
_TIMES_ITS_BYTES = 4  # memory of decoded specs
_encoded: Lru[int, tuple[object, bytes, str]] = Lru(_TABLES_BYTES)
_known_specs: Lru[str, tuple[TensorSpec, ...]] = Lru(_TABLES_BYTES)


def encode(
    message: msgspec.Struct, *, named: bool = False, known_tables: Collection[str] = (), known_specs: str = ""
) -> bytes:
    """Encodes any of the classes above as JSON.

    Args:
        named: True if the other end has the plan of an ``Open`` or ``Prepare``, or the source of an ``Announce``.  It
            is then named and not sent.
        known_tables: Hashes of the tables that the other end of a ``RankAck`` has.
        known_specs: Hash of the specs that the other end of an ``EngineInfo`` has; empty if it has none.
    """
    if isinstance(message, Open):
        message = _open_form(message, named=named)
    elif isinstance(message, Prepare):
        tables = msgspec.UNSET if named else msgspec.Raw(message.plan.encoded)
        sources = tuple(map(encode_source, message.sources)) or msgspec.UNSET
        message = _with(_PrepareForm, message, plan=message.plan.hash, tables=tables, sources=sources)
    elif isinstance(message, Announce):
        rest: dict[str, Any] = {"layout": message.layout, "plan": msgspec.UNSET, "bucket": msgspec.UNSET}
        if message.plan:
            rest = {"layout": msgspec.UNSET, "plan": message.plan, "bucket": message.layout.index}
        rest["following"] = len(message.following) or msgspec.UNSET
        name = name_of_source(message.source) if named else ""
        rest["known_source"] = name or msgspec.UNSET
        rest["source"] = msgspec.UNSET if name else encode_source(message.source)
        message = _with(_AnnounceForm, message, **rest)
    elif isinstance(message, RankAck):
        held = form_of(message.held, known_tables) if message.held.table.parts else msgspec.UNSET
        message = _with(_RankForm, message, held=held)
    elif isinstance(message, EngineInfo):
        known = _encoded.get(id(message.specs))
        if known is None:
            table = _encoder.encode(message.specs)
            known = message.specs, table, hash_of(table)  # kept alive, so that no other one gets its id
            _encoded.put(id(message.specs), known, _TIMES_ITS_BYTES * len(table))
        rest = {"specs": msgspec.Raw(known[1]), "table": msgspec.UNSET}
        if known[2] == known_specs:
            rest = {"specs": msgspec.UNSET, "table": known_specs}
        message = _with(_InfoForm, message, **rest)
    return _encoder.encode(message)


def _open_form(message: Open, *, named: bool) -> Any:
    plan = message.plan
    if plan is None:
        return _with(_OpenForm, message, plan=msgspec.UNSET, tables=msgspec.UNSET)
    tables = msgspec.UNSET if named else msgspec.Raw(plan.encoded)
    return _with(_OpenForm, message, specs=msgspec.UNSET, bucket_sizes=(), plan=plan.hash, tables=tables)


def _opened(form: Any) -> Open:
    """Returns the Open of its form."""
    if form.plan is msgspec.UNSET:
        if form.specs is msgspec.UNSET or form.tables is not msgspec.UNSET:
            raise ValueError("an Open needs specs, or a plan")
        return _with(Open, form, plan=None)
    if form.specs is not msgspec.UNSET or form.bucket_sizes:
        raise ValueError("an Open with a plan has its specs and sizes in the plan")
    plan = kept_plan(form.plan) if form.tables is msgspec.UNSET else take_plan(form.plan, bytes(form.tables))
    return _with(Open, form, specs=plan.specs, bucket_sizes=plan.bucket_sizes, plan=plan)


def _prepared(form: Any) -> Prepare:
    """Returns the Prepare of its form."""
    if form.plan is msgspec.UNSET:
        raise ValueError("a Prepare needs a plan")
    plan = kept_plan(form.plan) if form.tables is msgspec.UNSET else take_plan(form.plan, bytes(form.tables))
    sources = () if form.sources is msgspec.UNSET else tuple(map(decode_source, form.sources))
    return _with(Prepare, form, plan=plan, sources=sources)


def _announced(form: Any) -> Announce:
    """Returns the Announce of its form."""
    if (form.source is msgspec.UNSET) == (form.known_source is msgspec.UNSET):
        raise ValueError("an Announce needs a source, or the hash of one")
    source = kept_source(form.known_source) if form.source is msgspec.UNSET else decode_source(form.source)
    if form.layout is not msgspec.UNSET:
        if any(one is not msgspec.UNSET for one in (form.plan, form.bucket, form.following)):
            raise ValueError("an Announce has a layout, or buckets of a plan")
        form.layout.check()
        return _with(Announce, form, source=source, plan="", following=())
    if form.plan is msgspec.UNSET or form.bucket is msgspec.UNSET:
        raise ValueError("an Announce needs a layout, or a bucket of a plan")
    layouts = kept_plan(form.plan).layouts
    last = form.bucket + (0 if form.following is msgspec.UNSET else form.following)
    if last >= len(layouts):
        raise ValueError(f"bucket {last}: its plan has {len(layouts)}")
    if last > form.bucket and group_of(source) is None:
        raise ValueError("several buckets at once come in a group")
    first, *following = layouts[form.bucket : last + 1]
    return _with(Announce, form, source=source, layout=first, following=tuple(following))


def _described(data: bytes) -> EngineInfo:
    form = _infos.decode(data)
    if form.specs is msgspec.UNSET:
        specs = None if form.table is msgspec.UNSET else _known_specs.get(form.table)
        if specs is None:
            raise ValueError("specs are missing")
        return _with(EngineInfo, form, specs=specs)
    table = bytes(form.specs)
    name = hash_of(table)
    specs = _known_specs.get(name)
    if specs is None:
        specs = _specs.decode(table)
        _known_specs.put(name, specs, _TIMES_ITS_BYTES * len(table))
    return _with(EngineInfo, form, specs=specs)


def specs_hash(info: EngineInfo) -> str:
    """The hash under which this process has the specs of a decoded description; empty if it has them no more.

    An engine that is told the hash leaves the specs out.
    """
    return _known_specs.key_of(info.specs) or ""


def decode_ack(data: bytes) -> Ack:
    """Decodes an engine's answer; raises WireError if the bytes are none."""
    return decoded(_acks.decode, data, _ANSWER)


def decode_rank_ack(data: bytes, tables: MutableMapping[str, HeldTable] | None = None) -> RankAck:
    """Decodes an engine rank's answer; WireError if the bytes are none, or name a table that did not come.

    ``tables`` has the tables of parts that came with earlier answers, by hash, and takes the one in this.
    """

    def read(data: bytes) -> RankAck:
        form = _rank_acks.decode(data)
        held = NOTHING_HELD if form.held is msgspec.UNSET else held_of(form.held, {} if tables is None else tables)
        return _with(RankAck, form, held=held)

    return decoded(read, data, _ANSWER)


def decode_info(data: bytes) -> EngineInfo:
    """Decodes an engine's description of itself; raises WireError if the bytes are none."""
    return decoded(_described, data, _ANSWER)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decodes a trainer's message and checks every field; WireError names the field that is wrong.

    UnknownPlan says that it names a plan or a source that this process does not have.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"the message has {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        with gc_paused():  # tables of tensors and parts are many new objects
            form = _decoder.decode(data)
            if isinstance(form, _OpenForm):
                return _opened(form)
            if isinstance(form, _PrepareForm):
                return _prepared(form)
            return _announced(form) if isinstance(form, _AnnounceForm) else form
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a weightcast message: {error}") from None
