"""Who does not answer is waited for once, a moment; who answers again is seen at the next look."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.test_head import info
from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import ConfigError, DeadlineExceeded, TargetError, TargetUnreachable
from weightcast.fleet.lookout import Lookout
from weightcast.fleet.roster import Roster
from weightcast.wire.messages import EngineInfo

LONG_S = 100.0  # longer than a test may take
pytestmark = pytest.mark.timeout(30)


INFO = info("native")


class Crowd:
    """Some answer at once, some when told to."""

    def __init__(self) -> None:
        self.wakes = {"still": threading.Event(), "slow": threading.Event()}
        self.asked: list[str] = []
        self.lookout = Lookout(self.ask)

    def ask(self, url: str) -> str:
        self.asked.append(url)
        if url == "dead":
            raise ConfigError("nobody there")
        if url in self.wakes and not self.wakes[url].wait(0.01):
            raise TargetUnreachable(f"{url} said nothing", url=url) from DeadlineExceeded(
                who=url, waiting_for="an answer", timeout_s=0.01
            )
        return f"{url} is here"


def test_answers_come_together():
    crowd = Crowd()
    found = crowd.lookout.look(dict.fromkeys(["a", "dead", "b"], LONG_S))
    assert (found["a"], found["b"]) == ("a is here", "b is here")
    assert isinstance(found["dead"], ConfigError)
    assert crowd.lookout.look(dict.fromkeys([], LONG_S)) == {}


def test_a_question_stays_out_until_it_is_answered():
    crowd = Crowd()
    found = crowd.lookout.look(dict.fromkeys(["still", "a"], 0.05))
    assert found["a"] == "a is here"
    assert isinstance(found["still"], TargetUnreachable)
    assert found["still"].url == "still"
    time.sleep(0.05)
    # It has had its moment: not a second one, though its silence has had a deadline of its own meanwhile.
    again = crowd.lookout.look(dict.fromkeys(["still", "a"], 0.05))
    assert float(str(again["still"]).split(" for ")[1].split(" s")[0]) >= 0.1  # since it was asked first
    assert isinstance(again["still"], TargetUnreachable)
    assert again["a"] == "a is here"
    crowd.wakes["still"].set()
    # What it says in between may be old by then.
    time.sleep(0.05)
    assert crowd.lookout.look(dict.fromkeys(["still"], LONG_S)) == {"still": "still is here"}


def test_one_who_wakes_while_we_look_is_seen():
    crowd = Crowd()
    timer = threading.Timer(0.05, crowd.wakes["slow"].set)
    timer.start()
    assert crowd.lookout.look(dict.fromkeys(["slow"], LONG_S)) == {"slow": "slow is here"}
    timer.join()


def test_a_question_put_ahead_is_not_waited_for():
    crowd = Crowd()
    crowd.lookout.ask_ahead(["still", "a"], waited_s=LONG_S)
    crowd.lookout.ask_ahead(["still"], waited_s=0)  # it is out already
    time.sleep(0.02)
    found = crowd.lookout.look({"still": LONG_S, "a": LONG_S})
    assert found["a"] == "a is here"
    assert isinstance(found["still"], TargetUnreachable)
    crowd.lookout.forget("still")
    crowd.wakes["still"].set()
    assert crowd.lookout.look({"still": LONG_S}) == {"still": "still is here"}


def test_an_answer_to_a_question_of_late_will_do_and_an_older_one_will_not():
    crowd = Crowd()
    before = time.monotonic()
    crowd.lookout.ask_ahead(["a"], waited_s=0.0)
    time.sleep(0.05)
    assert crowd.lookout.look({"a": LONG_S}, since=before) == {"a": "a is here"}
    assert crowd.asked == ["a"]
    crowd.lookout.ask_ahead(["a"], waited_s=0.0)
    time.sleep(0.05)
    assert crowd.lookout.look({"a": LONG_S}, since=time.monotonic()) == {"a": "a is here"}
    assert crowd.asked == ["a", "a", "a"]
    crowd.lookout.ask_ahead(["still"], waited_s=0.0)  # who has not answered yet is waited for, and asked once
    threading.Timer(0.05, crowd.wakes["still"].set).start()
    assert crowd.lookout.look({"still": LONG_S}, anew=["still"], since=time.monotonic()) == {"still": "still is here"}


def test_who_was_only_glanced_at_may_be_waited_for_anew():
    crowd = Crowd()
    crowd.lookout.look({"slow": 0.01})
    time.sleep(0.1)
    assert isinstance(crowd.lookout.look({"slow": 0.1})["slow"], TargetUnreachable)  # at once: it has had its time
    timer = threading.Timer(0.1, crowd.wakes["slow"].set)
    timer.start()
    assert crowd.lookout.look({"slow": 10.0}, anew={"slow"}) == {"slow": "slow is here"}
    timer.join()


def test_whatever_goes_wrong_with_a_question_is_its_answer():
    goes_wrong = [True]

    def ask(url: str) -> str:
        if goes_wrong[0]:
            raise KeyError("no such field")
        return f"{url} is here"

    lookout = Lookout(ask)
    found = lookout.look({"odd": 1.0})["odd"]
    assert isinstance(found, TargetError)
    assert not isinstance(found, TargetUnreachable)
    assert (str(found), found.url) == ("odd: could not be asked: KeyError: 'no such field'", "odd")
    assert isinstance(found.__cause__, KeyError)
    goes_wrong[0] = False
    assert lookout.look({"odd": 1.0}) == {"odd": "odd is here"}


def test_several_may_look_at_once():
    crowd = Crowd()
    ready = threading.Barrier(5)

    def look() -> object:
        ready.wait(10)
        return crowd.lookout.look({"slow": 10.0, "still": 0.2})

    with ThreadPoolExecutor(4) as threads:
        looks = [threads.submit(look) for _ in range(4)]
        ready.wait(10)
        time.sleep(0.3)  # all of them wait for the same answer
        crowd.wakes["slow"].set()
        found = [one.result() for one in looks]
    for answers in found:
        assert answers["slow"] == "slow is here"
        assert isinstance(answers["still"], TargetUnreachable)
    crowd.wakes["still"].set()


def test_who_is_forgotten_while_somebody_looks_does_no_harm():
    crowd = Crowd()
    with ThreadPoolExecutor(1) as threads:
        look = threads.submit(crowd.lookout.look, {"slow": 10.0})
        while not crowd.asked:
            time.sleep(0.001)
        crowd.lookout.forget("slow")
        found = look.result(10)["slow"]
    assert isinstance(found, TargetUnreachable)  # its silence ends the question that nobody may ask again
    crowd.wakes["slow"].set()
    assert crowd.lookout.look({"slow": 10.0}) == {"slow": "slow is here"}


def test_a_hasty_look_is_not_held_against_anybody():
    awake = threading.Event()

    def recognise(client: Client) -> EngineInfo:
        if not awake.wait(0.05):
            raise TargetUnreachable("silence", url=client.target.url) from DeadlineExceeded(
                who=client.target.url, waiting_for="an answer", timeout_s=0.05
            )
        return INFO

    url = "http://127.0.0.1:1"
    roster = Roster([Target(url)], timeout_s=0.6, recognise=recognise)
    try:
        assert isinstance(roster.look(hasty=True)[url], TargetUnreachable)
        time.sleep(0.6)  # the question is out for longer than any deadline now
        timer = threading.Timer(0.2, awake.set)
        timer.start()
        assert roster.look() == {url: INFO}
        timer.join()
    finally:
        awake.set()
        roster.close()
