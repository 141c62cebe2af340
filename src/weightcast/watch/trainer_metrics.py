"""Prometheus metrics of the trainer's head (extra ``metrics``)."""

from __future__ import annotations

import functools
import threading
from typing import Any, get_args

from prometheus_client import REGISTRY, CollectorRegistry, Summary, start_http_server

from weightcast.errors import ConfigError
from weightcast.report import UpdateReport
from weightcast.watch.events import Event, TargetsChanged, UpdateEnded, UpdateOutcome, UpdateStarted
from weightcast.watch.instruments import UNKNOWN, counted, register, seconds_by, several_processes, shown_now
from weightcast.watch.listeners import Events

STATES = ("gone", "joining", "updating", "serving", "quarantined")


class _TrainerInstruments:
    """The metrics themselves.  No label grows with the number of processes or updates."""

    def __init__(self) -> None:
        self.update_seconds = seconds_by(
            "weightcast_update_seconds",
            "Seconds of an update by phase; engines' overlap the trainer's, and phase total is all of it.",
            ["phase", "transport"],
        )
        self.stall_seconds = Summary(
            "weightcast_stall_seconds",
            "Seconds in which an update kept a target from generating.",
            ["target"],
            registry=None,
        )
        self.bytes = counted(
            "weightcast_bytes",
            "Bytes of weights that engine ranks received in updates that they serve.",
            ["transport"],
        )
        self.version = shown_now(
            "weightcast_version", "Weight version that a target serves; NaN if it is unknown.", ["target"]
        )
        self.started = counted("weightcast_updates_started", "Updates that were begun.")
        self.finished = counted("weightcast_updates_finished", "Updates that are over, by outcome.", ["outcome"])
        self.targets = shown_now("weightcast_targets", "Targets in each state.", ["state"])
        self.changed_ratio = shown_now(
            "weightcast_changed_ratio",
            "Share of the bytes in tensors that the last update changed; NaN if it is unknown.",
        )
        self.changed_ratio.set(UNKNOWN)
        self.last_success = shown_now(
            "weightcast_last_success_timestamp_seconds",
            "Unix time at which an update last succeeded on every target; 0 before the first.",
        )
        # Series are looked up once: a look-up costs more than setting a value.  They exist from the start, since a
        # series that starts with its first event has no rate at that event.
        self.of_outcome = {outcome: self.finished.labels(outcome) for outcome in get_args(UpdateOutcome)}
        self.of_state = {state: self.targets.labels(state) for state in STATES}
        self.of_phase = functools.cache(self.update_seconds.labels)


class PrometheusMetrics:
    """Keeps the trainer's metrics; a listener for ``connect(on_event=...)``.

    Only the head counts, so every rank may be given the same arguments.  An object belongs to one updater at a time;
    a second updater in the process needs an object with a registry of its own.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, port: int | None = None, address: str = "127.0.0.1"
    ) -> None:
        """Registers nothing yet.

        Args:
            registry: Registry for the metrics.  None takes prometheus_client's own, or, with a port, a new one.
            port: Port of an exporter on the head, which serves ``/metrics``; 0 takes a free one.  None starts none.
            address: Address that the exporter listens on; ``0.0.0.0`` for all of this host.
        """
        self._registry = registry or (REGISTRY if port is None else CollectorRegistry())
        self._asked_port = port
        self._address = address
        self._made: _TrainerInstruments | None = None
        self._server: tuple[Any, threading.Thread] | None = None
        self._attached = False
        self._known: frozenset[str] = frozenset()

    @property
    def port(self) -> int | None:
        """Port of the exporter; None without one."""
        return self._server[0].server_port if self._server is not None else None

    def attach(self, events: Events) -> None:
        """As ``Attached.attach``; on the head, registers the metrics and starts the exporter.

        Raises:
            ConfigError: The registry has these metrics already, the port is taken, or another updater has this object.
        """
        if events.rank:
            return
        if self._attached:
            raise ConfigError(
                "this PrometheusMetrics belongs to another updater",
                hint="close that updater first, or pass another object with a registry of its own",
            )
        if self._made is None:
            made = _TrainerInstruments()
            register(made, self._registry)
            self._made = made
        if self._asked_port is not None:
            try:
                self._server = start_http_server(self._asked_port, self._address, self._registry)
            except OSError as error:
                raise ConfigError(
                    f"the metrics exporter cannot listen on {self._address}:{self._asked_port}: "
                    f"{error.strerror or error}",
                    hint="choose another port, or 0 for any free one",
                ) from error
        self._attached = True

    def detach(self) -> None:
        """As ``Attached.detach``; ends the exporter, and leaves the metrics in their registry."""
        self._attached = False
        if self._server is None:
            return
        server, thread = self._server
        self._server = None
        server.shutdown()
        server.server_close()
        thread.join()

    def __call__(self, event: Event) -> None:
        """As ``Listener``."""
        made = self._made
        if made is None:
            return
        match event:
            case UpdateStarted():
                made.started.inc()
            case TargetsChanged():
                self._targets(made, event)
            case UpdateEnded():
                if event.report is not None:
                    self._report(made, event.report)
                if event.outcome == "succeeded":
                    made.last_success.set_to_current_time()
                made.of_outcome[event.outcome].inc()
            case _:
                pass

    def _targets(self, made: _TrainerInstruments, event: TargetsChanged) -> None:
        targets = event.targets
        states: dict[str, int] = {state: 0 for state in STATES}
        for target in targets:
            states[target.state] += 1
            made.version.labels(target.url).set(UNKNOWN if target.version is None else target.version)
            made.stall_seconds.labels(target.url)
        for state, count in states.items():
            made.of_state[state].set(count)
        urls = frozenset(target.url for target in targets)
        for url in self._known - urls:
            if several_processes():
                made.version.labels(url).set(UNKNOWN)
            else:
                made.version.remove(url)
                made.stall_seconds.remove(url)
        self._known = urls

    def _report(self, made: _TrainerInstruments, report: UpdateReport) -> None:
        for phase, seconds in report.phases.items():
            if phase != "stall":
                made.of_phase(phase, report.transport).observe(seconds)
        made.of_phase("total", report.transport).observe(report.seconds)
        made.changed_ratio.set(UNKNOWN if report.changed_ratio is None else report.changed_ratio)
        served = [row for row in report.targets if row.status == "serving"]
        for row in served:
            made.stall_seconds.labels(row.url).observe(row.stall_s)
            made.bytes.labels(row.transport or report.transport).inc(report.bytes * row.ranks)
