"""The reference engine with the weight routes of a stock engine: ``python -m tests.gpu.dialect_engine NAME MODEL ...``.

As ``weightcast serve --dialect NAME``, without the packages that the command line needs.  The options are those of
``python -m weightcast.rollout``.
"""

from __future__ import annotations

import functools
import sys


def main() -> int:
    from weightcast.lab.dialects import routes_of
    from weightcast.rollout import launch

    name = sys.argv.pop(1)
    launch.serve = functools.partial(launch.serve, extra_routes=routes_of(name))
    return launch.main()


if __name__ == "__main__":
    sys.exit(main())
