"""Who does not answer is waited for once, a moment; who answers again is seen at the next look."""

from __future__ import annotations

import threading
import time

import pytest

from weightcast.errors import ConfigError, TargetUnreachable
from weightcast.fleet.lookout import Lookout

LONG_S = 100.0  # longer than a test may take
pytestmark = pytest.mark.timeout(30)


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
        if url in self.wakes:
            self.wakes[url].wait(LONG_S)
        return f"{url} is here"


def test_answers_come_together():
    crowd = Crowd()
    found = crowd.lookout.look(["a", "dead", "b"], limit_s=LONG_S)
    assert (found["a"], found["b"]) == ("a is here", "b is here")
    assert isinstance(found["dead"], ConfigError)
    assert crowd.lookout.look([], limit_s=LONG_S) == {}


def test_a_question_stays_out_until_it_is_answered():
    crowd = Crowd()
    found = crowd.lookout.look(["still", "a"], limit_s=0.05)
    assert found["a"] == "a is here"
    assert isinstance(found["still"], TargetUnreachable)
    assert found["still"].url == "still"
    time.sleep(0.05)
    # It has had its moment: not a second one, however long that may be, and no second question.
    again = crowd.lookout.look(["still", "a"], limit_s=0.05)
    assert isinstance(again["still"], TargetUnreachable)
    assert again["a"] == "a is here"
    assert crowd.asked.count("still") == 1
    crowd.wakes["still"].set()
    # What it said in between may be old by now.
    time.sleep(0.05)
    assert crowd.lookout.look(["still"], limit_s=LONG_S) == {"still": "still is here"}
    assert crowd.asked.count("still") == 2


def test_one_who_wakes_while_we_look_is_seen():
    crowd = Crowd()
    timer = threading.Timer(0.05, crowd.wakes["slow"].set)
    timer.start()
    assert crowd.lookout.look(["slow"], limit_s=LONG_S) == {"slow": "slow is here"}
    timer.join()
