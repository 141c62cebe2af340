"""A silent target is waited for once and briefly; the next look sees its answer."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.helpers.clock import PATIENCE_S, wait_until
from tests.helpers.roster import info
from weightcast.comm import event_loop
from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import ConfigError, DeadlineExceeded, TargetError, TargetUnreachable
from weightcast.update import background_probe as module
from weightcast.update import roster as roster_module
from weightcast.update.background_probe import BackgroundProbe
from weightcast.update.roster import Roster
from weightcast.wire.engine_info import EngineInfo

LONG_S = 1000.0  # longer than a test may take


INFO = info("native")


async def set_within(event: threading.Event, limit_s: float) -> bool:
    """Waits for the test's event without blocking the loop."""
    end = time.monotonic() + limit_s
    while not event.is_set() and time.monotonic() < end:
        await asyncio.sleep(0.002)
    return event.is_set()


class Probes(BackgroundProbe[str]):
    """Looks from a thread that waits."""

    def look(self, patience_s: dict[str, float], **options: object) -> dict[str, object]:
        return event_loop.run(self.look_on_loop(patience_s, **options))


class Crowd:
    """Targets that answer at once, and targets that answer when the test says so."""

    def __init__(self) -> None:
        self.wakes = {"still": threading.Event(), "slow": threading.Event()}
        self.asked: list[str] = []
        self.probes = Probes(self.ask)

    def wait_for_answer(self, url: str) -> None:
        """Waits until the running probe has been answered."""
        wait_until(lambda: url in self.probes._open and self.probes._open[url].answer, f"an answer of {url}")

    async def ask(self, url: str) -> str:
        self.asked.append(url)
        if url == "dead":
            raise ConfigError("nobody there")
        if url in self.wakes and not await set_within(self.wakes[url], 0.01):
            raise TargetUnreachable(f"{url} said nothing", url=url) from DeadlineExceeded(
                who=url, waiting_for="an answer", timeout_s=0.01
            )
        return f"{url} is here"


def test_look_returns_all_answers_together():
    crowd = Crowd()
    found = crowd.probes.look(dict.fromkeys(["a", "dead", "b"], LONG_S))
    assert (found["a"], found["b"]) == ("a is here", "b is here")
    assert isinstance(found["dead"], ConfigError)
    assert crowd.probes.look(dict.fromkeys([], LONG_S)) == {}


def test_probe_runs_until_it_is_answered():
    crowd = Crowd()
    patience_s = {"still": 0.05, "a": LONG_S}
    found = crowd.probes.look(patience_s)
    assert found["a"] == "a is here"
    assert isinstance(found["still"], TargetUnreachable)
    assert found["still"].url == "still"
    time.sleep(0.05)
    # It has had its moment: not a second one, though its silence has had a deadline of its own meanwhile.
    again = crowd.probes.look(patience_s)
    assert float(str(again["still"]).split(" for ")[1].split(" s")[0]) >= 0.1  # since it was asked first
    assert isinstance(again["still"], TargetUnreachable)
    assert again["a"] == "a is here"
    crowd.wakes["still"].set()
    # What it says in between may be old by then.
    time.sleep(0.05)
    assert crowd.probes.look(dict.fromkeys(["still"], LONG_S)) == {"still": "still is here"}


def test_target_that_wakes_during_a_look_is_seen():
    crowd = Crowd()
    timer = threading.Timer(0.05, crowd.wakes["slow"].set)
    timer.start()
    assert crowd.probes.look(dict.fromkeys(["slow"], LONG_S)) == {"slow": "slow is here"}
    timer.join()


def test_probe_started_ahead_is_not_waited_for():
    crowd = Crowd()
    crowd.probes.ask_ahead(["still", "a"], waited_s=LONG_S)
    crowd.probes.ask_ahead(["still"], waited_s=0)  # it is out already
    crowd.wait_for_answer("a")
    found = crowd.probes.look({"still": LONG_S, "a": LONG_S})
    assert found["a"] == "a is here"
    assert isinstance(found["still"], TargetUnreachable)
    crowd.probes.forget("still")
    crowd.wakes["still"].set()
    assert crowd.probes.look({"still": LONG_S}) == {"still": "still is here"}


def test_answer_to_a_recent_probe_is_accepted_and_an_older_one_is_not():
    crowd = Crowd()
    before = time.monotonic()
    crowd.probes.ask_ahead(["a"], waited_s=0.0)
    crowd.wait_for_answer("a")
    assert crowd.probes.look({"a": LONG_S}, since=before) == {"a": "a is here"}
    assert crowd.asked == ["a"]
    crowd.probes.ask_ahead(["a"], waited_s=0.0)
    crowd.wait_for_answer("a")
    assert crowd.probes.look({"a": LONG_S}, since=time.monotonic()) == {"a": "a is here"}
    assert crowd.asked == ["a", "a", "a"]
    crowd.probes.ask_ahead(["still"], waited_s=0.0)  # who has not answered yet is waited for, and asked once
    threading.Timer(0.05, crowd.wakes["still"].set).start()
    assert crowd.probes.look({"still": LONG_S}, anew=["still"], since=time.monotonic()) == {"still": "still is here"}


