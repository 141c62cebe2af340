"""What one update did: seconds by phase, bytes, and one row for each target.

Plain data with a readable ``str`` and a stable JSON form; it knows nothing of transports or engines.
"""

from __future__ import annotations

from typing import Literal

import msgspec

TargetStatus = Literal["serving", "quarantined", "untouched"]


class TargetReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one target came out of the update.

    Attributes:
        url: The engine's URL.
        engine: Kind and version, e.g. ``"weightcast 0.1.0"``.
        version_before: What it served before; None if unknown.
        version_after: What it serves now; None if unknown.
        digest: Model digest of what it keeps (or received, at that level); None without proof.
        status: ``serving`` the new version, ``untouched`` (the old version, whole), ``quarantined`` (paused, or it
            failed its proof after the switch: no request may go there before a full update).
        proof: Highest level of proof reached.
        ranks: Engine ranks behind the URL.
        digests_matched: How many of them hold exactly what was sent.
        stall_s: Seconds in which it generated nothing.
        not_updated: Tensors of the engine that this update did not write, by name.
        message: Anything worth knowing; the engine's own words after a refusal.
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
    message: str = ""


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """One update of all targets to one version.

    Attributes:
        version: The version asked for.
        transport: ``"ipc"``, ``"broadcast"``, ``"disk"`` or ``"checkpoint-engine"``.
        bytes: Payload of one copy of the model, in bytes.
        buckets: How many buckets it took.
        seconds: Wall time of the whole update.
        phases: Seconds by phase on the head trainer rank; phases overlap, so they do not add up to ``seconds``.
            ``open`` sessions and groups, ``gather`` shards into a bucket, ``pack`` digests and casts, ``send`` waiting
            for the wire and the engines, ``load`` inside the engines, ``verify`` digests read back,
            ``commit``, ``stall`` (longest of all targets).
        peak_extra_bytes: Most extra memory held by any trainer rank at once, measured.
        digest: Model digest of what was sent; None if ``verify="none"``.
        targets: One row for each target.
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

    @property
    def ok(self) -> bool:
        """True if every target serves the new version."""
        return all(row.status == "serving" and row.version_after == self.version for row in self.targets)

    def to_json(self) -> str:
        """The report as one line of JSON; field names are stable."""
        return msgspec.json.encode(self).decode()

    def __str__(self) -> str:
        """Units everywhere, one line for each target."""
        rate = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        ranks = sum(row.ranks for row in self.targets)
        phases = "   ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        lines = [
            f"version {self.version}: {format_bytes(self.bytes)} to {ranks} ranks over {self.transport} "
            f"in {self.seconds:.3f} s, {rate:.2f} GB/s, {self.buckets} bucket{'' if self.buckets == 1 else 's'}, "
            f"peak extra {format_bytes(self.peak_extra_bytes)}",
            f"  {phases}",
        ]
        for row in self.targets:
            before = "?" if row.version_before is None else row.version_before
            after = "?" if row.version_after is None else row.version_after
            digest = f", digest {row.digest} on {row.digests_matched} of {row.ranks} ranks" if row.digest else ""
            lines.append(f"  {row.status:<11} {row.url} ({row.engine}) {before} -> {after}, proof {row.proof}{digest}")
            if row.not_updated:
                shown = ", ".join(row.not_updated[:5])
                lines.append(f"              not updated: {shown}{' ...' if len(row.not_updated) > 5 else ''}")
            if row.message:
                lines.append(f"              {row.message}")
        return "\n".join(lines)


def format_bytes(count: int) -> str:
    """``123456789`` as ``"117.7 MiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
