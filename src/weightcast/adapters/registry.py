"""The kinds of engine.  A probe asks in this order, so an engine with our receiver is updated through the receiver."""

from __future__ import annotations

from weightcast.adapters.lmdeploy.detect import LmdeployKind
from weightcast.adapters.native.detect import NativeAdapterKind, NativeKind
from weightcast.adapters.sglang.detect import SglangKind
from weightcast.adapters.vllm.detect import VllmKind
from weightcast.protocols import Adapter, Kind
from weightcast.wire.adapters import AdapterRequest
from weightcast.wire.engine_info import EngineInfo

KINDS: tuple[Kind, ...] = (NativeKind(), SglangKind(), LmdeployKind(), VllmKind())


def adapter_kinds(request: AdapterRequest | None) -> tuple[Kind, ...]:
    """The kinds of engine that serve LoRA adapters beside their model; without a request a probe describes none."""
    return (NativeAdapterKind(request),)


def adapter_for(info: EngineInfo) -> Adapter:
    """Makes an adapter for a recognised engine."""
    return next(kind for kind in (*KINDS, *adapter_kinds(None)) if kind.name == info.kind).adapter(info)
