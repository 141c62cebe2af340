"""Staging inside vLLM's memory budget, and where a worker measures, sleeps and wakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from weightcast.errors import ConfigError
from weightcast.plugins.vllm.start_up import Budget
from weightcast.plugins.vllm.worker_hooks import wrap_worker

GIB = 1 << 30
EIGHT_B = 15 * GIB


def budget(
    cache: float, *, least: float = 1, fixed: float | None = None, host: float = 100, cpu: bool = False
) -> Budget:
    return Budget(
        cache_bytes=int(cache * GIB),
        least_bytes=int(least * GIB),
        fixed_bytes=None if fixed is None else int(fixed * GIB),
        host_bytes=int(host * GIB),
        on_host=cpu,
    )


@pytest.mark.parametrize(
    ("found", "place", "words"),
    [
        pytest.param(budget(110), "device", "", id="an H200 at vLLM's defaults"),
        pytest.param(budget(20), "device", "", id="a quarter of the cache is left"),
        pytest.param(budget(19), "host", "vLLM has 19.00 GiB for its KV cache, which needs 4.75", id="less is left"),
        pytest.param(
            budget(30, least=16), "host", "which needs 16.00 GiB of it", id="no request of full length is left"
        ),
        pytest.param(budget(5, host=17), "none", "17.00 GiB are free on the host", id="nowhere"),
        pytest.param(budget(90, fixed=15), "device", "", id="a cache of a fixed size leaves room"),
        pytest.param(budget(90, fixed=14), "host", "beside a KV cache of a fixed size", id="it leaves none"),
        pytest.param(budget(90, cpu=True), "device", "", id="a CPU"),
        pytest.param(budget(90, cpu=True, host=17), "none", "no room", id="a CPU whose memory others have"),
    ],
)
def test_auto_leaves_the_cache_what_it_needs(found, place, words):
    chosen, why = found.place("auto", EIGHT_B)
    assert chosen == place
    assert words in why


def test_a_place_that_was_asked_for_is_taken_or_refused():
    assert budget(17).place("device", EIGHT_B) == ("device", "")  # what auto would not do
    with pytest.raises(
        ConfigError, match=r"staging takes 15.00 GiB, and vLLM has 15.50 GiB .* needs 1.00 GiB"
    ) as caught:
        budget(15.5).place("device", EIGHT_B)
    assert "--gpu-memory-utilization" in str(caught.value.hint)
    assert budget(110).place("host", EIGHT_B) == ("host", "")
    with pytest.raises(ConfigError, match=r"staging on the host takes 15.00 GiB, and 16.00 GiB are free"):
        budget(110, host=16).place("host", EIGHT_B)
    assert budget(110).place("none", EIGHT_B) == ("none", "")


class Backend:
    """Notes what it is told."""

    def __init__(self, said: list[str]) -> None:
        self.told: list[Any] = []
        self.said = said  # with what the worker says
        self.no_room = ""
        self.sets = self

    def take_room(self, worker: Any, cache_bytes: int) -> int:
        self.told.append(("room", cache_bytes))
        return cache_bytes - 30

    def warm_up(self, worker: Any) -> None:
        self.told.append(("warm up", None))
        worker.said.append("warmed up")

    def fall_asleep(self, level: int) -> None:
        self.told.append(("sleep", level))

    def let_go(self) -> None:
        self.said.append("let go")

    def restore(self, tags: Sequence[str] | None) -> str:
        self.said.append(f"restored {tags}")
        return self.no_room

    def wake(self, tags: Sequence[str] | None) -> None:
        self.told.append(("wake", tags))


def worker_class(said: list[str]) -> type[Any]:
    class Worker:
        """As much of vLLM's as is wrapped."""

        def __init__(self, backend: object) -> None:
            self.weight_transfer_engine = backend
            self.said = said

        def determine_available_memory(self) -> int:
            said.append("measured")
            return 100

        def compile_or_warm_up_model(self) -> float:
            said.append("captured graphs")
            return 1.5

        def sleep(self, level: int = 1) -> None:
            said.append(f"slept {level}")

        def wake_up(self, tags: list[str] | None = None) -> None:
            said.append(f"woke {tags}")

    return Worker


def test_a_worker_tells_our_backend_and_no_other():
    said: list[str] = []
    kind = worker_class(said)
    wrap_worker(kind, Backend)
    wrap_worker(kind, Backend)  # once is enough
    backend = Backend(said)
    worker = kind(backend)
    assert worker.determine_available_memory() == 70
    assert worker.compile_or_warm_up_model() == 1.5
    worker.sleep()
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    worker.wake_up()
    assert worker.weightcast_restore(None) == ""
    calls = [("room", 100), ("warm up", None), ("sleep", 1), ("sleep", 2), ("wake", ["weights"]), ("wake", None)]
    assert backend.told == calls
    started = ["measured", "warmed up", "captured graphs"]
    slept = ["slept 1", "let go", "slept 2", "let go"]  # vLLM copies buffers while it falls asleep and wakes
    woke = ["restored ['weights']", "woke ['weights']", "restored None", "woke None", "restored None"]
    assert said == [*started, *slept, *woke]
    other = kind(object())
    assert other.determine_available_memory() == 100
    other.sleep(2)
    assert other.compile_or_warm_up_model() == 1.5
    assert len(backend.told) == len(calls)


def test_a_refusal_of_ours_leaves_the_weights_where_they_are():
    class Busy(Backend):
        def fall_asleep(self, level: int) -> None:
            raise RuntimeError("an update is under way")

    said: list[str] = []
    kind = worker_class(said)
    wrap_worker(kind, Busy)
    with pytest.raises(RuntimeError, match="under way"):
        kind(Busy(said)).sleep()
    assert said == []


def test_vllm_sleeps_on_without_room_for_weights_outside_of_its_pool():
    said: list[str] = []
    kind = worker_class(said)
    wrap_worker(kind, Backend)
    backend = Backend(said)
    backend.no_room = "rank 0 has no room"
    with pytest.raises(RuntimeError, match="rank 0 has no room"):
        kind(backend).wake_up()
    assert said == ["restored None"]
    assert backend.told == []
