"""Which message fits which state of a session, and what each leaves."""

from __future__ import annotations

import itertools
import threading
import time

import msgspec
import pytest
import torch

from tests.helpers.clock import PATIENCE_S, Clock
from tests.helpers.models import FusedModel, differing, specs_of, state, weights_of
from tests.helpers.session_bench import Hooks, Ranks, in_thread
from tests.helpers.sessions import Sender
from weightcast.digest.definition import model_digest, tensor_digest
from weightcast.receiver import WeightReceiver, session_steps
from weightcast.receiver import session as session_module
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.session import SessionHandler
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.messages import Message, Readback
from weightcast.wire.plans import UpdateTables


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("staging", ["device", "host", "none"])
@pytest.mark.parametrize("pause", ["abort", "retract", "in_place", "wait"])
def test_an_update(bench, staging, tp_size, pause):
    made = bench(staging=staging, tp_size=tp_size)
    engine, hooks = made.engine, made.hooks
    assert engine.info().state == "serving"
    assert (engine.info().version, engine.info().digest) == (0, None)
    sender = Sender(weights_of(3), version=3, pause=pause)
    received, kept = sender.digests()

    ack = made.transfer(sender)
    assert engine.state == "updating"
    assert engine.info().session_owner == "process 1 on here (to version 3)"
    assert ack.received == received
    assert ack.digest == model_digest(kept)
    assert ack.mismatched == ()
    assert ack.not_updated == ("embed", "requests_served")
    assert hooks.calls == ([f"pause {pause}"] if staging == "none" else [])

    ack = made.tell(sender.commit(kept))
    assert hooks.calls == [f"pause {pause}", "drop_caches", "set_version 3", "resume"]
    assert ack.digest == model_digest(kept)
    assert ack.resident_ranks == tp_size
    assert (ack.state, ack.version, ack.ranks) == ("serving", 3, tp_size)
    assert ack.stall_s > 0
    info = engine.info()
    assert (info.state, info.version, info.digest) == ("serving", 3, model_digest(kept))
    assert info.session_owner is None
    assert made.serves(3)
    assert engine.apply(Readback()).resident == {name: tensor_digest(tensor) for name, tensor in weights_of(3).items()}


def told_of(sender: Sender, buckets: int) -> Sender:
    """It says at Open how many buckets will come."""
    plan = UpdateTables(sender.open.specs, sender.layouts, (8,) * buckets)
    sender.open = msgspec.structs.replace(sender.open, plan=plan)
    return sender


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("staging", ["device", "none"])
def test_the_answer_to_the_last_bucket_that_open_told_of_is_the_answer_to_close(bench, staging, tp_size):
    made = bench(staging=staging, tp_size=tp_size)
    sender = Sender(weights_of(3), version=3)
    told_of(sender, len(sender.layouts))
    sent = sender.sent(made.engine.info().specs)
    made.tell(sender.open)
    acks = [made.tell(sender.announce(index)) for index in range(len(sender.layouts))]
    assert [ack.closed for ack in acks] == [False] * (len(acks) - 1) + [True]
    assert [ack.digest for ack in acks] == [""] * (len(acks) - 1) + [sent.digest]
    last = acks[-1]
    assert (last.received, last.suspects, last.not_updated) == ({}, {}, ("embed", "requests_served"))
    assert last.load_s > 0
    assert made.tell(sender.close(by_name=True)).received == sent.received  # whoever wants the names asks as before
    ack = made.tell(sender.commit(proven=True))
    assert ack.digest == sent.digest == model_digest(sent.received)
    assert made.serves(3)


@pytest.mark.parametrize("staging", ["device", "none"])
def test_a_last_bucket_that_leaves_something_out_is_refused(bench, staging):
    made = bench(staging=staging)
    sender = told_of(Sender(weights_of(3), version=3), 1)
    made.tell(sender.open)
    ack = made.engine.apply(sender.announce(0))
    assert not ack.ok
    assert not ack.closed
    assert "did not arrive whole" in ack.error
    assert "did not arrive whole" in made.refuse(sender.commit(proven=True))
    made.tell(sender.abort())
    assert made.serves(0) is (staging == "device")
    made.update(4)
    assert made.serves(4)


