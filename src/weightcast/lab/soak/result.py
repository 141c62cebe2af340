"""Settings and result of a soak."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a soak.

    Attributes:
        updates: Number of updates that must succeed.
        seconds: Shortest running time; 0 if only ``updates`` counts.
        clients: Number of requests kept running.
        fault_rate: Share of the updates that get a fault, from 0 to 1.
        timeout_s: Deadline of each single wait, in seconds.
    """

    model: Path
    updates: int
    seconds: float
    engines: int
    tp: int
    clients: int
    fault_rate: float
    seed: int
    bucket_bytes: int
    timeout_s: float
    folder: Path


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a soak; everything after ``answers_spanning`` should be zero or empty.

    Attributes:
        updates: Updates after which every engine served the new version.
        attempts: Updates that were begun.
        faults: Number of faults by kind.
        transports: Successful updates by transport.
        modes: Attempts by pause mode.
        engines_started: Engine processes started, including the first ones.
        trainers_started: Trainer processes started, including the first one.
        answers_dropped: Requests that ended with their engine, or were refused by it.
        answers_checked: Completions recomputed with the weights of the versions that they claim.
        answers_spanning: Checked completions whose tokens came from several versions.
        hangs: Waits for a trainer, an engine or a request that passed their deadline.
        mixed: Engines that did not serve one whole version, answers that no version explains, and corrupted updates
            that an engine accepted.
        failures: Updates that failed without a fault.
        leaked_processes: Processes that outlived their parent.
        leaked_segments: Names in /dev/shm that a process of the soak opened and that remain after all have ended.
        leaked_buffers: Shared buffers that an engine still held after the last update.
        leaked_fds: File descriptors gained by the first engine.
        slope_bytes_per_update: Memory gained by the first engine in the second half, by least squares.
        growing: Processes whose descriptors, threads or memory grew beyond noise.
        details: Descriptions of the first 20 errors.
    """

    updates: int
    attempts: int
    seconds: float
    faults: dict[str, int]
    transports: dict[str, int]
    modes: dict[str, int]
    engines_started: int
    trainers_started: int
    answers: int
    answers_dropped: int
    answers_checked: int
    answers_spanning: int
    hangs: int
    mixed: int
    failures: int
    leaked_processes: int
    leaked_segments: int
    leaked_buffers: int
    leaked_fds: int
    slope_bytes_per_update: int
    growing: list[str]
    details: list[str]

    @property
    def ok(self) -> bool:
        """True if there was no error without a fault, and at least one answer was checked."""
        bad = self.hangs + self.mixed + self.failures + self.leaked_processes + self.leaked_segments
        return not (bad + self.leaked_buffers + len(self.growing)) and self.answers_checked > 0
