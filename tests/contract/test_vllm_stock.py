"""The vLLM adapter against stock vLLM's own routes, worker methods, info classes and packing.

Three versions: the newest, the one that runs on a CPU, and one whose forms are older.  ``vllm_rig.py`` runs in each.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environment import QUICK, ROOT, engine_python, engine_sources

pytestmark = [pytest.mark.engine, pytest.mark.short]

UNIQUE_ID = base64.b64encode(bytes(range(128, 256))).decode()
UPDATES = ["update_weights"] * 3
OLD = ("0.25.1",)
# `make test` plays the newest version, `make engine-test` all.
PLAYED = ("0.33.0", *(pytest.param(version, marks=pytest.mark.engine_full) for version in ("0.32.0", *OLD)))


@pytest.fixture(scope="module", params=PLAYED)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The rig's output, and vLLM's version."""
    version: str = request.param
    return version, rig_output("vllm_rig.py", version, tmp_path_factory.mktemp("stand-ins"))


def rig_output(name: str, version: str, stand_ins: Path) -> dict[str, Any]:
    """Runs a rig of this folder with a version of vLLM; returns the document that it prints."""
    python = engine_python("vllm-0.32.0-cpu")
    path = [] if version == "0.32.0" else [str(engine_sources("vllm", version))]
    if version in OLD:  # it imports ray and does not use it here
        path.append(str(stand_ins))
        (stand_ins / "ray.py").write_text("")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*path, str(ROOT / "src"), str(QUICK)]),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "OMP_NUM_THREADS": "1",
    }
    rig = Path(__file__).with_name(name)
    done = subprocess.run([python, rig], capture_output=True, text=True, env=environment, check=False, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RIG ")]
    assert lines, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(lines[-1][4:])


def of(said: tuple[str, dict[str, Any]], case: str) -> dict[str, Any]:
    found = said[1][case]
    assert "error" not in found, found["error"]
    return found


def test_buckets_arrive_through_the_backend_nccl(said: tuple[str, dict[str, Any]]) -> None:
    found = of(said, "nccl")
    old = said[0] in OLD
    version = "default" if old else "7"
    assert found["first"] == {"equal": True, "buckets": 3, "version": 7, "engine_version": version}
    assert found["second"]["equal"]
    (joined,) = found["joined"]
    assert (joined["rank_offset"], joined["world_size"]) == (3, 5)
    if old:
        assert (joined["master_address"], joined["master_port"]) == ("10.0.0.1", 4567)
    else:
        assert joined["nccl_unique_id_b64"] == UNIQUE_ID
        assert joined["master_address"] is None
        assert (joined["packed"], joined["packed_buffer_size_bytes"]) == (True, 600)
        assert joined["packed_num_buffers"] == 32
    inits = ["init_weight_transfer_engine"] * (3 if old else 1)  # an older form for each refusal
    shutdown = [] if old else ["shutdown_weight_transfer_engine"]
    update = ["start_weight_update", *UPDATES, "finish_weight_update", "resume"]
    assert found["said"] == ["pause abort True", *shutdown, *inits, *update, "pause keep False", *update]


def test_buckets_arrive_through_the_backend_ipc_in_reused_buffers(
    said: tuple[str, dict[str, Any]],
) -> None:
    found = of(said, "ipc")
    assert found["first"]["equal"]
    assert found["second"]["equal"]
    inits = ["init_weight_transfer_engine"] * (2 if said[0] in OLD else 1)
    update = ["start_weight_update", *UPDATES, "finish_weight_update", "resume"]
    assert found["said"] == ["pause abort True", *inits, *update, "pause keep True", *update]


def test_session_left_open_by_a_dead_trainer_is_ended(said: tuple[str, dict[str, Any]]) -> None:
    assert of(said, "left_open")["equal"]


def test_aborted_update_leaves_the_old_version_or_a_paused_engine(
    said: tuple[str, dict[str, Any]],
) -> None:
    found = of(said, "aborted")
    assert found["before"] == "serving"
    assert found["said"][-2:] == ["finish_weight_update", "resume"]
    assert (found["after"], found["stays_paused"]) == ("quarantined", True)
    assert found["again"]["equal"]


def test_handle_of_another_gpu_is_refused_in_vllms_own_words(said: tuple[str, dict[str, Any]]) -> None:
    found = of(said, "refused")
    assert found["status"] == 500
    assert "IPC handle not found for GPU UUID" in found["words"]


def test_id_in_the_store_is_an_object_of_vllms_class(said: tuple[str, dict[str, Any]]) -> None:
    assert of(said, "by_store") == {"class": True, "same": True, "as_pickled": True}


def test_vllms_own_producer_packs_a_bucket_as_we_do(said: tuple[str, dict[str, Any]]) -> None:
    assert of(said, "chunks") == {"same": True}


def test_weightcasts_backend_fits_this_version(said: tuple[str, dict[str, Any]]) -> None:
    assert of(said, "plug_in") == {"registered": True, "abstract": [], "routes": True, "unasked": False}


def test_a_vllm_without_a_hook_point_is_refused_and_says_why(said: tuple[str, dict[str, Any]]) -> None:
    server, rank = of(said, "hook_points")["said"]
    for words in (server, rank):
        assert "is not as this plug-in expects" in words
        assert "name another backend in --weight-transfer-config" in words
    assert "vllm.v1.engine.core.EngineCore._initialize_kv_caches is missing" in server
    for name in ("determine_available_memory", "compile_or_warm_up_model", "wake_up"):
        assert f"Other.{name} is missing" in rank
    assert "Other.sleep" not in rank


def test_worker_of_this_version_counts_staging_and_reports_sleep(said: tuple[str, dict[str, Any]]) -> None:
    found = of(said, "around")
    assert found["sleep"] == [["sleep", 1], "let go", ["restore", ["weights"]], ["wake", ["weights"]]]
    assert found["room"] == [["room", 1000]]
    assert found["left"] == 970
    assert found["warms up"]


def test_what_leaves_the_pool_of_this_versions_sleep_is_freed_once(said: tuple[str, dict[str, Any]]) -> None:
    found = of(said, "pool_of_sleep")
    assert found["leaves"] == [False, True, False, False]  # not without it, with another one, or with other records
    first, *left, last = [4096 + number * (2 << 20) for number in range(4)]
    once = [4 << 20, left]
    assert found["freed"] == [once, once, [4 << 20, [*left, first, last]], [6 << 20, [*left, first, last, first]]]


def test_core_of_this_version_has_our_methods_before_it_is_forked(said: tuple[str, dict[str, Any]]) -> None:
    assert of(said, "before_the_core") == {"imported": False, "known": True}


def test_core_of_this_version_switches_in_one_call(said: tuple[str, dict[str, Any]]) -> None:
    found = of(said, "one_call")
    assert (found["kind"], found["answer"], found["after"]) == ("alone", ["", False, False], "UNPAUSED")
    steps = [["step", "PAUSED_ALL"]] * 2
    assert found["told"] == [*steps, ["preempted", "r"], ["weightcast_switch", [""]]]


def test_flashinfers_copy_of_sinks_is_renewed_in_this_version(said: tuple[str, dict[str, Any]]) -> None:
    """gpt-oss on GPUs newer than an H200: attention computes with a float32 copy that vLLM makes after loading."""
    found = of(said, "sinks")
    assert found["own_copy"], "this version makes no copy any more, so the renewal can go"
    assert found["stale"] == [1.0, 2.0, 3.0]
    assert found["noticed"]
    assert found["renewed"] == [4.0, 5.0, 6.0]
    assert found["in_place"]  # a captured graph reads the same memory


def test_the_cpus_copy_of_float16_sinks_is_renewed_in_this_version(said: tuple[str, dict[str, Any]]) -> None:
    """The copy comes with the first request, when the receiver has looked at the model already."""
    found = of(said, "sinks_of_float16")
    assert found["renewed"] == [4.0, 5.0, 6.0]
    assert found["own_copy"] == (said[0] not in OLD)
    assert found["noticed"] == found["own_copy"]
