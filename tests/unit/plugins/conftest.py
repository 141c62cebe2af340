"""Fixtures for tests of several engines' plug-ins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.helpers.clock import PATIENCE_S


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The server's event loop, on a thread."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(PATIENCE_S)
    made.close()
