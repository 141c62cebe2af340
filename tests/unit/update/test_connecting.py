"""A ``connect`` that takes long says what it is doing; a short one says nothing."""

from __future__ import annotations

import logging
import threading

from tests.helpers.clock import wait_until
from weightcast.update.watched import Connecting


def test_a_long_connect_says_what_it_is_doing(caplog):
    caplog.set_level(logging.INFO, logger="weightcast.update")
    with Connecting(long_s=0.01) as connecting:
        wait_until(lambda: "looked at" in caplog.text, "the first line")
        connecting.now("the trainer ranks meet")
        wait_until(lambda: "the trainer ranks meet" in caplog.text, "the second line")


def test_a_short_connect_and_other_ranks_say_nothing(caplog):
    caplog.set_level(logging.INFO, logger="weightcast.update")
    with Connecting(long_s=3600.0):
        pass
    with Connecting(long_s=0.05) as connecting:
        connecting.silence()
        wait_until(
            lambda: not [t for t in threading.enumerate() if t.name == "weightcast-connecting"], "the end of the thread"
        )
    assert not caplog.records
