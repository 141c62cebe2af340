"""Figures of the pages: each table between marks is what the script makes of the committed results."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("report")


def test_tables_of_figures_are_what_the_script_makes_of_the_results(report: Any) -> None:
    marked = [page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if "<!-- results: " in page.read_text()]
    assert {page.relative_to(ROOT).as_posix() for page in marked} == set(report.PAGES)
    for page in marked:
        assert page.read_text() == report.filled(page.read_text()), f"{page}: run python benchmarks/report.py"


def test_every_table_stands_on_a_page(report: Any) -> None:
    text = "".join((ROOT / name).read_text() for name in report.PAGES)
    assert [name for name in report.TABLES if f"<!-- results: {name} -->" not in text] == []


def test_a_mark_without_a_table_is_an_error(report: Any) -> None:
    with pytest.raises(KeyError, match="no-such-table"):
        report.filled("<!-- results: no-such-table -->\n<!-- results end -->")
