"""The collector of cycles is still during an update and as it was afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from tests.helpers.clock import PATIENCE_S
from weightcast.runtime import gc_pause
from weightcast.runtime.gc_pause import gc_paused, spare_what_lives


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_no_collection_starts_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        started.append(phase)

    gc.unfreeze()  # pytest's own objects are exempt in these tests
    monkeypatch.setattr(gc_pause, "_exempts", False)
    gc.callbacks.append(watch)
    try:
        with gc_paused():
            kept = [[number] for number in range(50 * gc.get_threshold()[0])]
            assert not started
        kept += [[number] for number in range(gc.get_threshold()[0] // 4)]
        assert not started, "what was made inside is not walked right after it"
        kept += [[number] for number in range(2 * gc.get_threshold()[0])]
        assert started
    finally:
        gc.callbacks.remove(watch)
        gc.freeze()


def test_garbage_made_inside_is_freed_and_what_is_exempt_stays_exempt() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    with gc_paused():
        garbage = weakref.ref(Node())
    assert garbage() is not None
    gc.collect()
    assert garbage() is None
    stays = Node()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with gc_paused():
            pass
        assert 0 < gc.get_freeze_count() <= frozen
        assert not any(known is stays for known in gc.get_objects())
    finally:
        gc.unfreeze()


def test_an_error_puts_it_back() -> None:
    with pytest.raises(KeyError), gc_paused():
        {}["nothing"]
    assert gc.isenabled()


def test_the_last_of_several_threads_puts_it_back() -> None:
    inside, left = Barrier(2), Barrier(2)

    def short() -> None:
        with gc_paused():
            inside.wait()
        left.wait()

    def long() -> bool:
        with gc_paused():
            inside.wait()
            left.wait()
            return gc.isenabled()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(short), pool.submit(long)
        first.result(timeout=PATIENCE_S)
        assert not second.result(timeout=PATIENCE_S)
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with gc_paused(), gc_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_live_objects_are_exempt_and_garbage_is_freed() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    stays, garbage = Node(), weakref.ref(Node())
    assert garbage() is not None
    spare_what_lives()
    try:
        assert garbage() is None
        assert not any(known is stays for known in gc.get_objects())
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None  # it works as ever for what comes
    finally:
        gc.unfreeze()
