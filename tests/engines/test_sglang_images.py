"""Stock SGLang on this CPU with a vision tower: the new one encodes images, and no language model is sent alone."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.engines.sglang_server import sglang
from tests.helpers.engines import Engine
from tests.helpers.vision import made
from weightcast import WeightUpdater
from weightcast.errors import WeightcastError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.multi_module import ComposedExporter

pytestmark = [pytest.mark.engine, pytest.mark.engine_full]

VISION, LANGUAGE = r"model\.visual\..*", r"(?!model\.visual\.).*"
CACHE = "SGLANG_VLM_CACHE_SIZE_MB"
OPTIONS = ("--mm-attention-backend=sdpa",)


def says(engine: Engine, image: Image.Image | None = None) -> tuple[list[int], list[float]]:
    """Greedy tokens about an image, or about text alone, with their log-probabilities."""
    body: dict[str, Any] = {"text": "what is this?", "return_logprob": True}
    if image is not None:
        data = io.BytesIO()
        image.save(data, "PNG")
        body["image_data"] = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
        body["text"] = "<|vision_start|><|image_pad|><|vision_end|>" + body["text"]
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    found = engine.post("/generate", **body)
    scores = [score for score, _, _ in found["meta_info"]["output_token_logprobs"]]
    return found["output_ids"], scores


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def image() -> Image.Image:
    return Image.effect_noise((64, 64), 90).convert("RGB")


def update(folder: Path, engine: Engine, version: int, transport: Any = "ipc") -> None:
    with WeightUpdater.connect(str(folder), [engine.url], transport=transport, verify="received") as updater:
        [row] = updater.update(version=version).targets
    assert (row.status, row.version_after) == ("serving", version), row


Said = dict[str, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def fresh(folders: dict[str, Path], image: Image.Image, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """Answers of servers that were started on each folder."""
    found: dict[str, Said] = {}
    for name, folder in folders.items():
        with sglang(tmp_path_factory.mktemp("logs"), (folder, 1, OPTIONS)) as [engine]:
            found[name] = {"image": says(engine, image), "text": says(engine)}
    return found


@pytest.fixture
def engine(folders: dict[str, Path], tmp_path: Path) -> Iterator[Engine]:
    with sglang(tmp_path, (folders["A"], 1, OPTIONS), extra={CACHE: "0"}) as [engine]:
        yield engine


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "0")


def check(engine: Engine, image: Image.Image, wanted: Said) -> None:
    for kind, (tokens, scores) in {"image": says(engine, image), "text": says(engine)}.items():
        assert tokens == wanted[kind][0], kind
        assert scores == pytest.approx(wanted[kind][1], abs=1e-4), kind


def test_the_answers_about_an_image_differ(fresh: dict[str, Said]) -> None:
    assert fresh["A"]["image"][0] != fresh["B"]["image"][0]
    assert fresh["A"]["text"] == fresh["B"]["text"], "they have one language model"
    assert fresh["A"]["text"][0] != fresh["C"]["text"][0]


@pytest.mark.parametrize("way", ["ipc", "broadcast", "disk"])
def test_an_image_from_before_an_update_is_seen_by_the_new_vision_tower(
    engine: Engine, folders: dict[str, Path], image: Image.Image, fresh: dict[str, Said], way: str
) -> None:
    check(engine, image, fresh["A"])
    for version, name in enumerate("BCA", 1):
        update(folders[name], engine, version, way)
        check(engine, image, fresh[name])


def test_a_language_model_alone_is_refused_and_one_beside_its_frozen_tower_is_served(
    engine: Engine, folders: dict[str, Path], image: Image.Image, fresh: dict[str, Said]
) -> None:
    with (
        CheckpointExporter(folders["C"], match=LANGUAGE) as language,
        CheckpointExporter(folders["A"], match=VISION) as vision,
    ):
        with pytest.raises(WeightcastError, match="no tensor of the update belongs to a vision tower"):
            WeightUpdater.connect(language, [engine.url])
        check(engine, image, fresh["A"])
        both = ComposedExporter({"language": language, "vision": vision})
        with WeightUpdater.connect(both, [engine.url], verify="received") as updater:
            [row] = updater.update(version=1).targets
    assert (row.status, row.version_after) == ("serving", 1)
    check(engine, image, fresh["C"])


def test_a_server_that_may_cache_encoded_images_is_refused_for_a_reason(
    folders: dict[str, Path],
    image: Image.Image,
    fresh: dict[str, Said],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sglang(tmp_path, (folders["A"], 1, OPTIONS)) as [engine]:
        check(engine, image, fresh["A"])
        monkeypatch.delenv(CACHE)
        with pytest.raises(WeightcastError, match="no flush reaches that cache"):
            WeightUpdater.connect(str(folders["B"]), [engine.url])
        monkeypatch.setenv(CACHE, "0")  # which is not true
        update(folders["B"], engine, 1)
        assert says(engine, image)[0] == fresh["A"]["image"][0], "SGLang has learnt to forget: the refusal can go"