def test_deadline_counts_from_now_for_urls_in_anew():
    crowd = Crowd()
    crowd.probes.look({"slow": 0.01})
    time.sleep(0.1)
    assert isinstance(crowd.probes.look({"slow": 0.1})["slow"], TargetUnreachable)  # at once: it has had its time
    timer = threading.Timer(0.1, crowd.wakes["slow"].set)
    timer.start()
    assert crowd.probes.look({"slow": LONG_S}, anew={"slow"}) == {"slow": "slow is here"}
    timer.join()


def test_any_exception_of_a_probe_is_its_answer():
    goes_wrong = [True]

    async def ask(url: str) -> str:
        if goes_wrong[0]:
            raise KeyError("no such field")
        return f"{url} is here"

    probes = Probes(ask)
    found = probes.look({"odd": LONG_S})["odd"]
    assert isinstance(found, TargetError)
    assert not isinstance(found, TargetUnreachable)
    assert (str(found), found.url) == ("odd: the probe failed: KeyError: 'no such field'", "odd")
    assert isinstance(found.__cause__, KeyError)
    goes_wrong[0] = False
    assert probes.look({"odd": LONG_S}) == {"odd": "odd is here"}


def test_concurrent_looks_share_a_probe():
    crowd = Crowd()
    ready = threading.Barrier(5)

    def look() -> object:
        ready.wait(PATIENCE_S)
        return crowd.probes.look({"slow": LONG_S, "still": 0.2})

    with ThreadPoolExecutor(4) as threads:
        looks = [threads.submit(look) for _ in range(4)]
        ready.wait(PATIENCE_S)
        time.sleep(0.3)  # all of them wait for the same answer
        crowd.wakes["slow"].set()
        found = [one.result() for one in looks]
    for answers in found:
        assert answers["slow"] == "slow is here"
        assert isinstance(answers["still"], TargetUnreachable)
    crowd.wakes["still"].set()


def test_url_may_be_forgotten_during_a_look():
    crowd = Crowd()
    with ThreadPoolExecutor(1) as threads:
        look = threads.submit(crowd.probes.look, {"slow": LONG_S})
        while not crowd.asked:
            time.sleep(0.001)
        crowd.probes.forget("slow")
        found = look.result(PATIENCE_S)["slow"]
    assert isinstance(found, TargetUnreachable)  # the forgotten probe ends and is not repeated
    crowd.wakes["slow"].set()
    assert crowd.probes.look({"slow": LONG_S}) == {"slow": "slow is here"}


class Unreachable:
    """A host to which each attempt to connect ends in an error when the test says so, or succeeds when it is up."""

    def __init__(self) -> None:
        self.up = False
        self.attempts = threading.Semaphore(0)

    async def ask(self, url: str) -> str:
        assert await asyncio.to_thread(self.attempts.acquire, timeout=PATIENCE_S)
        if self.up:
            return f"{url} is here"
        raise TargetUnreachable(f"{url}: cannot connect", url=url) from TimeoutError("timed out")


def test_host_that_is_switched_off_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(module, "_QUICK_ERROR_S", -1.0)  # no attempt here takes long
    host = Unreachable()
    probes = Probes(host.ask)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(probes.look, {"off": LONG_S})
        host.attempts.release()
        assert "cannot connect" in str(first.result(PATIENCE_S)["off"])
        for _ in range(3):  # no attempt has ended since, so a look that waited would wait for ever
            again = threads.submit(probes.look, {"off": LONG_S}, since=time.monotonic())
            assert "cannot connect" in str(again.result(PATIENCE_S)["off"])
        host.up = True
        host.attempts.release()
        wait_until(lambda: probes._open["off"].answer == ["off is here"], "the attempt in the background")
        host.attempts.release()  # what it said may be old by now, so it is asked again
        assert probes.look({"off": LONG_S}) == {"off": "off is here"}


def test_host_that_refuses_at_once_is_probed_at_every_look(monkeypatch):
    monkeypatch.setattr(module, "_QUICK_ERROR_S", LONG_S)
    host = Unreachable()
    probes = Probes(host.ask)
    for up in (False, False, True):
        host.up = up
        host.attempts.release()
        found = probes.look({"down": LONG_S})["down"]
        assert (found == "down is here") is up


def test_background_probes_end_with_membership(monkeypatch):
    monkeypatch.setattr(module, "_QUICK_ERROR_S", -1.0)
    host = Unreachable()
    probes = Probes(host.ask)
    host.attempts.release()
    probes.look({"off": LONG_S})
    running = probes._open["off"].task
    assert running is not None
    assert not running.done()
    probes.forget("off")
    host.attempts.release()
    wait_until(running.done, "the probe to end")


def test_hasty_look_marks_no_target_silent(monkeypatch):
    monkeypatch.setattr(roster_module, "_SILENT_WAIT_S", 0.1)
    awake = threading.Event()

    async def recognise(client: Client) -> EngineInfo:
        if not await set_within(awake, 0.05):
            raise TargetUnreachable("silence", url=client.target.url) from DeadlineExceeded(
                who=client.target.url, waiting_for="an answer", timeout_s=0.05
            )
        return INFO

    url = "http://127.0.0.1:1"
    roster = Roster([Target(url)], timeout_s=LONG_S, recognise=recognise)
    try:
        [link] = roster.links
        roster.look([link], hasty=True)
        assert isinstance(link.answer, TargetUnreachable)
        roster._probes._open[url].asked_at -= 2 * LONG_S  # longer ago than any deadline
        timer = threading.Timer(0.2, awake.set)
        timer.start()
        roster.look([link])
        assert link.answer == INFO
        timer.join()
    finally:
        awake.set()
        roster.close()
