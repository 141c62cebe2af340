"""Tests of how test files are given to pytest's workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers import scheduling
from tests.helpers.scheduling import place_of, scope_of


def test_files_of_an_engine_stay_together_and_others_are_their_own() -> None:
    assert scope_of("tests/engines/test_vllm_short.py::test_a[x::y]") == "vllm"
    assert scope_of("tests/engines/test_vllm_fp8.py::test_b") == "vllm"
    assert scope_of("tests/engines/test_sglang_cpu.py::TestX::test_c") == "sglang"
    assert scope_of("tests/contract/test_sglang.py::test_d") == "sglang"
    assert scope_of("tests/contract/test_lmdeploy_plugin.py::test_e") == "lmdeploy"
    for file in (
        "tests/engines/test_conformance.py",
        "tests/e2e/test_sglang_x.py",
        "tests/unit/transports/test_pump.py",
    ):
        assert scope_of(f"{file}::test_f") == file


def test_a_file_that_starts_an_engine_without_its_name_is_with_the_engines_others() -> None:
    root = Path(__file__).parents[2]
    for file, engine in scheduling._ENGINES.items():
        assert f"{engine}_server" in (root / file).read_text()
        assert scope_of(f"{file}::test_a") == engine


def test_files_of_the_slowest_engine_come_first() -> None:
    files = ["tests/contract/test_sglang.py", "tests/e2e/test_cli.py", "tests/engines/test_vllm_lora.py"]
    items: list[Any] = [SimpleNamespace(nodeid=f"{file}::test_a") for file in files]
    assert [item.nodeid.partition("::")[0] for item in sorted(items, key=place_of)] == [files[2], files[0], files[1]]
