"""The exporter of one's own in docs/exporters.md, as it stands there, with one trainer rank and with two."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.clock import AMPLE_S
from tests.helpers.harness import SMALL_BUCKETS, Engine, digests_of, next_version
from tests.helpers.ranks import Ranks
from tests.helpers.toy_engine import toy_weights
from weightcast import UpdateReport, WeightUpdater

PAGE = Path(__file__).parents[3] / "docs" / "exporters.md"


def exporter_of_the_page() -> Any:
    """The class in the section's first block of code."""
    section = PAGE.read_text().split("\n## An exporter of your own\n", 1)[1].split("\n## ", 1)[0]
    names: dict[str, Any] = {}
    exec(compile(re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0], str(PAGE), "exec"), names)
    return names["RowExporter"]


def update(url: str, first: int, second: int) -> list[UpdateReport]:
    """Updates twice, on every trainer rank; training changes the values in between."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows = {name: whole.chunk(ranks)[rank].clone() for name, whole in toy_weights(seed=first).items()}
    exporter = exporter_of_the_page()(rows, torch.device("cpu"))
    with WeightUpdater.connect(exporter, [url], bucket_bytes=SMALL_BUCKETS, timeout_s=AMPLE_S) as updater:
        reports = [updater.update(version=first)]
        for name, whole in toy_weights(seed=second).items():
            rows[name].copy_(whole.chunk(ranks)[rank])
        return [*reports, updater.update(version=second)]


def check(reports: list[UpdateReport], engine: Engine, second: int) -> None:
    assert [(report.ok, report.targets[0].proof) for report in reports] == [(True, "resident")] * 2
    assert reports[0].buckets > 5  # the larger matrices are cut into rows
    assert engine.digests() == digests_of(second, wire_dtype="bfloat16")


def test_an_exporter_of_ones_own_updates_an_engine():
    first, second = next_version(), next_version()
    with closing(Engine()) as engine:
        check(update(engine.url, first, second), engine, second)


def test_an_exporter_of_ones_own_gathers_the_rows_of_two_ranks():
    first, second = next_version(), next_version()
    with closing(Engine()) as engine, closing(Ranks(2)) as ranks:
        check(ranks.run(update, engine.url, first, second)[0], engine, second)
