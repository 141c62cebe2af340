"""A partial proof is reported as ``partial`` and refused below ``min_proven_share``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.helpers.models import ScalingModel
from tests.helpers.roster import info
from tests.helpers.session_bench import Bench
from tests.helpers.sessions import Sender
from tests.unit.receiver.test_rank import NEW, receiver_of
from weightcast.adapters.registry import adapter_for
from weightcast.cli.app import app
from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError, VerificationFailed
from weightcast.report import UpdateReport
from weightcast.transports.link import Link
from weightcast.transports.outcome import Outcome, check_share
from weightcast.wire.answers import Ack

DIGEST = "0" * 16
NAMES = tuple(f"w{number}" for number in range(999))


@pytest.fixture
def link() -> Link:
    client = SimpleNamespace(target=SimpleNamespace(url="http://u"))
    return Link(client=client, adapter=adapter_for(info("native")), info=info("native"))


def committed(unproven: tuple[str, ...]) -> Ack:
    return Ack(ok=True, version=1, ranks=1, digest=DIGEST, resident_ranks=1, unproven=unproven)


@pytest.mark.parametrize(
    ("unproven", "proof", "counts"),
    [((), "resident", (1, 0)), (NAMES[:1], "partial", (1, 1)), (NAMES, "partial", (1, 999))],
)
def test_report_row_counts_proven_tensors(link, unproven, proof, counts):
    outcome = Outcome(info=link.info)
    outcome.resident(link, committed(unproven), DIGEST, 1)
    row = outcome.row(link.url, None)
    assert (row.status, row.proof, (row.proven, row.unproven)) == ("serving", proof, counts)
    report = UpdateReport(
        version=1,
        transport="ipc",
        bytes=1,
        buckets=1,
        seconds=1.0,
        phases={},
        peak_extra_bytes=0,
        digest=DIGEST,
        targets=(row,),
    )
    assert (f"proof partial ({counts[0]} of {sum(counts)} tensors)" in str(report)) == bool(unproven)
    assert (f"{len(unproven)} tensors cannot be read back, w0 among them" in row.message) == bool(unproven)


def test_report_row_without_a_proven_tensor_has_proof_none(link):
    outcome = Outcome(info=link.info)
    outcome.resident(link, committed(NAMES), "", 0)
    row = outcome.row(link.url, None)
    assert (row.proof, row.proven, row.unproven) == ("none", 0, 999)


@pytest.mark.parametrize(("share", "good"), [(1.0, False), (0.9991, False), (0.999, True), (0.0, True)])
def test_share_below_the_minimum_is_refused(link, share, good):
    if good:
        check_share(link, 1000, NAMES[:1], share)
        return
    with pytest.raises(VerificationFailed, match=r"999 of 1000 tensors.*w0") as caught:
        check_share(link, 1000, NAMES[:1], share)
    assert caught.value.names == ("w0",)
    assert "min_proven_share=0.999 " in str(caught.value.hint)


def test_share_must_be_between_0_and_1(link):
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="min_proven_share"):
            UpdateConfig(min_proven_share=share)
    check_share(link, 0, (), 1.0)


def test_engine_lists_unprovable_tensors_at_open():
    bench = Bench()
    bench.ranks.receivers[0].close()
    bench.ranks.receivers[0] = receiver_of(ScalingModel())
    assert bench.tell(Sender(NEW).open).unproven == ("norm.weight",)
    bench.close()


def test_push_has_the_option_min_proven_share():
    assert "--min-proven-share" in CliRunner().invoke(app, ["push", "--help"], env={"COLUMNS": "200"}).output
