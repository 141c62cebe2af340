"""Real vLLM on this CPU with a vision tower: an image that vLLM has seen before an update is encoded again after it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.engines import Engine, push, verify
from tests.engines.environment import engine_python
from tests.engines.overlays import overlay
from tests.engines.vllm_server import vllm, vllm_command
from tests.vision import made, says

pytestmark = [pytest.mark.engine, pytest.mark.engine_full]

STANDINS = Path(__file__).with_name("standins")


def answer(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    reply = engine.client.post(f"{engine.url}/v1/chat/completions", json=body | {"model": "tiny"})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture
def serving(tmp_path: Path) -> Any:
    """Starts servers with torchvision, which vLLM's processor of videos needs."""
    more = overlay(engine_python("vllm-0.32.0-cpu"), "torchvision==0.28.0")

    def start(folder: Path, *options: str) -> Any:
        _, environment = vllm_command(folder, tmp_path, 0)
        path = os.pathsep.join((str(STANDINS), environment["PYTHONPATH"], str(more)))
        return vllm(
            folder,
            tmp_path,
            *options,
            "--max-model-len=512",
            "--mm-hasher-algorithm=sha256",
            extra={"PYTHONPATH": path},
        )

    return start


def test_an_image_from_before_an_update_is_seen_by_the_new_vision_tower(serving: Any, tmp_path: Path) -> None:
    folders = made(tmp_path)
    image = Image.effect_noise((64, 64), 90).convert("RGB")
    with serving(folders["B"]) as fresh:
        expected = says(partial(answer, fresh), image)
    with serving(folders["A"], "--no-enable-prefix-caching") as engine:
        before = says(partial(answer, engine), image)
        assert before[0] != expected[0]
        for version, (name, pause, wanted) in enumerate((("B", "in_place", expected), ("A", "retract", before)), 1):
            report = push(folders[name], [engine], version, "--pause", pause)
            assert [(row["proof"], row["version_after"]) for row in report["targets"]] == [("resident", version)]
            text, scores = says(partial(answer, engine), image)
            assert text == wanted[0]
            assert scores == pytest.approx(wanted[1], abs=1e-4)
            assert verify(folders[name], engine) == (0, set())
