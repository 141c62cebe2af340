"""Tests of how test files are given to pytest's workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.scheduling import place_of, scope_of


def test_files_of_an_engine_stay_together_and_others_are_their_own() -> None:
    assert scope_of("tests/engines/test_vllm_short.py::test_a[x::y]") == "vllm"
    assert scope_of("tests/engines/test_vllm_fp8.py::test_b") == "vllm"
    assert scope_of("tests/engines/test_sglang_cpu.py::TestX::test_c") == "sglang"
    for file in ("tests/engines/test_conformance.py", "tests/contract/test_vllm_stock.py", "tests/unit/test_pump.py"):
        assert scope_of(f"{file}::test_d") == file


def test_files_of_the_slowest_engine_come_first() -> None:
    files = ["tests/contract/test_sglang.py", "tests/engines/test_sglang_cpu.py", "tests/engines/test_vllm_lora.py"]
    items: list[Any] = [SimpleNamespace(nodeid=f"{file}::test_a") for file in files]
    assert [item.nodeid.partition("::")[0] for item in sorted(items, key=place_of)] == [files[2], files[1], files[0]]
