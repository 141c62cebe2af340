"""Runs the fault matrix or a part of it: ``python -m tests.faults [WORD ...] [--write docs/reliability.md]``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.faults.cases import Case, Step, all_cases
from tests.faults.kinds import KINDS, preload
from tests.faults.table import write_table
from tests.faults.world import Result, World

FIRST: tuple[Step, ...] = ("middle bucket", "commit", "open", "join", "after", "last bucket", "close", "first bucket")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose name has all these words")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    parser.add_argument("--json", type=Path, help="keep results here, a line for each case; a later run adds to them")
    parser.add_argument("--missing", action="store_true", help="only cases without a good result in the file of --json")
    parser.add_argument(
        "--deadline-s", type=float, help="of every wait in an update, in seconds; each kind has its own"
    )
    parser.add_argument("--list", action="store_true", help="only say which cases there are")
    args = parser.parse_args()
    preload()
    cases = [case for case in all_cases() if all(word in case.name for word in args.words)]
    # Those first that differ most from each other: who stops half way has seen most.
    order = list(KINDS)
    cases.sort(key=lambda case: (order.index(case.kind), FIRST.index(case.step)))
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    kept = _read(args.json) if args.json and args.json.exists() else {}
    if args.missing:
        cases = [case for case in cases if case.name not in kept or kept[case.name].wrong]
    results: list[Result] = []
    for result in play(cases, deadline_s=args.deadline_s):
        results.append(result)
        kept[result.case] = result
        if args.json:
            args.json.write_bytes(b"\n".join(msgspec.json.encode(result) for result in kept.values()))
    if args.write:
        write_table(args.write, [kept[case.name] for case in all_cases() if case.name in kept])
    bad = [result for result in results if result.wrong]
    print(f"{len(results)} cases, {len(bad)} of them wrong")
    return 1 if bad else 0


def _read(path: Path) -> dict[str, Result]:
    results = (msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines())
    return {result.case: result for result in results}


def play(cases: list[Case], *, deadline_s: float | None) -> Iterator[Result]:
    """Runs the cases in one world for each kind of engine; a world with an error is replaced."""
    world: World | None = None
    try:
        for number, case in enumerate(cases):
            if world is None or world.kind.name != case.kind:
                _close(world)
                world = World(case.kind, deadline_s=deadline_s)
            started = time.monotonic()
            result = world.play(case)
            took_s = time.monotonic() - started
            print(
                f"{number + 1:4}/{len(cases)} {took_s:5.1f} s  {case.name}: {result.outcome}, {result.seconds:.2f} s, "
                f"later {result.later_s:.2f} s",
                flush=True,
            )
            for wrong in result.wrong:
                print(f"          WRONG {wrong}", flush=True)
            yield result
            if result.wrong:  # its leftovers may spoil the next case
                _close(world)
                world = None
    finally:
        _close(world)


def _close(world: World | None) -> None:
    left = world.close() if world is not None else []
    if left:
        print(f"WRONG all engines have ended, and shared memory is left: {left}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
