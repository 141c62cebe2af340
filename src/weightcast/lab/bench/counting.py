"""Counts the messages, metadata bytes and opened handles of an update, by wrapping the functions that do the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weightcast.comm import http
from weightcast.receiver.sources import ipc

if TYPE_CHECKING:
    from weightcast.lab.bench.methods import Side


class Counting:
    """Context manager that adds messages, metadata bytes and opened handles to the counts of a side."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        side = self._side

        def on_post(path: str, body: bytes = b"", **_: Any) -> None:
            side.count("messages")
            side.count("metadata_bytes", len(body))

        self._beside(http.Client, "post", on_post)
        self._beside(http.Client, "get", on_post)
        self._beside(http.Client, "lease", on_post)
        self._beside(ipc.Mapping, "__init__", lambda *_: side.count("handle_opens"))

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _beside(self, owner: Any, name: str, watch: Callable[..., None]) -> None:
        before = getattr(owner, name, None)
        if before is None:
            return

        def call(this: Any, *arguments: Any, **options: Any) -> Any:
            watch(*arguments)
            return before(this, *arguments, **options)

        setattr(owner, name, call)
        self._undo.append(lambda: setattr(owner, name, before))
