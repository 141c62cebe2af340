"""Checks of prose for ``make check``: lines of docs over 120 characters, and docstrings and headings without a subject.

``python -m tests.prose`` prints each finding as ``file:line: text`` and exits 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 120
# A docstring or heading that begins so leaves its subject to be guessed.
HEADLESS = re.compile(r"(Who|What|Whose|Whatever|Whoever|Of|As what|Likewise)\b(?!.*\?)")


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the number and text of each line over the limit, except table rows, code blocks and bare links."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and len(line) > LIMIT and not line.lstrip().startswith("|") and " " in line.strip():
            yield number, line


def headless_headings(text: str) -> Iterator[tuple[int, str]]:
    """Yields each Markdown heading that has no subject; questions are allowed."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#") and HEADLESS.match(line.lstrip("# ")):
            yield number, line


def headless_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and first words of each docstring that has no subject."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if HEADLESS.match(text):
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def findings(root: Path) -> Iterator[str]:
    """Yields every finding in the docs and the Python files below a folder."""
    for path in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")]):
        text = path.read_text()
        for number, line in (*long_lines(text), *headless_headings(text)):
            yield f"{path.relative_to(root)}:{number}: {line[:100]}"
    for folder in ("src", "tests", "benchmarks", "examples", "docs_site"):
        for path in sorted((root / folder).rglob("*.py")):
            for number, line in headless_docstrings(path.read_text()):
                yield f"{path.relative_to(root)}:{number}: {line[:100]}"


def main() -> int:
    """Prints every finding in this checkout.

    Returns:
        The exit code: 1 if anything was found.
    """
    found = list(findings(ROOT))
    print("\n".join(found) if found else "prose: no findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
