"""Every engine that serves on a CPU passes the conformance run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conformance import KINDS, run

pytestmark = [pytest.mark.engine_full]


@pytest.mark.parametrize("name", KINDS)
def test_no_check_fails(name: str, tmp_path: Path) -> None:
    result = run(KINDS[name], tmp_path)
    assert not result.failed, result.text()
    assert sum(row.outcome == "passed" for row in result.rows) >= 12
