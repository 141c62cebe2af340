"""LMDeploy's rig (``lmdeploy_rig.py``) in a process of its own, in LMDeploy's environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.environment import QUICK, engine_python
from tests.engines.forked import Forked, start
from tests.engines.overlays import overlay
from tests.helpers.engines import NO_KEEP_ALIVE
from tests.helpers.harness import wait_for

VERSIONS = ("0.18.0", "0.16.0")
# `make test` plays the newest version, `make engine-test` all.
PLAYED = (VERSIONS[0], *(pytest.param(version, marks=pytest.mark.engine_full) for version in VERSIONS[1:]))
START_S = 600.0
IMPORTED = (
    "lmdeploy.pytorch.engine.model_agent.agent",
    "lmdeploy.pytorch.models.llama",
    "lmdeploy.pytorch.models.patch",
    "lmdeploy.pytorch.weight_loader.model_weight_loader",
    "lmdeploy.serve.core.async_engine",
    "lmdeploy.serve.openai.api_server",
    "lmdeploy.serve.openai.endpoints.router",
    "lmdeploy.serve.utils.server_utils",
)


def lmdeploy(version: str) -> tuple[Path, dict[str, str]]:
    """A Python that has this version, and the variables to start it with; versions share all else that they need."""
    python = engine_python(f"lmdeploy-{VERSIONS[0]}-cpu")
    path = [QUICK] if version == VERSIONS[0] else [overlay(python, f"lmdeploy=={version}"), QUICK]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling rotary embeddings would take seconds
        "HF_HUB_OFFLINE": "1",
    }
    return python, environment


@dataclass(slots=True, kw_only=True)
class Rig:
    """A running one."""

    url: str
    process: Forked | subprocess.Popen[bytes]
    client: httpx.Client = field(repr=False)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Returns the tokens that LMDeploy's own model generates."""
        return [
            self.post("/rig_generate", input_ids=list(prompt), max_tokens=count)["output_ids"] for prompt in prompts
        ]

    def post(self, path: str, **body: Any) -> Any:
        answer = self.client.post(self.url + path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None

    def get(self, path: str) -> Any:
        return self.client.get(self.url + path).raise_for_status().json()

    def calls(self) -> list[str]:
        """Returns the calls on events, buffers, graphs and caches since the last question."""
        return self.post("/rig_calls")["calls"]


@contextmanager
def rig(folder: Path, logs: Path, *options: str, version: str = VERSIONS[0]) -> Iterator[Rig]:
    """Serve a folder; ended on the way out."""
    log = logs / f"rig-{len(list(logs.glob('rig-*.log')))}.log"
    python, environment = lmdeploy(version)
    script = Path(__file__).parent / "lmdeploy_rig.py"
    with log.open("wb") as output:
        process = start(python, [str(script), str(folder), *options], modules=IMPORTED, env=environment, output=output)
    headers = {"authorization": f"Bearer {options[options.index('--key') + 1]}"} if "--key" in options else {}
    client = httpx.Client(timeout=300.0, trust_env=False, headers=headers, limits=NO_KEEP_ALIVE)

    def port() -> str | None:
        assert process.poll() is None, log.read_text()[-4000:]
        return next((line.split()[1] for line in log.read_text().splitlines() if line.startswith("ready ")), None)

    try:
        url = f"http://127.0.0.1:{wait_for(port, 'the rig to be ready', timeout_s=START_S)}"
        yield Rig(url=url, process=process, client=client)
    finally:
        process.kill()
        process.wait()
        client.close()
