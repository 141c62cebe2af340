"""A tensor that an engine knows and keeps nowhere may be part of an update; another one may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightcast.errors import ConfigError
from weightcast.transports.preflight import check_fits
from weightcast.wire.layout import TensorSpec


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


def link(required: list[TensorSpec], optional: list[TensorSpec]) -> Any:
    info = SimpleNamespace(model="m", specs=tuple(required), optional=tuple(optional))
    return SimpleNamespace(url="http://e", info=info, adapter=SimpleNamespace(specs=lambda: tuple(required)))


def test_update_may_contain_or_omit_an_optional_tensor() -> None:
    engine = link([spec("w", 2)], [spec("mtp", 3)])
    check_fits(engine, [spec("w", 2)])
    check_fits(engine, [spec("w", 2), spec("mtp", 3)])
    for wrong, words in (
        ([spec("mtp", 3)], "missing w"),
        ([spec("w", 2), spec("mtp", 4)], r"mtp has shape \(4,\), the engine's has \(3,\)"),
        ([spec("w", 2), spec("other", 3)], "unknown to the engine: other"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_fits(engine, wrong)
