"""The code of docs/integrations.md, as it stands there, with a real Trainer and a real engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.helpers.harness import SMALL_BUCKETS
from tests.helpers.tiny import tiny_model
from weightcast.digest.definition import model_digest, tensor_digest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def section(title: str) -> str:
    """The Python of one section of the page."""
    text = PAGE.read_text()
    [part] = [part for part in text.split("\n## ") if part.startswith(title)]
    return "\n".join(re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL))


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 12) % 500 + 5
        return {"input_ids": ids, "labels": ids}


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    from tests.helpers.engines import engines

    tiny_model(tmp_path / "other", seed=1)  # it starts on other weights than the trainer's
    with engines(tmp_path / "other", tmp_path, {}) as [started]:
        yield started


def test_the_callback_of_the_page_keeps_an_engine_at_the_trainers_weights(engine, tmp_path, capsys):
    model = tiny_model(tmp_path / "model", seed=2)
    before = engine.digests()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    names = {"Trainer": Trainer, "model": model, "arguments": arguments, "data": Rows(), "ENGINES": [engine.url]}
    code = section("transformers `Trainer`").replace('wire_dtype="bfloat16"', f"bucket_bytes={SMALL_BUCKETS * 4}")
    exec(compile(code, str(PAGE), "exec"), names)

    assert engine.info()["version"] == 3
    sent = {name: tensor_digest(tensor) for name, tensor in model.state_dict().items()}
    after = engine.digests()
    assert after == sent
    assert not set(before.values()) & set(after.values())  # nothing of what it started with is left
    said = capsys.readouterr().out
    assert [int(version) for version in re.findall(r"^version (\d+):", said, flags=re.MULTILINE)] == [0, 1, 2, 3]
    assert model_digest(sent) in said
