"""The tree in ``docs/architecture.md`` is the tree of ``src/weightcast``, and long classes say why they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "weightcast"
PAGE = ROOT / "docs" / "architecture.md"


def tree_of_page() -> set[str]:
    """Paths below ``src/weightcast`` in the page's tree; packages end with a slash."""
    block = re.search(r"```text\nsrc/weightcast/\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None, "docs/architecture.md has no tree"
    paths: set[str] = set()
    parents: list[str] = []
    for line in filter(str.strip, block[1].splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        name = line.split()[0]
        parents[depth:] = [name]
        paths.add("".join(parents))
    return paths


def tree_of_files() -> set[str]:
    """Packages and modules below ``src/weightcast``, without ``__init__`` and ``__main__``."""
    modules = {path for path in SOURCE.rglob("*.py") if not path.name.startswith("__")}
    packages = {path.parent for path in SOURCE.rglob("__init__.py")} - {SOURCE}
    return {f"{path.relative_to(SOURCE)}" for path in modules} | {f"{path.relative_to(SOURCE)}/" for path in packages}


def paths_in_prose() -> set[str]:
    """Files and packages that the rest of the page names in backticks, such as ``update/head.py``."""
    prose = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    return set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", prose)) - {"src/weightcast/"}


def test_every_package_and_module_is_in_the_tree_of_the_page():
    assert "\n".join(sorted(tree_of_files() - tree_of_page())) == ""


def test_everything_in_the_tree_of_the_page_exists():
    assert "\n".join(sorted(tree_of_page() - tree_of_files())) == ""


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
