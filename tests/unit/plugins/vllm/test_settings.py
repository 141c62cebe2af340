"""The plug-in checks at vLLM's start: vLLM's version, and the settings in vLLM's own configuration."""

from __future__ import annotations

import pytest

from weightcast.errors import ConfigError
from weightcast.plugins.engine_needs import EngineNeeds
from weightcast.plugins.hook_points import VLLM, check_worker
from weightcast.plugins.vllm.rank_protocol import settings_of


@pytest.mark.parametrize(
    ("config", "staging", "draft"),
    [
        ({}, "auto", "keep"),
        ({"other": {"staging": "attic"}}, "auto", "keep"),
        ({"weightcast": {"staging": "host"}}, "host", "keep"),
        ({"weightcast": {"draft": "update"}}, "auto", "update"),
        (None, "auto", "keep"),
    ],
)
def test_settings_are_read_from_vllms_own_config(config, staging, draft):
    settings = settings_of(config)
    assert (settings.staging, settings.draft) == (staging, draft)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"weightcast": {"staging": "attic"}}, "'attic'.*staging"),
        ({"weightcast": {"stagin": "host"}}, "'stagin'"),
        ({"weightcast": {"draft": "yes"}}, "'yes'.*draft"),
        ({"weightcast": "host"}, "is 'host'"),
        ({"weightcast": {"not_updated": "visual("}}, r"visual\(.*unterminated"),
    ],
)
def test_a_setting_that_is_not_understood_is_named(config, words):
    with pytest.raises(ConfigError, match=words) as caught:
        settings_of(config)
    assert "--additional-config" in str(caught.value.hint)


@pytest.mark.parametrize(
    "start", [lambda: VLLM.check("server"), lambda: check_worker(object)], ids=["API server", "worker"]
)
def test_a_vllm_below_the_lowest_version_is_refused_with_both_versions(start, monkeypatch):
    monkeypatch.setattr(EngineNeeds, "version", lambda needs: "0.24.0+cu129")
    with pytest.raises(ConfigError, match=r"vLLM 0\.24\.0\+cu129 is older than 0\.25, the lowest version") as caught:
        start()
    assert str(caught.value.hint).startswith("install vLLM 0.25 or newer")
