"""Our part of LMDeploy, without LMDeploy: settings and the launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.errors import ConfigError
from weightcast.plugins.hook_points import LMDEPLOY
from weightcast.plugins.lmdeploy.folder import failure_words, note_failure
from weightcast.plugins.lmdeploy.rank import fixed_scales
from weightcast.plugins.lmdeploy.settings import check_settings, mp_executor


def config(**changes: Any) -> Any:
    """LMDeploy's ``PytorchEngineConfig`` as its command line makes it without options."""
    plain = {"dp": 1, "ep": 1, "device_type": "cuda", "role": SimpleNamespace(name="Hybrid"), "mp_engine_backend": "mp"}
    return SimpleNamespace(**plain | changes)


def test_plain_settings_are_taken() -> None:
    check_settings(
        "pytorch", config(tp=1, distributed_executor_backend="uni", enable_prefix_caching=True, model_format="hf"), None
    )


@pytest.mark.parametrize(
    ("asked", "variable", "is_mp"),
    [(None, "", False), ("ray", "mp", False), ("mp", "", True), (None, "mp", True)],
)
def test_several_ranks_are_taken_with_ray_and_mp(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, variable: str, is_mp: bool
) -> None:
    settings = config(tp=2, distributed_executor_backend=asked)
    if variable:
        monkeypatch.setenv("LMDEPLOY_EXECUTOR_BACKEND", variable)  # LMDeploy looks at it if the option is not given
    check_settings("pytorch", settings, None)
    assert mp_executor(settings) == is_mp


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 2}, "--dp"),
        ({"ep": 2}, "--ep"),
        ({"adapters": {"a": "b"}}, "--adapters"),
        ({"quant_policy": 8}, "--quant-policy"),
        ({"model_format": "awq"}, "--model-format"),
        ({"empty_init": True}, "--empty-init"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"dllm_block_length": 4}, "--dllm-block-length"),
        ({"kv_transfer_config": {"a": 1}}, "--kv-transfer-config"),
        ({"role": SimpleNamespace(name="Prefill")}, "--role"),
        ({"device_type": "ascend"}, "--device"),
    ],
)
def test_settings_that_were_not_shown_to_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_settings("pytorch", config(**changes), None)


def test_several_wrong_settings_are_named_together() -> None:
    with pytest.raises(ConfigError, match=r"--dp.*--speculative-algorithm"):
        check_settings("pytorch", config(dp=2), object())


@pytest.mark.parametrize(
    ("speculative", "taken"),
    [
        ({"method": "eagle", "model": "/head"}, True),
        ({"method": "eagle3", "model": "/head"}, True),
        ({"method": "eagle3", "model": ""}, False),
        ({"method": "deepseek_mtp", "model": "/head"}, False),
        ({"method": "qwen3_5_mtp", "model": None}, False),
        ({"method": "dflash", "model": "/head"}, False),
    ],
)
def test_heads_with_a_checkpoint_of_their_own_are_taken(speculative: dict[str, Any], taken: bool) -> None:
    if taken:
        check_settings("pytorch", config(), SimpleNamespace(**speculative))
    else:
        with pytest.raises(ConfigError, match="other than eagle or eagle3 with a checkpoint of its own"):
            check_settings("pytorch", config(), SimpleNamespace(**speculative))


def test_a_draft_that_is_to_be_updated_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_DRAFT", "update")
    check_settings("pytorch", config(), SimpleNamespace(method="eagle3", model="/head"))
    with pytest.raises(ConfigError, match="without a draft model"):
        check_settings("pytorch", config(), None)


def test_another_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="not in turbomind") as caught:
        check_settings("turbomind", config(), None)
    assert "--backend pytorch" in (caught.value.hint or "")


@pytest.mark.parametrize("found", ["0.16.0", "0.19.0"])
def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: found)
    with pytest.raises(ConfigError, match=f"this is LMDeploy {found}") as caught:
        LMDEPLOY.check()
    assert "install LMDeploy 0.18.0" in (caught.value.hint or "")


def test_missing_hook_points_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.18.0")
    needed = ("json:loads(s)", "json:dumps(obj, nowhere)", "json:lost", "nowhere.at.all:f")
    with pytest.raises(ConfigError) as caught:
        LMDEPLOY.check(also=needed)
    said = str(caught.value)
    assert "LMDeploy 0.18.0 is not as this plug-in expects" in said
    assert "json.dumps has no parameter nowhere" in said
    assert "json.lost is missing" in said
    assert "nowhere.at.all.f is missing" in said
    assert "json.loads" not in said


def test_the_first_reason_of_a_failed_start_is_kept(tmp_path: Path) -> None:
    assert failure_words(str(tmp_path)) == ""
    note_failure(str(tmp_path), ConfigError("no memory", hint="use less"))
    note_failure(str(tmp_path), ConfigError("the engine process is gone"))
    assert failure_words(str(tmp_path)) == "no memory (use less)"


class Attention(nn.Module):
    """As LMDeploy's: with scales for a cache in 8 bits."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("k_scale", torch.tensor(scale))
        self.register_buffer("v_scale", torch.ones(()))


def test_scales_that_are_always_one_need_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdeploy.pytorch.nn.attention", SimpleNamespace(Attention=Attention))
    other = nn.Module()
    other.register_buffer("k_scale", torch.ones(()))
    model = nn.ModuleDict({"first": Attention(), "second": Attention(0.5), "third": other})
    assert list(fixed_scales(model)) == ["first.k_scale", "first.v_scale", "second.v_scale"]
