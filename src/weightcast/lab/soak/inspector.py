"""Inspection of an engine after an update: its state, its weight version and the digests of its weights."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from weightcast.comm.http import Client
from weightcast.config import Target
from weightcast.errors import DeadlineExceeded, WeightcastError
from weightcast.lab.soak.versions import Versions
from weightcast.wire.codec import decode_ack, decode_info
from weightcast.wire.engine_info import EngineInfo

_CACHED_VERSIONS = 16


@dataclass(slots=True)
class Tally:
    """Errors that a soak has found so far; ``Result`` explains the counts of the same names."""

    hangs: int = 0
    mixed: int = 0
    failures: int = 0
    details: list[str] = field(default_factory=list[str])

    def note(self, text: str) -> None:
        """Records the description of an error."""
        self.details.append(text)


class Inspector:
    """Compares the weights that engines keep with the versions that they claim to serve."""

    def __init__(self, versions: Versions, tally: Tally, *, idle_within_s: float) -> None:
        self._versions = versions
        self._tally = tally
        self._idle_within_s = idle_within_s
        self._expected: dict[int, dict[str, str]] = {}

    def inspect(self, url: str, allowed: set[int]) -> int | None:
        """Counts an error unless the engine serves one whole version out of ``allowed``.

        Returns:
            The version that the engine serves, or None if the engine could not be inspected.
        """
        client = Client(Target(url), timeout_s=self._idle_within_s)
        version: int | None = None
        try:
            info = self._wait_until_idle(client)
            if info is None:
                return None
            if info.state != "serving" or info.version not in allowed:
                self._tally.mixed += 1
                self._tally.note(
                    f"{url} is {info.state} at version {info.version}, expected one of {sorted(allowed)}: "
                    f"{info.message}"
                )
            version = info.version or 0
            kept = decode_ack(client.get_json("/weightcast/digests")).resident
            expected = self._digests(version)
            wrong = [name for name in kept if kept[name] != expected.get(name)]
            if wrong or not kept:
                self._tally.mixed += 1
                self._tally.note(f"{url} keeps other weights than version {version}: {', '.join(wrong[:4])}")
        except WeightcastError as error:
            self._tally.hangs += isinstance(error, DeadlineExceeded)
            self._tally.failures += 1
            self._tally.note(f"{url}: {error}")
        finally:
            client.close()
        return version

    def _wait_until_idle(self, client: Client) -> EngineInfo | None:
        deadline = time.monotonic() + self._idle_within_s
        while True:
            info = decode_info(client.get_json("/weightcast/info"))
            if info.state != "updating":
                return info
            if time.monotonic() > deadline:
                self._tally.hangs += 1
                self._tally.note(f"{client.target.url} is still being updated by {info.session_owner}")
                return None
            time.sleep(0.02)

    def _digests(self, version: int) -> dict[str, str]:
        if version not in self._expected:
            if len(self._expected) > _CACHED_VERSIONS:
                self._expected.pop(next(iter(self._expected)))
            self._expected[version] = self._versions.digests(version)
        return self._expected[version]
