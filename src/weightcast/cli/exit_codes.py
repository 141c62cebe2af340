"""The exit codes of all commands; ``docs/cli.md`` has the same table."""

from __future__ import annotations

from typing import Final

from weightcast.errors import ConfigError

SUCCESS: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
DIFFERS: Final = 3
INTERRUPTED: Final = 130

MEANING: Final = {
    SUCCESS: "what was asked is done",
    FAILURE: "it failed: an engine, the network, a disk or a check",
    USAGE: "wrong usage: what was asked cannot work as asked, and nothing has moved",
    DIFFERS: "the comparison was made, and the weights differ (`verify`)",
    INTERRUPTED: "interrupted by Ctrl-C",
}


def code_of(error: BaseException) -> int:
    """The exit code for an error that ended a command."""
    return USAGE if isinstance(error, ConfigError) else FAILURE
