"""Checks of the pause modes with requests that run while the weights change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightcast.config import PauseMode
from weightcast.errors import ConfigError, UpdateFailed, WeightcastError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.lab.conformance.answers import Stream
from weightcast.lab.conformance.engine import CheckpointName, EngineUnderTest
from weightcast.lab.conformance.failures import keeps_the_old_version
from weightcast.lab.conformance.result import Failed, NotApplicable, need
from weightcast.update.updater import WeightUpdater

_SEEN = 4  # tokens of every request that have come when the update begins
_TRIES = 4


def pauses_by(mode: PauseMode) -> Callable[[EngineUnderTest], str]:
    """Returns the check that an update with this pause mode keeps the mode's promise to running requests."""

    def check(engine: EngineUnderTest) -> str:
        if mode in engine.first.no_pause:
            raise NotApplicable(f"the engine refuses this mode: {engine.first.no_pause[mode]}")
        if engine.serves is None:
            engine.to("A")
        for _ in range(_TRIES):
            old, new = engine.serves, engine.other
            assert old is not None
            streams = _update_under_load(engine, new, mode)
            engine.says(new)  # no new request may reuse what the old weights have computed
            struck = _PROMISES[mode](engine, streams, old, new)
            if struck:
                return f"{struck} of {len(streams)} requests were running; {_KEPT[mode]}"
        raise NotApplicable(f"all requests of {engine.long_count} tokens were over before the switch")

    return check


def _update_under_load(engine: EngineUnderTest, name: CheckpointName, mode: PauseMode) -> list[Stream]:
    """Updates the engine while it answers several requests, and returns these when they are over.

    They begin in the middle of the update and so are there at its switch, or before it if that pauses the engine.
    """
    streams: list[Stream] = []

    def begin(done: int, total: int) -> None:
        if not streams and 2 * done >= total:
            streams.extend(engine.long_streams())
            for stream in streams:
                stream.wait_for(_SEEN)

    staged = keeps_the_old_version(engine)
    with CheckpointExporter(engine.folders[name]) as exporter:
        try:
            updater = engine.connect(exporter, pause=mode, progress=begin if staged else None)
        except ConfigError as error:
            raise NotApplicable(f"weightcast refuses this mode for it: {error}") from None
        with updater:
            if not staged:
                begin(0, 0)
            _update(engine, updater, name)
    need(streams, "the update was over before a request was sent")
    return [stream.ended() for stream in streams]


def _update(engine: EngineUnderTest, updater: WeightUpdater, name: CheckpointName) -> None:
    before, engine.serves = engine.serves, None
    try:
        report = updater.update(version=engine.next_version())
    except (ConfigError, UpdateFailed) as error:
        if _refused_before_it_moved(error):
            engine.serves = before
            raise NotApplicable(f"weightcast refuses this mode for it: {error}") from None
        raise
    need(report.ok, f"the update was not taken: {report}")
    engine.serves = name


def _refused_before_it_moved(error: WeightcastError) -> bool:
    if isinstance(error, UpdateFailed):
        rows = error.report.targets
        return all(row.status == "untouched" for row in rows) and "pause=" in str(error)
    return True


def _dropped(engine: EngineUnderTest, streams: Sequence[Stream], old: CheckpointName, new: CheckpointName) -> int:
    for stream, before in zip(streams, _before(engine, old), strict=True):
        if engine.repeatable:
            continue
        tokens = stream.tokens
        need(tokens == before[: len(tokens)], f"a dropped request has tokens that are not those of {old}")
    return sum(len(stream.tokens) < stream.count for stream in streams)


def _recomputed(engine: EngineUnderTest, streams: Sequence[Stream], old: CheckpointName, new: CheckpointName) -> int:
    pairs = [
        (stream, _common(stream.whole(), before)) for stream, before in zip(streams, _before(engine, old), strict=True)
    ]
    if engine.repeatable:
        return len(streams)
    struck = [(stream, kept) for stream, kept in pairs if kept < stream.count]

    def go_on(stream: Stream, kept: int) -> Stream:
        return engine.stream([*stream.prompt, *stream.tokens[:kept]], stream.count - kept)

    alone = [go_on(*each).whole() for each in struck]
    if any(rest != stream.tokens[kept:] for rest, (stream, kept) in zip(alone, struck, strict=True)):
        # Two tokens may be so near that the number of requests in a batch decides.
        together = [rest.whole() for rest in [go_on(*each) for each in struck]]
    else:
        together = alone
    for (stream, kept), *rests in zip(struck, alone, together, strict=True):
        came = stream.tokens[kept:]
        agreeing = max(_common(rest, came) for rest in rests)
        need(
            agreeing == len(came),
            f"after {kept} tokens of {old} came {agreeing} that {new} would give and then others: "
            "the KV cache was not computed again",
        )
    return len(struck)


def _kept_in_place(engine: EngineUnderTest, streams: Sequence[Stream], old: CheckpointName, new: CheckpointName) -> int:
    struck = 0
    for stream, before in zip(streams, _before(engine, old), strict=True):
        tokens = stream.whole()
        kept = _common(tokens, before)
        need(engine.repeatable or kept >= _SEEN, f"the first {_SEEN} tokens are not those of {old}")
        struck += kept < len(tokens)
    return struck


def _waited_for(engine: EngineUnderTest, streams: Sequence[Stream], old: CheckpointName, new: CheckpointName) -> int:
    for stream, before in zip(streams, _before(engine, old), strict=True):
        tokens = stream.whole()
        kept = _common(tokens, before)
        need(engine.repeatable or kept == len(tokens), f"after {kept} tokens of {old} the request got others")
    return len(streams)


def _before(engine: EngineUnderTest, old: CheckpointName) -> list[list[int]]:
    if not engine.baselines[old].long:
        raise Failed(f"there are no answers of {old} to compare with, because an earlier check failed")
    return engine.baselines[old].long


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens at the beginning that are the same."""
    return next(
        (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )


_PROMISES: dict[PauseMode, Callable[[EngineUnderTest, Sequence[Stream], CheckpointName, CheckpointName], int]] = {
    "abort": _dropped,
    "retract": _recomputed,
    "in_place": _kept_in_place,
    "wait": _waited_for,
}
_KEPT: dict[PauseMode, str] = {
    "abort": "they ended with tokens of the old weights alone",
    "retract": "they ended whole, and went on as the new weights would from the tokens that they had",
    "in_place": "they ended whole and kept the tokens that they had",
    "wait": "they ended whole with the old weights",
}
