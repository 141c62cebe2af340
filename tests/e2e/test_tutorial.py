"""The tutorial's commands and programs, taken from its pages and run in their order against a real engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers.engines import ENVIRONMENT, Engine, engines, weightcast
from weightcast.config import UpdateConfig
from weightcast.digest.definition import tensor_digest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial"
URL = "http://127.0.0.1:8000"
PROMPT = [[5, 6, 7]]


def program(page: str, name: str) -> str:
    """The code block of a page that begins with the name of its file."""
    text = (TUTORIAL / page).read_text()
    [code] = re.findall(rf"^```python\n# {re.escape(name)}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return code


def commands(page: str) -> list[list[str]]:
    """Arguments of every weightcast command of a page that talks to an engine, in order."""
    lines = re.findall(r"^\$ weightcast (.+)$", (TUTORIAL / page).read_text(), re.MULTILINE)
    found = [line.partition("  #")[0].split() for line in lines]
    return [words for words in found if words[0] not in ("serve", "--version")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tutorial's two models."""
    folder = tmp_path_factory.mktemp("tutorial")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(program("first-push.md", "make_models.py"), "make_models.py", "exec"), {})
    return folder


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Any:
    with engines(folder / "A", tmp_path, {}) as [started]:
        yield started


def test_models_of_the_tutorial_have_heads_that_vllm_takes_on_a_cpu(folder: Path) -> None:
    for name in ("A", "B"):
        config = AutoModelForCausalLM.from_pretrained(folder / name).config
        assert config.hidden_size // config.num_attention_heads >= 32


def run(words: list[str], engine: Engine, folder: Path) -> subprocess.CompletedProcess[str]:
    there = {"A": str(folder / "A"), "B": str(folder / "B"), URL: engine.url}
    return weightcast(*(there.get(word, word) for word in words))


def test_commands_of_the_first_push_do_what_the_page_says(engine: Engine, folder: Path) -> None:
    doctor, push, verify_b, verify_a, status, push_older = commands("first-push.md")
    before = engine.greedy(PROMPT, 8)

    assert run(doctor, engine, folder).returncode == 0
    pushed = run(push, engine, folder)
    assert pushed.returncode == 0, pushed.stderr
    assert "0 -> 1, proof resident" in pushed.stdout
    answer = engine.complete(PROMPT, 8)
    assert answer["weight_version"] == 1
    assert [choice["token_ids"] for choice in answer["choices"]] != before
    page = (TUTORIAL / "first-push.md").read_text()
    codes = [int(code) for code in re.findall(r"^\$ weightcast verify .+# exit code (\d)", page, re.MULTILINE)]
    differs = run(verify_a, engine, folder)
    assert [run(verify_b, engine, folder).returncode, differs.returncode] == codes
    assert codes[0] == 0 < codes[1]
    assert "lm_head.weight" in differs.stdout
    assert "serving" in run(status, engine, folder).stdout
    refused = run(push_older, engine, folder)
    assert refused.returncode == 2
    [words] = re.findall(r"refused before anything moves, with exit code 2: `(.+?)`", page, re.DOTALL)
    assert " ".join(words.split()).replace(URL, engine.url) in refused.stdout + refused.stderr
    assert engine.info()["version"] == 1


def test_loop_of_the_page_leaves_the_engine_at_its_last_version(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = engine.digests()
    monkeypatch.chdir(folder)
    code = program("first-loop.md", "train.py").replace(URL, engine.url)
    for _ in range(2):  # a second run against the same engine, too
        exec(compile(code, "train.py", "exec"), {})
    assert engine.info()["version"] == 5
    assert not set(before.values()) & set(engine.digests().values())
    assert capsys.readouterr().out.count("proof resident") == 10


def test_sharded_loop_of_the_page_updates_from_two_processes(engine: Engine, folder: Path) -> None:
    before = engine.digests()
    code = program("first-loop.md", "train_fsdp.py").replace(URL, engine.url)
    (folder / "train_fsdp.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train_fsdp.py"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert engine.info()["version"] == 5
    assert not set(before.values()) & set(engine.digests().values())
    assert done.stdout.count("proof resident") == 5  # one process prints


def test_five_lines_of_the_readme_update_an_engine(engine: Engine, folder: Path) -> None:
    text = (TUTORIAL.parents[1] / "README.md").read_text()
    [code] = re.findall(r"^## Five lines\n\n```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    model = AutoModelForCausalLM.from_pretrained(folder / "B")
    before = engine.digests()
    names: dict[str, Any] = {"model": model, "num_steps": 2, "train": lambda model: model.lm_head.weight.data.mul_(2)}
    exec(compile(re.sub(r"targets=\[.*?\]", f"targets=[{engine.url!r}]", code), "README.md", "exec"), names)
    names["updater"].close()
    after = engine.digests()
    assert engine.info()["version"] == 2
    assert after["lm_head.weight"] == tensor_digest(model.lm_head.weight)
    assert after["lm_head.weight"] != before["lm_head.weight"]


def test_options_of_the_cluster_page_exist() -> None:
    text = (TUTORIAL / "first-cluster.md").read_text()
    [call] = re.findall(r"WeightUpdater\.connect\(model, targets, (.+?)\) as", text)
    names = re.findall(r"(\w+)=", call)
    assert names == ["on_failure", "allow_older"]
    assert set(names) <= set(UpdateConfig.__dataclass_fields__)
    for words in commands("first-cluster.md"):
        shown = weightcast(words[0], "--help").stdout
        assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", shown)), words
