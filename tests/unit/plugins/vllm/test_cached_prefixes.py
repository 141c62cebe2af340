"""Generations of vLLM's prefix cache, on a core and a KV cache manager with as much of vLLM as they touch."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcast.plugins.vllm import cached_prefixes


class Request:
    """As vLLM's: it hashes its tokens with its salt as it is made."""

    def __init__(self, salt: str | None) -> None:
        self.cache_salt = salt
        self.block_hashes: list[str | None] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.append(self.cache_salt)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> tuple[type[Any], type[Any]]:
    """The classes of vLLM's core and KV cache manager, with our part in them."""

    class Manager:
        def get_computed_blocks(self, request: Request) -> list[str | None]:
            return request.block_hashes

    class Core:
        def __init__(self, manager: Any) -> None:
            self.scheduler = SimpleNamespace(kv_cache_manager=manager)

        def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
            return Request(request.cache_salt), 0

    module = ModuleType("vllm.v1.core.kv_cache_manager")
    module.KVCacheManager = Manager  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cached_prefixes.install(Core)
    cached_prefixes.install(Core)
    return Core, Manager


def added(core: Any, salt: str | None = None) -> Request:
    return core.preprocess_add_request(SimpleNamespace(cache_salt=salt))[0]


def test_requests_find_the_present_generation_alone(known: tuple[type[Any], type[Any]]) -> None:
    core_class, manager_class = known
    manager = manager_class()
    core = core_class(manager)
    waits, salted = added(core), added(core, "mine")
    assert manager.get_computed_blocks(waits) == [None]
    assert core.weightcast_next_generation(begin=False)
    assert core.weightcast_next_generation()
    assert manager.get_computed_blocks(waits) == manager.get_computed_blocks(added(core)) == ["1|"]
    assert manager.get_computed_blocks(salted) == manager.get_computed_blocks(added(core, "mine")) == ["1|mine"]


def test_a_manager_with_a_look_up_of_its_own_knows_no_generations(known: tuple[type[Any], type[Any]]) -> None:
    core_class, manager_class = known

    class Other(manager_class):  # type: ignore[misc, valid-type]
        def get_computed_blocks(self, request: Request) -> list[str | None]:
            return request.block_hashes

    core = core_class(Other())
    assert not core.weightcast_next_generation(begin=False)
    assert not core.weightcast_next_generation()
    assert added(core, "mine").block_hashes == ["mine"]


def test_a_manager_that_inherits_the_look_up_knows_generations(known: tuple[type[Any], type[Any]]) -> None:
    core_class, manager_class = known
    heir = type("Heir", (manager_class,), {})
    core = core_class(heir())
    assert core.weightcast_next_generation()
    assert added(core).block_hashes == ["1|"]


def test_a_scheduler_without_such_a_manager_takes_requests_as_before(known: tuple[type[Any], type[Any]]) -> None:
    core_class, _ = known
    core = core_class(None)
    core.scheduler = SimpleNamespace()
    assert added(core, "mine").block_hashes == ["mine"]
    assert not core.weightcast_next_generation()
