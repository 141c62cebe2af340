"""Figures of the README, each against the committed file that its row links to."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ROW = re.compile(r"^\| \[(?P<case>[^]]+)\]\(benchmarks/(?P<link>[^)]+)\) \|(?P<cells>.*)\|$", re.MULTILINE)
COLUMNS = ("limit", "weightcast", "vLLM", "SGLang", "LMDeploy", "broadcast for each tensor", "checkpoint-engine")


def rows() -> list[tuple[str, str, tuple[str, ...]]]:
    return [
        (found["case"], found["link"], tuple(cell.strip().strip("*") for cell in found["cells"].split("|")))
        for found in ROW.finditer((ROOT / "README.md").read_text())
    ]


def shown(seconds: float) -> str:
    """Returns a time as the table shows it: milliseconds, three digits or more."""
    ms = seconds * 1e3
    return f"{ms:.1f}" if ms < 99.95 else f"{ms:,.0f}"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def later(seconds: Sequence[float]) -> float:
    """Returns the median of the updates after the first one of a connection."""
    return statistics.median(seconds[1:])


def laboratory(name: str) -> dict[str, float]:
    result = read(name)
    found = {"limit": result["floor_s"]}
    for method in result["methods"]:
        if method["settings"].get("verify") == "none":
            continue
        [column] = [column for column in COLUMNS if method["name"].startswith(column)] or [""]
        found.setdefault(column, method["usable_s"]["median"])  # of several ways of weightcast, ``ipc`` comes first
    return found


def vllm(name: str, case: str, said: str) -> dict[str, float]:
    result = read(name)
    steps = [step for step in result["steps"] if step["case"] == case and step.get("step") == said]
    limit = steps[0]["bytes"] / result["copy_bytes_per_s"]
    found = {"limit": limit, "weightcast": later([step["update_s"] for step in steps])}
    for step in result["steps"]:
        if step["case"] == case and step.get("step") == "vLLM's own sender, idle" and "update_s" in step:
            found["vLLM"] = later(step["update_s"])
    return found


def sglang(name: str, model_name: str, case: str) -> dict[str, float]:
    model = read(name)["models"][model_name]
    found = {
        "limit": model["limits"]["copy_of_the_weights_s"],
        "weightcast": later([push["seconds"] for push in model["cases"][case]["pushes"]]),
    }
    peer = model["cases"].get("stock, SGLang's own sender, idle")
    if peer is not None and not peer["wrong"]:
        found["SGLang"] = later([turn["seconds"] for turn in peer["rounds"]])
    return found


def lmdeploy() -> dict[str, float]:
    return {"weightcast": read("gpu-lmdeploy-receiver-h200")["cases"]["in_place idle again"]["seconds"]}


def pairs(name: str, case: str, column: str) -> dict[str, float]:
    steps = [step for step in read(name)["steps"] if step["case"] == case and "update_s" in step]
    ours = [step["update_s"] for step in steps if step["step"] == "direct, idle, in_place"]
    [own] = [step["update_s"] for step in steps if step["step"].endswith("own sender, idle")]
    return {"weightcast": later(ours), column: statistics.median(own)}


REAL = {
    "vLLM 0.25.1, Qwen3-8B, 16 GB": lambda: vllm("gpu-vllm-8b-sender-h200", "8b", "direct, idle, in_place"),
    "vLLM 0.25.1, 16 layers of Qwen3-30B-A3B, 21 GB": lambda: vllm(
        "gpu-vllm-experts-h200", "moe", "direct, idle, in_place"
    ),
    "SGLang 0.5.17, Qwen3-8B, 16 GB": lambda: sglang("gpu-sglang-h200", "qwen3-8b", "receiver, direct, idle"),
    "SGLang 0.5.17, 16 layers of Qwen3-30B-A3B, 21 GB": lambda: sglang(
        "gpu-sglang-h200", "qwen3-30b-a3b-16-layers", "receiver, direct, idle"
    ),
    "vLLM 0.25.1, TP 2, Qwen3-8B, two H200s": lambda: pairs("gpu-vllm-pairs-mapped-2xh200", "tp2", "vLLM"),
    "vLLM 0.25.1, DP 2, Qwen3-8B, two H100s": lambda: pairs("gpu-vllm-pairs-2xh100", "dp2", "vLLM"),
    "vLLM 0.25.1, TP 2 and EP, 16 layers of Qwen3-30B-A3B, two H200s": lambda: pairs(
        "gpu-vllm-pairs-2xh200", "ep2", "vLLM"
    ),
    "SGLang 0.5.17, TP 2, Qwen3-8B, two H200s": lambda: pairs("gpu-sglang-pairs-2xh200", "tp2", "SGLang"),
    "SGLang 0.5.17, TP 2, 16 layers of Qwen3-30B-A3B, two H200s": lambda: pairs(
        "gpu-sglang-pairs-2xh200", "moe2", "SGLang"
    ),
    "LMDeploy 0.18.0, Qwen3-8B, 16 GB": lmdeploy,
}


@pytest.mark.parametrize(("case", "link", "cells"), rows(), ids=[case for case, _, _ in rows()])
def test_a_row_of_the_readme_has_the_figures_of_its_file(case: str, link: str, cells: tuple[str, ...]) -> None:
    if link.startswith("RESULTS.md#"):
        names = {path.stem.replace("+", ""): path.stem for path in RESULTS.glob("*.json")}
        found = laboratory(names[link.removeprefix("RESULTS.md#")])
    else:
        assert (ROOT / "benchmarks" / link).exists()
        found = REAL[case]()
    assert cells == tuple(shown(found[column]) if column in found else "-" for column in COLUMNS)


def test_every_row_of_figures_links_to_a_file() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| case | limit |") :].partition("\n\n")[0]
    assert len(table.splitlines()) - 2 == len(rows()) + table.count("\n| **")


def test_the_page_of_results_is_what_the_script_makes_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report = importlib.import_module("report")
    plots = {path.stem: f"results/{path.name}" for path in sorted(RESULTS.glob("*.svg"))}
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == report.render(report.read(RESULTS), plots)
