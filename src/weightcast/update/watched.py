"""Emits the beginning and the end of an update, on every trainer rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from weightcast.errors import UpdateFailed
from weightcast.fleet.health import TargetHealth
from weightcast.report import UpdateReport
from weightcast.watch.events import Events, Outcome, TargetNow, TargetsChanged, UpdateEnded, UpdateStarted

Health = Callable[[], Sequence[TargetHealth]]


def run_watched(
    update: Callable[[], UpdateReport],
    events: Events,
    *,
    version: int,
    transport: str,
    targets: Sequence[str],
    health: Health,
) -> UpdateReport:
    """Runs an update and emits ``UpdateStarted``, ``TargetsChanged`` and ``UpdateEnded`` around it.

    Args:
        update: Runs the update, and returns its report or raises.
        events: The events of this process.
        version: The weight version.
        transport: Name of the transport.
        targets: URLs of the targets that are to take part; empty on ranks other than the head.
        health: Returns the recorded health of all targets.
    """
    rank = events.rank
    started = time.monotonic()
    events.emit(
        UpdateStarted(
            version=version, transport=transport, targets=tuple(targets), rank=rank, at=started, time_s=time.time()
        )
    )

    def end(outcome: Outcome, report: UpdateReport | None, error: BaseException | None = None) -> None:
        tell_targets(events, health)
        events.emit(
            UpdateEnded(
                version=version if report is None else report.version,
                transport=transport,
                outcome=outcome,
                report=report,
                error="" if error is None else str(error),
                error_kind="" if error is None else type(error).__name__,
                rank=rank,
                at=time.monotonic(),
            )
        )

    try:
        report = update()
    except BaseException as error:
        end("failed", error.report if isinstance(error, UpdateFailed) else None, error)
        raise
    end("succeeded" if report.ok else "partial", report)
    return report


def tell_targets(events: Events, health: Health) -> None:
    """Emits ``TargetsChanged``, on the head."""
    if events.rank:
        return
    targets = tuple(
        TargetNow(url=row.url, state=row.state, active=row.active, version=row.version, reason=row.reason)
        for row in health()
    )
    events.emit(TargetsChanged(targets=targets, at=time.monotonic()))
