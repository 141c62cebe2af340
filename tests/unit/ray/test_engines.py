"""Engines under Ray without Ray: command lines, the keeper, and who may be asked after an update."""

from __future__ import annotations

import json

import pytest

from weightcast.errors import ConfigError
from weightcast.ray import RolloutEngines, lmdeploy_engine, reference_engine, sglang_engine, vllm_engine
from weightcast.ray.engine_kinds import EngineKind, wake_requests
from weightcast.ray.engines import RayEngine
from weightcast.report import TargetReport, UpdateReport


def test_command_lines():
    kind = reference_engine("m", "--threads", "1")
    assert kind.command[1:5] == ("-m", "weightcast", "serve", "m")
    assert kind.command[-2:] == ("--threads", "1")
    assert {"{host}", "{port}", "{tp}"} <= set(kind.command)
    vllm = vllm_engine("m", "--enforce-eager", program=("/venv/bin/vllm", "serve"))
    assert vllm.command[:3] == ("/venv/bin/vllm", "serve", "m")
    assert '{"backend": "weightcast"}' in vllm.command
    assert vllm.env == {"VLLM_SERVER_DEV_MODE": "1"}
    plain = vllm_engine("m", receiver=False)
    assert "--weight-transfer-config" not in plain.command
    assert sglang_engine("m").wake == ("/resume_memory_occupation",)
    assert sglang_engine("m").env == {}
    assert sglang_engine("m", receiver=True).env == {"SGLANG_PLUGINS": "weightcast"}
    lmdeploy = lmdeploy_engine("m", "--dtype", "bfloat16")
    assert lmdeploy.command[:6] == ("lmdeploy", "serve", "api_server", "m", "--backend", "pytorch")
    assert lmdeploy.command[-2:] == ("--dtype", "bfloat16")
    assert (lmdeploy.sleep, lmdeploy.wake) == (("/sleep?level=1",), ("/wakeup",))


def test_trainers_get_the_settings_of_nccl_that_the_server_makes_for_itself():
    for arguments, cumem, nvls in (
        ((), "0", "0"),
        (("--enable-symm-mem",), "1", "1"),
        (("--enable-nccl-nvls",), "0", "1"),
        (("--moe-a2a-backend", "deepep_v2"), "1", "0"),
    ):
        found = sglang_engine("m", *arguments, receiver=True).trainer_env
        assert found == {"NCCL_CUMEM_ENABLE": cumem, "NCCL_NVLS_ENABLE": nvls}
    assert vllm_engine("m").trainer_env == {}
    own = EngineKind(command=("serve",), env={"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"})
    assert own.trainer_env == {"NCCL_NVLS_ENABLE": "0"}


def test_engines_wake_wholly_or_by_tag():
    tags = ["weights", "kv_cache"]
    assert wake_requests(sglang_engine("m"), []) == [("/resume_memory_occupation", b"{}")]
    [(path, body)] = wake_requests(sglang_engine("m"), tags)
    assert (path, json.loads(body)) == ("/resume_memory_occupation", {"tags": tags})
    assert wake_requests(vllm_engine("m"), tags) == [("/wake_up?tags=weights&tags=kv_cache", b"{}")]
    assert wake_requests(lmdeploy_engine("m"), tags[:1]) == [("/wakeup?tags=weights", b"{}")]
    assert wake_requests(reference_engine("m"), []) == [("/wake", b"{}")]
    with pytest.raises(ConfigError, match=r"take no tags to wake \(weights\)"):
        wake_requests(reference_engine("m"), tags[:1])


def group(*states: str, engine: str = "auto") -> RolloutEngines:
    engines = object.__new__(RolloutEngines)
    engines._kind, engines._api_key, engines.version = EngineKind(command=("serve",), engine=engine), None, None
    engines._members = [RayEngine(number, None) for number in range(len(states))]  # type: ignore[arg-type]
    for member, state in zip(engines._members, states, strict=True):
        member.url, member.state = f"http://{member.number}", state  # type: ignore[assignment]
    return engines


def report(version: int, *statuses: str) -> UpdateReport:
    return UpdateReport(
        version=version,
        transport="ipc",
        bytes=1,
        buckets=1,
        seconds=1.0,
        phases={},
        peak_extra_bytes=0,
        digest="d",
        targets=tuple(
            TargetReport(url=f"http://{number}", engine="x", status=status)  # type: ignore[arg-type]
            for number, status in enumerate(statuses)
        ),
    )


def test_urls_after_an_update_are_the_engines_that_serve_it():
    engines = group("serving", "waiting", "dead", "serving")
    engines.admit(report(4, "serving", "serving", "serving", "quarantined"))
    assert engines.urls == ("http://0", "http://1")  # the restarted one too; the dead stays dead
    assert engines.version == 4
    assert [target.url for target in engines.waiting] == ["http://3"]
    engines.admit(report(5, "untouched", "untouched", "untouched", "untouched"))
    assert engines.urls == ("http://0", "http://1")  # all serve what they served
    assert engines.version == 4
    engines.admit(report(6, "serving", "untouched", "untouched", "serving"))
    assert engines.urls == ("http://0", "http://3")  # 1 is behind now
    engines.admit(None)
    assert engines.urls == ("http://0", "http://3")


def test_engines_are_updated_as_the_kind_that_they_were_started_as():
    engines = group("waiting", engine="acme")
    assert [(target.url, target.engine) for target in engines.waiting] == [("http://0", "acme")]


def test_a_first_update_that_fails_leaves_everybody_where_he_is():
    engines = group("serving", "serving")
    engines.admit(report(1, "untouched", "untouched"))
    assert engines.urls == ("http://0", "http://1")
    assert engines.version is None
