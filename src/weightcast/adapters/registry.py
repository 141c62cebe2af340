"""The kinds of engine.  A probe asks in this order, so an engine with our receiver is updated through the receiver."""

from __future__ import annotations

from weightcast.adapters.lmdeploy.detect import LmdeployKind
from weightcast.adapters.native.detect import NativeKind
from weightcast.adapters.sglang.detect import SglangKind
from weightcast.adapters.vllm.detect import VllmExtensionKind, VllmKind
from weightcast.protocols import Adapter, Kind
from weightcast.wire.messages import EngineInfo

KINDS: tuple[Kind, ...] = (NativeKind(), SglangKind(), LmdeployKind(), VllmKind(), VllmExtensionKind())


def adapter_for(info: EngineInfo) -> Adapter:
    """Makes an adapter for a recognised engine."""
    return next(kind for kind in KINDS if kind.name == info.kind).adapter(info)
