"""A commit that fails half way: every rank keeps the old version, proven, or the engine is quarantined and paused."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.models import weights_of
from tests.helpers.session_bench import Bench
from tests.helpers.sessions import Sender
from tests.helpers.torn import OUT_OF_MEMORY, FailingCopy, tear
from weightcast.receiver import exchanges
from weightcast.wire.messages import Readback

PLACES = ["device", "device that keeps storage", "host"]
COPIED = PLACES[1:]


@pytest.fixture
def tp_size(request):
    return getattr(request, "param", 2)


@pytest.fixture
def made(request, tp_size, monkeypatch):
    """An engine that serves version 1, which was proven."""
    monkeypatch.setattr(exchanges, "_CHUNK_BYTES", 64)  # several chunks for tensors this small
    where = request.param
    bench = Bench(staging=where.split()[0], tp_size=tp_size, keep_storage="keeps" in where)
    bench.update(1)
    bench.hooks.calls.clear()
    yield bench
    bench.close()


def ready(made: Bench, version: int = 2, **changes) -> Sender:
    """Everything of a version is there, and nothing is switched."""
    sender = Sender(weights_of(version), version=version, **changes)
    made.transfer(sender)
    return sender


def check_old(made: Bench, version: int = 1) -> None:
    info = made.engine.info()
    assert (info.state, info.version, info.paused, info.session_owner) == ("serving", version, False, None)
    assert made.serves(version)
    assert made.hooks.calls[-1] == "resume"


def check_quarantined(made: Bench, words: str) -> None:
    info = made.engine.info()
    assert (info.state, info.paused, info.session_owner, info.digest) == ("quarantined", True, None, None)
    assert words in info.message
    assert "set_version 2" not in made.hooks.calls


def heal(made: Bench) -> None:
    made.update(5)
    assert made.serves(5)
    assert made.engine.state == "serving"
    assert not made.hooks.paused


@pytest.mark.parametrize("tp_size", [1, 2], indirect=True)
@pytest.mark.parametrize("made", PLACES, indirect=True)
@pytest.mark.parametrize("after", [0, 1, 4])
def test_undo_restores_only_the_parameters_that_were_switched(made, after):
    digest = made.engine.info().digest
    sender = ready(made)
    cut = tear(made.ranks.receivers[-1].loader.staging, after=after)
    ack = made.engine.apply(sender.commit(proven=True))
    assert cut.times == 0
    assert not ack.ok
    assert OUT_OF_MEMORY in ack.error
    check_old(made)
    assert made.engine.info().digest == digest
    # The trainer ends the session as it always does; there is nothing left to undo.
    assert made.tell(sender.abort()).state == "serving"
    check_old(made)
    heal(made)


@pytest.mark.parametrize("made", COPIED, indirect=True)
@pytest.mark.parametrize("half", [False, True])
def test_a_copy_that_fails_anywhere_in_a_commit_leaves_the_old_version(made, half):
    at, failed = 0, 0
    while True:
        sender = ready(made)
        commit = sender.commit(proven=True)
        with FailingCopy(at, half=half) as fault:
            ack = made.engine.apply(commit)
        assert ack.ok == (fault.failed == 0)
        if ack.ok:
            break
        check_old(made)
        failed += 1
        at += 5
    assert failed > 10
    assert made.serves(2)


@pytest.mark.parametrize("tp_size", [1, 2], indirect=True)
@pytest.mark.parametrize("made", PLACES, indirect=True)
def test_failed_undo_quarantines_the_engine(made):
    sender = ready(made)
    cut = tear(made.ranks.receivers[-1].loader.staging, after=3, times=2)
    ack = made.engine.apply(sender.commit(proven=True))
    assert cut.times == 0
    assert (ack.ok, ack.state) == (False, "quarantined")
    assert OUT_OF_MEMORY in ack.error
    check_quarantined(made, "could not be switched back")
    assert made.tell(sender.abort()).state == "quarantined"
    heal(made)


@pytest.mark.parametrize("made", COPIED, indirect=True)
def test_failed_copy_in_the_undo_quarantines_the_engine(made):
    sender = ready(made)
    commit = sender.commit(proven=True)
    with FailingCopy(20, times=1 << 30):
        ack = made.engine.apply(commit)
    assert (ack.ok, ack.state) == (False, "quarantined")
    check_quarantined(made, "could not be switched back")
    heal(made)


@pytest.mark.parametrize("made", PLACES, indirect=True)
def test_undo_that_does_not_restore_the_old_version_quarantines_the_engine(made):
    sender = ready(made)
    receiver = made.ranks.receivers[-1]
    tear(receiver.loader.staging, after=3)
    spoilt = receiver.loader.residents["qkv"]

    def spoil() -> None:
        with torch.no_grad():
            spoilt.view(-1)[3] += 1  # what an undo that says nothing has not brought back

    undo = receiver.loader.staging.undo

    def wrong_undo() -> None:
        undo()
        spoil()

    receiver.loader.staging.undo = wrong_undo
    ack = made.engine.apply(sender.commit(proven=True))
    assert (ack.ok, ack.state) == (False, "quarantined")
    check_quarantined(made, "q.weight")
    receiver.loader.staging.undo = undo
    heal(made)


@pytest.mark.parametrize("made", PLACES, indirect=True)
def test_a_first_update_is_undone_with_proof_as_well(made):
    """Nothing was read back when an engine has just started; what it serves is summed before the switch."""
    for receiver in made.ranks.receivers:
        receiver.loader.live.known = None
    sender = ready(made)
    tear(made.ranks.receivers[-1].loader.staging, after=3)
    assert not made.engine.apply(sender.commit(proven=True)).ok
    check_old(made)


@pytest.mark.parametrize("made", COPIED, indirect=True)
def test_undo_of_copied_contents_without_proof_quarantines_the_engine(made):
    for receiver in made.ranks.receivers:
        receiver.loader.live.known = None
    sender = ready(made, verify="none")
    tear(made.ranks.receivers[-1].loader.staging, after=3)
    ack = made.engine.apply(sender.commit())
    assert (ack.ok, ack.state) == (False, "quarantined")
    check_quarantined(made, "the old weights had no digests")
    heal(made)


@pytest.mark.parametrize("made", PLACES[:1], indirect=True)
def test_undo_of_exchanged_storage_needs_no_proof(made):
    for receiver in made.ranks.receivers:
        receiver.loader.live.known = None
    sender = ready(made, verify="none")
    tear(made.ranks.receivers[-1].loader.staging, after=3)
    assert not made.engine.apply(sender.commit()).ok
    check_old(made)


@pytest.mark.parametrize("made", PLACES, indirect=True)
def test_a_finisher_that_raises_in_the_commit_is_run_again_for_the_old_weights(made):
    receiver = made.ranks.receivers[-1]
    runs: list[float] = []

    def finisher() -> None:
        runs.append(float(receiver.loader.residents["qkv"].detach().view(-1)[0]))
        if len(runs) == 1:
            raise LookupError("no graph")

    receiver.loader.live.finishers = (finisher,)
    sender = ready(made)
    ack = made.engine.apply(sender.commit(proven=True))
    assert not ack.ok
    assert "no graph" in ack.error
    check_old(made)
    assert len(runs) == 2
    assert runs[0] != runs[1]
    heal(made)


@pytest.mark.parametrize("made", PLACES, indirect=True)
def test_a_finisher_that_raises_in_the_undo_quarantines(made):
    receiver = made.ranks.receivers[-1]
    broken = [True]

    def finisher() -> None:
        if broken:
            raise LookupError("no graph")

    receiver.loader.live.finishers = (finisher,)
    sender = ready(made)
    ack = made.engine.apply(sender.commit(proven=True))
    assert (ack.ok, ack.state) == (False, "quarantined")
    check_quarantined(made, "no graph")
    broken.clear()
    heal(made)


@pytest.mark.parametrize("made", PLACES, indirect=True)
def test_finishers_do_not_run_after_a_flip_that_failed(made):
    receiver = made.ranks.receivers[-1]
    runs: list[int] = []
    receiver.loader.live.finishers = (lambda: runs.append(1),)
    sender = ready(made)
    tear(receiver.loader.staging, after=3)
    assert not made.engine.apply(sender.commit(proven=True)).ok
    check_old(made)
    assert runs == []


@pytest.mark.parametrize("made", PLACES, indirect=True)
def test_a_quarantined_engine_stays_so_when_a_flip_is_undone(made):
    made.engine._engine.quarantine("for another reason")
    sender = ready(made)
    tear(made.ranks.receivers[-1].loader.staging, after=3)
    assert not made.engine.apply(sender.commit(proven=True)).ok
    assert (made.engine.state, made.hooks.paused) == ("quarantined", True)
    heal(made)


@pytest.mark.parametrize("made", PLACES, indirect=True)
def test_after_an_undo_the_next_failure_is_proven_undone_too(made):
    for version in (2, 3):
        sender = ready(made, version)
        tear(made.ranks.receivers[-1].loader.staging, after=version)
        assert not made.engine.apply(sender.commit(proven=True)).ok
        check_old(made)
    assert made.tell(Readback()).mismatched == ()
    heal(made)
