"""The report of one update: seconds by phase, bytes, and one row for each target.

A report is plain data with a readable ``str`` and a stable JSON form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from weightcast.timeline import perfetto
from weightcast.timeline.tracks import Timeline

TargetStatus = Literal["serving", "quarantined", "untouched", "unknown"]
_MAKES_TIMELINE = "_makes_timeline"
PROOFS = ("none", "received", "resident", "behaviour")  # levels of proof, lowest first


class LegReport(msgspec.Struct, frozen=True, kw_only=True):
    """A carrier of the weights from some trainer ranks to some ranks of an engine.

    Attributes:
        by: What carries them: ``"mapped"`` (engine ranks read the weights where trainer ranks keep them), ``"buffer"``
            (they read a shared bucket), ``"group"`` (an nccl or gloo group), ``"rdma"`` or ``"file"``.
        bytes: Bytes that these engine ranks took over this leg, together; 0 until the target has taken everything.
            Each rank takes whole buckets where tensors are gathered, and otherwise the parts that it keeps.
        seconds: Time in which at least one bucket was announced to the target and not yet taken.  It includes the
            engine's copies and sums, not the pauses in which the trainer gathers the next bucket.  All legs of a target
            have the same.
    """

    ranks: tuple[int, ...]
    by: str
    trainers: tuple[int, ...]
    bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate at which the leg delivered; 0 if it is not known."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """The leg in words."""
        ours = f"trainer rank{'s' * (len(self.trainers) > 1)} {_ranges(self.trainers)}"
        theirs = f"rank{'s' * (len(self.ranks) > 1)} {_ranges(self.ranks)}"
        taken = f": {format_bytes(self.bytes)}" if self.bytes else ""
        at = f" at {format_rate(self.bytes_per_s)}" if self.bytes_per_s else ""
        return f"{self.by} from {ours} to {theirs}{taken}{at}"


class TargetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the update on one target.

    Attributes:
        engine: Kind and version, e.g. ``"weightcast 1.2.3"``.
        version_before: Version before the update; None if unknown.
        version_after: Version that the engine reports now; None if it reports none or could not be asked.
        digest: Model digest of the weights that it holds (or received, at that level); None without proof.
        status: State of the engine.  ``serving``: it serves the new version.  ``untouched``: it serves the whole old
            version, because it never switched or was switched back.  ``unknown``: the answer to the commit was lost,
            and the engine could not be asked again.  ``quarantined``: it is paused or gone, or failed its proof after
            the switch, or serves the new version although the others were switched back.  An engine that is
            ``unknown`` or ``quarantined`` must get no request before a full update.
        proof: Highest level of proof reached.
        ranks: Number of engine ranks behind the URL.
        digests_matched: Number of ranks whose digests match.
        stall_s: Time without generation, in seconds.
        peak_extra_bytes: Most extra memory of any engine rank during the session, in bytes.
        not_updated: Names of the engine's tensors that this update did not write.
        transport: Name of the transport that reached the target in the last attempt; empty if none was tried.
        legs: What carries the weights to each engine rank from each trainer rank, how many bytes it carried and how
            fast; empty if none was tried.
        message: Further information; the engine's own words after a refusal.
        notes: Failures beside the update that did not stop it, such as a group that the engine did not leave, and a
            rate far below the usual one.
    """

    url: str
    engine: str
    version_before: int | None = None
    version_after: int | None = None
    digest: str | None = None
    status: TargetStatus = "untouched"
    proof: Literal["none", "received", "resident", "behaviour"] = "none"
    ranks: int = 0
    digests_matched: int = 0
    stall_s: float = 0.0
    peak_extra_bytes: int = 0
    not_updated: tuple[str, ...] = ()
    transport: str = ""
    legs: tuple[LegReport, ...] = ()
    message: str = ""
    notes: tuple[str, ...] = ()


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One update of all targets to one version.

    ``timeline`` is made when it is read first, so that no update waits for it.  ``to_json`` and a pickle have it;
    ``==``, ``msgspec.structs.replace`` and msgspec's own encoders know only the other attributes.

    Attributes:
        transport: ``"ipc"``, ``"broadcast"``, ``"disk"`` and so on; ``"ipc+broadcast"`` if targets were reached in
            different ways, which their rows name.
        bytes: Bytes sent: the payload of one copy of the model, or less if the update failed before all was sent.
        phases: Seconds by phase.  Those of the head trainer rank follow one another and take all of ``seconds``.
            ``open``: sessions and groups.  ``gather``: shards into a bucket.  ``pack``: digests and casts.  ``send``:
            waits for the transport and the engines.  ``verify``: digests and log-probabilities compared.  ``commit``.
            ``recover``: ends failed attempts, asks engines what they serve, and makes another transport.  ``other``:
            what is left, such as waits for other trainer ranks.  Engines are busy meanwhile, so their times overlap
            these: ``load``, the digests that they read back, which ``verify`` has too, and ``stall``; the longest of
            all targets.
        peak_extra_bytes: Most extra memory that any trainer rank held at once, in bytes, measured.
        planned_extra_bytes: The same as ``connect`` has planned it; the limit ``max_extra_bytes`` holds for this.
        bucket_bytes: Size of a bucket in bytes, as the caller gave it or as ``connect`` chose it.
        digest: Model digest of the sent weights; None if ``verify="none"``.
        targets: One row for each target.
        unsummed: Names of tensors that were summed in the sender's bucket, because the exporter's ranks do not sum
            their shards.  No digest covers the gather of these tensors.
        changed_ratio: Share of the bytes that lie in tensors, or in the rows of one that one bucket carries, which
            differ from the update before; None for the first update and without digests.
        cast: Number of tensors that were cast on the way, by the dtype that every engine keeps.
    """

    version: int
    transport: str
    bytes: int
    buckets: int
    seconds: float
    phases: dict[str, float]
    peak_extra_bytes: int
    digest: str | None
    targets: tuple[TargetReport, ...]
    unsummed: tuple[str, ...] = ()
    changed_ratio: float | None = None
    planned_extra_bytes: int = 0
    bucket_bytes: int = 0
    cast: dict[str, int] = {}

    @cached_property
    def timeline(self) -> Timeline:
        """When each rank did what; on trainer rank 0 only, empty elsewhere."""
        make: Callable[[], Timeline] = vars(self).pop(_MAKES_TIMELINE, Timeline)
        return make()

    def with_timeline(self, make: Callable[[], Timeline]) -> Self:
        """Returns the same report with a timeline, which the function makes when it is first asked for."""
        found = msgspec.structs.replace(self)
        vars(found)[_MAKES_TIMELINE] = make
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_json, (self.to_json(),)

    @property
    def ok(self) -> bool:
        """True if every target serves the new version."""
        return all(row.status == "serving" and row.version_after == self.version for row in self.targets)

    def short_of(self, level: str) -> tuple[TargetReport, ...]:
        """The targets whose proof is below this level."""
        return tuple(row for row in self.targets if PROOFS.index(row.proof) < PROOFS.index(level))

    def to_json(self) -> str:
        """The report as one line of JSON; field names are stable."""
        return msgspec.json.encode(self.to_dict()).decode()

    def to_dict(self) -> dict[str, Any]:
        """The fields of ``to_json``, as msgspec encodes them."""
        return msgspec.structs.asdict(self) | {"timeline": self.timeline}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what ``to_json`` wrote, with the timeline.

        Raises:
            msgspec.ValidationError: The text is no report.
        """
        found = msgspec.json.decode(text, type=cls)
        timeline = msgspec.json.decode(text, type=_HasTimeline).timeline
        return found.with_timeline(lambda: timeline)

    def to_perfetto(self, path: str | Path) -> Path:
        """Writes the timeline of every rank as a trace for ui.perfetto.dev and returns the path.

        Raises:
            ValueError: This report has no timeline; only that of trainer rank 0 has one.
            OSError: The file cannot be written.
        """
        return perfetto.write(path, [msgspec.convert(self, perfetto.Update, from_attributes=True)])

    def __str__(self) -> str:
        """A summary with units, and one line for each target."""
        return self.text()

    def text(self, *, told: str = "") -> str:
        """The same as ``str``, without messages that are part of the text ``told``."""
        lines = self._head_lines()
        mixed = len({row.transport for row in self.targets if row.transport}) > 1
        for row in self.targets:
            before = "?" if row.version_before is None else row.version_before
            after = "?" if row.version_after is None else row.version_after
            ranks = count_of(row.ranks, "rank")
            digest = f", digest {row.digest} on {row.digests_matched} of {ranks}" if row.digest else ""
            by = f", by {row.transport}" if mixed and row.transport else ""
            lines.append(
                f"  {row.status:<11} {row.url} ({row.engine}) {before} -> {after}, proof {row.proof}{digest}{by}"
            )
            if len(row.legs) > 1 or any(leg.bytes for leg in row.legs):
                lines.append(f"              {'; '.join(map(str, row.legs))}")
            if row.not_updated:
                shown = ", ".join(row.not_updated[:5])
                lines.append(f"              not updated: {shown}{' ...' if len(row.not_updated) > 5 else ''}")
            if row.message and row.message not in told:
                lines.append(f"              {row.message}")
            lines += [f"              note: {note}" for note in row.notes]
        for dtype, count in self.cast.items():
            lines.append(f"  {count_of(count, 'tensor')} travelled in {dtype}, which the engines keep")
        if self.unsummed:
            shown = ", ".join(self.unsummed[:5])
            more = " ..." if len(self.unsummed) > 5 else ""
            lines.append(f"  {len(self.unsummed)} tensors were not summed where the trainer holds them: {shown}{more}")
        return "\n".join(lines)

    def _head_lines(self) -> list[str]:
        if not self.buckets and not any(row.status == "serving" for row in self.targets):
            return [f"version {self.version}: nothing was sent; ended after {self.seconds:.3f} s"]
        phases = "  " + "   ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        buckets = count_of(self.buckets, "bucket")
        if not any(row.status == "serving" for row in self.targets):
            sent = f"failed after {buckets} ({format_bytes(self.bytes)}) over {self.transport}"
            return [f"version {self.version}: {sent} and {self.seconds:.3f} s", phases]
        extra = format_bytes(self.peak_extra_bytes)
        if self.planned_extra_bytes:
            extra += f" (planned {format_bytes(self.planned_extra_bytes)})"
        rate = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        ranks = count_of(sum(row.ranks for row in self.targets), "rank")
        return [
            f"version {self.version}: {format_bytes(self.bytes)} to {ranks} over {self.transport} "
            f"in {self.seconds:.3f} s, {rate:.2f} GB/s, {buckets}, peak extra {extra}",
            phases,
        ]


class _HasTimeline(msgspec.Struct):
    timeline: Timeline = Timeline()


def _ranges(numbers: Sequence[int]) -> str:
    """Formats ``(0, 1, 2, 5)`` as ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def one_line(text: str) -> str:
    """Joins the lines of a text into one; some libraries put whole stacks into a message."""
    return " ".join(text.split())


def count_of(count: int, word: str) -> str:
    """Returns ``"1 rank"``, ``"2 ranks"``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def format_rate(bytes_per_s: float) -> str:
    """Formats ``1234567890`` as ``"1.23 GB/s"``."""
    rate = bytes_per_s / 1e9
    return f"{rate:.0f} GB/s" if rate >= 100 else f"{rate:.3g} GB/s"


def format_bytes(count: int) -> str:
    """Formats ``123456789`` as ``"117.7 MiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
