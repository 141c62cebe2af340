"""A partial proof is reported as ``partial`` and refused with ``strict``."""

from __future__ import annotations

import re

import pytest

from tests.helpers.models import ScalingModel
from tests.helpers.roster import info, link_to, members_of, planner_of
from tests.helpers.session_bench import Bench
from tests.helpers.sessions import Sender
from tests.unit.receiver.test_rank import NEW, receiver_of
from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError
from weightcast.report import TargetReport, UpdateReport
from weightcast.transports.link import Link
from weightcast.transports.preflight import check_proof, error_if_unproven
from weightcast.transports.session import Outcome
from weightcast.update.verify import Verifier
from weightcast.wire.answers import Ack

DIGEST = "0" * 16
NAMES = tuple(f"w{number}" for number in range(999))


@pytest.fixture
def link() -> Link:
    return link_to(info("native"))


def row_of(link: Link, ack: Ack, digest: str, proven: int) -> TargetReport:
    """The row of a target that has committed."""
    connecting = members_of({link.url: link.info})
    link.session.committed, link.outcome = ack, Outcome(info=link.info)
    Verifier(connecting.members, planner_of().exporter).compare_kept(link, ack, digest, proven)
    return link.row()


def committed(unproven: tuple[str, ...]) -> Ack:
    return Ack(ok=True, version=1, ranks=1, digest=DIGEST, resident_ranks=1, unproven=unproven)


@pytest.mark.parametrize(
    ("unproven", "proof", "counts"),
    [((), "resident", (1, 0)), (NAMES[:1], "partial", (1, 1)), (NAMES, "partial", (1, 999))],
)
def test_report_row_counts_proven_tensors(link, unproven, proof, counts):
    row = row_of(link, committed(unproven), DIGEST, 1)
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
    row = row_of(link, committed(NAMES), "", 0)
    assert (row.proof, row.proven, row.unproven) == ("none", 0, 999)


def test_tensors_that_cannot_be_read_back_are_named_once(link, caplog):
    for names in (NAMES[:8], NAMES[:8], (), NAMES[:1]):
        assert error_if_unproven(link, committed(names), UpdateConfig()) is None
    first, second = [record.getMessage() for record in caplog.records]
    count = len(link.info.specs)
    assert f"http://u: 8 of {count} tensors cannot be proven resident" in first
    assert "w0, w1, w2, w3, w4, w5" in first
    assert "w0" in second
    error = error_if_unproven(link, committed(NAMES[:1]), UpdateConfig(strict=True))
    assert error is not None
    assert re.search("and strict=True asks for it: .*w0", str(error))
    assert error.names == ("w0",)
    for level in ("none", "received"):
        assert error_if_unproven(link, committed(NAMES[:1]), UpdateConfig(strict=True, verify=level)) is None
    assert error_if_unproven(link, committed(()), UpdateConfig(strict=True)) is None


@pytest.mark.parametrize("level", ["received", "resident"])
def test_an_engine_that_can_prove_nothing_is_named_or_refused(caplog, level):
    stock = info("sglang")
    link = link_to(stock)
    words = rf"http://u \(.*\) cannot prove that weights are {level}"
    for _ in range(2):
        check_proof([link], UpdateConfig(verify=level))
    [record] = caplog.records
    assert re.search(words, record.getMessage())
    other = link_to(stock, "http://v")
    with pytest.raises(ConfigError, match=rf"{words}; http://v .*, and strict=True asks for it"):
        check_proof([link, other], UpdateConfig(verify=level, strict=True))
    check_proof([link], UpdateConfig(verify="none", strict=True))


def test_engine_lists_unprovable_tensors_at_open():
    bench = Bench()
    bench.ranks.receivers[0].close()
    bench.ranks.receivers[0] = receiver_of(ScalingModel())
    assert bench.tell(Sender(NEW).open).unproven == ("norm.weight",)
    bench.close()
