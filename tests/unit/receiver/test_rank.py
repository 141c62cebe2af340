"""One rank: what each message does to its model, in which order, and what an abort leaves."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import msgspec
import pytest
import torch

from tests.helpers.mapped import HostMapper
from tests.helpers.models import FusedModel, differing, specs_of, state, weights_of
from tests.helpers.sessions import Sender, announce
from weightcast.comm.rendezvous import Rendezvous
from weightcast.errors import ConfigError, Refused
from weightcast.receiver import WeightReceiver, staging
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.runtime import peak_memory
from weightcast.wire.bucket_sources import BroadcastSource, IpcSource, MemoryHandle
from weightcast.wire.held import NOTHING_HELD
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Announce, Join, Leave, Owner, Prepare, Readback
from weightcast.wire.plans import UpdateTables

OLD, NEW = weights_of(1), weights_of(2)


def receiver_of(model: FusedModel, **kwargs) -> WeightReceiver:
    with torch.no_grad():
        model.load_weights(OLD.items())
    return WeightReceiver(model, load_weights=model.load_weights, expected=specs_of(OLD), **kwargs)


@pytest.fixture(params=["device", "host", "none"])
def place(request):
    return request.param


@pytest.fixture
def model():
    return FusedModel()


@pytest.fixture
def receiver(model):
    made = receiver_of(model)
    yield made
    made.close()


def new_state() -> dict[str, torch.Tensor]:
    model = FusedModel()
    with torch.no_grad():
        model.load_weights(NEW.items())
    return state(model)


def run(receiver: WeightReceiver, sender: Sender, until: str = "commit"):
    """Apply everything up to a message; the last answer."""
    ack = None
    for message in sender.transfer():
        ack = receiver.apply(message)
        assert ack.ok, ack.error
    return receiver.apply(sender.commit()) if until == "commit" else ack


@pytest.mark.parametrize("bucket_bytes", [64, 2000])
def test_a_whole_session(model, place, bucket_bytes):
    receiver = receiver_of(model, staging=place)
    sender = Sender(NEW, bucket_bytes=bucket_bytes)
    kept = sender.digests({"norm.weight": "bfloat16"})[1]
    ack = run(receiver, sender, until="close")
    assert ResidentFold().fold([ack]).digests == kept
    assert ack.not_updated == ("embed", "requests_served")
    assert ack.touched == (place == "none")
    ack = receiver.apply(sender.commit())
    assert ack.ok
    assert ResidentFold().fold([ack]).digests == kept
    assert differing(model, new_state()) == []
    assert ResidentFold().fold([receiver.apply(Readback())]).digests == kept
    receiver.close()


def test_verify_none_digests_nothing(model, receiver):
    sender = Sender(NEW, verify="none")
    assert run(receiver, sender, until="close").held == NOTHING_HELD
    assert receiver.apply(sender.commit()).held == NOTHING_HELD
    assert differing(model, new_state()) == []


def test_received_does_not_read_back(receiver):
    sender = Sender(NEW, verify="received")
    ack = run(receiver, sender, until="close")
    assert ResidentFold().fold([ack]).digests == sender.digests()[0]
    assert receiver.apply(sender.close(by_name=False)).held == ack.held  # it may be asked again
    assert receiver.apply(sender.commit()).held == NOTHING_HELD


@pytest.mark.parametrize("after", ["open", "bucket", "close", "commit"])
def test_an_abort_brings_the_old_version_back(model, place, after):
    before_finish: list[int] = []
    receiver = receiver_of(model, staging=place, finishers=[lambda: before_finish.append(1)])
    before = state(model)
    sender = Sender(NEW)
    for number, message in enumerate(sender.transfer()):
        assert receiver.apply(message).ok
        if (after == "open" and number == 0) or (after == "bucket" and number == 3):
            break
    if after == "commit":
        assert receiver.apply(sender.commit()).ok
        assert len(before_finish) == 1
        assert differing(model, before)
    ack = receiver.apply(sender.abort())
    assert ack.ok
    touched = place == "none" and after != "open"
    assert ack.touched == touched
    if touched:
        assert differing(model, before)
    else:
        assert differing(model, before) == []
    assert len(before_finish) == (0 if after != "commit" else 1 if place == "none" else 2)
    assert receiver.apply(sender.abort()).ok
    assert run(receiver, Sender(NEW)).ok
    assert differing(model, new_state()) == []
    receiver.close()


@pytest.mark.parametrize("place", ["device", "host", "none"])
def test_what_can_be_done_before_a_commit_is_done_when_all_weights_wait(model, place):
    seen: list[list[str]] = []
    receiver = receiver_of(model, staging=place, before_commit=[lambda: seen.append(differing(model, before))])
    before = state(model)
    sender = Sender(NEW)
    *buckets, close = sender.transfer()
    for message in buckets:
        assert receiver.apply(message).ok
    assert seen == []
    ack = receiver.apply(close)
    assert ack.ok, ack.error
    assert seen == ([] if place == "none" else [[]]), "the old version serves meanwhile"
    if place != "none":
        staged = receiver.loader.staging
        assert differing(model, new_state()), "a test that cannot fail"
        waiting = staged.waiting_contents
        assert receiver.apply(sender.commit()).ok
        assert staged.live_contents == waiting
    receiver.close()


def test_a_failure_before_a_commit_fails_the_update_and_changes_nothing(model):
    def fail() -> None:
        raise RuntimeError("the kernels of this layer have other ideas")

    receiver = receiver_of(model, before_commit=[fail])
    before = state(model)
    sender = Sender(NEW)
    *buckets, close = sender.transfer()
    for message in buckets:
        assert receiver.apply(message).ok
    ack = receiver.apply(close)
    assert (ack.ok, ack.error) == (False, "the kernels of this layer have other ideas")
    assert receiver.apply(sender.abort()).ok
    assert differing(model, before) == []
    receiver.close()


def test_a_commit_cannot_be_repeated(model, receiver):
    sender = Sender(NEW)
    assert run(receiver, sender).ok
    again = receiver.apply(sender.commit())
    assert (again.ok, again.refused) == (False, True)
    assert "committed before" in again.error
    assert differing(model, new_state()) == []


def test_nothing_without_a_session(receiver, model):
    before = state(model)
    sender = Sender(NEW)
    for message in (sender.announce(0), sender.close(), sender.commit()):
        ack = receiver.apply(message)
        assert (ack.ok, ack.refused) == (False, True)
        assert "no such session" in ack.error
    assert receiver.apply(sender.abort()).ok
    stranger = Sender(NEW)
    assert receiver.apply(sender.open).ok
    for message in (stranger.announce(0), stranger.close(), stranger.commit()):
        assert "no such session" in receiver.apply(message).error
    assert receiver.apply(stranger.abort()).ok  # of no session of ours: nothing ends
    assert receiver.apply(sender.announce(0)).ok
    assert differing(model, before) == []


def test_a_model_of_other_weights_is_refused_and_the_session_before_goes_on(receiver):
    sender = Sender(NEW)
    assert receiver.apply(sender.open).ok
    wrong = Sender({"other": torch.zeros(3)})
    ack = receiver.apply(wrong.open)
    assert (ack.ok, ack.refused) == (False, True)
    assert "missing" in ack.error
    assert "is it a checkpoint of this model?" in ack.error
    assert receiver.apply(sender.announce(0)).ok


def test_close_names_what_is_missing(receiver):
    sender = Sender(NEW)
    assert receiver.apply(sender.open).ok
    for index in range(len(sender.layouts) - 1):
        assert receiver.apply(sender.announce(index)).ok
    ack = receiver.apply(sender.close())
    assert not ack.ok
    assert ack.missing
    assert ack.missing[-1] == list(NEW)[-1]
    assert "not everything has arrived" in receiver.apply(sender.commit()).error


def test_a_buffer_that_is_not_there_is_refused(receiver, model):
    before = state(model)
    sender = Sender(NEW)
    assert receiver.apply(sender.open).ok
    good = sender.announce(0)
    real = sender.buffer.handle()

    def with_handle(**changes) -> Announce:
        fields = {
            "kind": "shm",
            "device": "cpu",
            "size_bytes": real.size_bytes,
            "token": real.token,
            "pid": real.pid,
            "fd": real.fd,
        }
        return announce(sender.session, good.layout, IpcSource(handles=(MemoryHandle(**fields | changes),)))

    for changes in (
        {"pid": 2**22 + 1},
        {"fd": 9999},
        {"fd": 0},
        {"token": "00" * 16},
        {"token": real.token[:5]},
        {"token": ""},
        {"size_bytes": real.size_bytes + 1},
        {"size_bytes": 1 << 45},
        {"size_bytes": 1},
        {"size_bytes": 0},
        {"device": "GPU-of-somebody-else"},
        {"kind": "cuda", "device": "GPU-of-somebody-else"},
    ):
        ack = receiver.apply(with_handle(**changes))
        assert not ack.ok, changes
        assert ack.error
    group = announce(sender.session, good.layout, BroadcastSource(group="nowhere"))
    assert "not in group nowhere" in receiver.apply(group).error
    assert receiver.apply(good).ok
    assert differing(model, before) == []


def test_a_bucket_larger_than_its_buffer_is_refused(receiver):
    sender = Sender(NEW)
    assert receiver.apply(sender.open).ok
    good = sender.announce(0)
    large = BucketLayout(index=0, slots=good.layout.slots, size_bytes=sender.buffer.data.numel() + 1)
    ack = receiver.apply(announce(sender.session, large, good.source))
    assert "its buffer 200" in ack.error


def test_an_interrupt_ends_the_session_until_the_next(receiver, model):
    sender = Sender(NEW)
    assert receiver.apply(sender.open).ok
    receiver.interrupt("the trainer is gone")
    ack = receiver.apply(sender.announce(0))
    assert "interrupted" in ack.error
    assert receiver.apply(sender.abort()).ok
    assert run(receiver, Sender(NEW)).ok
    assert differing(model, new_state()) == []


def test_an_interrupt_before_a_meeting_ends_it(receiver):
    place = Rendezvous(host="127.0.0.1", timeout_s=5.0)
    join = Join(
        session="s",
        group="g",
        host="127.0.0.1",
        port=place.port,
        token="ab" * 16,
        first_rank=1,
        world_size=2,
        backend="gloo",
        timeout_s=60.0,
    )
    receiver.interrupt("the trainer is gone")
    ack = receiver.apply(join)
    assert (ack.ok, ack.cause) == (False, "group")
    assert "cancelled" in ack.error


def test_a_backend_for_other_devices_is_refused(receiver):
    join = Join(
        group="g", host="127.0.0.1", port=9, token="ab" * 16, first_rank=1, world_size=2, backend="nccl", timeout_s=60.0
    )
    ack = receiver.apply(join)
    assert (ack.ok, ack.cause) == (False, "engine")
    assert "nccl" in ack.error
    assert receiver.apply(Leave(group="g")).ok
    assert receiver.apply(Leave()).ok


class Stumbling(FusedModel):
    """A loader that falls over what it is given."""

    error: Exception | None = None

    def load_one(self, name, tensor):
        if name == "norm.weight":
            tensor = tensor + 0
            if self.error is not None and not tensor.is_meta:
                raise self.error
        super().load_one(name, tensor)


@pytest.mark.parametrize(
    "error", [KeyError("norm"), AssertionError("shapes"), ZeroDivisionError(), RuntimeError("a\nb")]
)
def test_a_loader_that_raises_is_an_answer(error):
    model = Stumbling()
    receiver = receiver_of(model, staging="none")
    model.error = error
    sender = Sender(NEW, bucket_bytes=10_000)
    assert receiver.apply(sender.open).ok
    ack = receiver.apply(sender.announce(0))
    assert not ack.ok
    assert not ack.refused
    assert ack.touched
    assert ack.error
    assert "\n" not in ack.error
    assert receiver.apply(sender.abort()).touched
    model.error = None
    assert run(receiver, Sender(NEW)).ok


@pytest.mark.parametrize("where", ["device", "none"])
def test_a_finisher_that_raises_can_be_undone(model, where):
    broken = [True]

    def finisher() -> None:
        if broken[0]:
            raise LookupError("no graph")

    receiver = receiver_of(model, staging=where, finishers=[finisher])
    before = state(model)
    sender = Sender(NEW)
    ack = run(receiver, sender)
    assert "no graph" in ack.error
    broken[0] = False
    assert receiver.apply(sender.abort()).ok
    assert (differing(model, before) == []) == (where == "device")


def test_a_tensor_parallel_rank_must_be_told_what_to_expect(model):
    with pytest.raises(ConfigError, match="told"):
        WeightReceiver(model, load_weights=model.load_weights, tp_rank=1, tp_size=2)


def test_without_being_told_a_model_expects_its_own_names():
    model = torch.nn.Linear(3, 2)

    def load_weights(weights):
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor)

    receiver = WeightReceiver(model, load_weights=load_weights)
    weights = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}
    assert run(receiver, Sender(weights)).ok
    assert torch.equal(model.weight, weights["weight"])


def test_nothing_of_a_session_stays(receiver):
    def footprint() -> set[object]:
        gc.collect()
        files = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
        return {*files, *receiver._steps._memory._mappings, *map(id, peak_memory._open)}

    before = footprint()
    for number in range(12):
        sender = Sender(NEW)
        if number % 2:
            run(receiver, sender)
        else:
            receiver.apply(sender.open)
            receiver.apply(sender.announce(0))
            receiver.apply(sender.abort())
            assert not receiver._steps._memory._mappings  # a dead trainer's memory would live on
        sender.buffer.close()
    receiver.apply(Leave())
    # What threads of earlier tests held before may go at any time.
    assert footprint() <= before


def test_a_new_trainer_ends_what_is_mapped_of_the_old_one(receiver):
    first = Sender(NEW)
    run(receiver, first)
    assert receiver._steps._memory._mappings
    first.buffer.close()

    second = Sender(NEW, owner=Owner(host="here", pid=2))
    assert receiver.apply(second.open).ok
    assert not receiver._steps._memory._mappings


def preparation(sender: Sender, **changes) -> Prepare:
    """Tells of an update whose buckets will all lie in the sender's buffer."""
    sources = (IpcSource(handles=(sender.buffer.handle(),)),) * len(sender.layouts)
    settings = {"owner": sender.open.owner, "sources": sources} | changes
    return Prepare(plan=UpdateTables(sender.open.specs, sender.layouts), verify="resident", **settings)


