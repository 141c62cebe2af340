"""Methods of updating as a rig runs them: their two halves, the processes of a case, the times of a turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from weightcast.errors import WeightcastError
from weightcast.lab.bench.decoding import Decoding
from weightcast.lab.bench.raw import Pipe, RawGroup
from weightcast.lab.bench.shapes import ModelShape
from weightcast.lab.bench.synthetic import SyntheticEngine

ProcessPlacement = Literal["colocated", "disaggregated"]


class MeasuringFailed(WeightcastError):
    """A measured process failed or hung; all processes were killed."""


class WrongWeights(MeasuringFailed):
    """An engine kept other weights than were sent; the processes still run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Processes and devices of a case.

    Attributes:
        placement: ``colocated``: engine i on trainer i's device. ``disaggregated``: on devices of their own.
        trainers: Number of trainer processes; the weights are sharded over them by rows.
        engines: Number of engine processes; each keeps the whole model.
        threads: Number of torch threads in each process on a CPU.
        generate: True if engines generate all the time, so that a stall is measured and not only computed.
    """

    model: str
    placement: ProcessPlacement
    trainers: int
    engines: int
    device: Literal["cpu", "cuda"]
    threads: int = 1
    generate: bool = False

    def device_of(self, role: str, rank: int) -> torch.device:
        """Returns the device of one process."""
        if self.device == "cpu":
            return torch.device("cpu")
        first = self.trainers if role == "engine" and self.placement == "disaggregated" else 0
        return torch.device("cuda", first + rank)


@dataclass(slots=True, kw_only=True)
class Side:
    """The process that a half runs in.

    Attributes:
        rank: Rank among the processes of the same role.
        pipes: Pipes to the processes of the other role, by rank.
        store_port: Port of the store for the rendezvous of groups.
        serial: Number of preparations so far, the same in all processes.
    """

    layout: Layout
    rank: int
    device: torch.device
    shape: ModelShape
    pipes: list[Pipe]
    store_port: int
    serial: int = 0
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def group(self, name: str, *, rank: int, size: int) -> RawGroup:
        """Makes a plain torch group."""
        # No name is used twice: the store keeps the addresses of an earlier group's members.
        name = f"{name}/{self.serial}"
        return RawGroup(port=self.store_port, name=name, rank=rank, size=size, device=self.device)

    def count(self, what: str, number: int = 1) -> None:
        """Adds to a count in the result."""
        self.counts[what] = self.counts.get(what, 0) + number


@dataclass(slots=True, kw_only=True)
class TrainerSide(Side):
    """A trainer process: ``model`` has the checkpoint's names; DTensors if there is more than one trainer."""

    model: nn.Module
    version: int = 0


@dataclass(slots=True, kw_only=True)
class EngineSide(Side):
    """An engine process: ``engine`` has the live parameters, ``decoding`` generates with them meanwhile.

    ``served`` has what several methods share: a model's parameters have one second set.
    """

    engine: SyntheticEngine
    decoding: Decoding
    served: dict[object, Any] = field(default_factory=dict[object, Any])


class Half(Protocol):
    """One side of a method; ``prepare`` runs before its turns and ``close`` after them."""

    def prepare(self) -> None:
        """Makes groups, buffers and registrations, once."""
        ...

    def update(self, version: int) -> dict[str, float] | None:
        """Runs one turn and returns figures for the result, if any.

        An engine's half may return ``usable_at`` (seconds of ``time.monotonic``) if its weights were complete earlier.
        """
        ...

    def close(self) -> None:
        """Releases everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way of updating, or a limit.

    Attributes:
        trainer: ``module:Class`` of the trainer's half; ``engine`` likewise.
        options: Keyword arguments of both halves.
        emulated: Parts that are our code and not the named project's own.
        writes: False for limits, which move bytes and change no weights.
        pauses: True if the rig must pause the engines during the whole turn.
    """

    name: str
    trainer: str
    engine: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    emulated: tuple[str, ...] = ()
    writes: bool = True
    pauses: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Times of one turn.

    Attributes:
        usable_s: Seconds until the last engine's live parameters were complete.
        returned_s: Seconds until the last trainer process returned.
        stall_s: Longest time in which an engine generated nothing, in seconds.
        extra: Figures that the halves returned; the largest over the processes.
    """

    usable_s: float
    returned_s: float
    stall_s: float
    extra: dict[str, float]
