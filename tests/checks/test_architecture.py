"""The paths and floors in ``docs/architecture.md`` are those of the code, and long classes say why they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "weightcast"
PAGE = ROOT / "docs" / "architecture.md"


def paths_in_prose() -> set[str]:
    """Files and packages that the rest of the page names in backticks, such as ``update/head.py``."""
    prose = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    return set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", prose)) - {"src/weightcast/"}


def test_paths_in_the_text_of_the_page_exist():
    missing = [path for path in paths_in_prose() if not (SOURCE / path).exists() and not (ROOT / path).exists()]
    assert sorted(missing) == []


def test_floors_of_the_page_are_those_of_the_import_contract():
    contract = re.search(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert contract is not None
    floors = re.findall(r'"(.*)"', contract[1])
    assert "```text\n" + "\n".join(floors) + "\n```" in PAGE.read_text()


def classes_without_a_reason(text: str, limit: int = 350) -> list[str]:
    """Names of the classes over ``limit`` lines that no comment above them explains."""
    lines = text.splitlines()
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            explained = lines[first - 2].startswith(f"# Over {limit} lines: ") if first > 1 else False
            if node.end_lineno - first >= limit and not explained:
                found.append(node.name)
    return found


def test_class_over_350_lines_says_above_it_why():
    body = "    x: int\n" * 350
    assert classes_without_a_reason(f"class Long:\n{body}") == ["Long"]
    assert classes_without_a_reason(f"# Over 350 lines: one lock.\n@final\nclass Long:\n{body}") == []
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "examples", "docs_site")]
    # The peers' packages are others' code.
    files = [path for folder in folders for path in sorted(folder.rglob("*.py")) if ".peers" not in path.parts]
    long = [
        f"{path.relative_to(ROOT)}: {name}" for path in files for name in classes_without_a_reason(path.read_text())
    ]
    assert long == []
