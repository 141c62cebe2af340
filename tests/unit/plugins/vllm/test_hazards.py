"""The parts of an engine that an update leaves alone are named first: by the plug-in, a stock server, doctor."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from weightcast.adapters.vllm.server_info import Facts
from weightcast.errors import ConfigError
from weightcast.plugins.vllm.engine_hooks import VllmHooks
from weightcast.plugins.vllm.hazards import hazards_of
from weightcast.plugins.vllm.stores import check_stores, store_outside
from weightcast.transports.preflight import warn_hazards
from weightcast.update.diagnose import _staging, hazards
from weightcast.wire.codec import decode_info, encode
from weightcast.wire.engine_info import NO_RECEIVER, EngineInfo


def config(**changes: Any) -> SimpleNamespace:
    settings: dict[str, Any] = {"lora_config": None, "cache_config": SimpleNamespace(), "kv_transfer_config": None}
    return SimpleNamespace(**(settings | changes))


def info(**changes: Any) -> EngineInfo:
    settings: dict[str, Any] = {
        "protocol": 4,
        "engine": "vllm 0.32.0",
        "model": "tiny",
        "state": "serving",
        "version": 1,
        "digest": None,
        "tp_size": 1,
        "host_id": "here",
        "ranks": (),
        "staging": "device",
        "transports": ("ipc",),
        "specs": (),
    }
    return EngineInfo(**(settings | changes))


@pytest.mark.parametrize("kind", ["sglang", "lmdeploy", "vllm"])
def test_the_hint_for_an_engine_without_our_receiver_names_the_page_of_its_own(kind):
    hint = _staging(info(staging="none", kind=kind, protocol=NO_RECEIVER)).hint or ""
    [page] = re.findall(r"docs/engines/\S+\.md", hint)
    assert kind in page
    assert Path(page).exists()


def test_a_plain_server_has_none():
    assert hazards_of(config(), keeps_draft=False) == ()
    assert store_outside(config()) == ""
    check_stores(config())


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"keeps_draft": True}, "the draft model keeps the weights"),
        ({"lora_config": object()}, {}, "adapters that vLLM loads from folders"),
        ({"cache_config": SimpleNamespace(calculate_kv_scales=True)}, {}, "scales of its KV cache"),
        ({}, {"not_updated": "visual.*"}, "keeps the tensors that match 'visual.*'"),
    ],
)
def test_the_plug_in_names_each(changes, options, words):
    found = hazards_of(config(**changes), **({"keeps_draft": False} | options))
    assert len(found) == 1
    assert words in found[0]


def test_a_cache_outside_of_vllm_forbids_in_place():
    assert store_outside(config(kv_transfer_config=SimpleNamespace(kv_connector="Shelf"))) == "the KV connector Shelf"
    assert store_outside(config(cache_config=SimpleNamespace(kv_offloading_size=4.0))) == "the offloaded KV cache"
    loop: Any = None
    client = SimpleNamespace(resume_generation=None)
    hooks = VllmHooks(client, loop, prefix_caching=False, cache_outside="the KV connector Shelf")
    assert "the KV connector Shelf" in hooks.no_pause["in_place"]
    assert "retract" in hooks.no_pause["in_place"]
    assert VllmHooks(client, loop, prefix_caching=False).no_pause == {}


# Connectors of vLLM 0.25, 0.32 and 0.33 with their settings.  Those that files or other servers keep are not emptied,
# also if they say that they are.
STORES = [
    ({"kv_connector": "ExampleConnector"}, {}, "KV connector ExampleConnector"),
    ({"kv_connector": "LMCacheMPConnector"}, {}, "KV connector LMCacheMPConnector"),
    ({"kv_connector": "MooncakeStoreConnector"}, {}, "KV connector MooncakeStoreConnector"),
    ({"kv_connector": "MultiConnector"}, {}, "KV connector MultiConnector"),
    ({"kv_connector": "OffloadingConnector", "kv_connector_module_path": "mine"}, {}, "OffloadingConnector"),
    ({"kv_connector": "OffloadingConnector"}, {"spec_name": "TieringOffloadingSpec"}, "OffloadingConnector"),
    ({"kv_connector": "SimpleCPUOffloadConnector"}, {"kv_offload_backend": "disk"}, "SimpleCPUOffloadConnector"),
    ({"kv_connector": "OffloadingConnector"}, {"cpu_bytes_to_use": 1 << 30}, ""),
    ({"kv_connector": "SimpleCPUOffloadConnector"}, {}, ""),
    ({"kv_connector": None}, {}, ""),
]


@pytest.mark.parametrize(("transfer", "extra", "words"), STORES)
def test_a_store_that_no_update_empties_is_refused_by_name(transfer, extra, words):
    settings: dict[str, Any] = transfer | {"kv_connector_extra_config": extra}
    started = config(kv_transfer_config=SimpleNamespace(**settings))
    facts = Facts.of(json.dumps({"vllm_config": {"kv_transfer_config": settings}}).encode())
    assert facts.offloads is (transfer["kv_connector"] is not None)
    assert ("in_place" in facts.no_pause()) is facts.offloads
    if not words:
        check_stores(started)
        assert facts.never_emptied == ""
        return
    with pytest.raises(ConfigError, match=f"{words} keeps what the old weights computed") as caught:
        check_stores(started)
    assert "start vLLM without --kv-transfer-config" in str(caught.value.hint)
    assert f"{words} keeps what the old weights computed" in facts.never_emptied
    assert facts.transports() == ()
    assert facts.never_emptied in facts.advice()


def test_a_store_of_encoder_outputs_is_refused_by_name():
    settings = {"ec_connector": "Gallery", "ec_role": "ec_both"}
    with pytest.raises(ConfigError, match="the encoder connector Gallery keeps"):
        check_stores(config(ec_transfer_config=SimpleNamespace(**settings)))
    facts = Facts.of(json.dumps({"vllm_config": {"ec_transfer_config": settings}}).encode())
    assert "start vLLM without --ec-transfer-config" in facts.never_emptied


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_config": {"max_loras": 1}}, "adapters that vLLM loads from folders"),
        ({"cache_config": {"calculate_kv_scales": True}}, "--calculate-kv-scales"),
        (
            {"parallel_config": {"is_moe_model": True}, "kernel_config": {"moe_backend": "triton"}},
            "kernels for experts (--moe-backend triton)",
        ),
        ({"speculative_config": {"method": "eagle"}}, "its draft model is not updated"),
        ({"model_config": {"multimodal_config": {"limit_per_prompt": {}}}}, "it encodes images"),
        ({"model_config": {"quantization": "fp8"}}, "its weights are quantised (fp8)"),
    ],
)
def test_a_stock_server_tells_them_too(changes, words):
    facts = Facts.of(json.dumps({"vllm_config": {"cache_config": {}} | changes}).encode())
    assert len(facts.hazards()) == 1
    assert words in facts.hazards()[0]


def test_a_stock_server_with_prefix_caching_refuses_in_place():
    def facts(caching: bool) -> Facts:
        return Facts.of(json.dumps({"vllm_config": {"cache_config": {"enable_prefix_caching": caching}}}).encode())

    assert "prefix caching" in facts(True).no_pause()["in_place"]
    assert facts(False).no_pause() == {}


def test_a_stock_server_that_has_seen_images_refuses_in_place():
    """vLLM drops the outputs of encoders in a pause that drops its caches, and in no other."""
    model = {"model_config": {"multimodal_config": {"limit_per_prompt": {}}}}
    facts = Facts.of(json.dumps({"vllm_config": model | {"cache_config": {"enable_prefix_caching": False}}}).encode())
    assert "the encoder's outputs" in facts.no_pause()["in_place"]


def test_connect_warns_and_doctor_lists(caplog: pytest.LogCaptureFixture):
    told = info(hazards=("one", "two"), no_pause={"in_place": "it keeps the cache"})
    assert decode_info(encode(told)) == told
    assert decode_info(encode(msgspec.structs.replace(told, hazards=()))).hazards == ()
    link: Any = SimpleNamespace(url="http://e:1", info=told)
    with caplog.at_level(logging.WARNING):
        warn_hazards(link)
    assert [record.getMessage() for record in caplog.records] == [
        "http://e:1 (vllm 0.32.0): one",
        "http://e:1 (vllm 0.32.0): two",
    ]
    checks = list(hazards(told))
    assert [(check.name, check.level) for check in checks] == [
        ("hazard", "warn"),
        ("hazard", "warn"),
        ("pause", "warn"),
    ]
    assert "in_place is refused: it keeps the cache" in checks[-1].text
