"""Real vLLM on this CPU with a vision tower: all of it is updated, or its language model alone if it was told so."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.engines.environment import engine_python
from tests.engines.overlays import overlay
from tests.engines.vllm_server import vllm, vllm_command
from tests.helpers.engines import Engine, push, verify
from tests.helpers.vision import made, says
from weightcast import WeightUpdater
from weightcast.errors import WeightcastError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.multi_module import ComposedExporter

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


VISION, LANGUAGE = r"model\.visual\..*", r"(?!model\.visual\.).*"


def test_a_language_model_without_its_vision_tower_is_refused_unless_the_engine_was_told_to_keep_that(
    serving: Any, tmp_path: Path
) -> None:
    folders = made(tmp_path)
    image = Image.effect_noise((64, 64), 90).convert("RGB")
    with serving(folders["C"]) as fresh:
        expected = says(partial(answer, fresh), image)
    with serving(folders["A"]) as engine:
        before = says(partial(answer, engine), image)
        assert before[0] != expected[0]
        with CheckpointExporter(folders["C"], match=LANGUAGE) as language:
            with pytest.raises(WeightcastError, match=r"missing model\.visual\.\w+"):
                WeightUpdater.connect(language, [engine.url])
            assert says(partial(answer, engine), image)[0] == before[0]
            with CheckpointExporter(folders["A"], match=VISION) as vision:  # as a trainer that does not train it
                both = ComposedExporter({"language": language, "vision": vision})
                with WeightUpdater.connect(both, [engine.url], pause="retract") as updater:
                    [row] = updater.update(version=1).targets
        # A constant of vLLM's own, which no checkpoint has.
        assert (row.proof, row.not_updated) == ("resident", ("visual.input_norm.bias",))
        text, scores = says(partial(answer, engine), image)
        assert text == expected[0]
        assert scores == pytest.approx(expected[1], abs=1e-4)
        assert verify(folders["C"], engine) == (0, set())

    with serving(folders["A"], "--additional-config", json.dumps({"weightcast": {"not_updated": VISION}})) as engine:
        with CheckpointExporter(folders["C"], match=LANGUAGE) as language:
            for version in (1, 2):
                with WeightUpdater.connect(language, [engine.url], pause="retract") as updater:
                    [row] = updater.update(version=version).targets
                assert row.proof == "resident"
                assert row.not_updated, "the report names what was not updated"
                assert all(name.startswith("visual.") for name in row.not_updated)
                assert "visual.blocks.0.attn.qkv.weight" in row.not_updated
                text, scores = says(partial(answer, engine), image)
                assert text == expected[0]
                assert scores == pytest.approx(expected[1], abs=1e-4)
        with pytest.raises(WeightcastError, match=r"unknown to the engine: model\.visual\.\w+"):
            WeightUpdater.connect(str(folders["B"]), [engine.url])
        assert says(partial(answer, engine), image)[0] == expected[0]
