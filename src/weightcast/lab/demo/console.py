"""Interface of the demo's output; the command line passes an implementation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Console(Protocol):
    """Functions that the demo prints with; ``weightcast.cli.render`` implements them."""

    def note(self, text: str) -> None:
        """Writes a line to stderr."""
        ...

    def say_json(self, document: Any) -> None:
        """Writes the JSON document to stdout."""
        ...

    def progress(self, what: str) -> AbstractContextManager[Callable[[int, int], None]]:
        """Shows progress; the context's value takes the bytes done and the total bytes."""
        ...
