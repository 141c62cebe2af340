"""Makes the pictures of the pages about watching, with the commands that those pages show.

    python -m tests.pictures docs/watching

Two reference engines with a random model of 40 million parameters are updated eight times on this machine.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console

from tests.helpers import browser, perfetto_ui
from tests.helpers.engines import engines, weightcast
from tests.helpers.tiny import tiny_model, tiny_tokenizer
from weightcast.cli.status_watch import TokenRates, table_of
from weightcast.config import Target
from weightcast.update.observe import Observer

SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 12, "head_dim": 48}


def main() -> int:
    out = Path(sys.argv[1])
    lacks = perfetto_ui.missing()
    if lacks:
        print(lacks, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _run(folder, out)
    return 0


def _run(folder: Path, out: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        tiny_model(folder / name, seed=seed, **SIZES)
        tiny_tokenizer(folder / name)
    lines: list[str] = []
    with engines(folder / "old", folder, {"tp": 2}, {"tp": 1}) as pair:
        to = [part for engine in pair for part in ("--to", engine.url)]
        for version in range(1, 9):
            done = weightcast(
                *("push", folder / "new", *to, "--version", version, "--via", "broadcast", "--bucket-bytes", "16MiB"),
                *("--trace", folder / "trace.json", "--html", folder / "update.html", "--json"),
            )
            assert done.returncode == 0, done.stderr
            lines.append(done.stdout.replace("\n", " "))
        done = weightcast("push", folder / "old", "--to", pair[0].url, "--version", 9, "--via", "broadcast")
        assert done.returncode == 0, done.stderr
        _status([engine.url for engine in pair], out / "status.svg")
    (folder / "run.jsonl").write_text("\n".join(lines))
    done = weightcast("trace", folder / "run.jsonl", "-o", folder / "run.html")
    assert done.returncode == 0, done.stderr
    with browser.browser(folder) as page:
        for name, dark in (("update", False), ("run", True)):
            page.open((folder / f"{name}.html").as_uri(), width=1160, height=860, dark=dark)
            _shrink(page.picture(folder / "shot.png", whole=False), out / f"{name}.png")
    with perfetto_ui.perfetto(folder / "trace.json", folder, width=1300, height=660) as ui:
        _shrink(ui.picture(folder / "shot.png"), out / "perfetto.png")


def _status(urls: list[str], path: Path) -> None:
    """Draws the live table of one moment, as a terminal shows it."""
    observers = [Observer(Target(url), timeout_s=30.0) for url in urls]
    observed = [observer.look() for observer in observers]
    for observer in observers:
        observer.close()
    rates = TokenRates()
    console = Console(file=io.StringIO(), record=True, width=178, force_terminal=True)
    console.print(table_of(observed, rates, width=178))
    svg = console.export_svg(title="weightcast status --watch")
    path.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # fonts of another host


def _shrink(source: Path, target: Path) -> None:
    """Stores a picture with 128 colours, which a page of text and bars does not exceed visibly."""
    with Image.open(source) as image:
        image.convert("RGB").quantize(128).save(target, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
