"""Asks a running engine how it is, cheaply enough to be repeated every second."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightcast.adapters.registry import all_kinds, kind_named
from weightcast.adapters.requests import NO_ROUTE
from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import TargetRejected, WeightcastError, WireError
from weightcast.update.recognise import recognise
from weightcast.wire.engine_info import EngineInfo, EngineStatus, UpdateStatus, decode_status

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{[^}]*\})? +(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The load of an engine, from its own metrics, at a monotonic time.

    ``tokens`` counts those generated since its start; None if it does not count them.
    """

    running: int
    waiting: int
    tokens: float | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One engine at one moment.

    Attributes:
        state: ``serving``, ``paused``, ``updating``, ``quarantined`` or ``no answer``.
        since_s: Seconds since it began to serve that version; None if it does not say.
        update: The update that runs now, or the last one; None if it does not say, or there was none.
        requests: Its load; None if it exports no metrics.
    """

    url: str
    state: str
    engine: str = ""
    version: int | None = None
    since_s: float | None = None
    update: UpdateStatus | None = None
    requests: Requests | None = None
    message: str = ""


class Observer:
    """Observes one engine.  Not thread-safe."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        """Nothing is asked yet; ``timeout_s`` limits each answer.  Raises as ``Client``."""
        self._client = Client(target, timeout_s=timeout_s)
        self._is_ours = target.engine == "auto" or kind_named(target.engine).has_receiver
        self._in_short = self._is_ours
        self._has_metrics = True

    def look(self) -> Observation:
        """Asks the engine.  An engine that does not answer is an observation too."""
        url = self._client.target.url
        try:
            status = self._status()
            return _observed(url, status or recognise(self._client), self._requests())
        except WeightcastError as error:
            self._in_short, self._has_metrics = self._is_ours, True  # it may come back as another one
            return Observation(url=url, state="no answer", message=str(error))

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _status(self) -> EngineStatus | None:
        """Asks an engine with our receiver; None for one that has no such route."""
        if not self._in_short:
            return None
        try:
            return decode_status(self._client.get_json("/weightcast/status"))
        except TargetRejected as error:
            if error.status not in NO_ROUTE:
                raise
        except WireError:  # some servers answer every path
            pass
        self._in_short = False
        return None

    def _requests(self) -> Requests | None:
        """Reads the engine's own metrics; None if it has none, or not where they are expected."""
        if not self._has_metrics:
            return None
        try:
            return parse_requests(self._client.get_json("/metrics"), at=time.monotonic())
        except TargetRejected:
            self._has_metrics = False
            return None


def parse_requests(metrics: bytes, *, at: float) -> Requests | None:
    """Reads the load of an engine out of Prometheus' text format; None if it is not there.

    An engine's load is a sum over labels, such as data-parallel replicas and models.
    """
    loads = [kind.load for kind in all_kinds() if kind.load is not None]
    known = {name for load in loads for name in (load.running, load.waiting, load.tokens)}
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics.decode(errors="replace")):
        if name in known:
            try:
                sums[name] = sums.get(name, 0.0) + float(value)
            except ValueError:
                continue
    running = _first(sums, [load.running for load in loads])
    waiting = _first(sums, [load.waiting for load in loads])
    tokens = _first(sums, [load.tokens for load in loads])
    if running is None:
        return None
    return Requests(running=int(running), waiting=int(waiting or 0.0), tokens=tokens, at=at)


def _first(sums: Mapping[str, float], names: Sequence[str]) -> float | None:
    found = next((sums[name] for name in names if name in sums), None)
    return found if found is not None and math.isfinite(found) else None


def _observed(url: str, found: EngineStatus | EngineInfo, requests: Requests | None) -> Observation:
    status = found if isinstance(found, EngineStatus) else None
    return Observation(
        url=url,
        state="paused" if found.paused and found.state == "serving" else found.state,
        engine=found.engine,
        version=found.version,
        since_s=None if status is None else status.since_s,
        update=None if status is None else status.update,
        requests=requests,
        message=found.message,
    )
