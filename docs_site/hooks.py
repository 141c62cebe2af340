"""Hooks of MkDocs: pages from outside ``docs/``, pages made from the code, and links that work in a checkout too."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # MkDocs imports this file by its path

from docs_site import configuration, links, modules  # noqa: E402

_STYLE = Path(__file__).with_name("console.css")


def on_config(config: Any) -> Any:
    """Fills in the entries of ``nav`` that stand for folders."""
    config.nav = filled(config.nav, Path(config.docs_dir))
    return config


def filled(nav: list[Any], docs: Path) -> list[Any]:
    """The entries of a `nav`; one that ends in `/` becomes the pages of that folder."""
    found: list[Any] = []
    for entry in nav:
        [(title, value)] = entry.items()
        if isinstance(value, list):
            found.append({title: filled(value, docs)})
        elif value.endswith("/"):
            pages = sorted(path.relative_to(docs).as_posix() for path in (docs / value).rglob("*.md"))
            found.append({title: pages})
        else:
            found.append(entry)
    return found


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the style sheet and the pages that are not files in ``docs/``."""
    files.append(File.generated(config, _STYLE.name, abs_src_path=str(_STYLE)))
    for path, place in links.PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    files.append(File.generated(config, configuration.PAGE, content=configuration.page()))
    files.append(File.generated(config, modules.PAGE, content=modules.page()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Translates the links of a page."""
    try:
        return links.translated(markdown, page=page.file.src_uri, root=ROOT, source_url=_source_url())
    except links.BrokenLink as error:
        raise PluginError(str(error)) from error


def _source_url() -> str | None:
    """URL of the sources on the web, if the project has one."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    repository = urls.get("Source") or urls.get("Repository")
    return f"{repository.rstrip('/')}/blob/main" if repository else None
