"""A partial proof is reported as ``partial`` and refused with ``strict``."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from tests.helpers.models import ScalingModel
from tests.helpers.roster import info
from tests.helpers.session_bench import Bench
from tests.helpers.sessions import Sender
from tests.unit.receiver.test_rank import NEW, receiver_of
from weightcast.adapters.registry import adapter_for
from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError, VerificationFailed
from weightcast.report import UpdateReport
from weightcast.transports.link import Link
from weightcast.transports.outcome import Outcome
from weightcast.transports.preflight import check_proof, check_read_back
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


def test_tensors_that_cannot_be_read_back_are_named_once(link, caplog):
    for names in (NAMES[:8], NAMES[:8], (), NAMES[:1]):
        check_read_back(link, names, UpdateConfig())
    first, second = [record.getMessage() for record in caplog.records]
    count = len(link.info.specs)
    assert f"http://u: 8 of {count} tensors cannot be proven resident" in first
    assert "w0, w1, w2, w3, w4, w5" in first
    assert "w0" in second
    with pytest.raises(VerificationFailed, match=r"and strict=True asks for it: .*w0") as caught:
        check_read_back(link, NAMES[:1], UpdateConfig(strict=True))
    assert caught.value.names == ("w0",)
    for level in ("none", "received"):
        check_read_back(link, NAMES[:1], UpdateConfig(strict=True, verify=level))
    check_read_back(link, (), UpdateConfig(strict=True))


@pytest.mark.parametrize("level", ["received", "resident"])
def test_an_engine_that_can_prove_nothing_is_named_or_refused(caplog, level):
    stock = info("sglang")
    client = SimpleNamespace(target=SimpleNamespace(url="http://u"))
    link = Link(client=client, adapter=adapter_for(stock), info=stock)
    words = rf"http://u \(.*\) cannot prove that weights are {level}"
    for _ in range(2):
        check_proof([link], UpdateConfig(verify=level))
    [record] = caplog.records
    assert re.search(words, record.getMessage())
    other = Link(client=SimpleNamespace(target=SimpleNamespace(url="http://v")), adapter=adapter_for(stock), info=stock)
    with pytest.raises(ConfigError, match=rf"{words}; http://v .*, and strict=True asks for it"):
        check_proof([link, other], UpdateConfig(verify=level, strict=True))
    check_proof([link], UpdateConfig(verify="none", strict=True))


def test_engine_lists_unprovable_tensors_at_open():
    bench = Bench()
    bench.ranks.receivers[0].close()
    bench.ranks.receivers[0] = receiver_of(ScalingModel())
    assert bench.tell(Sender(NEW).open).unproven == ("norm.weight",)
    bench.close()
