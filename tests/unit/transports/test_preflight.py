"""Checks before anything moves: tensors that an engine does not keep, and the number of the first update."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError
from weightcast.transports.preflight import check_fits, tell_served
from weightcast.wire.layout import TensorSpec


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


def link(required: list[TensorSpec], optional: list[TensorSpec]) -> Any:
    info = SimpleNamespace(model="m", specs=tuple(required), optional=tuple(optional))
    return SimpleNamespace(url="http://e", info=info)


def test_update_may_contain_or_omit_an_optional_tensor() -> None:
    engine = link([spec("w", 2)], [spec("mtp", 3)])
    check_fits([engine], [spec("w", 2)])
    check_fits([engine], [spec("w", 2), spec("mtp", 3)])
    for wrong, words in (
        ([spec("mtp", 3)], "missing w"),
        ([spec("w", 2), spec("mtp", 4)], r"mtp has shape \(4,\), the engine's has \(3,\)"),
        ([spec("w", 2), spec("other", 3)], "unknown to the engine: other"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_fits([engine], wrong)


def test_missing_and_unknown_tensors_are_both_named() -> None:
    engine = link([spec(f"layers.{n}.q_proj", 2) for n in range(9)], [])
    with pytest.raises(
        ConfigError, match=r"missing layers\.0\.q_proj, .*; unknown to the engine: layers\.0\.qkv, .*"
    ) as caught:
        check_fits([engine], [spec(f"layers.{n}.qkv", 6) for n in range(9)])
    assert "ModuleExporter(model, family=..., names=...)" in str(caught.value.hint)


@pytest.mark.parametrize("listed", [[], [spec("w", 2)]], ids=["without a list", "with a list"])
def test_a_draft_is_refused_for_an_engine_without_one(listed: list[TensorSpec]) -> None:
    engine = link(listed, [])
    engine.info.engine = "sglang 0.5.23"
    check_fits([engine], [spec("w", 2)])
    with pytest.raises(ConfigError, match=r"takes no draft model, and draft\.w belongs to one") as caught:
        check_fits([engine], [spec("w", 2), spec("draft.w", 2)])
    assert "leave draft= out" in str(caught.value.hint)


def test_an_engine_with_another_table_than_the_others_is_not_missed() -> None:
    table = (spec("w", 2),)
    alike: list[Any] = [link([], []) for _ in range(5)]
    for engine in alike:
        engine.info.specs = table
    check_fits(alike, [spec("w", 2)])
    other = link([spec("w", 3)], [])
    other.url = "http://other"
    with pytest.raises(ConfigError, match=r"do not fit http://other .*shape \(2,\)"):
        check_fits([*alike, other], [spec("w", 2)])


def at(*versions: int | None) -> Any:
    return {f"http://e{number}": SimpleNamespace(version=version) for number, version in enumerate(versions)}


@pytest.mark.parametrize(
    ("versions", "level"),
    [
        pytest.param((0, 0), None, id="a first run"),
        pytest.param((7, 7), logging.INFO, id="a second run"),
        pytest.param((7, None), logging.INFO, id="one waits for its first weights"),
        pytest.param((7, 3), logging.WARNING, id="engines that answer differently"),
        pytest.param((7, 0), logging.WARNING, id="one was restarted"),
    ],
)
def test_a_served_version_is_a_warning_only_if_engines_serve_different_ones(caplog, versions, level):
    caplog.set_level(logging.DEBUG, "weightcast")
    tell_served(at(*versions), UpdateConfig())
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    if level is not None:
        assert " serves version 7" in caplog.text
        assert "update(version=N) with a lower N is refused" in caplog.text
    assert (f"(http://e1 serves {versions[1]})" in caplog.text) == (level == logging.WARNING)


def test_versions_that_may_be_older_are_not_spoken_of(caplog):
    caplog.set_level(logging.DEBUG, "weightcast")
    tell_served(at(7, 3), UpdateConfig(allow_older=True))
    assert caplog.records == []
