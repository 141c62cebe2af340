"""Updates real engines with tiny models of many families: ``python -m tests.sweep [--engine vllm] [FAMILY ...]``.

Each family gets two sets of random weights.  The engine starts on the first and is updated with the second from a
checkpoint, then with the first from a live module.  After each push, its greedy tokens and log-probabilities must be
those of a server that was started on the pushed weights.  Results are kept and written to docs/models.md.
"""

from __future__ import annotations

import argparse
import sys
import time

import transformers

from tests.sweep.models import FAMILIES
from tests.sweep.play import play
from tests.sweep.table import ENGINES, read, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="config.model_type of a family; all by default")
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm")
    parser.add_argument("--tp", type=int, default=1, help="number of ranks of the engine")
    parser.add_argument("--missing", action="store_true", help="only families without a kept result")
    parser.add_argument("--list", action="store_true", help="print the families and do nothing")
    args = parser.parse_args()
    if args.list:
        print("\n".join(FAMILIES))
        return 0
    if unknown := [family for family in args.families if family not in FAMILIES]:
        parser.error(f"unknown families: {', '.join(unknown)}; --list prints those that are known")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wrong = 0
    for family in args.families or FAMILIES:
        if args.missing and (args.engine, family, args.tp) in read():
            continue
        started = time.monotonic()
        result = play(family, args.engine, args.tp)
        wrong += result.wrong
        # The file is read again each time, so that two sweeps may run at once.
        write(read() | {(args.engine, family, args.tp): result})
        took_s = time.monotonic() - started
        print(f"{family}, {args.engine}, TP {args.tp}, {took_s:.0f} s: checkpoint {result.checkpoint}", flush=True)
        if result.live != result.checkpoint:
            print(f"  live module {result.live}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
