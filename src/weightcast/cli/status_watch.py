"""``weightcast status --watch``: a live table on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from weightcast.cli.render import say
from weightcast.config import Target
from weightcast.page.words import digits, seconds, size
from weightcast.report import count_of, one_line
from weightcast.update.observe import Observation, Observer
from weightcast.wire.engine_info import UpdateStatus

if TYPE_CHECKING:
    from rich.table import Table

Show = Callable[[Sequence[Observation]], None]
_COLUMNS = ("engine", "state", "version", "staleness", "last update", "phases", "rate", "requests")
_LEFT_OUT_FIRST = ("phases", "rate", "requests", "last update", "staleness")
_GAP = 3
_ASKING = "asking"  # no answer yet
_REDRAW_S = 0.5
_SHOWN_S = 1e-4  # shorter phases are left out
_PHASES = ("wire", "load", "verify", "pause", "switch", "resume")
_STYLES = {"serving": "green", "updating": "cyan", "paused": "yellow", _ASKING: "dim"}


def watch(targets: Sequence[Target], *, interval_s: float, timeout_s: float, as_json: bool) -> None:
    """Observes engines until Ctrl-C, its normal end; ``as_json`` prints a document for each change, on one line."""
    looks = [_Look(target, interval_s=interval_s, timeout_s=timeout_s) for target in targets]
    with ExitStack() as stack:
        try:
            show = _live_table(stack) if sys.stdout.isatty() and not as_json else _Changes(as_json=as_json)
            for look in looks:
                look.start()
            while True:
                show([look.latest for look in looks])
                time.sleep(min(interval_s, _REDRAW_S))
        except KeyboardInterrupt:
            return


class _Look:
    """Observes one engine again and again on a thread of its own, so that a silent engine delays no other.

    The thread is a daemon: Ctrl-C need not wait for an answer.
    """

    def __init__(self, target: Target, *, interval_s: float, timeout_s: float) -> None:
        self.latest = Observation(url=target.url, state=_ASKING)
        self._observer = Observer(target, timeout_s=timeout_s)
        self._interval_s = interval_s

    def start(self) -> None:
        threading.Thread(target=self._run, name="weightcast-look", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.latest = self._observer.look()
            time.sleep(self._interval_s)


def _live_table(stack: ExitStack) -> Show:
    from rich.live import Live

    live, rates = stack.enter_context(Live(auto_refresh=False, vertical_overflow="visible")), TokenRates()
    return lambda found: live.update(table_of(found, rates, width=live.console.width), refresh=True)


class TokenRates:
    """Tokens per second of each engine, between two observations."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}
        self._rates: dict[str, float] = {}

    def __call__(self, found: Observation) -> float | None:
        """Returns the rate between the last two answers of an engine; None if there are not two."""
        requests = found.requests
        if requests is None or requests.tokens is None:
            self._before.pop(found.url, None)
            self._rates.pop(found.url, None)
            return None
        before = self._before.get(found.url)
        if before is None or requests.tokens < before[0]:
            self._before[found.url] = requests.tokens, requests.at
            self._rates.pop(found.url, None)
        elif requests.at > before[1]:
            self._rates[found.url] = (requests.tokens - before[0]) / (requests.at - before[1])
            self._before[found.url] = requests.tokens, requests.at
        return self._rates.get(found.url)


