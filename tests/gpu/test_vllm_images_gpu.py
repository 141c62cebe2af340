"""Real vLLM with a vision tower on a GPU: an image that vLLM has seen before an update is encoded again after it.

vLLM comes from where ``test_vllm_gpu`` has it from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.gpu.servers import Record, Server
from tests.gpu.test_vllm_gpu import pytestmark as needs_vllm
from tests.gpu.test_vllm_gpu import vllm
from tests.helpers.vision import made, says
from weightcast import WeightUpdater
from weightcast.config import PauseMode

pytestmark = [*needs_vllm[:-1], pytest.mark.timeout(400)]

# Not every build of vLLM has FlashAttention, which a vision tower takes by default.
OPTIONS = ["--dtype=bfloat16", "--mm-encoder-attn-backend=TORCH_SDPA"]


def about(server: Server, image: Image.Image) -> tuple[str, list[float]]:
    return says(lambda body: server.post("/v1/chat/completions", body | {"model": "m"}), image)


def test_an_image_from_before_an_update_is_seen_by_the_new_vision_tower(tmp_path: Path, record: Record) -> None:
    folders = made(tmp_path, torch.bfloat16)
    image = Image.effect_noise((64, 64), 90).convert("RGB")
    common: dict[str, Any] = {"backend": "weightcast", "gpus": [0], "eager": False, "options": OPTIONS}
    with (
        vllm(folders["A"], tmp_path / "updated.log", **common) as server,
        vllm(folders["B"], tmp_path / "fresh.log", **common) as fresh,
    ):
        server.wait_ready()
        fresh.wait_ready()
        record("vllm", server.get("/version").json()["version"])
        wanted = {"A": about(server, image), "B": about(fresh, image)}
        assert about(server, image) == wanted["A"]  # by now it comes from the cache of encoded images
        assert wanted["A"][0] != wanted["B"][0]
        steps: list[tuple[str, PauseMode]] = [("B", "in_place"), ("A", "retract"), ("B", "in_place")]
        for version, (name, pause) in enumerate(steps, 1):
            model: Any = AutoModelForImageTextToText.from_pretrained(folders[name], dtype=torch.bfloat16)
            with WeightUpdater.connect(model.to("cuda:0"), [server.url], transport="ipc", pause=pause) as updater:
                [row] = updater.update(version=version).targets
            assert (row.version_after, row.proof, row.not_updated) == (version, "resident", ()), row
            assert about(server, image) == wanted[name]
