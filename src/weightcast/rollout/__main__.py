"""Runs ``python -m weightcast.rollout MODEL_DIR``: the reference engine without the command line's extras.

multiprocessing imports this module in the ranks' processes too, so it imports nothing at the top.
"""

import sys

if __name__ == "__main__":
    from weightcast.rollout.launch import main

    sys.exit(main())
