"""``weightcast`` in a process that is on another host, as far as it can tell."""

from __future__ import annotations

from tests.helpers.placed import move_to_another_host
from weightcast.__main__ import main as weightcast


def main() -> int:
    """Runs the command of this process's arguments."""
    move_to_another_host()
    return weightcast()
