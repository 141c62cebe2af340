"""Play the matrix, or a part of it: ``python -m tests.faults [WORD ...] [--write docs/reliability.md]``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from tests.faults.cases import Case, all_cases
from tests.faults.table import write_table
from tests.faults.world import Result, World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose name has all these words")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    parser.add_argument("--json", type=Path, help="write one line for each case")
    parser.add_argument("--list", action="store_true", help="only say which cases there are")
    args = parser.parse_args()
    cases = [case for case in all_cases() if all(word in case.name for word in args.words)]
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    results = play(cases)
    if args.json:
        args.json.write_bytes(b"\n".join(msgspec.json.encode(result) for result in results))
    if args.write:
        write_table(args.write, results)
    bad = [result for result in results if result.wrong]
    print(f"{len(results)} cases, {len(bad)} of them wrong")
    return 1 if bad or not results else 0


def play(cases: list[Case]) -> list[Result]:
    results: list[Result] = []
    world: World | None = None
    try:
        for number, case in enumerate(cases):
            if world is None or world.kind.name != case.kind:
                if world is not None:
                    world.close()
                world = World(case.kind)
            started = time.monotonic()
            result = world.play(case)
            results.append(result)
            took_s = time.monotonic() - started
            print(
                f"{number + 1:4}/{len(cases)} {took_s:5.1f} s  {case.name}: {result.outcome}, {result.seconds:.2f} s, "
                f"later {result.later_s:.2f} s",
                flush=True,
            )
            for wrong in result.wrong:
                print(f"          WRONG {wrong}", flush=True)
            if result.wrong:  # what it has left may spoil the next case
                world.close()
                world = None
    finally:
        if world is not None:
            world.close()
    return results


if __name__ == "__main__":
    sys.exit(main())
