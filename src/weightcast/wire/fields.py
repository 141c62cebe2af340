"""Bounded types of the fields of messages, answers and descriptions, and text of another process made fit for a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from weightcast.config import MAX_VERSION
from weightcast.errors import WireError, visible
from weightcast.watch.events import Step

MAX_BUCKETS = 1 << 20
PlanHash = Annotated[str, Meta(min_length=32, max_length=32, pattern=r"^[0-9a-f]{32}\Z")]
Session = Annotated[str, Meta(min_length=32, max_length=32, pattern=r"^[0-9a-f]{32}\Z")]
Text = Annotated[str, Meta(max_length=4096)]
# No control characters: the engine's description is shown on terminals.
Label = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
Digest = Annotated[str, Meta(max_length=80)]
Version = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Count = Annotated[int, Meta(ge=0, le=MAX_BUCKETS)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
Host = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9._:%-]+\Z")]
Port = Annotated[int, Meta(ge=1, le=65535)]
TraceParent = Annotated[str, Meta(max_length=55, pattern=r"^([0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")]
RankSteps = Annotated[tuple[Step, ...], Meta(max_length=1 << 20)]
_T = TypeVar("_T")
GroupName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]


def decoded(read: Callable[[bytes], _T], data: bytes, what: str) -> _T:
    """Decodes bytes of another process; raises WireError, with the word for ``what`` they should be, for others."""
    try:
        return read(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not {what}: {error}") from None


def shown(text: str) -> str:
    """Returns text from another process for a log or a label: one line without control characters."""
    return visible(text if text.isprintable() else " ".join(text.split()))
