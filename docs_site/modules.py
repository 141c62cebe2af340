"""Makes the page of all modules from the first line of each one's docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docs_site.configuration import table_rows

SOURCE = Path(__file__).parents[1] / "src" / "weightcast"
PAGE = "reference/modules.md"


def page() -> str:
    """The page, with a section for each package."""
    lines = ["# Modules", "", "This page is made from the docstrings. [Architecture](../architecture.md) says how the"]
    lines += ["packages belong together, and `protocols.py` is the one to read first.", ""]
    for package in packages():
        lines += [f"## {package.relative_to(SOURCE.parent)}", ""]
        if package != SOURCE:
            lines += [summary(package / "__init__.py"), ""]
        lines += ["| module | content |", "|---|---|"]
        lines += [*table_rows((f"`{path.name}`", summary(path)) for path in modules(package)), ""]
    return "\n".join(lines)


def packages() -> list[Path]:
    """Every package that has modules, in order of its path."""
    return sorted({path.parent for path in SOURCE.rglob("*.py") if not path.name.startswith("__")})


def modules(package: Path) -> Iterator[Path]:
    """The modules of a package, without those that only Python calls."""
    return (path for path in sorted(package.glob("*.py")) if not path.name.startswith("__"))


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line; empty if it has none."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].replace("``", "`").split())
