"""Settings with which our part of SGLang starts or ends the start, without SGLang."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcast.errors import ConfigError
from weightcast.plugins import sglang as plugin
from weightcast.plugins.sglang.endpoints import _no_pause
from weightcast.plugins.sglang.settings import check_settings, has_draft, ranks_of, updates_draft
from weightcast.plugins.staged_receiver import staging_setting


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"nnodes": 2}, "--nnodes"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"disaggregation_mode": "decode"}, "servers of their own"),
        ({"quantization": "fp8"}, "--quantization"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"ep_size": 2}, "--ep-size"),
        ({"smg_grpc_mode": True}, "--smg-grpc-mode"),
        ({"grpc_port": 30001}, "--grpc-port"),
        ({"offload_group_size": 4}, "--offload-group-size"),
        ({"weight_cache_mode": "daemon"}, "--weight-cache-mode"),
    ],
)
def test_settings_that_were_not_shown_to_be_right_are_refused_by_name(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_settings(SimpleNamespace(**setting))


def test_default_settings_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimpleNamespace(
        dp_size=1, nnodes=1, tokenizer_worker_num=1, disaggregation_mode="null", offload_group_size=-1
    )
    check_settings(plain)
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ConfigError, match="Rust"):
        check_settings(plain)
    monkeypatch.delenv("SGLANG_RUST_SERVER")
    monkeypatch.setenv("SGLANG_GRPC_PORT", "30001")
    with pytest.raises(ConfigError, match="SGLANG_GRPC_PORT"):
        check_settings(plain)


class Given(SimpleNamespace):
    """SGLang 0.5.23's ``ServerArgs``, which keeps what it was given, and its decisions beside it."""

    def __init__(self, decided: dict[str, Any], **given: Any) -> None:
        super().__init__(**given)
        self.decided = decided

    def resolve_once(self) -> None:
        raise AssertionError("SGLang has decided already")


class Decided:
    """SGLang 0.5.23's ``ResolvingConfig``."""

    def __init__(self, server_args: Given) -> None:
        self._server_args = server_args

    def __getattr__(self, name: str) -> Any:
        given = self._server_args
        return given.decided[name] if name in given.decided else getattr(given, name)


@pytest.fixture
def decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.arg_groups.overrides"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["sglang.srt.arg_groups.overrides"])["resolving_view"] = Decided


@pytest.mark.usefixtures("decides")
def test_a_setting_that_sglang_turned_on_by_itself_is_refused() -> None:
    check_settings(Given({}, enable_lora=None))
    with pytest.raises(ConfigError, match="LoRA adapters"):
        check_settings(Given({"enable_lora": True}, enable_lora=None, lora_paths=["a=/adapter"]))
    with pytest.raises(ConfigError, match="expert parallelism"):  # and one that it was given
        check_settings(Given({"ep_size": 1}, ep_size=2))
    assert ranks_of(Given({"dp_size": 4}, dp_size=1, tp_size=2, pp_size=1)) == 8
    assert set(_no_pause(Given({"pp_size": 2}, pp_size=1))) == {"abort", "retract", "wait"}


def test_an_sglang_whose_decisions_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", None)
    with pytest.raises(ConfigError, match=r"not as this plug-in expects: its decisions about settings cannot be read"):
        check_settings(Given({}, enable_lora=None))


DRAFT = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/head", "model_path": "/model"}


@pytest.mark.parametrize(
    ("setting", "version", "taken"),
    [
        ({}, "0.5.23", True),
        ({"speculative_algorithm": "EAGLE"}, "0.5.23", True),
        ({}, "0.5.17", True),
        ({}, "0.5.20", False),
        ({"speculative_algorithm": "STANDALONE"}, "0.5.23", False),
        ({"speculative_algorithm": "NGRAM"}, "0.5.23", False),
        ({"speculative_draft_model_path": "/model"}, "0.5.23", False),
        ({"speculative_draft_model_path": None}, "0.5.23", False),
        ({"enable_multi_layer_eagle": True}, "0.5.23", False),
        ({"pp_size": 2}, "0.5.23", False),
        ({"speculative_token_map": "/words"}, "0.5.23", False),
    ],
)
def test_drafts_that_were_tried_are_taken(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], version: str, taken: bool
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    args = SimpleNamespace(**DRAFT | setting)
    if taken:
        check_settings(args)
    else:
        with pytest.raises(ConfigError, match="draft"):
            check_settings(args)


def test_a_draft_is_kept_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.23")
    args = SimpleNamespace(**DRAFT)
    assert has_draft(args)
    assert not updates_draft(args)
    monkeypatch.setenv("WEIGHTCAST_DRAFT", "update")
    assert updates_draft(args)
    with pytest.raises(ConfigError, match="no draft that an update can reach"):
        updates_draft(SimpleNamespace(speculative_algorithm=None))
    monkeypatch.setenv("WEIGHTCAST_DRAFT", "yes")
    with pytest.raises(ConfigError, match="'yes'"):
        updates_draft(args)


def test_staging_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert staging_setting() == "auto"
    for value in ("auto", "device", "host"):
        monkeypatch.setenv("WEIGHTCAST_STAGING", value)
        assert staging_setting() == value
    monkeypatch.setenv("WEIGHTCAST_STAGING", "none")
    with pytest.raises(ConfigError, match="'none'"):
        staging_setting()


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ({}, set()),
        ({"pp_size": 1}, set()),
        ({"pp_size": 2}, {"abort", "retract", "wait"}),
        (DRAFT, {"in_place"}),
        (DRAFT | {"disable_overlap_schedule": True}, set()),
    ],
)
def test_pauses_that_would_be_wrong_are_refused_at_connect(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], refused: set[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.23")
    found = _no_pause(SimpleNamespace(**{"disable_overlap_schedule": False} | setting))
    assert set(found) == refused
    assert all("use " in why for why in found.values())


@pytest.mark.parametrize("named", [None, "", "other", "other, weightcasts"])
def test_without_its_name_the_plug_in_does_nothing(monkeypatch: pytest.MonkeyPatch, named: str | None) -> None:
    if named is None:
        monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("SGLANG_PLUGINS", named)
    plugin.register()


def test_named_in_an_sglang_that_it_does_not_know_it_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other, weightcast")
    with pytest.raises(SystemExit, match=r"(?s)weightcast cannot run in this SGLang.*load_model is missing"):
        plugin.register()
