"""Our metrics on the page of a real vLLM server in the multiprocess mode of prometheus_client."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from tests.engines.test_vllm_cpu import SIZES
from tests.engines.test_vllm_short import check_metrics
from tests.engines.vllm_server import vllm, vllm_command
from tests.helpers.engines import push
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast.config import Target
from weightcast.update.observe import Observer

pytestmark = [pytest.mark.engine_full]


def test_metrics_of_several_processes_have_no_label_for_a_process(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        tiny_model(tmp_path / name, seed=seed, **SIZES)
        tiny_tokenizer(tmp_path / name)
    files = tmp_path / "metrics"
    files.mkdir()
    # The mode is chosen when prometheus_client is imported, so this server must not be forked from one without it.
    _, environment = vllm_command(tmp_path / "a", tmp_path, 0)
    extra = {
        "PROMETHEUS_MULTIPROC_DIR": str(files),
        "PYTHONPATH": os.pathsep.join((environment["PYTHONPATH"], str(files))),
    }
    with vllm(tmp_path / "a", tmp_path, extra=extra) as engine:
        for version, name in ((1, "b"), (2, "a")):
            push(tmp_path / name, [engine], version, "--bucket-bytes", "64KiB")
        assert list(files.glob("gauge_mostrecent_*.db"))
        check_metrics(engine, version=2, updates=2)
        engine.complete([[5, 17, 30]], 4)  # before its first request, vLLM's page has no load in this mode
        with closing(Observer(Target(engine.url), timeout_s=60.0)) as observer:
            seen = observer.look()  # as `weightcast status --watch` asks it
        assert (seen.state, seen.version, seen.engine.split()[0]) == ("serving", 2, "vllm")
        assert seen.update is not None
        assert seen.update.outcome == "committed"
        assert {"wire", "load", "switch"} <= seen.update.phases.keys()
        assert seen.requests is not None
        assert (seen.requests.running, seen.requests.waiting) == (0, 0)
        assert seen.requests.tokens == 4
