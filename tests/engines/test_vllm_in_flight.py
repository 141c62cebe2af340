"""Real vLLM on this CPU with a batch in flight at every switch, as vLLM has it on GPUs.

vLLM schedules no batch ahead on a CPU, though it can: a plug-in of its own switches that on.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_cpu import SIZES, Served
from tests.engines.vllm_server import greedy_tokens, vllm, vllm_command
from tests.helpers.clock import PATIENCE_S
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast import Target, WeightUpdater
from weightcast.exporters.checkpoint import CheckpointExporter

pytestmark = [pytest.mark.engine, pytest.mark.engine_full]

COUNT = 240
PROMPTS = [[5 + number, 17, 200, 33] for number in range(4)]
AHEAD = """
def register():
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "schedules_ahead"):
        return
    check = CpuPlatform.check_and_update_config.__func__

    def and_schedule_ahead(cls, config):
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(and_schedule_ahead)
    CpuPlatform.schedules_ahead = True
"""


def plug_in(folder: Path) -> dict[str, str]:
    """Makes the plug-in; returns the environment in which vLLM finds it and ours."""
    metadata = folder / "schedule_ahead-1.dist-info"
    metadata.mkdir(parents=True)
    (folder / "schedule_ahead.py").write_text(AHEAD)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: schedule-ahead\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nschedule_ahead = schedule_ahead:register\n")
    _, environment = vllm_command(folder, folder, 0)
    path = os.pathsep.join((str(folder), environment["PYTHONPATH"]))
    return {"PYTHONPATH": path, "VLLM_PLUGINS": "weightcast,schedule_ahead"}


def running(served: Served) -> int:
    """How many requests vLLM says it computes."""
    page = served.engine.client.get(served.engine.url + "/metrics").text
    found = re.search(r"^vllm:num_requests_running\{.*\} ([\d.]+)$", page, re.MULTILINE)
    return int(float(found[1])) if found else 0


def test_a_batch_in_flight_ends_before_requests_lose_their_cache(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in "AB"}
    models: dict[str, Any] = {}
    for seed, (name, folder) in enumerate(folders.items()):
        models[name] = tiny_model(folder, seed=seed, **SIZES)
        tiny_tokenizer(folder)
    extra = plug_in(tmp_path / "ahead")
    with vllm(folders["A"], tmp_path, "--no-enable-prefix-caching", extra=extra) as engine, ExitStack() as stack:
        served = Served(engine, folders, models)
        assert served.serves("A")
        updaters: dict[str, WeightUpdater] = {}
        turned = 0
        for name, folder in folders.items():
            exporter = stack.enter_context(CheckpointExporter(folder))
            connected = WeightUpdater.connect(exporter, [Target(engine.url)], pause="retract", timeout_s=PATIENCE_S)
            updaters[name] = stack.enter_context(connected)
        for version, (old, new) in enumerate(("AB", "BA", "AB", "BA"), 1):
            found: list[list[int]] = []
            requests = threading.Thread(target=lambda found=found: found.extend(greedy_tokens(engine, PROMPTS, COUNT)))
            requests.start()
            deadline = time.monotonic() + PATIENCE_S
            while requests.is_alive() and not running(served):
                assert time.monotonic() < deadline
            (row,) = updaters[new].update(version=version).targets
            assert (row.proof, row.version_after) == ("resident", version)
            requests.join()
            for prompt, tokens in zip(PROMPTS, found, strict=True):
                before = served.says(old, prompt, COUNT)
                same = (at for at, pair in enumerate(zip(tokens, before, strict=True)) if pair[0] != pair[1])
                kept = next(same, COUNT)
                if kept < COUNT:
                    assert tokens[kept:] == served.says(new, prompt + tokens[:kept], COUNT - kept)
                    turned += 1
            assert served.serves(new)
        assert turned, "no answer was under way at a switch"
        assert "setting pause state to PAUSED_ALL" in (tmp_path / "vllm.log").read_text(), "no batch was in flight"
