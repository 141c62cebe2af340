"""Trainer ranks and an engine for tests of other projects' classes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.harness import Engine
from tests.helpers.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    two = Ranks(2)
    yield two
    two.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    started = Engine()
    yield started
    started.close()
