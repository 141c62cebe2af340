"""Work that was put off is done in order, and its errors are logged."""

from __future__ import annotations

import logging
import threading

from weightcast.watch import later

PATIENCE_S = 60.0


def test_the_thread_does_the_work_in_order():
    done = threading.Event()
    worked: list[tuple[str, str]] = []

    def work(name: str) -> None:
        worked.append((name, threading.current_thread().name))

    later.settle()
    later.put_off(lambda: work("first"))
    later.put_off(lambda: (work("last"), done.set()))
    assert done.wait(PATIENCE_S)
    assert worked == [("first", "weightcast-watch"), ("last", "weightcast-watch")]


def test_an_error_is_logged_and_does_not_stop_the_rest(caplog):
    def fails() -> None:
        raise ValueError("mine")

    done: list[int] = []
    with caplog.at_level(logging.ERROR, "weightcast.watch"):
        later.put_off(fails)
        later.put_off(lambda: done.append(1))
        later.settle()
    assert done == [1]
    [record] = caplog.records
    assert record.exc_info is not None


def test_who_settles_waits_for_work_that_another_thread_does():
    done: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        done.append("work")

    later.put_off(work)
    first = threading.Thread(target=later.settle)
    first.start()
    assert inside.wait(PATIENCE_S)
    second = threading.Thread(target=lambda: (later.settle(), done.append("settled")))
    second.start()
    assert done == []
    go_on.set()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert done == ["work", "settled"]
