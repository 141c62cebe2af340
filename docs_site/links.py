"""Translates the links of Markdown pages, which are written for a checkout, to links of the site.

Pages link to each other, to sources and to results by relative paths, so they work in a checkout.  The site has some of
these files at other places and others not at all.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

# Files outside docs/ that are pages of the site, by their path in the checkout.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "RESULTS.md": "results.md",
}
_FENCE = re.compile(r"^(`{3,}).*?^\1`*\s*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)")
_OTHER_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:|//|#")


class BrokenLink(Exception):
    """A page links to a file that does not exist."""


def page_of(path: str) -> str | None:
    """Place on the site of a file of the checkout; None if the site does not have it."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") and path.endswith(".md") else None


def path_of(page: str) -> str:
    """Path in the checkout of a page of the site."""
    sources = {place: path for path, place in PAGES.items()}
    return sources.get(page, f"docs/{page}")


def translated(markdown: str, *, page: str, root: Path, source_url: str | None = None) -> str:
    """Rewrites the links of a page.

    Args:
        markdown: Text of the page.
        page: Its place on the site.
        root: The checkout.
        source_url: URL of the checkout's files on the web.  Without it, a link to a file that the site does not have
            becomes its text.

    Raises:
        BrokenLink: A link leads to a file that does not exist.
    """
    here = posixpath.dirname(path_of(page))

    def replaced(found: re.Match[str]) -> str:
        target, text = found["target"], found["text"]
        if _OTHER_SCHEME.match(target):
            return found[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(here, path))
        place = page_of(path)
        if place is not None:
            relative = posixpath.relpath(place, posixpath.dirname(page) or ".")
            return f"{found['image']}[{text}]({relative}{'#' if anchor else ''}{anchor})"
        if not (root / path).exists():
            raise BrokenLink(f"{path_of(page)} links to {target}, which does not exist")
        return f"[{text}]({source_url}/{path})" if source_url else text

    parts: list[str] = []
    end = 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replaced, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, markdown[end:])])
