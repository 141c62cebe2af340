"""Runs the fault matrix or a part of it: ``python -m tests.faults [WORD ...] [--write PAGE]``.

With ``--random N`` it plays N cases, chosen at random, one after another in the same engines, and looks for leaks.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.faults.cases import Case, Step, all_cases
from tests.faults.kinds import KINDS, preload
from tests.faults.playing import Played, play, play_side_by_side
from tests.faults.table import write_page
from tests.faults.world import Result

FIRST: tuple[Step, ...] = ("middle bucket", "commit", "open", "join", "after", "last bucket", "close", "first bucket")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose name has all these words")
    parser.add_argument("--write", type=Path, help="write the results to this page, as tables")
    parser.add_argument(
        "--json",
        type=Path,
        help="keep results here, a line for each case; a later run adds to them, and a case that is played again keeps "
        "what was wrong before",
    )
    parser.add_argument("--missing", action="store_true", help="only cases without a good result in the file of --json")
    parser.add_argument(
        "--deadline-s", type=float, help="of every wait in an update, in seconds; each kind has its own"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="this many cases side by side; who is wrong then is played once more, alone"
    )
    parser.add_argument("--random", type=int, metavar="N", help="play N random cases of one kind (native), not all")
    parser.add_argument("--seed", type=int, help="of the random choice; the same seed chooses the same cases")
    parser.add_argument("--list", action="store_true", help="only say which cases there are")
    args = parser.parse_args()
    preload()
    cases = [case for case in all_cases() if all(word in case.name for word in args.words)]
    # Those first that differ most from each other: who stops half way has seen most.
    order = list(KINDS)
    cases.sort(key=lambda case: (order.index(case.kind), FIRST.index(case.step)))
    if args.random:
        if args.jobs > 1 or args.write or args.missing:
            parser.error("--random goes without --jobs, --write and --missing")
        cases = _at_random(cases, args.random, args.seed)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    kept = _read(args.json) if args.json and args.json.exists() else {}
    if args.missing:
        cases = [case for case in cases if case.name not in kept or kept[case.name].wrong]
    played: list[Result] = []
    started = time.monotonic()
    for number, (result, took_s) in enumerate(
        _play(cases, jobs=args.jobs, deadline_s=args.deadline_s, leaks=bool(args.random)), 1
    ):
        print(
            f"{number:4}/{len(cases)} {took_s:5.1f} s  {result.case}: {result.outcome}, {result.seconds:.2f} s, "
            f"later {result.later_s:.2f} s",
            flush=True,
        )
        for wrong in result.wrong:
            print(f"          WRONG {wrong}", flush=True)
        before = kept.get(result.case)
        if before is not None:
            result = msgspec.structs.replace(result, before=before.wrong or before.before)
        kept[result.case] = result
        played.append(result)
        if args.json:
            args.json.write_bytes(b"\n".join(msgspec.json.encode(result) for result in kept.values()))
    if args.write:
        minutes = (time.monotonic() - started) / 60
        revision = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
        where = f"Played at revision {revision}, on {os.cpu_count()} cores, in {minutes:.0f} minutes."
        write_page(args.write, [kept[case.name] for case in all_cases() if case.name in kept], played=where)
    # A case that was played again, alone, counts as it was then.
    last = played if args.random else list({result.case: result for result in played}.values())
    bad = [result for result in last if result.wrong]
    print(f"{len(last)} cases, {len(bad)} of them wrong")
    return 1 if bad else 0


def _at_random(cases: list[Case], count: int, seed: int | None) -> list[Case]:
    """Chooses cases of one kind; says how to play the same ones again."""
    if len({case.kind for case in cases}) > 1:
        cases = [case for case in cases if case.kind == "native"]
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    print(f"--random {count} --seed {seed}", flush=True)
    # Torch records its last 2000 collectives, nearly 1 KiB each; over hundreds of updates that looks like a leak.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    return random.Random(seed).choices(cases, k=count)


def _read(path: Path) -> dict[str, Result]:
    results = (msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines())
    return {result.case: result for result in results}


def _play(cases: list[Case], *, jobs: int, deadline_s: float | None, leaks: bool) -> Iterator[Played]:
    if jobs == 1:
        yield from play(cases, deadline_s=deadline_s, leaks=leaks)
        return
    bad: list[Case] = []
    by_name = {case.name: case for case in cases}
    for result, took_s in play_side_by_side(cases, jobs=jobs, deadline_s=deadline_s):
        yield result, took_s
        if result.wrong:
            bad.append(by_name[result.case])
    if bad:
        print(f"{len(bad)} cases were wrong with others beside them; each is played once more, alone", flush=True)
        yield from play(bad, deadline_s=deadline_s)


if __name__ == "__main__":
    sys.exit(main())
