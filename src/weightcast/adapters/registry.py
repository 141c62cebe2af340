"""The kinds of engine: ours, and those of other packages.

A probe asks in the order of ``OURS``, so that an engine with our receiver is updated through it.  The other packages'
kinds follow in the order of their names; they are imported only if none of ours recognises a server, or if one of them
is asked for.
"""

from __future__ import annotations

from weightcast.adapters.lmdeploy.detect import LmdeployKind
from weightcast.adapters.native.detect import NativeAdapterKind, NativeKind
from weightcast.adapters.sglang.detect import SglangKind
from weightcast.adapters.vllm.detect import VllmKind
from weightcast.errors import ConfigError
from weightcast.protocols import Adapter, Kind
from weightcast.runtime.entry_points import ENGINES, EntryPoints
from weightcast.wire.adapters import KIND, AdapterRequest
from weightcast.wire.engine_info import EngineInfo

OURS: tuple[Kind, ...] = (NativeKind(), SglangKind(), LmdeployKind(), VllmKind())


def adapter_kind(request: AdapterRequest | None) -> Kind:
    """The kind of engine that serves LoRA adapters beside its model; without a request it describes none."""
    return NativeAdapterKind(request)


def _kind(name: str, loaded: object) -> Kind:
    """Makes the kind that an entry point names; raises TypeError if it names something else."""
    if not isinstance(loaded, type) or not issubclass(loaded, Kind):
        raise TypeError(f"{loaded!r} is not a class of a weightcast.protocols.Kind")
    kind = loaded()
    if kind.name != name:
        raise TypeError(f"its kind has another name: {kind.name!r}")
    return kind


OTHERS = EntryPoints(ENGINES, _kind, taken=("auto", KIND, *(kind.name for kind in OURS)))


def all_kinds() -> tuple[Kind, ...]:
    """All kinds of engine, in the order of a probe.  Imports the other packages'."""
    return (*OURS, *OTHERS.made())


def kind_named(name: str) -> Kind:
    """Returns the kind of this name; raises ConfigError if there is none, or if its package cannot be imported."""
    for kind in OURS:
        if kind.name == name:
            return kind
    for found in OTHERS.load():
        if found.name == name:
            if found.made is None:
                raise ConfigError(
                    f"engine={name!r}: {found.package} cannot be used: {found.error}", hint="repair that package"
                )
            return found.made
    raise ConfigError(
        f"engine={name!r} is unknown: choose one of {', '.join(kind.name for kind in all_kinds())}",
        hint="leave it out where the engine can be asked: the default, auto, asks for every kind",
    )


def kind_of(info: EngineInfo) -> Kind:
    """Returns the kind of a recognised engine."""
    return adapter_kind(None) if info.kind == KIND else kind_named(info.kind)


def adapter_for(info: EngineInfo) -> Adapter:
    """Makes an adapter for a recognised engine."""
    return kind_of(info).adapter(info)
