"""``python -m weightcast.rollout MODEL_DIR``: the reference engine without the command line's extras.

The processes of the ranks import this module too (multiprocessing does), so it imports nothing by itself.
"""

import sys

if __name__ == "__main__":
    from weightcast.rollout.launch import main

    sys.exit(main())
