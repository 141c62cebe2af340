"""Because of whom a group failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.helpers.clock import PATIENCE_S, Clock, wait_until
from tests.helpers.roster import info
from weightcast.comm import rendezvous as rendezvous_module
from weightcast.comm import update_group as group_module
from weightcast.comm.update_group import GroupFailed, UpdateGroup
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, TargetRejected, TargetsFailed
from weightcast.protocols import Invitation
from weightcast.transports import blame as blame_module
from weightcast.transports import channel as channel_module
from weightcast.transports.channel import Channel
from weightcast.transports.plan import TargetPlan
from weightcast.transports.session import LinkSession
from weightcast.watch.listeners import Events
from weightcast.wire.answers import GROUP_FAILED
from weightcast.wire.engine_info import EngineInfo, RankInfo


def engine_info(tp: int) -> EngineInfo:
    """An engine of so many ranks, on one host."""
    ranks = tuple(RankInfo(rank=rank, pid=1, device="cpu") for rank in range(tp))
    return msgspec.structs.replace(info("native"), tp_size=tp, ranks=ranks)


REFUSED = TargetRejected("http://a: Failed to initialize custom process group", url="http://a", status=400)
LOST = TargetLost("http://b: did not join in time", url="http://b")


def future(error: Exception) -> Future[None]:
    made: Future[None] = Future()
    made.set_exception(error)
    return made


def culprit(meeting: Any, *, answered: int) -> BaseException:
    """Blames one of two engines, the first of which has refused and the second of which was lost."""
    links: Any = [SimpleNamespace(url=error.url) for error in (REFUSED, LOST)]
    posts = [future(REFUSED), future(LOST)]
    return blame_module.find_culprit(
        GroupFailed("cancelled"),
        posts,
        "a bucket",
        links=links,
        timeout_s=0.1,
        tells_group_failure=meeting == "weightcast",
        first=posts[:answered],
    )


@pytest.mark.parametrize(("answered", "blamed"), [(0, LOST), (1, REFUSED)])
def test_stock_engine_that_refuses_after_the_abort_is_not_blamed(answered: int, blamed: Exception) -> None:
    assert culprit("torch", answered=answered) is blamed


def test_error_names_every_engine_with_our_receiver_that_failed() -> None:
    found = culprit("weightcast", answered=1)
    assert isinstance(found, TargetsFailed)
    assert found.failures == (REFUSED, LOST)
    assert found.urls == ("http://a", "http://b")


@pytest.mark.parametrize("meeting", ["weightcast", "torch"])
def test_error_names_every_engine_that_refused_a_bucket(meeting: Any) -> None:
    """The second refuses a moment after the first, when the first has already ended the broadcast."""
    group, first = Group(), threading.Event()
    links: Any = [Refusing(f"http://{name}", group, first if name == "b" else None) for name in "abc"]
    links[2].accepts = True
    settings: Any = {"meeting": meeting, "device": torch.device("cpu"), "host": "127.0.0.1"}
    channel = Channel(links, **settings, bucket_bytes=1, timeout_s=20.0)
    channel._group = group
    group.look = first.set
    try:
        with pytest.raises(TargetsFailed) as caught:
            channel.send(bucket(0), None)
        assert caught.value.urls == ("http://a", "http://b")
        assert "http://a refused bucket 0" in str(caught.value)
        assert "http://b refused bucket 0" in str(caught.value)
    finally:
        channel._group = None
        channel.close()


# -- two buckets in flight


class Group:
    """A group whose first broadcast arrives and whose second one does not."""

    name = "g"
    look: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.alive = True
        self.entered = [threading.Event(), threading.Event()]
        self._why = ""
        self._aborted = threading.Event()

    def start_broadcast(self, data: torch.Tensor) -> int:
        if not self.alive:
            raise GroupFailed(f"group g: {self._why}")
        index = int(data[0])
        self.entered[index].set()
        return index

    def finish(self, work: int, *, poll: Callable[[], None] = lambda: None, **_: object) -> None:
        while self.look is not None and not self._aborted.wait(0.01):
            try:
                poll()
            except TargetRejected:
                self.look()  # the other one refuses now
                raise
        if work == 1:
            assert self._aborted.wait(PATIENCE_S)
            raise GroupFailed(f"group g: {self._why}")

    def abort(self, why: str) -> None:
        self.alive, self._why = False, self._why or why
        self._aborted.set()

    def wait_for_abort(self) -> None:
        assert self._aborted.wait(PATIENCE_S)


class Answering:
    """A target that answers to the first bucket when it is told to, and to later ones that its group has failed."""

    stages = True

    def __init__(self, url: str, group: Group, answers: threading.Event, error: Exception | None = None) -> None:
        self.url = url
        self.session = LinkSession(id="s")
        self.info = engine_info(1)
        self.plan, self.members = TargetPlan(), (0,)
        self.events = Events()
        self.adapter = SimpleNamespace(
            bucket=lambda session, layout, **_: layout.index, leave=lambda group: None, meeting="weightcast"
        )
        self._group, self._answers, self._error = group, answers, error

    def touch(self) -> None: ...

    async def leave(self, group: str | None) -> None: ...

    async def ask(self, kind: str, index: int, *, timeout_s: float, buckets: range) -> None:
        if index > 0:
            await asyncio.to_thread(self._group.wait_for_abort)
            raise TargetRejected(f"{self.url}: group failed", url=self.url, status=GROUP_FAILED)
        assert await asyncio.to_thread(self._answers.wait, PATIENCE_S)
        if self._error is not None:
            raise self._error


class Refusing(Answering):
    """A target that refuses every bucket, once it is told to; or one that waits in the broadcast."""

    accepts = False

    def __init__(self, url: str, group: Group, told: threading.Event | None) -> None:
        super().__init__(url, group, threading.Event())
        self._told = told

    async def ask(self, kind: str, index: int, *, timeout_s: float, buckets: range) -> None:
        if self.accepts:
            await asyncio.to_thread(self._group.wait_for_abort)
            raise TargetRejected(f"{self.url}: its group failed", url=self.url, status=GROUP_FAILED)
        if self._told is not None:
            assert await asyncio.to_thread(self._told.wait, PATIENCE_S)
        raise TargetRejected(f"{self.url}: unknown tensor", url=self.url, status=400)


def bucket(index: int) -> Any:
    data = torch.full((1,), index, dtype=torch.uint8)
    return SimpleNamespace(layout=SimpleNamespace(index=index, size_bytes=1), data=data)


def test_late_answer_is_blamed_for_the_buckets_after_it_too() -> None:
    """The answer to the first bucket is read for the third, while the second is on its way and fails because of it."""
    group, answers = Group(), threading.Event()
    links: Any = [Answering("http://a", group, answers), Answering("http://b", group, answers, LOST)]
    settings: Any = {"meeting": "weightcast", "device": torch.device("cpu"), "host": "127.0.0.1"}
    channel = Channel(links, **settings, bucket_bytes=1, timeout_s=PATIENCE_S, in_flight=2)
    channel._group = group
    try:
        channel.send(bucket(0), None)
        with ThreadPoolExecutor(2) as pool:
            second = pool.submit(channel.send, bucket(1), None)
            assert group.entered[1].wait(PATIENCE_S)
            third = pool.submit(channel.send, bucket(2), None)
            answers.set()
            for failed in (second, third):
                with pytest.raises(TargetLost, match="http://b: lost at bucket 0"):
                    failed.result(timeout=PATIENCE_S)
        channel.settle()
        channel.drain()  # nothing is due any more
    finally:
        channel._group = None
        channel.close()


# -- who does not come


class Member:
    """A target whose ranks are threads here.

    Args:
        name: Of its host.
        tp: How many ranks it has.
        stray: Those of its ranks that were told something else than the others.
        told: What.
        after: What has to happen before it comes.
        gives_up: Set when it is to leave the meeting again.
    """

    def __init__(
        self,
        name: str,
        *,
        tp: int = 1,
        stray: tuple[int, ...] = (),
        told: Mapping[str, Any] = MappingProxyType({"token": "another"}),
        after: threading.Event | None = None,
        gives_up: threading.Event | None = None,
    ) -> None:
        self.url = f"http://{name}"
        self.session = LinkSession()
        self.group_rank = 0
        self.info = engine_info(tp)
        self.plan, self.members = TargetPlan(), tuple(range(tp))
        self.adapter = SimpleNamespace(join=lambda invitation: invitation, leave=lambda group: None)
        self._stray, self._told, self._after, self._gives_up = stray, dict(told), after, gives_up
        self.refused = threading.Event()
        self._groups: list[UpdateGroup] = []

    async def ask(self, kind: str, invitation: Invitation, *, timeout_s: float) -> None:
        await asyncio.to_thread(self._come, invitation)

    def _come(self, invitation: Invitation) -> None:
        if self._after is not None:
            assert self._after.wait(PATIENCE_S)
        with ThreadPoolExecutor(self.info.tp_size) as pool:
            joins = [pool.submit(self._join, rank, invitation) for rank in range(self.info.tp_size)]
        for join in joins:
            error = join.exception()
            if error is not None:
                self.refused.set()
                hint = getattr(error, "hint", None)
                raise TargetRejected(f"{self.url} refused: {error}", url=self.url, status=GROUP_FAILED, hint=hint)

    async def leave(self, group: str | None) -> None:
        while self._groups:
            self._groups.pop().close()

    def _join(self, rank: int, invitation: Invitation) -> None:
        told = {
            "host": invitation.join.host,
            "port": invitation.join.port,
            "name": invitation.join.group,
            "token": invitation.join.token,
            "rank": invitation.join.first_rank + rank,
            "world_size": invitation.join.world_size,
            "timeout_s": invitation.join.timeout_s,
        }
        told |= self._told if rank in self._stray else {}
        self._groups.append(UpdateGroup.join(**told, device=torch.device("cpu"), cancelled=self._gives_up))


TIMEOUT_S = 1000.0  # on the clock that stands still


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock of everybody who waits for others to come.  Tries of torch's store, which has its own, are short."""
    monkeypatch.setattr(rendezvous_module, "_FIRST_TRY_S", 1.0)
    with Clock().within(rendezvous_module, group_module, channel_module, blame_module) as clock:
        yield clock


