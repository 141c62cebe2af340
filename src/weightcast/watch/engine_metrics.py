"""Prometheus metrics of one engine, for the engine's own ``/metrics``."""

from __future__ import annotations

import functools
from typing import get_args

from prometheus_client import CollectorRegistry

from weightcast.watch.instruments import UNKNOWN, counted, register, seconds_by, shown_now
from weightcast.watch.sessions import Answered, SessionOutcome, SessionRecord, SessionWatcher

STATES = ("serving", "updating", "quarantined")


class _EngineInstruments:
    """The metrics themselves; ``model_name`` is the label that vLLM and SGLang use."""

    def __init__(self) -> None:
        self.update_seconds = seconds_by(
            "weightcast_engine_update_seconds",
            "Seconds of a committed update by phase, on the slowest rank; phase total is all of it.",
            ["model_name", "phase", "transport"],
        )
        self.stall_seconds = seconds_by(
            "weightcast_engine_stall_seconds",
            "Seconds in which a committed update kept the engine from generating.",
            ["model_name"],
        )
        self.received = counted(
            "weightcast_engine_received_bytes",
            "Bytes of weights that each rank has received, by transport.",
            ["model_name", "transport"],
        )
        self.started = counted("weightcast_engine_updates_started", "Updates that were begun.", ["model_name"])
        self.finished = counted(
            "weightcast_engine_updates_finished", "Updates that are over, by outcome.", ["model_name", "outcome"]
        )
        self.version = shown_now(
            "weightcast_engine_version", "Weight version that the engine serves; NaN if it is unknown.", ["model_name"]
        )
        self.state = shown_now(
            "weightcast_engine_state", "1 for the state that the engine is in.", ["model_name", "state"]
        )
        self.last_update = shown_now(
            "weightcast_engine_last_update_timestamp_seconds",
            "Unix time of the last committed update; 0 before the first.",
            ["model_name"],
        )


class EngineMetrics(SessionWatcher):
    """Keeps an engine's metrics."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str, version: int | None) -> None:
        """Registers the metrics in the registry of an engine's ``/metrics``; ``ConfigError`` if it has them already."""
        made = self._made = _EngineInstruments()
        register(made, registry)
        self._model = model_name
        # Series are looked up once: a look-up costs more than setting a value.
        self._started = made.started.labels(model_name)
        self._stall_seconds = made.stall_seconds.labels(model_name)
        self._last_update = made.last_update.labels(model_name)
        self._last_update.set(0)
        self._finished = {outcome: made.finished.labels(model_name, outcome) for outcome in get_args(SessionOutcome)}
        self._version = made.version.labels(model_name)
        self._states = {state: made.state.labels(model_name, state) for state in STATES}
        self._update_seconds = functools.cache(functools.partial(made.update_seconds.labels, model_name))
        self._now("serving", version)

    def opened(self, session: SessionRecord) -> None:
        """As ``SessionWatcher.opened``."""
        self._started.inc()

    def answered(self, session: SessionRecord | None, answered: Answered) -> None:
        """As ``SessionWatcher.answered``."""
        if answered.ok and answered.bytes:
            self._made.received.labels(self._model, answered.transport).inc(answered.bytes)

    def ended(self, session: SessionRecord) -> None:
        """As ``SessionWatcher.ended``."""
        assert session.outcome is not None
        assert session.ended is not None
        self._finished[session.outcome].inc()
        if session.outcome != "committed":
            return
        for phase, seconds in session.phases().items():
            self._update_seconds(phase, session.transport).observe(seconds)
        self._update_seconds("total", session.transport).observe(session.ended - session.began)
        self._stall_seconds.observe(session.stall_s)
        self._last_update.set_to_current_time()

    def state_changed(self, session: SessionRecord | None, state: str, version: int | None, reason: str) -> None:
        """As ``SessionWatcher.state_changed``."""
        self._now(state, version)

    def _now(self, state: str, version: int | None) -> None:
        for name, series in self._states.items():
            series.set(int(name == state))
        self._version.set(UNKNOWN if version is None else version)
