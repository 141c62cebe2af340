"""Because of whom a group failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from weightcast.comm.group import GroupFailed, WorldGroup
from weightcast.errors import DeadlineExceeded, TargetError, TargetLost, TargetRejected
from weightcast.protocols import Invitation
from weightcast.transports.channel import Channel
from weightcast.wire.messages import GROUP_FAILED

REFUSED = TargetRejected("http://a: Failed to initialize custom process group", url="http://a", status=400)
LOST = TargetLost("http://b: did not join in time", url="http://b")


def future(error: Exception) -> Future[None]:
    made: Future[None] = Future()
    made.set_exception(error)
    return made


def culprit(meeting: Any, *, answered: int) -> BaseException:
    """Of two engines, the first of which has refused and the second of which was lost."""
    links: Any = [SimpleNamespace(url=error.url) for error in (REFUSED, LOST)]
    channel = Channel(
        links, meeting=meeting, device=torch.device("cpu"), host="127.0.0.1", bucket_bytes=1, timeout_s=0.1
    )
    posts = [future(REFUSED), future(LOST)]
    try:
        return channel._culprit(GroupFailed("cancelled"), posts, "a bucket", posts[:answered])
    finally:
        channel.close()


@pytest.mark.parametrize(("answered", "blamed"), [(0, LOST), (1, REFUSED)])
def test_a_stock_engine_that_refuses_after_we_gave_up_is_not_blamed(answered: int, blamed: Exception) -> None:
    assert culprit("torch", answered=answered) is blamed


def test_an_engine_of_ours_says_by_its_status_whether_it_is_to_blame() -> None:
    assert culprit("weightcast", answered=1) is REFUSED


# -- two buckets in flight


class Group:
    """A group whose first broadcast arrives and whose second one does not."""

    name = "g"

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

    def finish(self, work: int, **_: object) -> None:
        if work == 1:
            assert self._aborted.wait(20)
            raise GroupFailed(f"group g: {self._why}")

    def abort(self, why: str) -> None:
        self.alive, self._why = False, self._why or why
        self._aborted.set()

    def wait_for_abort(self) -> None:
        assert self._aborted.wait(20)


class Answering:
    """A target that answers to the first bucket when it is told to, and to later ones that its group has failed."""

    stages, sent = True, 0

    def __init__(self, url: str, group: Group, answers: threading.Event, error: Exception | None = None) -> None:
        self.url = url
        self.session = "s"
        self.info = SimpleNamespace(tp_size=1)
        self.adapter = SimpleNamespace(
            bucket=lambda session, layout, **_: layout.index, leave=lambda group: None, meeting="weightcast"
        )
        self._group, self._answers, self._error = group, answers, error

    def touch(self) -> None: ...

    def took_over(self) -> None: ...

    def let_go(self, steps: object, **_: object) -> None: ...

    def ask(self, index: int, *, timeout_s: float) -> None:
        if index > 0:
            self._group.wait_for_abort()
            raise TargetRejected(f"{self.url}: group failed", url=self.url, status=GROUP_FAILED)
        assert self._answers.wait(20)
        if self._error is not None:
            raise self._error


def bucket(index: int) -> Any:
    data = torch.full((1,), index, dtype=torch.uint8)
    return SimpleNamespace(layout=SimpleNamespace(index=index, size_bytes=1), data=data, runs=lambda: [data])


def test_a_late_answer_is_to_blame_for_the_buckets_after_it_too() -> None:
    """The answer to the first bucket is read for the third, while the second is on its way and fails because of it."""
    group, answers = Group(), threading.Event()
    links: Any = [Answering("http://a", group, answers), Answering("http://b", group, answers, LOST)]
    settings: Any = {"meeting": "weightcast", "device": torch.device("cpu"), "host": "127.0.0.1"}
    channel = Channel(links, **settings, bucket_bytes=1, timeout_s=20.0, in_flight=2)
    channel._group = group
    try:
        channel.send(bucket(0), None)
        with ThreadPoolExecutor(2) as pool:
            second = pool.submit(channel.send, bucket(1), None)
            assert group.entered[1].wait(20)
            third = pool.submit(channel.send, bucket(2), None)
            answers.set()
            for failed in (second, third):
                with pytest.raises(TargetLost, match="http://b: lost at bucket 0"):
                    failed.result(timeout=20)
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
        late_s: How long it takes to come.
        gives_up_s: When it leaves the meeting again.
    """

    def __init__(
        self,
        name: str,
        *,
        tp: int = 1,
        stray: tuple[int, ...] = (),
        told: Mapping[str, Any] = MappingProxyType({"token": "another"}),
        late_s: float = 0.0,
        gives_up_s: float | None = None,
    ) -> None:
        self.url = f"http://{name}"
        self.session = ""
        self.group_rank = 0
        self.info = SimpleNamespace(tp_size=tp)
        self.adapter = SimpleNamespace(join=lambda invitation: invitation, leave=lambda group: None)
        self._stray, self._told, self._late_s, self._gives_up_s = stray, dict(told), late_s, gives_up_s
        self._groups: list[WorldGroup] = []

    def ask(self, invitation: Invitation, *, timeout_s: float) -> None:
        time.sleep(self._late_s)
        with ThreadPoolExecutor(self.info.tp_size) as pool:
            joins = [pool.submit(self._join, rank, invitation) for rank in range(self.info.tp_size)]
        for join in joins:
            error = join.exception()
            if error is not None:
                hint = getattr(error, "hint", None)
                raise TargetRejected(f"{self.url} refused: {error}", url=self.url, status=GROUP_FAILED, hint=hint)

    def let_go(self, steps: object, **_: object) -> None:
        while self._groups:
            self._groups.pop().close()

    def _join(self, rank: int, invitation: Invitation) -> None:
        gives_up = threading.Event()
        if self._gives_up_s is not None:
            threading.Timer(self._gives_up_s, gives_up.set).start()
        told = {
            "host": invitation.host,
            "port": invitation.port,
            "name": invitation.group,
            "token": invitation.token,
            "rank": invitation.first_rank + rank,
            "world_size": invitation.world_size,
            "timeout_s": invitation.timeout_s,
        }
        told |= self._told if rank in self._stray else {}
        self._groups.append(WorldGroup.join(**told, device=torch.device("cpu"), cancelled=gives_up))