class Meet:
    """Makes channels to members and connects them."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []

    def __call__(self, *members: Member) -> None:
        links: Any = members
        settings: Any = {"meeting": "weightcast", "device": torch.device("cpu"), "host": "127.0.0.1"}
        self.channels.append(Channel(links, **settings, bucket_bytes=1, timeout_s=TIMEOUT_S))
        self.channels[-1].connect()

    def is_over(self) -> bool:
        """True if the head has given the last meeting up and listens no more."""
        store = self.channels[-1]._store
        return store is not None and store._store is None


@pytest.fixture
def meet(clock: Clock) -> Iterator[Meet]:
    meet = Meet()
    yield meet
    clock.move(2 * TIMEOUT_S)  # for those still on their way
    for channel in meet.channels:
        channel.close()


@pytest.fixture
def meet_in_vain(meet: Meet, clock: Clock) -> Callable[..., TargetError]:
    """Lets everybody come to where they were told to, then the deadline pass; the error."""

    def connect(*members: Member) -> TargetError:
        everybody = 1 + sum(member.info.tp_size for member in members)
        with ThreadPoolExecutor(1) as pool:
            meeting = pool.submit(meet, *members)
            # Threads of one group have one name, so count those that wait and not their names.
            wait_until(lambda: clock.polling >= everybody or meeting.done(), "everybody to wait for the others")
            clock.move(TIMEOUT_S + 1.0)
            with pytest.raises(TargetError) as caught:
                meeting.result()
        return caught.value

    return connect


def test_engines_that_join_share_the_group(meet: Meet) -> None:
    meet(Member("a"), Member("b", tp=2), Member("c"))


@pytest.mark.parametrize("strays", ["b", "ac", "abc"])
def test_error_names_every_engine_that_did_not_join(meet_in_vain: Callable[..., TargetError], strays: str) -> None:
    members = [Member(name, tp=2, stray=(0, 1) if name in strays else ()) for name in "abc"]
    error = meet_in_vain(*members)
    named = error.urls if isinstance(error, TargetsFailed) else (error.url,)
    assert named == tuple(f"http://{name}" for name in strays)
    for member in members:
        said = f"{member.url}: ranks 0, 1 did not come to weightcast-"
        assert (said in str(error)) == (member.url in named)
    assert "GLOO_SOCKET_IFNAME" in (error.hint or "")


def test_error_names_the_single_rank_that_did_not_join(meet_in_vain: Callable[..., TargetError]) -> None:
    error = meet_in_vain(Member("a"), Member("b", tp=3, stray=(1,)))
    assert "http://b: rank 1 did not come" in str(error)
    assert error.url == "http://b"
    assert not isinstance(error, TargetsFailed)


@pytest.mark.parametrize("told", [{"world_size": 7}, {"world_size": 2}, {"rank": 3}, {"port": 1}])
def test_error_names_the_engine_with_a_wrong_invitation(meet_in_vain: Callable[..., TargetError], told: Any) -> None:
    error = meet_in_vain(Member("a", stray=(0,), told=told), Member("b"), Member("c"))
    assert "http://a: rank 0 did not come" in str(error)
    assert error.url == "http://a"
    assert not isinstance(error, TargetsFailed)


def test_error_names_an_only_engine(meet_in_vain: Callable[..., TargetError]) -> None:
    error = meet_in_vain(Member("a", stray=(0,)))
    assert "http://a: rank 0 did not come to weightcast-" in str(error)
    assert error.url == "http://a"


def test_error_names_the_engine_that_cannot_join_and_not_those_that_are_joining(meet: Meet) -> None:
    """The clock stands still, so nobody is named because of a deadline."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        members = Member("a", after=over), Member("b", stray=(0,), told={"port": 1}), Member("c", after=over)
        meeting = pool.submit(meet, *members)
        wait_until(lambda: members[1].refused.is_set() and meet.is_over(), "the head to give up because of http://b")
        over.set()
        with pytest.raises(TargetError, match="cannot reach the rendezvous at") as caught:
            meeting.result()
    assert not isinstance(caught.value, TargetsFailed)
    assert caught.value.url == "http://b"
    assert "http://a" not in str(caught.value)
    assert "open TCP 1 " in (caught.value.hint or "")


def test_no_engine_is_blamed_if_one_joined_and_left_again(meet: Meet, clock: Clock) -> None:
    gives_up, over = threading.Event(), threading.Event()
    members = Member("a", after=over), Member("b", gives_up=gives_up)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet, *members)
        wait_until(lambda: clock.polling >= 2, "the head and http://b to wait for http://a")
        gives_up.set()
        wait_until(meet.is_over, "the head to give up because of http://b")
        over.set()
        with pytest.raises((GroupFailed, DeadlineExceeded)):
            meeting.result()
