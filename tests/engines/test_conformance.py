"""Every engine that serves on a CPU passes the conformance run, but for known defects of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conformance import KINDS, run

pytestmark = [pytest.mark.engine_full]


@pytest.mark.parametrize("name", KINDS)
def test_no_check_fails_but_those_that_are_known(name: str, tmp_path: Path) -> None:
    result = run(KINDS[name], tmp_path)
    assert {row.check for row in result.failed} == set(KINDS[name].fails), result.text()
    assert sum(row.outcome == "passed" for row in result.rows) >= 12