def test_memory_of_the_first_update_is_mapped_before_it(receiver, model):
    first = Sender(NEW)
    assert receiver.apply(preparation(first)).ok
    mapped = dict(receiver._steps._memory._mappings)
    assert len(mapped) == 1
    run(receiver, first)
    assert receiver._steps._memory._mappings == mapped
    assert torch.equal(model.o, NEW["o.weight"])


def test_another_trainer_that_prepares_ends_what_is_mapped_of_the_one_before(receiver):
    first, second = Sender(NEW), Sender(NEW, owner=Owner(host="here", pid=2))
    assert receiver.apply(preparation(first)).ok
    assert receiver.apply(preparation(second)).ok
    assert [handle.token for handle in receiver._steps._memory._mappings] == [second.buffer.handle().token]
    assert receiver.apply(first.open).ok
    assert not receiver._steps._memory._mappings


def test_memory_that_cannot_be_mapped_yet_hinders_no_update(receiver, model):
    sender = Sender(NEW)
    handle = msgspec.structs.replace(sender.buffer.handle(), token="0" * 32)
    answer = receiver.apply(preparation(sender, sources=(IpcSource(handles=(handle,)),) * len(sender.layouts)))
    assert (answer.ok, answer.cause) == (False, "mapping")
    run(receiver, sender)
    assert torch.equal(model.o, NEW["o.weight"])


