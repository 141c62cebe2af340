"""The docs site: links, the pages made from the code, and error texts that name pages or are named by one."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer
from docs_site import configuration, hooks, links, modules
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES
from typer.testing import CliRunner

import weightcast
from weightcast import AdvancedOptions, Target, UpdateOptions
from weightcast.adapters.registry import OURS
from weightcast.cli.app import app
from weightcast.cli.options import MEANING
from weightcast.config import UpdateConfig, VerifyLevel
from weightcast.transports.registry import TRANSPORTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "weightcast"
GAP = "\0"  # stands for a value in an f-string


def strings() -> Iterator[str]:
    """Every string of the sources that is no docstring; values of f-strings are gaps."""
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else GAP for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                yield node.value


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(strings())


# -- links


def test_links_between_pages_and_to_the_readme_lead_to_their_places_on_the_site():
    text = "[a](../wire.md#routes) [b](../../README.md) [c](vllm.md) [d](https://x.org) [e](#here)"
    moved = links.translated(text, page="engines/sglang.md", root=ROOT)
    assert moved == "[a](../wire.md#routes) [b](../index.md) [c](vllm.md) [d](https://x.org) [e](#here)"


def test_links_of_the_readme_lead_to_pages_below_it():
    assert links.translated("[a](docs/engines/vllm.md)", page="index.md", root=ROOT) == "[a](engines/vllm.md)"


def test_link_to_a_source_becomes_its_text_without_a_project_url_and_a_link_with_one():
    text = "[`config.py`](../src/weightcast/config.py)"
    assert links.translated(text, page="wire.md", root=ROOT) == "`config.py`"
    found = links.translated(text, page="wire.md", root=ROOT, source_url="https://host/tree")
    assert found == "[`config.py`](https://host/tree/src/weightcast/config.py)"


def test_link_to_a_missing_file_is_an_error_that_names_page_and_target():
    with pytest.raises(links.BrokenLink, match=re.escape("docs/wire.md links to ../src/gone.py")):
        links.translated("[a](../src/gone.py)", page="wire.md", root=ROOT)


def test_code_blocks_keep_their_text():
    text = "```python\nx = [a](gone.md)\n```\n"
    assert links.translated(text, page="wire.md", root=ROOT) == text


# -- nav


def test_copying_a_console_block_gives_its_commands_alone():
    style = (ROOT / "docs_site" / "console.css").read_text()
    hidden = re.findall(r"code\[data-md-copying\] \.(\w+)", style)  # the attribute that the copy button sets
    lexer = get_lexer_by_name("console")
    pages = [*DOCS.rglob("*.md"), *(ROOT / path for path in links.PAGES)]
    blocks = {
        block: page for page in pages for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S)
    }
    assert len(blocks) > 30
    for block, page in blocks.items():
        kept = "".join(text for kind, text in lexer.get_tokens(block) if STANDARD_TYPES[kind] not in hidden)
        commands = re.findall(r"^\$ ((?:.*\\\n)*.*\n)", block, re.M)
        assert re.sub(r"\n+", "\n", kept) == "".join(commands) != "", (page, block)


def test_entry_of_a_folder_becomes_its_pages(tmp_path):
    (tmp_path / "more").mkdir()
    for page in ("a.md", "more/b.md", "more/c.md"):
        (tmp_path / page).write_text("# Page")
    nav = [{"Top": [{"A": "a.md"}, {"More": "more/"}]}]
    assert hooks.filled(nav, tmp_path) == [{"Top": [{"A": "a.md"}, {"More": ["more/b.md", "more/c.md"]}]}]


# -- configuration


@pytest.fixture(scope="module")
def page() -> str:
    return configuration.page()


@pytest.mark.parametrize("owner", [UpdateOptions, AdvancedOptions, Target])
def test_every_option_has_a_row_with_default_and_meaning(page, owner):
    described = configuration.attributes_of(owner)
    defaults = {field.name: field.default for field in (*dataclasses.fields(UpdateConfig), *dataclasses.fields(Target))}
    for name in owner.__annotations__:
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        meaning = row.rstrip(" |").rpartition(" | ")[2]
        assert len(meaning) > 10, row
        assert meaning.strip() == described[name]
        if isinstance(defaults.get(name), str):
            assert defaults[name] in row


def test_flags_that_have_other_names_than_their_options_exist(page):
    for option, flag in (
        ("transport", "--via"),
        ("timeout_s", "--timeout"),
        ("disk_folder", "--advanced disk_folder="),
    ):
        assert re.search(rf"^\| `{option}` \| `{flag}` \|", page, re.MULTILINE)
    assert "| `ca_file` | `--ca-file` | `WEIGHTCAST_CA_FILE` |" in page


def test_every_flag_that_a_commands_help_shows_is_on_the_page(page):
    runner = CliRunner()
    names = [command for command in typer.main.get_command(app).commands if command != "bench"]
    for words in [*([name] for name in names), ["bench", "updates"]]:
        shown = runner.invoke(app, [*words, "--help"]).output
        section = page.split(f"### weightcast {' '.join(words)}\n", 1)[1].split("\n### ", 1)[0]
        flags = set(re.findall(r"^\s+(?:-\w, )?(--[a-z][a-z-]*)", shown, re.MULTILINE)) - {"--help"}
        assert flags, shown
        assert {flag for flag in flags if f"`{flag}`" not in section} == set(), words


def test_environment_variables_of_the_page_are_those_that_the_code_reads():
    assert configuration.variables_read(SOURCE) == set(configuration.VARIABLES)


def test_variables_are_found_in_every_form_of_reading(tmp_path):
    (tmp_path / "a.py").write_text(
        "import os\nNAME = 'BY_CONSTANT'\nos.environ['BY_INDEX']\nos.environ.get('BY_GET')\nos.getenv('BY_GETENV')\n"
        "'BY_TEST' in os.environ\nos.environ.get(NAME)\n'no' in os.environ.get('LIST', '').split(',')\n"
    )
    (tmp_path / "b.py").write_text(
        f"import os\nfrom {tmp_path.name}.c import FAR as NEAR\nos.environ[NEAR]\nfrom os import path\n"
    )
    (tmp_path / "c.py").write_text("FAR = 'BY_IMPORT'\nUNREAD = 'NEVER'\n")
    found = {"BY_INDEX", "BY_GET", "BY_GETENV", "BY_TEST", "BY_CONSTANT", "LIST", "BY_IMPORT"}
    assert configuration.variables_read(tmp_path) == found


def test_bars_separate_cells_only_outside_of_code():
    [row] = configuration.table_rows([("`a|b`", "c|d")])
    assert row == "| `a|b` | c\\|d |"


def test_api_page_has_every_public_name():
    listed = set(re.findall(r"^::: weightcast\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE))
    errors = {
        name
        for name in weightcast.__all__
        if getattr(weightcast, name).__class__ is type
        and issubclass(getattr(weightcast, name), weightcast.WeightcastError)
    }
    assert "errors" in listed
    assert set(weightcast.__all__) - errors - {"__version__"} <= listed


# -- modules


def test_page_of_modules_has_a_line_for_each_module():
    rows = dict(re.findall(r"^\| `(.+\.py)` \| (.*) \|$", modules.page(), re.MULTILINE))
    files = {path.name for path in SOURCE.rglob("*.py") if not path.name.startswith("__")}
    assert rows.keys() == files
    assert [name for name, text in rows.items() if not text] == []


# -- errors and pages


def test_every_page_that_an_error_or_message_names_exists(texts):
    named = {name.rstrip(".") for text in texts for name in re.findall(r"\bdocs/[\w./-]+", text)}
    assert "docs/engines/matrix.md" in named  # the search finds something
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_error_text_of_the_troubleshooting_page_is_in_the_sources(texts):
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 30
    patterns = {head: re.compile(".*".join(map(re.escape, head.split("..."))), re.DOTALL) for head in headings}
    assert [head for head, pattern in patterns.items() if not any(map(pattern.search, texts))] == []


def test_matrix_has_every_kind_of_engine_transport_and_proof():
    page = (DOCS / "engines" / "matrix.md").read_text()
    names = {"native": "reference engine", "vllm": "vLLM, stock"}
    for kind in OURS:
        assert names.get(kind.name, kind.name).lower() in page.lower()
    for spec in TRANSPORTS:
        assert f"\n| `{spec.name}` |" in page
    for level in set(get_args(VerifyLevel)) - {"none"}:
        assert f"\n| `{level}` |" in page


def test_support_table_has_every_kind_of_engine_and_transport():
    page = (DOCS / "support.md").read_text()
    table = page.split("\n## Transports\n", 1)[1].split("\n## ", 1)[0]
    pages = re.findall(r"\(engines/([\w-]+)\.md\)", table)
    assert {kind.name.split("-")[0] for kind in OURS} <= {"native", *(name.split("-")[0] for name in pages)}
    for spec in TRANSPORTS:
        assert f" `{spec.name}` |" in table, spec.name


def test_every_exit_code_is_in_the_docs():
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == MEANING


# -- code


def python_blocks() -> Iterator[tuple[str, str]]:
    """The name of the page and the text of every block of Python, on all pages."""
    for page in [*DOCS.rglob("*.md"), *(ROOT / path for path in links.PAGES)]:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            yield str(page.relative_to(ROOT)), block


def test_code_on_pages_compiles_and_imports_names_that_exist():
    wrong: list[str] = []
    blocks = list(python_blocks())
    for page, block in blocks:
        for node in ast.walk(ast.parse(block, page)):
            name = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
            if not name.startswith("weightcast"):
                continue
            if importlib.util.find_spec(name) is None:
                wrong.append(f"{page}: {name}")
                continue
            try:
                module = importlib.import_module(name)
            except ImportError:  # of an engine or a trainer's framework, which this environment does not have
                continue
            for each in node.names:
                if not hasattr(module, each.name) and importlib.util.find_spec(f"{name}.{each.name}") is None:
                    wrong.append(f"{page}: {name}.{each.name}")
    assert len(blocks) > 30
    assert wrong == []
