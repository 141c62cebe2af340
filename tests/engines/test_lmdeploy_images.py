"""LMDeploy's own Qwen3-VL and Qwen2.5-VL, routes and agent on the CPU: updates with a vision tower, and transformers.

LMDeploy's attention kernels, scheduler and cache are not in it (``lmdeploy_rig``), nor its server's reading of images:
the patches come from transformers' processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tests.engines.lmdeploy_server import Rig, rig
from tests.helpers.vision import made
from weightcast import Target, WeightUpdater
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.multi_module import ComposedExporter

pytestmark = [pytest.mark.engine, pytest.mark.engine_full]

VISION, LANGUAGE = r"(model\.)?visual\..*", r"(?!(model\.)?visual\.).*"
COUNT = 10
BUCKET = 400_000


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def folders(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    return made(tmp_path_factory.mktemp("vision"), family=request.param)


@pytest.fixture(scope="module")
def asked(folders: dict[str, Path]) -> dict[str, Any]:
    """A prompt about an image, for LMDeploy's model and for transformers'."""
    image = Image.effect_noise((64, 64), 90).convert("RGB")
    found = AutoImageProcessor.from_pretrained(folders["A"])(images=[image], return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folders["A"])
    words = int(found["image_grid_thw"].prod()) // 4
    start, end = model.config.vision_start_token_id, model.config.vision_end_token_id
    prompt = [5, start, *[model.config.image_token_id] * words, end, 17, 200, 33]
    return {"prompt": prompt, "pixel_values": found["pixel_values"], "grid": found["image_grid_thw"]}


@pytest.fixture(scope="module")
def right(folders: dict[str, Path], asked: dict[str, Any]) -> dict[str, list[int]]:
    """The tokens that transformers generates with the weights of each folder."""
    said: dict[str, list[int]] = {}
    ids = torch.tensor([asked["prompt"]])
    for name, folder in folders.items():
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        of_image = (ids == model.config.image_token_id).int()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=of_image,
            pixel_values=asked["pixel_values"],
            image_grid_thw=asked["grid"],
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=None,
        )
        said[name] = out[0, ids.shape[1] :].tolist()
    return said


@pytest.fixture
def running(folders: dict[str, Path], tmp_path: Path) -> Iterator[Rig]:
    with rig(folders["A"], tmp_path) as found:
        yield found


def says(running: Rig, asked: dict[str, Any]) -> list[int]:
    image = {
        "pixel_values": asked["pixel_values"].tolist(),
        "grid_thw": asked["grid"][0].tolist(),
        "start": asked["prompt"].index(asked["prompt"][2]),
    }
    return running.post("/rig_generate", input_ids=asked["prompt"], max_tokens=COUNT, image=image)["output_ids"]


def update(weights: Any, running: Rig, transport: Any) -> tuple[str, ...]:
    """Updates it; returns what the report names as not updated."""
    target = Target(running.url, engine="lmdeploy", devices=("cpu",))
    with WeightUpdater.connect(weights, [target], transport=transport, bucket_bytes=BUCKET, timeout_s=60.0) as updater:
        [row] = updater.update().targets
    assert row.status == "serving", row
    return row.not_updated


def test_the_new_tower_and_the_new_model_answer(
    folders: dict[str, Path], asked: dict[str, Any], right: dict[str, list[int]], running: Rig, tmp_path: Path
) -> None:
    assert len({tuple(tokens) for tokens in right.values()}) == 3
    assert says(running, asked) == right["A"]
    with rig(folders["B"], tmp_path) as fresh:
        weights = fresh.get("/rig_weights")
    assert len([name for name in weights if name.startswith("visual.")]) > 20
    for name, transport in (("B", "ipc"), ("C", "broadcast"), ("B", "broadcast")):
        update(str(folders[name]), running, transport)
        assert says(running, asked) == right[name], (name, transport)
    assert running.get("/rig_weights") == weights


def test_a_tower_from_its_checkpoint_goes_with_a_model_from_elsewhere(
    folders: dict[str, Path], asked: dict[str, Any], right: dict[str, list[int]], running: Rig
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folders["A"], dtype=torch.float32)
    with (
        closing(CheckpointExporter(folders["A"], match=LANGUAGE)) as language,
        closing(CheckpointExporter(folders["B"], match=VISION)) as tower,
    ):
        assert update(ComposedExporter({"language": language, "vision": tower}), running, "ipc") == ()
    assert says(running, asked) == right["B"], "B has another tower than A, and the same language model"
    update(model, running, "ipc")  # names and layout from transformers itself
    assert says(running, asked) == right["A"]


def test_a_tower_that_is_not_sent_stays_and_is_named(
    folders: dict[str, Path], asked: dict[str, Any], right: dict[str, list[int]], running: Rig
) -> None:
    # C has the tower of A and another language model.
    with closing(CheckpointExporter(folders["C"], match=LANGUAGE)) as language:
        assert update(language, running, "ipc") == ("the vision tower, if this server has one",)
    assert says(running, asked) == right["C"]
