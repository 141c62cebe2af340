"""The engine's floor: which message fits which state, who may pause whom, and what every failure leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec
import pytest
import torch

from tests.clock import PATIENCE_S, Clock
from tests.unit.models import FusedModel, differing, specs_of, state, weights_of
from tests.unit.sessions import Sender
from weightcast.comm.rendezvous import Rendezvous
from weightcast.digest.definition import model_digest, tensor_digest
from weightcast.errors import DeadlineExceeded, EngineFailure, Refused
from weightcast.receiver import WeightReceiver
from weightcast.receiver import session as module
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.session import SessionHandler
from weightcast.receiver.staging import Place
from weightcast.watch.listeners import Events, Listener
from weightcast.wire.answers import Ack, RankAck
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.messages import Join, Leave, Message, Readback, Revert


class Ranks:
    """All ranks in this process, one after the other; one may be told to fail."""

    def __init__(self, receivers: Sequence[WeightReceiver]) -> None:
        self.receivers = list(receivers)
        self.tp_size = len(self.receivers)
        self.broken = ""

    def apply(self, message: Message, *, timeout_s: float) -> list[RankAck]:
        if self.broken == type(message).__name__ or self.broken == "all":
            raise EngineFailure("rank 1 was killed", ranks=[1], hint="restart the engine")
        return [receiver.apply(message) for receiver in self.receivers]

    def run(self, command: bytes) -> bytes:
        return command

    def interrupt(self, reason: str) -> None:
        for receiver in self.receivers:
            receiver.interrupt(reason)

    def pids(self) -> Sequence[int]:
        return [0] * self.tp_size

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


class Hooks:
    """Remembers what was asked, fails when told to."""

    def __init__(self) -> None:
        self.paused = False
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] in self.failing:
            raise self.failing[name.split()[0]]

    def pause(self, mode: str, timeout_s: float) -> None:
        self._call(f"pause {mode}")
        self.paused = True

    def stop_waiting(self) -> None:
        pass

    def resume(self) -> None:
        self._call("resume")
        self.paused = False

    def drop_caches(self) -> None:
        assert self.paused
        self._call("drop_caches")

    def set_version(self, version: int) -> None:
        assert self.paused
        self._call(f"set_version {version}")


class Bench:
    """An engine of one or two ranks with the weights of version 0."""

    def __init__(
        self,
        *,
        staging: Place = "device",
        tp_size: int = 1,
        keep_storage: bool = False,
        listener: Listener | None = None,
    ) -> None:
        self.models = [FusedModel(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
        weights = weights_of(0)
        with torch.no_grad():
            for model in self.models:
                model.load_weights(weights.items())
        self.ranks = Ranks(
            [
                WeightReceiver(
                    model,
                    load_weights=model.load_weights,
                    expected=specs_of(weights),
                    tp_rank=rank,
                    tp_size=tp_size,
                    staging=staging,
                    keep_storage=keep_storage,
                )
                for rank, model in enumerate(self.models)
            ]
        )
        self.hooks = Hooks()
        facts = EngineFacts(
            engine="test 1",
            model="m",
            host_id="h",
            ranks=tuple(RankInfo(rank=rank, pid=1, device="cpu") for rank in range(tp_size)),
            staging=staging,
            transports=("ipc", "broadcast"),
            specs=tuple(specs_of(weights)),
        )
        events = Events([listener]) if listener is not None else None
        self.engine = SessionHandler(self.ranks, self.hooks, facts, events=events)

    def close(self) -> None:
        self.engine.close()
        self.ranks.close()

    def tell(self, message: Message) -> Ack:
        ack = self.engine.apply(message)
        assert ack.ok, ack.error
        return ack

    def refuse(self, message: Message) -> str:
        before = self.engine.info()
        ack = self.engine.apply(message)
        assert not ack.ok
        assert ack.error
        assert ack.state == before.state == self.engine.state
        assert self.engine.info() == before
        return ack.error

    def transfer(self, sender: Sender) -> Ack:
        ack = None
        for message in sender.transfer():
            ack = self.tell(message)
        assert ack is not None
        return ack

    def update(self, version: int, **changes) -> Ack:
        sender = Sender(weights_of(version), version=version, **changes)
        self.transfer(sender)
        return self.tell(sender.commit(sender.digests()[1]))

    def serves(self, version: int) -> bool:
        """Every rank has exactly the weights of the version."""
        for rank, model in enumerate(self.models):
            wanted = FusedModel(tp_rank=rank, tp_size=len(self.models))
            with torch.no_grad():
                wanted.load_weights(weights_of(version).items())
            if differing(model, state(wanted)):
                return False
        return True


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(**kwargs) -> Bench:
        made.append(Bench(**kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


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
    assert ack.received_ranks == tp_size
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
    sender.open = msgspec.structs.replace(sender.open, bucket_runs=((8,),) * buckets)
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
    assert [ack.received_all for ack in acks] == [""] * (len(acks) - 1) + [sent.of_all]
    last = acks[-1]
    assert (last.received, last.received_ranks, last.not_updated) == ({}, tp_size, ("embed", "requests_served"))
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
    announce = other.announce(0, layout=type(layout)(index=0, slots=layout.slots, size_bytes=layout.size_bytes))
    return type(announce)(session=sender.session, layout=announce.layout, source=announce.source)


def test_versions_count_up(bench):
    made = bench()
    made.update(5)
    assert "version 4 is older than 5" in made.refuse(Sender(weights_of(4), version=4).open)
    made.update(5)  # the same again is fine
    made.update(4, allow_older=True)
    assert made.engine.info().version == 4
    assert made.serves(4)


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
    with Clock().within(module) as clock:
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


def _until(condition, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- proof


def test_what_is_kept_otherwise_than_expected_is_undone(bench):
    for staging in ("device", "host", "none"):
        made = bench(staging=staging)
        made.update(1)
        sender = Sender(weights_of(2), version=2)
        made.transfer(sender)
        expected = sender.digests()[1] | {"o.weight": "0" * 16}
        ack = made.engine.apply(sender.commit(expected))
        assert not ack.ok
        assert "what is kept differs from what was sent: its digest is not that of what the trainer sent" in ack.error
        assert ack.state == ("quarantined" if staging == "none" else "serving")
        assert made.hooks.paused == (staging == "none")
        assert made.engine.info().version == 1
        assert made.serves(1) == (staging != "none")
        assert "no such session" in made.engine.apply(sender.commit(expected)).error
        made.update(3)
        assert made.serves(3)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("staging", ["device", "none"])
def test_what_is_kept_is_compared_with_what_was_received(bench, staging, tp_size):
    made = bench(staging=staging, tp_size=tp_size)
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    ack = made.tell(sender.commit(proven=True))
    assert made.engine.info().digest == ack.digest == model_digest(sender.digests()[1])
    assert made.serves(1)

    sender = Sender(weights_of(2), version=2)
    made.transfer(sender)
    for receiver in made.ranks.receivers:
        with torch.no_grad():
            receiver.loader.staging.target("norm").mul_(2)  # something between Close and Commit that should not happen
    ack = made.engine.apply(sender.commit(proven=True))
    assert not ack.ok
    assert "what is kept differs from what was sent: norm.weight" in ack.error
    assert made.serves(1) == (staging != "none")


def test_a_digest_of_other_tensors_than_are_kept_is_refused(bench):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    kept = sender.digests()[1]
    ack = made.engine.apply(sender.commit({name: kept[name] for name in list(kept)[1:]}))
    assert not ack.ok
    assert made.serves(0)


def test_what_was_not_digested_has_no_proof(bench):
    made = bench()
    sender = Sender(weights_of(1), version=1, verify="none")
    made.transfer(sender)
    ack = made.engine.apply(sender.commit(proven=True))
    assert not ack.ok
    assert "what is kept differs from what was sent" in ack.error
    assert made.serves(0)


def test_without_proof_there_is_no_digest(bench):
    made = bench()
    made.update(1)
    for level in ("none", "received"):
        sender = Sender(weights_of(2), version=2, verify=level)
        made.transfer(sender)
        ack = made.tell(sender.commit())
        assert ack.digest == ""
        assert made.engine.info().digest is None
        assert made.serves(2)


def test_ranks_that_received_something_else_are_counted(bench):
    made = bench(tp_size=2)
    sender = Sender(weights_of(1), version=1)
    received = sender.digests()[0]
    made.tell(sender.open)
    for index in range(len(sender.layouts)):
        announce = sender.announce(index)
        acks = [made.ranks.receivers[0].apply(announce)]
        if index == 2:
            sender.buffer.data[0] ^= 1
        acks.append(made.ranks.receivers[1].apply(announce))
        assert all(ack.ok for ack in acks)
    made.engine._session.buckets = len(sender.layouts)  # handed round by hand, one rank after the other
    ack = made.tell(sender.close())
    assert ack.received == received
    assert ack.received_ranks == 1
    assert len(ack.mismatched) == 1
    ack = made.tell(sender.close(by_name=False))
    assert ack.received_all == sender.sent().of_all
    assert ack.received == {}
    assert ack.received_ranks == 1


# -- failures


def test_a_pause_that_fails_at_the_switch_leaves_the_old_version(bench):
    made = bench()
    late = DeadlineExceeded(who="engine", waiting_for="3 requests to finish", timeout_s=1)
    sender = Sender(weights_of(1), version=1, pause="wait")
    made.transfer(sender)
    made.hooks.failing["pause"] = late
    ack = made.engine.apply(sender.commit(sender.digests()[1]))
    assert "3 requests to finish" in ack.error
    made.hooks.failing.clear()
    assert "has failed" in made.refuse(sender.commit())
    assert made.tell(sender.abort()).state == "serving"
    assert made.hooks.calls[-1] == "resume"
    assert made.serves(0)
    made.update(2)
    assert made.serves(2)


@pytest.mark.parametrize(
    "error", [DeadlineExceeded(who="e", waiting_for="x", timeout_s=1), RuntimeError("out of order")]
)
def test_a_pause_that_fails_at_open_leaves_no_session(bench, error):
    made = bench(staging="none")
    made.hooks.failing["pause"] = error
    sender = Sender(weights_of(1), version=1)
    ack = made.engine.apply(sender.open)
    assert not ack.ok
    assert ack.state == made.engine.state == "serving"
    assert not made.engine.holds(sender.session)
    made.hooks.failing.clear()
    made.update(2)
    assert made.serves(2)


@pytest.mark.parametrize("hook", ["drop_caches", "set_version"])
def test_a_hook_that_fails_after_the_switch_quarantines(bench, hook):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    made.hooks.failing[hook] = EngineFailure("a rank is gone", ranks=[0])
    ack = made.engine.apply(sender.commit(sender.digests()[1]))
    assert (ack.ok, ack.state) == (False, "quarantined")
    assert ack.failed_ranks == (0,)
    assert made.hooks.paused
    assert "gone" in made.engine.info().message
    made.hooks.failing.clear()
    made.update(2)
    assert made.engine.state == "serving"
    assert made.serves(2)


def test_an_engine_that_would_not_hold_still_is_not_switched_while_it_runs(bench):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    made.hooks.failing["pause"] = Refused("not in this mode")
    assert "not in this mode" in made.refuse(sender.commit())
    made.hooks.failing.clear()
    assert "this session has failed" in made.refuse(sender.commit())
    assert made.hooks.calls == ["pause abort"]
    assert made.serves(0)
    assert made.tell(sender.abort()).state == "serving"
    made.update(2)
    assert made.serves(2)


late = DeadlineExceeded(who="e", waiting_for="x", timeout_s=1)
unforeseen = RuntimeError("out of order")


@pytest.mark.parametrize("hook", ["drop_caches", "set_version", "resume"])
def test_whatever_a_hook_raises_after_the_switch_quarantines(bench, hook):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.transfer(sender)
    made.hooks.failing[hook] = unforeseen
    ack = made.engine.apply(sender.commit(sender.digests()[1]))
    assert (ack.ok, ack.state, ack.error) == (False, "quarantined", "RuntimeError: out of order")
    assert made.hooks.paused
    assert made.engine.info().message == ("version 1 is in, but not what depends on it: RuntimeError: out of order")
    made.hooks.failing.clear()
    made.update(2)
    assert made.engine.state == "serving"
    assert made.serves(2)


@pytest.mark.parametrize("error", [late, EngineFailure("no loop"), unforeseen])
def test_an_engine_that_does_not_go_on_after_an_abort_is_quarantined(bench, error):
    made = bench(staging="none")
    sender = Sender(weights_of(1), version=1)
    made.tell(sender.open)
    made.hooks.failing["resume"] = error
    ack = made.engine.apply(sender.abort())
    assert (ack.ok, ack.state) == (False, "quarantined")
    assert made.hooks.paused
    info = made.engine.info()
    assert info.session_owner is None
    assert str(error) in info.message
    made.hooks.failing.clear()
    made.update(2)
    assert made.engine.state == "serving"
    assert made.serves(2)


@pytest.mark.parametrize("error", [late, unforeseen])
def test_whatever_the_executor_raises_at_an_abort_does_not_leave_the_engine_paused_for_nobody(
    bench, monkeypatch, error
):
    made = bench(staging="none")
    sender = Sender(weights_of(1), version=1)
    made.tell(sender.open)

    def fail(message: Message, *, timeout_s: float) -> list[RankAck]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(made.ranks, "apply", fail)
        ack = made.engine.apply(sender.abort())
    assert (ack.ok, ack.state) == (False, "quarantined")
    info = made.engine.info()
    assert (info.state, info.session_owner, info.paused) == ("quarantined", None, True)
    assert str(error) in info.message
    made.update(2)
    assert made.engine.state == "serving"
    assert made.serves(2)


def test_an_engine_that_cannot_even_pause_is_quarantined_all_the_same(bench):
    made = bench(tp_size=2)
    sender = Sender(weights_of(1), version=1)
    made.tell(sender.open)
    made.ranks.broken = "Announce"
    made.hooks.failing["pause"] = unforeseen
    ack = made.engine.apply(sender.announce(0))
    assert (ack.ok, ack.failed_ranks, ack.state) == (False, (1,), "quarantined")
    message = made.engine.info().message
    assert "rank 1 was killed" in message
    assert "could not be paused and may go on generating: RuntimeError: out of order" in message


def test_what_any_rank_cannot_prove_is_told(bench, monkeypatch):
    made = bench(tp_size=2)
    apply = made.ranks.apply

    def beside(message: Message, *, timeout_s: float) -> list[RankAck]:
        names = (("scale",), ("o.weight", "scale"))
        acks = apply(message, timeout_s=timeout_s)
        return [msgspec.structs.replace(ack, unproven=names[ack.rank]) for ack in acks]

    monkeypatch.setattr(made.ranks, "apply", beside)
    sender = Sender(weights_of(1), version=1)
    assert made.transfer(sender).unproven == ("scale", "o.weight")
    assert made.tell(sender.commit()).unproven == ("scale", "o.weight")


@pytest.mark.parametrize("error", [None, late, unforeseen])
def test_what_a_stranger_asks_in_vain_does_not_end_the_update(bench, monkeypatch, error):
    made = bench()
    apply = made.ranks.apply

    def fail(message: Message, *, timeout_s: float) -> list[RankAck]:
        if not isinstance(message, Readback):
            return apply(message, timeout_s=timeout_s)
        if error is not None:
            raise error
        return [RankAck(rank=0, ok=False, error="the model computes with something else")]

    monkeypatch.setattr(made.ranks, "apply", fail)
    sender = Sender(weights_of(3), version=3)
    for message in sender.transfer():
        made.tell(message)
        made.refuse(Readback())
    made.tell(sender.commit(sender.digests()[1]))
    assert made.engine.state == "serving"
    assert made.serves(3)


@pytest.mark.parametrize("what", ["Open", "Announce", "Close", "Commit", "Abort", "Readback"])
def test_a_rank_that_dies_quarantines_the_engine_and_is_named(bench, what):
    made = bench(tp_size=2)
    sender = Sender(weights_of(1), version=1)
    made.ranks.broken = what
    messages = {
        "Open": lambda: sender.open,
        "Announce": lambda: sender.announce(0),
        "Close": sender.close,
        "Commit": sender.commit,
        "Abort": sender.abort,
        "Readback": Readback,
    }
    if what in ("Announce", "Abort"):
        made.tell(sender.open)
    if what == "Close":
        made.tell(sender.open)
        for index in range(len(sender.layouts)):
            made.tell(sender.announce(index))
    if what == "Commit":
        made.transfer(sender)
    ack = made.engine.apply(messages[what]())
    assert (ack.ok, ack.failed_ranks, ack.state) == (False, (1,), "quarantined")
    assert "rank 1 was killed" in ack.error
    assert "rank 1 was killed" in made.engine.info().message
    made.ranks.broken = "all"
    made.engine.apply(sender.abort())
    assert made.engine.info().session_owner is None
    assert not made.engine.apply(Sender(weights_of(2), version=2).open).ok


_place = Rendezvous(host="127.0.0.1", timeout_s=PATIENCE_S)


def meeting(**changes) -> Join:
    """With somebody who does not come."""
    fields = {
        "group": "g",
        "host": "127.0.0.1",
        "port": _place.port,
        "token": "ab" * 16,
        "first_rank": 1,
        "world_size": 2,
        "backend": "gloo",
        "timeout_s": 1000.0,
    }
    return Join(**fields | changes)


def under_way(made: Bench, message: Message) -> tuple[threading.Thread, list[Ack]]:
    answers: list[Ack] = []
    thread = threading.Thread(target=lambda: answers.append(made.engine.apply(message)))
    thread.start()
    time.sleep(0.2)
    assert not answers
    return thread, answers


def test_a_group_that_failed_is_told_from_a_rank_that_did(bench):
    made = bench()
    ack = made.engine.apply(meeting(timeout_s=0.2))
    assert (ack.ok, ack.cause, ack.state) == (False, "group", "serving")
    made.tell(Leave(group="g"))


def test_a_meeting_without_a_session_ends_soon(bench, monkeypatch):
    monkeypatch.setattr(module, "_UNOWNED_JOIN_S", 0.2)
    made = bench()
    assert made.engine.apply(meeting(timeout_s=80000.0)).cause == "group"
    made.update(1)


def test_a_meeting_without_a_session_gives_way_to_an_update(bench):
    made = bench()
    waiting, answers = under_way(made, meeting())
    made.update(1)
    waiting.join(PATIENCE_S)
    assert answers[0].cause == "group"
    assert made.serves(1)


def test_a_meeting_for_a_session_that_is_over_is_refused(bench):
    # The last words of a trainer that died: its session ends before they are read.
    made = bench()
    sender = Sender(weights_of(1), version=1)
    assert "no such session" in made.refuse(meeting(session=sender.session))
    made.tell(sender.open)
    assert "no such session" in made.refuse(meeting(session="0" * 32))
    made.engine.lease_lost(sender.session)
    assert "no such session" in made.refuse(meeting(session=sender.session))


def test_the_end_of_a_session_ends_its_meeting(bench):
    made = bench()
    sender = Sender(weights_of(1), version=1)
    made.tell(sender.open)
    waiting, answers = under_way(made, meeting(session=sender.session))
    made.engine.lease_lost(sender.session)
    waiting.join(PATIENCE_S)
    assert answers[0].cause == "group"
    assert made.engine.state == "serving"
    made.update(2)


def test_a_new_trainer_need_not_wait_until_the_old_ones_end_is_over(bench):
    made = bench()
    old, new = Sender(weights_of(1), version=1), Sender(weights_of(2), version=2)
    made.tell(old.open)
    made.tell(old.announce(0))
    made.engine._session.ending = "the trainer's connection was lost"  # its abort is on the way
    made.tell(new.open)
    assert made.engine.holds(new.session)
    made.engine.lease_lost(old.session)
    assert made.engine.holds(new.session)


def test_strangers_do_not_wait_for_a_message_under_way(bench):
    made = bench()
    sender, stranger = Sender(weights_of(1), version=1), Sender(weights_of(2), version=2)
    made.tell(sender.open)
    with made.engine._busy:
        answers: list[Ack] = []
        threads = [
            threading.Thread(target=lambda message=message: answers.append(made.engine.apply(message)))
            for message in (stranger.open, stranger.announce(0), stranger.close(), stranger.commit())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(answers) == 4
        assert not any(ack.ok for ack in answers)


# -- two buckets in flight


def in_thread(engine: SessionHandler, message: Message) -> tuple[threading.Thread, list[Ack]]:
    acks: list[Ack] = []
    thread = threading.Thread(target=lambda: acks.append(engine.apply(message)))
    thread.start()
    return thread, acks


@pytest.mark.parametrize("staging", ["device", "none"])
def test_a_bucket_that_overtakes_the_one_before_it_waits_for_its_turn(bench, staging):
    made = bench(staging=staging)
    sender, quicker = Sender(weights_of(3), version=3), Sender(weights_of(3), version=3)
    quicker.session = sender.session
    made.tell(sender.open)
    thread, acks = in_thread(made.engine, quicker.announce(1))
    thread.join(0.1)
    assert thread.is_alive()
    made.tell(sender.announce(0))
    thread.join(PATIENCE_S)
    assert [ack.ok for ack in acks] == [True]
    for index in range(2, len(sender.layouts)):
        made.tell(sender.announce(index))
    made.tell(sender.close())
    assert len(sender.layouts) > 2
    made.tell(sender.commit(sender.digests()[1]))
    assert made.serves(3)


def test_who_waits_for_a_turn_hears_of_the_end(bench):
    made = bench()
    sender = Sender(weights_of(3), version=3)
    made.tell(sender.open)
    thread, acks = in_thread(made.engine, sender.announce(1))
    thread.join(0.1)
    assert thread.is_alive()
    made.tell(sender.abort("changed my mind"))
    thread.join(PATIENCE_S)
    assert [ack.ok for ack in acks] == [False]
    assert "no such session" in acks[0].error
    assert made.serves(0)
    made.update(4)


def test_who_waits_for_a_turn_that_never_comes_is_refused_in_time(bench):
    made = bench()
    sender = Sender(weights_of(3), version=3, timeout_s=0.2)
    made.tell(sender.open)
    assert "bucket 1 came where bucket 0 was due" in made.refuse(sender.announce(1))
    assert "bucket 2 came where bucket 0 was due" in made.refuse(sender.announce(2))


def test_of_two_in_flight_both_say_that_their_group_has_failed(bench, monkeypatch):
    made = bench()
    sender = Sender(weights_of(3), version=3)
    made.tell(sender.open)
    lost = RankAck(rank=0, ok=False, cause="group", error="the trainer is gone")
    monkeypatch.setattr(made.ranks, "apply", lambda message, timeout_s: [lost])
    acks = [made.engine.apply(sender.announce(index)) for index in (0, 1)]
    assert [ack.cause for ack in acks] == ["group", "group"]
    assert all("the trainer is gone" in ack.error for ack in acks)


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
        assert (committed.unproven, committed.digest) == ((), model_digest(kept))
        wanted = FusedModel()
        with torch.no_grad():
            wanted.load_weights(weights_of(2).items())
        assert differing(model, state(wanted)) == []
    finally:
        engine.close()
        receiver.close()


# -- a commit that is said again, or taken back


@pytest.fixture(params=["device", "host"])
def staged(request):
    made = Bench(staging=request.param, tp_size=2)
    yield made
    made.close()


def committed(bench: Bench, version: int, **changes) -> tuple[Sender, Ack]:
    sender = Sender(weights_of(version), version=version, **changes)
    bench.transfer(sender)
    return sender, bench.tell(sender.commit(sender.digests()[1]))


def timeless(ack: Ack) -> Ack:
    """The answer without the moments at which it was asked for and given."""
    return msgspec.structs.replace(ack, heard=None, answered=None)


def test_a_commit_that_is_said_again_gets_the_same_answer_and_switches_once(staged):
    sender, first = committed(staged, 1)
    again = staged.tell(sender.commit(sender.digests()[1]))
    assert timeless(again) == timeless(first)
    assert staged.serves(1)
    other, _ = committed(staged, 2)
    assert "no such session" in staged.refuse(sender.commit())
    assert staged.tell(other.commit()).version == 2
    assert staged.serves(2)


def test_a_revert_brings_back_weights_version_and_digest_and_may_be_said_again(staged):
    committed(staged, 1)
    before = staged.engine.info()
    sender, _ = committed(staged, 2)
    staged.hooks.calls.clear()
    ack = staged.tell(Revert(session=sender.session))
    assert staged.serves(1)
    assert staged.engine.info() == before
    assert (ack.version, ack.digest) == (1, before.digest)
    assert staged.hooks.calls == ["pause abort", "drop_caches", "set_version 1", "resume"]
    assert timeless(staged.tell(Revert(session=sender.session))) == timeless(ack)
    assert staged.serves(1)
    assert "switched back to version 1" in staged.refuse(sender.commit())
    staged.update(3)
    assert staged.serves(3)


def test_only_the_last_commit_can_be_taken_back_and_only_until_the_next_open(staged):
    first, _ = committed(staged, 1)
    second, _ = committed(staged, 2)
    assert "no such session" in staged.refuse(Revert(session=first.session))
    third = Sender(weights_of(3), version=3)
    staged.tell(third.open)
    assert "no such session" in staged.engine.apply(Revert(session=second.session)).error
    staged.tell(third.abort())
    assert "no such session" in staged.refuse(Revert(session=second.session))
    assert staged.serves(2)


def test_without_a_second_set_of_weights_a_revert_is_refused_and_the_new_version_goes_on():
    bench = Bench(staging="none")
    try:
        sender, _ = committed(bench, 1)
        assert "no second set" in bench.refuse(Revert(session=sender.session))
        assert bench.serves(1)
        assert not bench.hooks.paused
    finally:
        bench.close()


def test_a_revert_to_other_weights_than_were_served_quarantines(staged):
    committed(staged, 1)
    sender, _ = committed(staged, 2)
    staging = staged.ranks.receivers[1].loader.staging
    with torch.no_grad():
        staging.target("qkv").view(-1)[0] += 1  # a bit that flipped while the old set waited
    ack = staged.engine.apply(Revert(session=sender.session))
    assert not ack.ok
    assert (staged.engine.state, staged.hooks.paused) == ("quarantined", True)
    assert "going back from version 2 to 1 failed" in staged.engine.info().message
    staged.update(3)
    assert staged.serves(3)
    assert not staged.hooks.paused


@pytest.mark.parametrize("what", ["Revert", "drop_caches", "pause"])
def test_a_revert_that_fails_never_leaves_the_engine_paused_for_nobody(staged, what):
    committed(staged, 1)
    sender, _ = committed(staged, 2)
    if what == "Revert":
        staged.ranks.broken = "Revert"
    else:
        staged.hooks.failing[what] = RuntimeError("in the way")
    assert not staged.engine.apply(Revert(session=sender.session)).ok
    staged.ranks.broken = ""
    staged.hooks.failing.clear()
    if what == "pause":
        assert (staged.engine.state, staged.hooks.paused, staged.serves(2)) == ("serving", False, True)
    else:
        assert (staged.engine.state, staged.hooks.paused) == ("quarantined", True)


def test_an_engine_that_slept_since_cannot_go_back_and_serves_on(staged):
    sender, _ = committed(staged, 1)
    with staged.engine.between_updates():
        for receiver in staged.ranks.receivers:
            receiver.sleep()
            receiver.wake()
    assert not staged.engine.apply(Revert(session=sender.session)).ok
    assert (staged.engine.state, staged.hooks.paused, staged.serves(1)) == ("serving", False, True)
