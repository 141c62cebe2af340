"""Bytes on the links between hosts, by each way, and the ways that are chosen by them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.transports.test_direct_ways import engine, topology
from weightcast.comm.ipc import host_id
from weightcast.transports.link_bytes import by_broadcast, by_buckets, by_messages, in_chains, mixed
from weightcast.transports.preflight import choose_transport
from weightcast.transports.topology import Topology
from weightcast.wire.layout import TensorSpec

SPECS = (TensorSpec(name="w", dtype="uint8", shape=(80, 10)),)
FSDP: dict[str, Any] = {"hosts": ("a", "a", "b", "b"), "whole_on": lambda: ()}
HSDP: dict[str, Any] = {"hosts": ("a", "a", "b", "b"), "whole_on": lambda: ("a", "b")}


def fleet(trainers: int, *hosts: str, device: str = "cpu", tp: int = 1, **more: Any) -> Topology:
    """An engine on each of the hosts."""

    def places(side: str, count: int) -> list[str]:
        return [device if device == "cpu" else f"GPU-{side}-{number}" for number in range(count)]

    engines = [engine(*places(f"{number}", tp), host=host) for number, host in enumerate(hosts)]
    return topology(places("trainer", trainers), *engines, specs=SPECS, **more)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        # As benchmarks/cells.py counts them on TCP.
        (fleet(1, *"cde"), {"broadcast": 1600, "messages": 2400, "relay": 800}),
        (fleet(1, *"cdefghij"), {"broadcast": 3200, "messages": 6400, "relay": 800}),
        # NCCL enters each host once, and both ranks of an engine get their halves from the trainer.
        (fleet(1, *"cde", device="GPU"), {"broadcast": 800, "messages": 2400, "relay": 800}),
        (fleet(1, "c", device="GPU", tp=2), {"broadcast": 800, "messages": 800, "relay": 800}),
        (fleet(1, "c", tp=2), {"broadcast": 1600, "messages": 800, "relay": 800}),
        (fleet(1, *"cd", cell_ranks=1), {"broadcast": 1600, "messages": 1600, "relay": 1600}),
        # Trainer ranks on two hosts send a half each.
        (fleet(4, *"cd", **FSDP), {"broadcast": 1600, "messages": 800, "relay": 800}),
        (fleet(4, *"ab", **FSDP), {"buckets": 400, "messages": 400, "mixed": 400}),
        (fleet(4, *"ab", **HSDP), {"buckets": 0, "messages": 400, "mixed": 0}),
        (fleet(2, host_id(), host_id()), {"broadcast": 0, "messages": 0, "relay": 0, "buckets": 0, "mixed": 0}),
    ],
)
def test_busiest_link_of_each_way(place: Topology, expected: dict[str, int]) -> None:
    ways = {
        "broadcast": by_broadcast,
        "buckets": by_buckets,
        "messages": by_messages,
        "mixed": mixed,
        "relay": in_chains,
    }
    assert {name: ways[name](place).busiest for name in expected} == expected


def test_links_of_a_chain_wait_for_each_other_but_not_within_a_host() -> None:
    found = [in_chains(fleet(1, *hosts)) for hosts in ("c", "cd", "cde", "cdef", "ccddee")]
    assert [one.busiest for one in found] == [800] * 5
    assert [one.cost for one in found] == [800, 800, 1200, 1600, 1200]


def test_vectors_are_kept_whole_by_every_rank() -> None:
    place = fleet(1, "c", tp=2)
    vector = TensorSpec(name="v", dtype="uint8", shape=(30,))
    more = topology(["cpu"], *place.infos.values(), specs=(*SPECS, vector))
    assert by_messages(more).busiest == 800 + 2 * 30
    assert by_messages(more).busiest_link == f"out of host {host_id()}"


@pytest.mark.parametrize(
    ("place", "direct", "auto"),
    [
        (fleet(1, "c"), "messages", "broadcast"),  # nothing to save
        (fleet(1, *"cd"), "relay", "direct relay"),
        (fleet(1, *"cde"), "relay", "broadcast"),  # links of a long chain wait for each other
        (fleet(1, *"cd", device="GPU"), "messages", "broadcast"),
        (fleet(1, "c", tp=2), "messages", "direct messages"),
        (fleet(1, *"cd", cell_ranks=1), "messages", "broadcast"),
        (fleet(4, *"ab", **FSDP), "mixed", "ipc"),
        (fleet(4, *"ab", **HSDP), "memory", "ipc"),
        (fleet(4, *"cd", **FSDP), "messages", "direct messages"),
        (fleet(4, *"cdef", **FSDP), "messages", "broadcast"),
        (fleet(2, host_id(), host_id()), "memory", "ipc"),
        (fleet(2, host_id(), host_id(), unmapped={"http://e0"}), "mixed", "ipc"),
    ],
)
def test_fewest_bytes_on_the_busiest_link_decide(place: Topology, direct: str, auto: str) -> None:
    assert choose_transport("direct", place).variant == direct
    spec = choose_transport("auto", place)
    assert f"{spec.name} {spec.variant}".strip() == auto