def test_order_is_kept_and_a_violation_changes_nothing(bench):
    made = bench()
    first, stranger = Sender(weights_of(1), version=1), Sender(weights_of(2), version=2)
    for early in (first.announce(0), first.close(), first.commit()):
        assert "no such session" in made.refuse(early)
    made.tell(first.abort())  # nothing of it is left: that is what an abort wants
    made.tell(first.open)
    assert "open already" in made.refuse(first.open)
    assert "already being updated by process 1 on here" in made.refuse(stranger.open)
    for strange in (stranger.announce(0), stranger.close(), stranger.commit()):
        assert "no such session" in made.refuse(strange)
    made.tell(stranger.abort())
    assert made.engine.holds(first.session)
    assert not made.engine.holds(stranger.session)
    assert "bucket 1 came where bucket 0 was due" in made.refuse(first.announce(1))
    assert "not closed" in made.refuse(first.commit())
    assert "0 buckets arrived, the trainer sent 1" in made.refuse(first.close(1))
    for index in range(len(first.layouts)):
        made.tell(first.announce(index))
        assert "due" in made.refuse(first.announce(index))
    assert "arrived, the trainer sent 0" in made.refuse(first.close(0))
    made.tell(first.close())
    made.tell(first.close())
    assert "due" in made.refuse(first.announce(0))
    made.tell(first.commit(first.digests()[1]))
    for late in (first.announce(0), first.close()):
        assert "no such session" in made.refuse(late)
    made.tell(first.abort())
    assert made.serves(1)


def test_what_was_not_announced_is_refused(bench):
    made = bench()
    sender, other = Sender(weights_of(1), version=1), Sender(weights_of(1, heads=8), version=1)
    made.tell(sender.open)
    layout = next(one for one in other.layouts if any(slot.spec.name == "q.weight" for slot in one.slots))
    assert "not what was announced" in made.refuse(_as(sender, other, layout))


def _as(sender: Sender, other: Sender, layout) -> Message:
    """Another trainer's bucket under this trainer's session."""
    bucket = other.announce(0, layout=type(layout)(index=0, slots=layout.slots, size_bytes=layout.size_bytes))
    return msgspec.structs.replace(bucket, session=sender.session)


def test_versions_count_up(bench):
    made = bench()
    made.update(5)
    assert "version 4 is older than 5" in made.refuse(Sender(weights_of(4), version=4).open)
    made.update(5)  # the same again is fine
    made.update(4, allow_older=True)
    assert made.engine.info().version == 4
    assert made.serves(4)


def test_a_pause_mode_that_the_engine_cannot_have_is_refused_before_any_rank_hears_of_it(bench):
    made = bench()
    state = made.engine._engine
    state.facts = msgspec.structs.replace(state.facts, no_pause={"in_place": "it keeps the cache; use pause retract"})
    refused = made.refuse(Sender(weights_of(1), version=1, pause="in_place").open)
    assert "pause in_place: it keeps the cache; use pause retract" in refused
    assert (made.engine.state, made.hooks.calls) == ("serving", [])
    made.update(1, pause="retract")


def test_a_model_of_other_weights_is_refused_on_every_rank(bench):
    made = bench(tp_size=2)
    error = made.refuse(Sender({"w": torch.zeros(2)}, version=1).open)
    assert "missing" in error
    assert "unknown to this model: w" in error
    made.update(1)
    assert made.serves(1)


@pytest.mark.parametrize("after", ["open", "bucket", "close"])
@pytest.mark.parametrize("staging", ["device", "host", "none"])
def test_an_abort(bench, staging, after):
    made = bench(staging=staging)
    made.update(1)
    made.hooks.calls.clear()
    sender = Sender(weights_of(2), version=2)
    for number, message in enumerate(sender.transfer()):
        made.tell(message)
        if (after == "open" and number == 0) or (after == "bucket" and number == 2):
            break
    ack = made.tell(sender.abort("the trainer thought again"))
    half = staging == "none" and after != "open"
    assert ack.state == made.engine.state == ("quarantined" if half else "serving")
    assert made.engine.info().session_owner is None
    assert made.engine.info().version == 1
    assert made.hooks.paused == half
    if half:
        assert "ended half way: the trainer thought again" in made.engine.info().message
        assert made.engine.info().digest is None
        # It stays so when a session ends before it wrote anything, and is healed by one that does not.
        again = Sender(weights_of(3), version=3)
        made.tell(again.open)
        made.tell(again.abort())
        assert made.engine.state == "quarantined"
        assert made.hooks.paused
    else:
        assert made.serves(1)
        assert made.engine.info().digest is not None
    made.update(4)
    assert made.serves(4)
    assert made.engine.state == "serving"
    assert not made.hooks.paused
    assert made.engine.info().message == ""


