"""Distribution of the test files among pytest's workers: files of one engine go to one worker, one after the other.

A worker that starts processes of an engine imports the engine first, ten to fifteen seconds of a processor
(``engines/forked.py``).  The files of the slowest engine come first: one of them as the last would be waited for alone.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

SLOWEST_FIRST = ("vllm", "sglang", "lmdeploy")
_OF_ENGINE = re.compile(r"tests/(?:engines|contract)/test_([a-z]+)(?:_[a-z0-9_]+)?\.py")
# Files whose names say something else than the engine that they start.
_ENGINES = {"tests/engines/test_engine_relays.py": "vllm"}


def scope_of(nodeid: str) -> str:
    """Returns the name of the tests that stay together with this one."""
    file = nodeid.partition("::")[0]
    found = _OF_ENGINE.fullmatch(file)
    engine = _ENGINES.get(file, "" if found is None else found[1])
    return engine if engine in SLOWEST_FIRST else file


def place_of(item: pytest.Item) -> int:
    """A key to sort tests by."""
    scope = scope_of(item.nodeid)
    return SLOWEST_FIRST.index(scope) if scope in SLOWEST_FIRST else len(SLOWEST_FIRST)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns ``--dist loadfile`` in which the files of an engine count as one."""
    from xdist.scheduler import LoadFileScheduling  # only who has workers needs it

    class ByEngine(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByEngine(config, log)
