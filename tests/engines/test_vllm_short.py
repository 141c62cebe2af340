"""The short choice for ``make test``: real vLLM on this CPU, with our receiver.

A real model with tied embeddings is on one rank, and experts are on two.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engines.overlays import NIXL
from tests.engines.test_vllm_cpu import COUNT, EXPERTS, PAUSES, PROMPTS, SIZES, Served, check_pause
from tests.engines.trainer import update_directly, update_sharded
from tests.engines.vllm_server import greedy_tokens, vllm
from tests.helpers.clock import AMPLE_S, PATIENCE_S
from tests.helpers.engines import Engine, push, status, verify, weightcast
from tests.helpers.harness import wait_for
from tests.helpers.metrics import series
from tests.helpers.ranks import Ranks
from tests.helpers.tiny import greedy, tiny_model, tiny_tokenizer
from weightcast import Target
from weightcast.comm.rendezvous import Rendezvous
from weightcast.errors import UpdateFailed
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.connect import connect as connect_in_lab
from weightcast.lab.demo.smollm2 import ensure_smollm2
from weightcast.wire.codec import encode
from weightcast.wire.messages import Join

pytestmark = [pytest.mark.engine]


def said_by(folder: Path) -> list[list[int]]:
    """Returns the tokens that transformers generates."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.short
def test_a_real_model_with_tied_embeddings(tmp_path: Path) -> None:
    a, b = ensure_smollm2(lambda done, total: None), tmp_path / "b"
    shutil.copytree(a, b)
    torch.manual_seed(5)
    tensors = load_file(a / "model.safetensors")
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor.mul_(torch.empty_like(tensor).uniform_(0.8, 1.2))
    save_file(tensors, b / "model.safetensors", metadata={"format": "pt"})
    expected = {folder: said_by(folder) for folder in (a, b)}
    assert expected[a] != expected[b]
    with vllm(a, tmp_path) as engine:
        assert greedy_tokens(engine, PROMPTS, COUNT) == expected[a]
        for version, folder, via in ((1, b, "broadcast"), (2, a, "ipc"), (3, b, "ipc")):
            report = push(folder, [engine], version, "--via", via, "--bucket-bytes", "64MiB")
            assert [(row["proof"], row["version_after"]) for row in report["targets"]] == [("resident", version)]
            assert greedy_tokens(engine, PROMPTS, COUNT) == expected[folder]
        assert verify(b, engine) == (0, set())
        assert verify(a, engine)[0] == 3
        assert [(row["version"], row["state"]) for row in status(engine)] == [(3, "serving")]
        check_metrics(engine, version=3, updates=3)
        log = tmp_path / "vllm.log"
        wait_for(lambda: re.search(r"INFO .*version 3 serves; stall", log.read_text()), "our line, in vLLM's form")
        assert "pauses vLLM for each commit" not in log.read_text(), "the switch is no call into the engine core"