Connect = Callable[..., None]


@pytest.fixture
def meet() -> Iterator[Connect]:
    made: list[Channel] = []

    def connect(*members: Member, timeout_s: float) -> None:
        links: Any = members
        settings: Any = {"meeting": "weightcast", "device": torch.device("cpu"), "host": "127.0.0.1"}
        made.append(Channel(links, **settings, bucket_bytes=1, timeout_s=timeout_s))
        made[-1].connect()

    yield connect
    for channel in made:
        channel.close()


def test_those_who_come_meet(meet: Connect) -> None:
    meet(Member("a"), Member("b", tp=2), Member("c"), timeout_s=20.0)


@pytest.mark.parametrize("strays", ["b", "ac", "abc"])
def test_all_who_do_not_come_are_named_at_once(meet: Connect, strays: str) -> None:
    members = [Member(name, tp=2, stray=(0, 1) if name in strays else ()) for name in "abc"]
    with pytest.raises(TargetError) as caught:
        meet(*members, timeout_s=1.0)
    error = caught.value
    assert (error.url, *error.also) == tuple(f"http://{name}" for name in strays)
    for member in members:
        said = f"{member.url}: ranks 0, 1 did not come to weightcast-"
        assert (said in str(error)) == (member.url in (error.url, *error.also))
    assert "GLOO_SOCKET_IFNAME" in (error.hint or "")


def test_a_single_rank_that_does_not_come_is_told_from_the_others(meet: Connect) -> None:
    with pytest.raises(TargetError, match="http://b: rank 1 did not come") as caught:
        meet(Member("a"), Member("b", tp=3, stray=(1,)), timeout_s=1.0)
    assert (caught.value.url, caught.value.also) == ("http://b", ())


@pytest.mark.parametrize("told", [{"world_size": 7}, {"world_size": 2}, {"rank": 3}, {"port": 1}])
def test_whatever_an_engine_got_wrong_of_an_invitation_it_is_the_one_that_is_named(meet: Connect, told: Any) -> None:
    with pytest.raises(TargetError, match="http://a: rank 0 did not come") as caught:
        meet(Member("a", stray=(0,), told=told), Member("b"), Member("c"), timeout_s=1.0)
    assert (caught.value.url, caught.value.also) == ("http://a", ())


def test_the_only_engine_is_named_too(meet: Connect) -> None:
    with pytest.raises(TargetError, match="http://a: rank 0 did not come to weightcast-") as caught:
        meet(Member("a", stray=(0,)), timeout_s=1.0)
    assert caught.value.url == "http://a"


def test_who_cannot_come_is_named_at_once_and_not_those_on_their_way(meet: Connect) -> None:
    started = time.monotonic()
    with pytest.raises(TargetError, match="nothing to meet at") as caught:
        meet(Member("a", late_s=1.0), Member("b", stray=(0,), told={"port": 1}), Member("c"), timeout_s=20.0)
    assert (caught.value.url, caught.value.also) == ("http://b", ())
    assert "http://a" not in str(caught.value)
    assert "open TCP 1 " in (caught.value.hint or "")
    assert time.monotonic() - started < 10.0


def test_nobody_is_blamed_where_one_came_and_left_again(meet: Connect) -> None:
    with pytest.raises((GroupFailed, DeadlineExceeded)):
        meet(Member("a", late_s=1.0), Member("b", gives_up_s=0.3), timeout_s=20.0)