def test_a_buffer_that_went_after_it_was_mapped_is_not_read(receiver, model):
    before = model.o.clone()
    sender = Sender(NEW)
    assert receiver.apply(preparation(sender)).ok
    handle = sender.buffer.handle()
    assert receiver.apply(sender.open).ok
    sender.buffer.close()
    announced = announce(sender.session, sender.layouts[0], IpcSource(handles=(handle,)))
    answer = receiver.apply(announced)
    assert (answer.ok, answer.cause) == (False, "mapping")
    assert "has released this buffer" in answer.error
    assert torch.equal(model.o, before)


class TiedByTheEngine(torch.nn.Module):
    """Drops a stored head that equals the embedding, and computes with the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(5, 4), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "embed":
                self.embed.data.copy_(tensor)


@pytest.mark.parametrize("verify", ["none", "received", "resident"])
@pytest.mark.parametrize("bucket_bytes", [40, 400])
def test_a_copy_that_was_dropped_must_stay_a_copy(verify, bucket_bytes):
    made = TiedByTheEngine()
    old, new = torch.randn(5, 4), torch.randn(5, 4)
    receiver = WeightReceiver(made, load_weights=made.load_weights, expected=specs_of({"embed": old, "head": old}))
    receiver.loader.copies = {"head": "embed"}
    settings = {"verify": verify, "bucket_bytes": bucket_bytes}
    for weights in ({"embed": old}, {"embed": new, "head": new.clone()}):
        assert run(receiver, Sender(weights, **settings)).ok
        assert torch.equal(made.embed, weights["embed"])
    sender = Sender({"embed": old, "head": old + 1}, **settings)
    *_, ack = [receiver.apply(message) for message in sender.transfer()]
    assert not ack.ok
    assert "head differs from embed" in ack.error
    assert not receiver.apply(sender.abort()).touched
    assert torch.equal(made.embed, new)
    receiver.close()


def test_a_receiver_says_why_it_does_not_stage(model):
    assert receiver_of(model).staging_note == ""
    sharing = FusedModel()
    sharing.view = torch.nn.Parameter(sharing.o.data[:, :4], requires_grad=False)
    words = "nowhere: an update that fails half way quarantines the engine; o and view share memory"
    assert words in receiver_of(sharing).staging_note


def test_asleep_it_neither_takes_an_update_nor_reads_back(model, place):
    receiver = receiver_of(model, staging=place)
    run(receiver, Sender(NEW))
    receiver.sleep(hint="wake it first")
    for message in (*Sender(NEW).transfer(),)[:1], (Readback(),):
        ack = receiver.apply(message[0])
        assert (ack.ok, ack.refused, ack.error) == (False, True, "the engine is asleep (wake it first)")
    receiver.wake()
    assert run(receiver, Sender(NEW)).ok
    assert differing(model, new_state()) == []


@pytest.mark.parametrize("discard", [False, True])
def test_asleep_it_lets_its_weights_go_and_brings_back_what_was_not_discarded(model, monkeypatch, discard):
    mapper = HostMapper()
    monkeypatch.setattr(staging, "mapper_of", lambda device: mapper)
    receiver = receiver_of(model, staging="device", keep_storage=True, may_move=True)
    sender = Sender(OLD)
    run(receiver, sender, until="close")
    with pytest.raises(Refused, match="an update is under way"):
        receiver.sleep(discard=discard, lets_go=True)
    assert receiver.apply(sender.commit()).ok
    before, held = state(model), ResidentFold().fold([receiver.apply(Readback())]).digests
    receiver.sleep(discard=discard, lets_go=True)
    assert receiver.loader.staging.let_go()
    assert not mapper.live
    assert "asleep" in receiver.apply(Readback()).error
    receiver.wake()
    if discard:
        assert differing(model, before)
    else:
        assert differing(model, before) == []
        assert ResidentFold().fold([receiver.apply(Readback())]).digests == held
    assert run(receiver, Sender(NEW)).ok
    assert differing(model, new_state()) == []


def test_it_does_not_fall_asleep_in_the_middle_of_an_update(model):
    receiver = receiver_of(model, staging="device")
    sender = Sender(NEW)
    run(receiver, sender, until="close")
    with pytest.raises(Refused, match="an update is under way"):
        receiver.sleep()
    assert receiver.apply(sender.commit()).ok
    receiver.sleep()


def test_what_no_update_writes_outlives_discarded_weights(model, place):
    receiver = receiver_of(model, staging=place)
    assert receiver.loader.partly_written()
    garbage = 1234
    receiver.sleep(discard=True)
    with torch.no_grad():
        for tensor in receiver.loader.residents.values():
            tensor.detach().fill_(garbage)  # what memory holds that was mapped anew
    receiver.wake()
    assert run(receiver, Sender(NEW)).ok
    assert differing(model, new_state()) == []
    assert [name for name, tensor in receiver.loader.residents.items() if bool((tensor == garbage).any())] == []
