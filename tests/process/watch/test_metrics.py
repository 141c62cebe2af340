"""Prometheus metrics of several processes on one page."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.metrics import series
from tests.helpers.watching import A, B

MULTIPROCESS = """
from prometheus_client import CollectorRegistry, REGISTRY, generate_latest, multiprocess
from tests.helpers.watching import targets, tell_session, trainer_events
from weightcast.watch import PrometheusMetrics
from weightcast.watch.engine_metrics import EngineMetrics
from weightcast.watch.listeners import Events

events = Events([PrometheusMetrics()])
for event in [*trainer_events(), targets(b="serving")]:
    events.emit(event)
tell_session(EngineMetrics(REGISTRY, model_name="m", version=6))
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_in_multiprocess_mode_nothing_is_labelled_with_a_process(tmp_path):
    environment = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    pages = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", MULTIPROCESS], env=environment, capture_output=True, text=True
        )
        for _ in range(2)  # a process that was started again, as an API server is
    ]
    assert [page.returncode for page in pages] == [0, 0], pages[0].stderr + pages[1].stderr
    assert len(list(Path(tmp_path).glob("gauge_mostrecent_*.db"))) == 2
    assert "pid=" not in pages[1].stdout
    found = series(pages[1].stdout)
    assert found["weightcast_updates_started_total",] == 2  # counters of both processes
    assert found["weightcast_targets", "serving"] == 1  # gauges of the last one
    assert math.isnan(found["weightcast_version", A])  # a series cannot be removed in this mode
    assert found["weightcast_version", B] == 7
    assert found["weightcast_engine_update_seconds_count", "m", "total", "ipc"] == 2
    assert found["weightcast_engine_state", "m", "serving"] == 1