def test_a_session_ends_by_itself_when_nothing_is_heard(bench):
    made = bench()
    sender = Sender(weights_of(1), version=1, lease_s=60.0)
    with Clock().within(session_module, session_steps) as clock:
        made.tell(sender.open)
        for index in range(4):
            clock.move(40.0)
            made.tell(sender.announce(index))  # every message renews it
        clock.move(61.0)
        _until(lambda: made.engine.info().session_owner is None and made.engine.state == "serving")
    assert "no such session" in made.refuse(sender.announce(4))
    assert made.serves(0)
    made.update(2)


def test_a_lost_lease_ends_only_its_own_session(bench):
    made = bench()
    first, second = Sender(weights_of(1), version=1), Sender(weights_of(2), version=2)
    made.tell(first.open)
    made.engine.lease_lost(first.session)
    assert made.engine.state == "serving"
    made.tell(second.open)
    made.engine.lease_lost(first.session)
    assert made.engine.holds(second.session)


class _Unfair:
    """A lock that whoever comes first gets last."""

    def __init__(self, lock) -> None:
        self._lock = lock
        self.came, self.turn = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if not self.came.is_set():
            self.came.set()
            assert self.turn.wait(PATIENCE_S)
        self._lock.acquire()

    def __exit__(self, *_) -> None:
        self._lock.release()


@pytest.mark.parametrize("how_far", ["open", "committed"])
def test_an_open_that_waits_does_not_end_what_its_trainer_has_begun_since(bench, how_far):
    made = bench()
    older, newer = Sender(weights_of(2), version=2), Sender(weights_of(3), version=2)
    newer.session = newer.session[:16] + older.session[16:]  # of the same trainer
    newer.open = msgspec.structs.replace(newer.open, session=newer.session)
    made.engine._busy = lock = _Unfair(made.engine._busy)
    thread, answers = in_thread(made.engine, older.open)
    assert lock.came.wait(PATIENCE_S)
    messages = itertools.chain(newer.transfer(), [newer.commit(proven=True)])
    for message in itertools.islice(messages, 1 if how_far == "open" else None):
        made.tell(message)
    lock.turn.set()
    thread.join(PATIENCE_S)
    assert [ack.ok for ack in answers] == [False]
    assert "its trainer has begun another update since" in answers[0].error
    assert not made.engine.holds(older.session)
    for message in messages:
        made.tell(message)
    assert made.serves(3)


def _until(condition, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Skips(FusedModel):
    """Has no use for what is called ``mtp``."""

    def load_weights(self, weights):
        return super().load_weights((name, tensor) for name, tensor in weights if not name.startswith("mtp"))


@pytest.mark.parametrize("comes", [True, False])
def test_a_tensor_that_no_rank_keeps_may_come_or_stay_away(bench, comes):
    known = weights_of(1) | {"mtp.fc": torch.randn(4, 3)}
    model = Skips()
    receiver = WeightReceiver(model, load_weights=model.load_weights, expected=specs_of(known))
    optional = tuple(spec for spec in specs_of(known) if spec.name in receiver.loader.skipped)
    assert [spec.name for spec in optional] == ["mtp.fc"]
    facts = EngineFacts(
        engine="test 1",
        model="m",
        host_id="h",
        ranks=(RankInfo(rank=0, pid=1, device="cpu"),),
        staging="device",
        transports=("ipc",),
        specs=tuple(spec for spec in specs_of(known) if spec not in optional),
        optional=optional,
        note="one tensor is not kept",
    )
    engine = SessionHandler(Ranks([receiver]), Hooks(), facts)
    try:
        assert (engine.info().optional, engine.info().message) == (optional, "one tensor is not kept")
        weights = weights_of(2) | ({"mtp.fc": torch.randn(4, 3)} if comes else {})
        sender = Sender(weights, version=2)
        for message in sender.transfer():
            ack = engine.apply(message)
            assert ack.ok, ack.error
        kept = {name: digest for name, digest in sender.digests()[1].items() if name != "mtp.fc"}
        committed = engine.apply(sender.commit(kept))
        assert committed.ok, committed.error
        assert committed.digest == model_digest(kept)
        wanted = FusedModel()
        with torch.no_grad():
            wanted.load_weights(weights_of(2).items())
        assert differing(model, state(wanted)) == []
    finally:
        engine.close()
        receiver.close()
