"""Kinds of engines that faults are injected into, a row for each.

A row says how to start one, which of its requests is which step of a session, and how to find out from outside what it
serves.  Version ``v`` has the weights ``toy_weights(seed=v)``, so weights say by themselves whose version they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tests.harness import Engine, digests_of, free

Transport = Literal["ipc", "broadcast"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of engine.

    Attributes:
        name: As in the table.
        transports: What it can be updated by.
        start: A process of it; with ``ranks`` engine ranks.
        step_of: Which step a request is: ``open``, ``join``, ``bucket``, ``close``, ``commit`` or empty, by path and
            body.
        standing: What one that is alive serves.
    """

    name: str
    transports: tuple[Transport, ...]
    start: Callable[[int], Engine]
    step_of: Callable[[str, bytes], str]
    standing: Callable[[Engine], Standing]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What an engine serves, as seen from outside.

    Attributes:
        version: Whose weights it has, whole; None if it is out of use.
        wrong: What must not be, in words; empty if all is well.
    """

    version: int | None
    wrong: str = ""


def _start_native(ranks: int) -> Engine:
    return Engine("--local") if ranks == 1 else Engine("--tp", str(ranks), "--grace-s", "1")


_NATIVE_STEPS = {"join": "join", "announce": "bucket", "close": "close", "commit": "commit"}


def _native_step(path: str, body: bytes) -> str:
    if path == "/weightcast/open":
        return "open"
    if path != "/weightcast/apply":
        return ""
    return _NATIVE_STEPS.get(json.loads(body)["type"], "")


def _native_standing(engine: Engine) -> Standing:
    info = free(engine)
    if info.state == "quarantined":
        return Standing(version=None, wrong="" if info.paused else "quarantined, and not paused")
    kept = engine.digests()
    assert info.version is not None
    whole = kept == digests_of(info.version, engine.dtype)
    return Standing(version=info.version, wrong="" if whole else f"its weights are not those of {info.version}")


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="native",
            transports=("ipc", "broadcast"),
            start=_start_native,
            step_of=_native_step,
            standing=_native_standing,
        ),
    )
}
