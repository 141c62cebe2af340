"""The row of an engine that may or may not have switched."""

from __future__ import annotations

import msgspec
import pytest

from tests.helpers.roster import info, link_to
from weightcast.errors import TargetLost, TargetUnreachable
from weightcast.transports.session import Outcome

URL = "http://127.0.0.1:1"
SERVED = msgspec.structs.replace(info("native"), version=7)


@pytest.mark.parametrize(
    ("now", "status", "version_after"),
    [
        pytest.param(msgspec.structs.replace(SERVED, version=8), "unknown", 8, id="says the new version"),
        pytest.param(SERVED, "unknown", 7, id="says the old version"),
        pytest.param(msgspec.structs.replace(SERVED, state="quarantined"), "quarantined", 7, id="quarantined"),
        pytest.param(TargetUnreachable(f"{URL}: silent", url=URL), "unknown", None, id="does not answer"),
    ],
)
def test_row_after_a_lost_answer_to_commit_claims_no_version_as_proven(now, status, version_after) -> None:
    link = link_to(SERVED, URL)
    link.outcome = Outcome(info=SERVED, failed=TargetLost(f"{URL}: no answer to commit", url=URL), in_doubt=True)
    link.answered(now, waited=True)
    row = link.row()
    assert (row.status, row.version_before, row.version_after) == (status, 7, version_after)
    assert (row.proof, row.digest, row.digests_matched) == ("none", None, 0)
    assert "no answer to commit" in row.message
    assert "it is not known whether the engine has switched" in row.message
