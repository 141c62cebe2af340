"""The state of one engine: serving, updating or quarantined, and the version that it serves."""

from __future__ import annotations

import logging
import secrets
from typing import Any, Protocol, runtime_checkable

import msgspec

from weightcast.config import PauseMode
from weightcast.errors import error_words
from weightcast.receiver.staging import StagingPlace
from weightcast.wire.answers import Ack, State
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import PROTOCOL

log = logging.getLogger("weightcast.receiver")

_PAUSE_S = 30.0  # deadline of the pause of a quarantined engine


class EngineHooks(Protocol):
    """The engine that the receiver lives in: its pause, its caches and its version stamp."""

    @property
    def paused(self) -> bool:
        """True while no request runs, whoever paused the engine."""
        ...

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Returns when no request runs; none runs until ``resume``."""
        ...

    def stop_waiting(self) -> None:
        """Makes a ``pause`` that still waits for running requests raise now; a pause that was reached stays."""
        ...

    def resume(self) -> None:
        """Ends the pause."""
        ...

    def drop_caches(self) -> None:
        """Drops what was computed with the old weights, except what belongs to a request that keeps it."""
        ...

    def set_version(self, version: int) -> None:
        """Stamps whatever is generated from now on with this version."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """Hooks of an engine whose memory may sleep in parts."""

    @property
    def sleep_words(self) -> str:
        """Says which memory sleeps; empty if none does."""
        ...


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``EngineInfo`` that stay the same while the engine runs.

    ``note`` is its ``message`` unless the engine is quarantined.  An ``Open`` with a mode of ``no_pause`` is refused.
    """

    engine: str
    model: str
    host_id: str
    ranks: tuple[RankInfo, ...]
    staging: StagingPlace
    transports: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    optional: tuple[TensorSpec, ...] = ()
    note: str = ""
    staging_bytes: int = 0
    no_pause: dict[PauseMode, str] = {}
    hazards: tuple[str, ...] = ()
    reads_remote: bool = False


class EngineState:
    """The state, version and digest that an engine tells of itself; the ``message`` of a quarantined one says why."""

    def __init__(self, hooks: EngineHooks, facts: EngineFacts, *, version: int | None, tp_size: int) -> None:
        self.state: State = "serving"
        self.version = version
        self.digest: str | None = None
        self.message = ""
        self.hooks = hooks
        self.facts = facts
        self._tp_size = tp_size
        self._instance = secrets.token_hex(16)

    def info(self, session_owner: str | None) -> EngineInfo:
        """The engine's description of itself; ``session_owner`` is the trainer that updates it now."""
        facts = msgspec.structs.asdict(self.facts)
        del facts["note"]
        return EngineInfo(
            protocol=PROTOCOL,
            state=self.state,
            version=self.version,
            digest=self.digest,
            tp_size=self._tp_size,
            session_owner=session_owner,
            message=self.said,
            paused=self.hooks.paused,
            instance=self._instance,
            **facts,
        )

    @property
    def asleep(self) -> str:
        """Says which memory sleeps; empty if none does."""
        return self.hooks.sleep_words if isinstance(self.hooks, Sleeps) else ""

    @property
    def said(self) -> str:
        """The engine's message about its state, with the memory that sleeps."""
        return "; ".join(filter(None, (self.message or self.facts.note, self.asleep)))

    def held_back(self) -> str:
        """Says why an engine with new weights answers no request; empty if it does."""
        if asleep := self.asleep:
            return f"{asleep}; it has the new weights, and answers no request until all its memory is awake"
        if not self.hooks.paused:
            return ""
        return "it was paused before this update and still is: it answers no request until it is resumed"

    def ack(self, *, ok: bool = True, **fields: Any) -> Ack:
        """An answer to the trainer, with the state that is left."""
        return Ack(ok=ok, state=self.state, version=self.version, ranks=self._tp_size, **fields)

    def quarantine(self, why: str) -> None:
        """Pauses the engine until a full update succeeds; the message says so if it could not be paused."""
        self.state = "quarantined"
        self.message = why
        self.digest = None  # what is kept now was never proven
        try:
            self.hooks.pause("abort", _PAUSE_S)
        except Exception as error:  # the engine's hooks are other people's code; the reason must still be told
            log.exception("could not pause")
            self.message += f"; it could not be paused and may go on generating: {error_words(error)}"

    def discard(self, why: str) -> None:
        """Quarantines the engine at no known version, without a pause."""
        self.state = "quarantined"
        self.message = why
        self.version = None
        self.digest = None

    def replace(self, why: str) -> None:
        """Lets the engine serve at no known version."""
        self.discard(why)
        self.state = "serving"
