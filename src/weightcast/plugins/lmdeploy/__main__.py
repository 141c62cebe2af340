"""LMDeploy with our receiver: ``python -m weightcast.plugins.lmdeploy serve api_server MODEL ...``."""

from __future__ import annotations

import sys

from weightcast.errors import WeightcastError, error_words

_USAGE = (
    "usage: python -m weightcast.plugins.lmdeploy serve api_server MODEL --backend pytorch ...\n"
    "The arguments are those of `lmdeploy`.\n"
)


def main() -> None:
    """Checks LMDeploy, adds our hooks and runs LMDeploy's own command line."""
    if sys.argv[1:3] != ["serve", "api_server"]:
        sys.exit(_USAGE)
    from weightcast.plugins.lmdeploy import server

    sys.argv[0] = "lmdeploy"
    try:
        server.run()
    except WeightcastError as error:
        sys.exit(f"weightcast cannot run in this LMDeploy: {error_words(error)}")


if __name__ == "__main__":
    main()