def test_experts_on_two_ranks(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in "AB"}
    models: dict[str, Any] = {}
    for seed, (name, folder) in enumerate(folders.items()):
        models[name] = tiny_model(folder, family="qwen3_moe", seed=seed, **SIZES, **EXPERTS)
        tiny_tokenizer(folder)
    expected = {name: said_by(folder) for name, folder in folders.items()}
    assert expected["A"] != expected["B"]
    tiny_model(tmp_path / "other", num_hidden_layers=3)
    with vllm(folders["A"], tmp_path, "--no-enable-prefix-caching", tp=2, wheels=[NIXL]) as engine:
        assert greedy_tokens(engine, PROMPTS, COUNT) == expected["A"]
        for version, name, via in ((5, "B", "ipc"), (6, "A", "broadcast"), (7, "B", "broadcast")):
            report = push(folders[name], [engine], version, "--via", via, "--bucket-bytes", "64KiB")
            assert report["targets"][0]["digests_matched"] == 2
            assert greedy_tokens(engine, PROMPTS, COUNT) == expected[name]
        assert verify(folders["B"], engine) == (0, set())
        check_metrics(engine, version=7, updates=3)
        # From a trainer that keeps experts stacked, sharded over two processes, which compares its own forward pass.
        with closing(Ranks(2)) as ranks:
            for version, name, via in ((8, "A", "ipc"), (9, "B", "broadcast")):
                said = ranks.run(update_sharded, str(folders[name]), engine.url, via, version)
                (row,) = json.loads(said[0])["targets"]
                assert (row["proof"], row["version_after"]) == ("behaviour", version)
                assert greedy_tokens(engine, PROMPTS, COUNT) == expected[name]
            # Each of vLLM's ranks takes its own share out of the trainer ranks' shards, which nobody gathers.
            ways = [{"direct_by": "memory"}, {"direct_by": "messages"}, {"direct_by": "shards", "keep_mapped": True}]
            ways += [{"transport": "rdma"}]
            for version, name, way in zip((10, 11, 12, 13), "ABAB", ways, strict=True):
                said = ranks.run(update_directly, str(folders[name]), engine.url, version, way)
                (row,) = json.loads(said[0])["targets"]
                assert (row["proof"], row["version_after"]) == ("resident", version)
                assert row["transport"] == way.get("transport", "direct")
                assert greedy_tokens(engine, PROMPTS, COUNT) == expected[name]
            assert verify(folders["B"], engine) == (0, set())
            (row,) = json.loads(ranks.run(update_sharded, str(folders["A"]), engine.url, "ipc", 14)[0])["targets"]
            assert row["version_after"] == 14
            (row,) = json.loads(ranks.run(update_sharded, str(folders["B"]), engine.url, "ipc", 15)[0])["targets"]
            assert row["version_after"] == 15
        # Stock vLLM answers nobody any more while it waits for a trainer that never comes.
        store = Rendezvous(host="127.0.0.1", timeout_s=PATIENCE_S)
        lonely = Join(
            group="lonely",
            host="127.0.0.1",
            port=store.port,
            token="0" * 32,
            first_rank=1,
            world_size=3,
            backend="gloo",
            timeout_s=AMPLE_S,
        )
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(engine.client.post, engine.url + "/weightcast/apply", content=encode(lonely))
            while 1 in store.absent(lonely.token, lonely.world_size):
                assert not waits.done(), waits.result().text
                time.sleep(0.05)
            assert greedy_tokens(engine, PROMPTS, COUNT) == expected["B"]
            assert not waits.done()
            store.close()  # half a minute before the receiver would give up
            assert waits.result().status_code >= 400
            assert "group lonely: the rendezvous failed" in waits.result().text
        refused = weightcast("push", tmp_path / "other", "--to", engine.url, "--version", 16)
        assert refused.returncode == 2
        assert "do not fit" in refused.stderr
        assert greedy_tokens(engine, PROMPTS, COUNT) == expected["B"]
        served = Served(engine, folders, models)
        for pause in PAUSES:
            before = states_set(tmp_path)
            check_pause(served, pause)
            # A commit is one call, in which vLLM goes on; it is paused before where requests must end first.
            paused = [pause] if pause in ("abort", "wait") else []
            assert states_set(tmp_path) - before == 2 * len(paused)
        lose_and_start_again(served, tmp_path)


def states_set(logs: Path) -> int:
    """How often vLLM's scheduler was paused or resumed."""
    return (logs / "vllm.log").read_text().count("setting pause state to")


def check_metrics(engine: Engine, *, version: int, updates: int) -> None:
    """The receiver's metrics are on vLLM's own page, with vLLM's label for the model and none for a process."""
    page = engine.client.get(engine.url + "/metrics").text
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"}' in page
    assert not [line for line in page.splitlines() if line.startswith("weightcast_") and "pid=" in line]
    found = series(page)
    assert found["weightcast_engine_version", "tiny"] == version
    assert found["weightcast_engine_state", "tiny", "serving"] == 1
    assert found["weightcast_engine_updates_started_total", "tiny"] == updates
    assert found["weightcast_engine_updates_finished_total", "tiny", "committed"] == updates
    for phase in ("wire", "load", "verify", "pause", "switch", "resume", "total"):
        names = [name for name in found if name[:3] == ("weightcast_engine_update_seconds_count", "tiny", phase)]
        assert sum(found[name] for name in names) == updates, phase
    assert found["weightcast_engine_stall_seconds_count", "tiny"] == updates


def lose_and_start_again(served: Served, logs: Path) -> None:
    """Every process of an engine is killed in the middle of an update; a new one gets the next update whole."""
    family = served.engine.family()

    def kill(done: int, total: int) -> None:
        if 0 < done < total:
            for process in family:
                if process.is_running():
                    process.kill()

    exporter = CheckpointExporter(served.folders["A"])
    updater = connect_in_lab(
        exporter, [Target(served.engine.url)], bucket_bytes=1 << 16, timeout_s=AMPLE_S, progress=kill
    )
    with exporter, updater:
        begin = time.monotonic()
        with pytest.raises(UpdateFailed, match=re.escape(served.engine.url)):
            updater.update(version=served.version() + 1)
        assert time.monotonic() - begin < PATIENCE_S
        served.engine.process.wait(PATIENCE_S)
        assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
        with vllm(served.folders["B"], logs) as again:
            assert greedy_tokens(again, PROMPTS, COUNT) == said_by(served.folders["B"])
            updater.retarget([Target(again.url)])
            report = updater.update(version=1)
            assert [(row.proof, row.version_after) for row in report.targets] == [("resident", 1)]
            assert greedy_tokens(again, PROMPTS, COUNT) == said_by(served.folders["A"])
