"""The real engine's floor, held against the model in ``helpers/session_model.py``: messages of several trainers in any
order, ranks that die in the middle of them, leases that end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.helpers.models import specs_of, weights_of
from tests.helpers.session_bench import Bench, Ranks, meeting
from tests.helpers.session_model import Crash, EngineModel
from tests.helpers.sessions import Sender
from tests.helpers.torn import tear
from weightcast.config import VerifyLevel
from weightcast.errors import EngineFailure
from weightcast.receiver.engine_state import EngineState
from weightcast.receiver.session_steps import SessionSteps
from weightcast.receiver.staging import StagingPlace
from weightcast.wire.answers import RankAck
from weightcast.wire.layout import Packing, plan_buckets
from weightcast.wire.messages import Abort, Leave, Message, Owner, Prepare, Readback, Revert
from weightcast.wire.plans import UpdateTables

BUCKET_BYTES = 1000


class Mortal(Ranks):
    """Ranks of which the last may die over a message, before anybody did anything or after the others had."""

    crash: Crash = ""

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        crash, self.crash = self.crash, ""
        if not crash:
            return super().apply(message, timeout_s=timeout_s)
        if crash == "late":
            for receiver in self.receivers[:-1]:
                receiver.apply(message)
        raise EngineFailure("the last rank was killed", ranks=[self.tp_size - 1])


class Sessions(RuleBasedStateMachine):
    """The engine does what the model does, in any order of messages."""

    staging: StagingPlace = "device"
    tp_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(staging=self.staging, tp_size=self.tp_size, ranks=Mortal)
        self.senders = [Sender(weights_of(1), version=1, bucket_bytes=BUCKET_BYTES)]
        self.buckets = len(self.senders[0].layouts)
        self.model = EngineModel(staged=self.staging != "none", buckets=self.buckets)

    def teardown(self) -> None:
        self.bench.close()

    def current(self) -> Sender | None:
        return next((sender for sender in self.senders if sender.session == self.model.session), None)

    def tell(self, message: Message, after: tuple[EngineModel, bool], crash: Crash = "") -> None:
        """The engine's answer and the model's."""
        self.bench.ranks.crash = crash
        ack = self.bench.engine.apply(message)
        # Who was refused by the engine itself never came to a rank, and none died.
        self.bench.ranks.crash = ""
        self.model, good = after
        assert ack.ok == good, (message, ack.error)
        assert ack.ok or ack.error

    def who(self, stale: int) -> Sender:
        """Mostly the trainer whose session is open, else some other, whose session is over or never was."""
        current = self.current()
        return current if current is not None and stale == 0 else self.senders[-1 - stale % len(self.senders)]

    @rule(
        step=st.integers(-1, 2),
        older=st.booleans(),
        crash=st.sampled_from(["", "", "", "early"]),
        steps=st.integers(0, 9),
        honest=st.booleans(),
    )
    def open(self, step: int, older: bool, crash: Crash, steps: int, honest: bool) -> None:
        """A new trainer; it goes some way if it is let in."""
        version = max(0, self.model.version + step)
        number = len(self.senders)
        sender = Sender(
            weights_of(version),
            version=version,
            allow_older=older,
            bucket_bytes=BUCKET_BYTES,
            owner=Owner(host="here", pid=number),
        )
        self.senders.append(sender)
        self.tell(sender.open, self.model.open(sender.session, version, older=older, crash=crash), crash)
        for _ in range(steps):
            self.go_on(honest)

    def go_on(self, honest: bool) -> None:
        """The next step of the trainer whose session is open."""
        sender, model = self.current(), self.model
        if sender is None or model.failed:
            return
        if model.closed:
            self.commit(0, honest, "", False)
        elif model.sent == self.buckets:
            self.close(0, 0, "")
        else:
            self.announce(0, 0, "")

    @precondition(lambda self: self.current() is not None)
    @rule()
    def open_again(self) -> None:
        sender = self.current()
        assert sender is not None
        self.tell(sender.open, self.model.open(sender.session, sender.open.version))

    @rule()
    def open_for_another_model(self) -> None:
        stranger = Sender({"w": torch.zeros(1)}, version=self.model.version + 1)
        self.tell(stranger.open, (self.model, False))

    @rule(
        stale=st.sampled_from([0, 0, 0, 1, 2]),
        ahead=st.sampled_from([0, 0, 0, 1, -1]),
        crash=st.sampled_from(["", "", "", "", "early", "late"]),
    )
    def announce(self, stale: int, ahead: int, crash: Crash) -> None:
        sender = self.who(stale)
        index = self.model.sent + ahead
        if 0 <= index < self.buckets:
            self.tell(sender.announce(index), self.model.announce(sender.session, index, crash=crash), crash)

    @rule(
        stale=st.sampled_from([0, 0, 0, 1]),
        more=st.sampled_from([0, 0, 0, 1]),
        crash=st.sampled_from(["", "", "", "early"]),
    )
    def close(self, stale: int, more: int, crash: Crash) -> None:
        sender = self.who(stale)
        count = self.model.sent + more
        self.tell(sender.close(count), self.model.close(sender.session, count, crash=crash), crash)

    @rule(
        stale=st.sampled_from([0, 0, 0, 1]),
        honest=st.sampled_from([True, True, False]),
        crash=st.sampled_from(["", "", "", "early", "late"]),
        stumble=st.sampled_from([False, False, False, True]),
        torn=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def commit(self, stale: int, honest: bool, crash: Crash, stumble: bool, torn: int = 0) -> None:
        sender = self.who(stale)
        expected = sender.digests()[1]
        if not honest:
            expected["scale"] = "0" * 16
        if stumble:
            self.bench.hooks.failing["drop_caches"] = EngineFailure("the cache is in the way")
        after = self.model.commit(sender.session, honest=honest, crash=crash, stumble=stumble, torn=torn)
        cut = tear(self.bench.ranks.receivers[-1].loader.staging, after=2, times=torn)
        self.tell(sender.commit(expected), after, crash)
        cut.times = 0
        self.bench.hooks.failing.clear()

    @rule(stale=st.sampled_from([1, 1, 0, 2]), crash=st.sampled_from(["", "", "", "early", "late"]))
    def revert(self, stale: int, crash: Crash) -> None:
        sender = self.who(stale)
        message = Revert(session=sender.session)
        self.tell(message, self.model.revert(sender.session, crash=crash), crash)

    @rule(stale=st.sampled_from([0, 0, 1]), crash=st.sampled_from(["", "", "", "early", "late"]))
    def abort(self, stale: int, crash: Crash) -> None:
        sender = self.who(stale)
        self.tell(sender.abort(), self.model.abort(sender.session, crash=crash), crash)

    @rule(stale=st.sampled_from([0, 0, 1]))
    def lease_lost(self, stale: int) -> None:
        sender = self.who(stale)
        self.bench.engine.lease_lost(sender.session)
        self.model = self.model.lease_lost(sender.session)

    @rule()
    def look(self) -> None:
        # Read back, leave and abort what is not there: anybody may, and nothing changes.
        for message in (Readback(), Leave(), Leave(group="g"), Abort(session="0" * 32)):
            assert self.bench.engine.apply(message).ok

    @rule(verify=st.sampled_from(["none", "resident"]), bucket_bytes=st.sampled_from([4096, 1 << 20]))
    def prepare(self, verify: VerifyLevel, bucket_bytes: int) -> None:
        # Anybody may between two updates, and nothing changes.  A rank that died may still have its session.
        specs = tuple(specs_of(weights_of(0)))
        plan = UpdateTables(specs, plan_buckets(specs, bucket_bytes=bucket_bytes, packing=Packing()))
        before = self.bench.engine.info()
        ack = self.bench.engine.apply(Prepare(plan=plan, verify=verify))
        assert not ack.ok or self.current() is None
        assert ack.ok or self.current() is not None or before.state == "quarantined"
        assert self.bench.engine.info() == before

    @precondition(lambda self: self.current() is not None)
    @rule()
    def join_from_outside(self) -> None:
        self.tell(meeting(), (self.model, False))

    @rule()
    def join_for_a_session_that_is_over(self) -> None:
        self.tell(meeting(session="0" * 32), (self.model, False))

    @invariant()
    def agrees(self) -> None:
        info, model = self.bench.engine.info(), self.model
        assert info.version == model.version
        assert info.state == ("quarantined" if model.quarantined else "updating" if model.session else "serving")
        assert (info.session_owner is None) == (not model.session)
        assert self.bench.hooks.paused == model.paused
        if len(model.live) == 1:
            assert self.bench.serves(*model.live)

    @invariant()
    def whole(self) -> None:
        model = self.model
        assert model.paused or (model.whole and self.bench.serves(model.version))

    @invariant()
    def awake(self) -> None:
        model = self.model
        assert not model.paused or model.session or model.quarantined


class SessionsOnHost(Sessions):
    staging: StagingPlace = "host"


class SessionsUnstaged(Sessions):
    staging: StagingPlace = "none"


class SessionsOfOneRank(Sessions):
    tp_size = 1


limits = settings(
    max_examples=25, stateful_step_count=25, deadline=None, print_blob=False, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("machine", [Sessions, SessionsOnHost, SessionsUnstaged, SessionsOfOneRank])
def test_the_engine_does_what_the_model_does(machine):
    run_state_machine_as_test(machine, settings=limits)


def _no_check(engine: SessionSteps, message: Message) -> None:
    return


def _no_quarantine(engine: EngineState, why: str) -> None:
    engine.state = "serving"


def _stays_paused(engine: SessionSteps, session: object) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("part", "name", "wrong"),
    [
        (SessionSteps, "check", _no_check),
        (EngineState, "quarantine", _no_quarantine),
        (SessionSteps, "_resume", _stays_paused),
    ],
)
def test_an_engine_that_is_wrong_is_found(monkeypatch, part: type, name: str, wrong: Callable[..., object]):
    monkeypatch.setattr(part, name, wrong)
    # The same search each time, ended by the first thing found: a random one would take seconds or minutes.
    found = settings(
        limits,
        max_examples=200,
        phases=[p for p in limits.phases if p.name == "generate"],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(SessionsUnstaged, settings=found)
