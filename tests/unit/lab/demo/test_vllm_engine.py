"""Which Python the demo's vLLM runs under, and what is lent to it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from weightcast.errors import ConfigError
from weightcast.lab.demo import vllm_engine
from weightcast.lab.demo.settings import DemoConfig

ROOT = Path(__file__).parents[4]


def a_python(folder: Path, *, says: str) -> Path:
    """A program that answers as a Python would that lacks these packages."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {says}\n")
    path.chmod(0o755)
    return path


def test_a_python_without_vllm_is_refused_with_a_way_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no vllm, torch") as caught:
        vllm_engine.engine_python(a_python(tmp_path, says="vllm torch"))
    assert "tests.engines.environment" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="No such file"):
        vllm_engine.engine_python(tmp_path / "none")


def test_a_python_with_all_that_is_needed_is_taken(tmp_path: Path) -> None:
    python = a_python(tmp_path, says="")
    assert vllm_engine.engine_python(python) == python


def test_an_environment_in_the_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weightcast" / "engines" / "vllm-9-cpu-py3.11-0"
    (folder / "bin").mkdir(parents=True)
    python = a_python(folder / "bin", says="")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no environment of"):
        vllm_engine.engine_python(None)  # it was not finished
    (folder / ".ready").touch()
    assert vllm_engine.engine_python(None) == python


def test_what_is_lent_is_weightcast_alone_with_the_projects_entry_points(tmp_path: Path) -> None:
    vllm_engine._lend(tmp_path)
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"weightcast"}
    assert (tmp_path / "weightcast" / "plugins" / "vllm" / "__init__.py").is_file()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ours = {group: entries["weightcast"] for group, entries in declared.items() if group.startswith("vllm.")}
    assert ours == vllm_engine.ENTRY_POINTS


def test_the_choice_of_engine_is_checked() -> None:
    with pytest.raises(ConfigError, match="engine='sglang'"):
        DemoConfig(engine="sglang")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--engine vllm"):
        DemoConfig(engine_python=Path("/usr/bin/python3"))