def table_of(found: Sequence[Observation], rates: TokenRates, *, width: int) -> Table:
    """Returns the table of one moment.

    ``rates`` remembers the tokens of each engine.  Less important columns are left out where they do not fit into the
    ``width`` of the terminal, in characters.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    newest = max((each.version for each in found if each.version is not None), default=None)
    rows = [_cells(each, newest, rates(each)) for each in found]
    shown = _fitting(rows, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in shown:
        table.add_column(name, no_wrap=name != "engine", overflow="fold")
    for each, row in zip(found, rows, strict=True):
        style = _STYLES.get(each.state, "red")
        table.add_row(*(Text(row[name], style=style if name == "state" else "") for name in shown))
    unwell = [each for each in found if each.message and each.state in ("no answer", "quarantined")]
    if unwell:
        table.caption = Text("\n".join(_named(each) for each in unwell))
        table.caption_justify = "left"
    return table


def _cells(found: Observation, newest: int | None, tokens_per_s: float | None) -> dict[str, str]:
    return {
        "engine": found.url.removeprefix("http://"),
        "state": found.state,
        "version": "?" if found.version is None else str(found.version),
        "staleness": staleness(found, newest),
        "last update": last_update(found.update),
        "phases": phases(found.update),
        "rate": rate(found.update),
        "requests": requests(found, tokens_per_s),
    }


def _fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    widths = {name: max([len(name), *(len(row[name]) for row in rows)]) for name in _COLUMNS}
    shown: list[str] = list(_COLUMNS)
    for name in _LEFT_OUT_FIRST:
        if sum(widths[each] + _GAP for each in shown) - _GAP > width:
            shown.remove(name)
    return shown


def _named(found: Observation) -> str:
    """Returns the message of an engine with its URL, which most messages name already."""
    words = one_line(found.message)
    return words if words.startswith(found.url) else f"{found.url}: {words}"


def staleness(found: Observation, newest: int | None) -> str:
    """Returns how far an engine is behind the newest version of all, and the age of its version."""
    if found.version is None or newest is None:
        return "-"
    behind = newest - found.version
    age = f", {duration(found.since_s)}" if found.since_s is not None else ""
    return f"{f'{behind} behind' if behind else 'newest'}{age}"


def duration(value: float) -> str:
    """Formats an age: ``42 s``, ``3 min``, ``5 h``, ``2 d``."""
    for limit, size_, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if value < limit:
            return f"{value / size_:.0f} {unit}"
    return f"{value / 86400:.0f} d"


def last_update(update: UpdateStatus | None) -> str:
    """Returns the time and the end of the last update."""
    if update is None:
        return "-"
    if update.outcome == "running":
        return f"to {update.version} for {seconds(update.seconds)}, {count_of(update.buckets, 'bucket')}"
    ended = "" if update.outcome == "committed" else f"{update.outcome} after "
    ago = f", {duration(update.ago_s)} ago" if update.ago_s is not None else ""
    return f"{ended}{seconds(update.seconds)}{ago}"


def phases(update: UpdateStatus | None) -> str:
    """Returns the seconds of the last update by phase."""
    if update is None:
        return "-"
    known = {name: took for name in _PHASES if (took := update.phases.get(name, 0.0)) >= _SHOWN_S}
    known |= {"stall": update.stall_s} if update.stall_s >= _SHOWN_S else {}
    return "  ".join(f"{name} {seconds(took)}" for name, took in known.items()) or "-"


def rate(update: UpdateStatus | None) -> str:
    """Returns the bytes of the last update per second."""
    return f"{size(update.bytes / update.seconds)}/s" if update is not None and update.bytes and update.seconds else "-"


def requests(found: Observation, tokens_per_s: float | None) -> str:
    """Returns the load of an engine."""
    if found.requests is None:
        return "-"
    waiting = f", {found.requests.waiting} wait" if found.requests.waiting else ""
    speed = f", {digits(tokens_per_s)} tok/s" if tokens_per_s is not None else ""
    return f"{found.requests.running} run{waiting}{speed}"


class _Changes:
    """Prints a line when the state, the version or the update of an engine is another than before."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._before: dict[str, tuple[object, ...]] = {}

    def __call__(self, found: Sequence[Observation]) -> None:
        newest = max((each.version for each in found if each.version is not None), default=None)
        for each in found:
            if each.state == _ASKING:
                continue
            update = each.update
            key = (
                each.state,
                each.version,
                None if update is None else (update.version, update.outcome, update.owner),
                each.message,
            )
            if self._before.get(each.url) == key:
                continue
            self._before[each.url] = key
            say(msgspec.json.encode(_fields(each, newest)).decode() if self._as_json else _line(each, newest))
        sys.stdout.flush()


def _line(found: Observation, newest: int | None) -> str:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    version = "?" if found.version is None else str(found.version)
    words = [f"{now} {found.url} {found.state}, version {version}"]
    if found.version is not None and newest is not None and newest > found.version:
        words.append(f"{newest - found.version} behind")
    if found.update is not None:
        words.append(f"last update {last_update(found.update)}: {phases(found.update)}")
    if found.message:
        words.append(one_line(found.message).removeprefix(f"{found.url}: "))
    return "; ".join(words)


def _fields(found: Observation, newest: int | None) -> dict[str, Any]:
    behind = None if found.version is None or newest is None else newest - found.version
    return {
        "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "url": found.url,
        "state": found.state,
        "engine": found.engine,
        "version": found.version,
        "behind": behind,
        "since_s": found.since_s,
        "update": found.update,
        "requests": found.requests,
        "message": one_line(found.message),
    }
