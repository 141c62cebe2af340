"""The fault matrix: every fault at every step, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from tests.faults.kinds import KINDS, Kind, Transport

Step = Literal["open", "join", "first bucket", "middle bucket", "last bucket", "close", "commit", "after"]
Subject = Literal["engine", "engine rank", "trainer head", "trainer rank", "network", "memory", "gather", "replica"]
Fault = Literal[
    "kill", "stop", "delay", "drop", "refuse", "cut", "lose answer", "flip", "flip answer", "tear", "tear twice"
]

WITH_GROUP: tuple[Transport, ...] = ("broadcast", "direct messages", "direct mixed", "direct relay")
STEPS: tuple[Step, ...] = get_args(Step)
OF_PROCESSES: tuple[Fault, ...] = ("kill", "stop", "delay")
OF_SWITCHES: tuple[Fault, ...] = ("tear", "tear twice")
IN_TRAINER: tuple[Subject, ...] = ("memory", "gather", "replica")
OF_NETWORKS: tuple[Fault, ...] = ("delay", "drop", "refuse", "cut", "lose answer", "flip", "flip answer")
WORDS: dict[Fault, str] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP until all is over",
    "delay": "held up for a part of the deadline, which nothing must mind",
    "drop": "from here on every byte is swallowed, both ways",
    "refuse": "from here on every connection is reset",
    "cut": "this connection is reset before the message arrives",
    "lose answer": "the message arrives, its answer does not",
    "flip": "one bit of the message, of the bucket in memory, of a received shard, or of one rank's replica is another",
    "flip answer": "one bit of the answer is another",
    "tear": "its switch of weights fails half way",
    "tear twice": "its switch of weights fails half way, and so does the way back",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault.

    Attributes:
        kind: Of engine.
        transport: How weights travel.
        on: What is struck.
        fault: How.
        step: When: as this message of the first update passes by; ``after`` is the Open of the next one.
    """

    kind: str
    transport: Transport
    on: Subject
    fault: Fault
    step: Step

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.transport}: {self.on}, {self.fault} at {self.step}"

    @property
    def reads_shards(self) -> bool:
        """True if engines get each trainer rank's own shards, and nothing is gathered."""
        return self.transport == "rdma" or self.transport.startswith("direct")


def all_cases() -> Iterator[Case]:
    """Yields the cases of the matrix, row by row."""
    for kind in KINDS.values():
        for transport in kind.transports:
            for on, fault in _rows():
                for step in STEPS:
                    case = Case(kind=kind.name, transport=transport, on=on, fault=fault, step=step)
                    if _makes_sense(case) and _is_played(kind, case):
                        yield case


def _makes_sense(case: Case) -> bool:
    if case.fault in OF_SWITCHES:
        return case.step == "commit" and KINDS[case.kind].can_tear
    if case.step == "join" and case.transport not in WITH_GROUP:
        return False  # there is no rendezvous
    if case.on == "gather" and case.reads_shards:
        return False  # nothing is gathered
    if case.transport == "direct shards" and case.step in ("first bucket", "last bucket"):
        return False  # all is one bucket
    if case.step == "close" and not KINDS[case.kind].stock:
        return False  # the last bucket and Close have one answer
    if case.step == "join" and KINDS[case.kind].stock and case.on.startswith("trainer"):
        return False  # the engine retries for half an hour and must be restarted
    if case.on == "replica":
        return case.step == "middle bucket"  # it differs all the time
    return case.on not in IN_TRAINER or case.step.endswith("bucket")


def _is_played(kind: Kind, case: Case) -> bool:
    """False for cases that another case covers or that the kind does not support."""
    if case.step == "middle bucket":
        return _is_played_half_way(kind, case)
    if case.transport == "disk":
        return False  # engines are asked once to load a folder; the other steps are those of ipc
    if case.reads_shards and case.step not in ("join", "first bucket", "last bucket"):
        return case.fault == "kill"  # a session begins and ends in the same way as over ipc
    if case.fault == "delay" and case.on != "network":
        return False
    if case.fault == "stop" and case.on in ("trainer head", "trainer rank") and case.step not in ("open", "commit"):
        return False
    if case.step == "first bucket" or (case.step == "last bucket" and kind.stock):
        return not kind.stock and not kind.costly and case.on in ("engine", "memory")
    if case.fault in ("cut", "flip answer") and not kind.stock:
        return case.step == "commit" and not kind.costly
    if kind.costly:
        return _is_played_where_it_costs(case)
    return not kind.stock or _is_played_where_it_is_stock(case)


def _is_played_half_way(kind: Kind, case: Case) -> bool:
    if kind.stock:
        return case.on != "memory" and case.fault != "cut"
    if not kind.costly:
        return True
    if case.on in ("engine rank", "trainer head", "trainer rank"):
        return case.fault == ("kill" if case.transport in WITH_GROUP else "stop")
    return case.fault != "cut" and not (case.on == "engine" and case.fault == "kill" and case.transport != "ipc")


def _is_played_where_it_costs(case: Case) -> bool:
    if case.on == "engine":  # every step is struck once
        return (case.fault == "kill") == (case.step in _ENDS[case.transport])
    return case.on == "network" and case.fault in ("drop", "refuse")


def _is_played_where_it_is_stock(case: Case) -> bool:
    if case.step == "after":  # the Open of another update
        return case.on == "engine" or case.fault == "drop"
    if case.on == "engine" or case.fault in ("drop", "refuse"):
        return True
    if case.on == "network" and case.step == "join":
        return case.fault != "cut"
    if case.fault == "lose answer":
        return case.step == "commit"
    return case.transport == "broadcast" and (
        case.fault == "delay" or (case.on, case.fault) == ("trainer head", "kill")
    )


# Where a costly engine is ended; elsewhere it is stopped.
_ENDS: dict[str, tuple[Step, ...]] = {"ipc": ("open", "commit"), "broadcast": ("join", "last bucket", "after")}


def _rows() -> Iterator[tuple[Subject, Fault]]:
    processes: tuple[Subject, ...] = ("engine", "engine rank", "trainer head", "trainer rank")
    for on in processes:
        for fault in OF_PROCESSES:
            yield on, fault
    for fault in OF_NETWORKS:
        yield "network", fault
    for on in IN_TRAINER:
        yield on, "flip"
    for fault in OF_SWITCHES:
        yield "engine rank", fault
