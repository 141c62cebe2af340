"""Cases of the fault matrix: each transport and each kind of failure once.  ``make faults`` plays all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cases import all_cases
from tests.faults.kinds import KINDS
from tests.faults.world import World
from tests.helpers.stolen import Inexcusable
from weightcast.comm import nixl

pytestmark = [pytest.mark.deadlines, pytest.mark.short]

# Each victim that was killed is started again, and gets the last update of its case.
OF_EACH_TRANSPORT = ("engine, kill at middle bucket", "memory, flip at middle bucket")
OTHERS = [
    "native, ipc: engine rank, kill at middle bucket",
    "native, ipc: engine, stop at after",
    "native, ipc: engine rank, tear at commit",
    "native, ipc: network, drop at middle bucket",
    "native, ipc: network, lose answer at commit",
    "native, broadcast: network, refuse at join",
    "native, broadcast: gather, flip at middle bucket",
    "native, broadcast: trainer rank, kill at middle bucket",
    "native, broadcast: trainer head, kill at last bucket",
    "sglang, ipc: trainer rank, kill at middle bucket",
    "sglang, broadcast: network, flip at middle bucket",
    "sglang, disk: engine, kill at middle bucket",
    "sglang, disk: gather, flip at middle bucket",
]
NAMES = [f"native, {way}: {case}" for way in KINDS["native"].transports for case in OF_EACH_TRANSPORT] + OTHERS
# An engine that was just started takes two seconds for its first update on a slow machine beside other tests.
LIMITS = {"deadline_s": 4.0, "patience_s": 30.0}
CASES = {case.name: case for case in all_cases()}


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, World]]:
    made: dict[str, World] = {}
    yield made
    left = [words for world in made.values() for words in world.close()]
    assert not left


@pytest.mark.parametrize("name", NAMES)
def test_whatever_fails_engines_serve_whole_versions_and_nobody_waits_too_long(
    worlds: dict[str, World], name: str
) -> None:
    case = CASES[name]
    if "rdma" in case.transport and nixl.missing():
        pytest.skip(nixl.missing())
    if case.kind not in worlds:
        worlds[case.kind] = World(case.kind, **LIMITS)
    result = worlds[case.kind].play(case)
    if result.wrong:
        worlds.pop(case.kind).close()  # its leftovers may spoil the next case
    if not result.only_late:
        raise Inexcusable(result)
    assert not result.wrong, result
    assert result.outcome != "no answer"
