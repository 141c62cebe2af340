"""Measures all cases of a plan on one machine.

    python benchmarks/run.py --plan cpu --out benchmarks/results
    python benchmarks/run.py --plan h200-4 --out $OUT --limit-s 560
    python benchmarks/run.py --plan h200-4 --only disaggregated-1+1-8b --out $OUT
    python benchmarks/run.py --plan h200-1 --only colocated-1-many --profile 6 --out $OUT

Each case runs in a process of its own, with a deadline, most valuable first; each result is written when it is there.
What fails is written down as well, and the exit code says how many did. ``report.py`` makes tables of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from plans import PLANS, Case  # noqa: E402

_LEAST_S = 20.0


def measure(case: Case) -> dict[str, Any]:
    """Measures one case in this process."""
    from peers import sources
    from peers.table import peers

    from sweep import run_limits
    from weightcast.lab.bench.case import TurnLimits, run_case
    from weightcast.lab.bench.contenders import ours

    assert case.layout is not None
    plan = TurnLimits(turns=case.turns, warm=case.warm, tries=case.tries, budget_s=case.budget_s)
    if case.kind == "limits":
        return run_limits(case.layout, say=_say)
    found = ours(case.layout, bucket_bytes=case.bucket_bytes, levels=case.levels, staging=case.staging)
    others, not_run = peers(case.layout, bucket_bytes=case.peer_bytes) if case.peer_bytes else ([], {})
    taking_part = [peer for peer in others if peer.name not in case.left_out]
    result = run_case(case.layout, [*found, *taking_part], plan, not_run=not_run | case.left_out, say=_say)
    result["peers"] = sources.versions()
    return result


def profile(case: Case, *, turns: int) -> dict[str, Any]:
    """Measures and prints updates of weightcast alone, with their phases and the functions that take their time."""
    from weightcast.lab.bench.contenders import ours
    from weightcast.lab.bench.machine import facts
    from weightcast.lab.bench.rig import Rig

    assert case.layout is not None
    rows: list[dict[str, Any]] = []
    with Rig(case.layout) as rig:
        for contender in ours(
            case.layout, bucket_bytes=case.bucket_bytes[:1], levels=case.levels, staging=case.staging
        ):
            method = contender.settings[0]
            prepare_s, stacks = rig.prepare_profiled(method, timeout_s=case.deadline_s)
            print(f"{method.name}, prepared in {prepare_s * 1e3:.1f} ms", flush=True)
            print_stacks(stacks)
            rows.append({"method": method.name, "prepare_s": prepare_s} | stacks)
            for number in range(turns + 1):
                last = number == turns
                turn, stacks = rig.turn(method, timeout_s=case.deadline_s, profile=last)
                row: dict[str, Any] = {"method": method.name, "update": number + 1, "profiled": last}
                row["usable_s"] = turn.usable_s
                row |= {"returned_s": turn.returned_s, "phases": turn.extra}
                rows.append(row | {key: stacks[key] for key in ("trainer", "engine") if last})
                print_profiled(rows[-1])
            rig.drop(method)
    return {"what": "profile", "machine": facts(), "case": case.name, "rows": rows}


def print_profiled(row: dict[str, Any]) -> None:
    """Prints one update of ``profile``."""
    phases = "  ".join(f"{name.removesuffix('_s')} {seconds * 1e3:.1f}" for name, seconds in row["phases"].items())
    profiled = ", profiled (the times are useless)" if row["profiled"] else ""
    print(f"{row['method']}, update {row['update']}{profiled}: usable {row['usable_s'] * 1e3:.1f} ms")
    print(f"    returned {row['returned_s'] * 1e3:.1f}  {phases}", flush=True)
    print_stacks(row)


def print_stacks(tables: Mapping[str, Any]) -> None:
    """Prints the functions that took the time of a trainer and an engine."""
    for role in ("trainer", "engine"):
        for kind, places in tables.get(role, {}).items():
            words = "with all that it calls" if kind == "inside" else "without weightcast's functions that it calls"
            print(f"  {role}, ms in a function {words}")
            for place, ms in places.items():
                print(f"    {ms:9.1f}  {place}", flush=True)


def script_for(case: Case, plan: str, out: Path) -> list[str]:
    """Returns the command that measures a case."""
    if case.kind in ("updates", "limits"):
        return [sys.executable, str(HERE / "run.py"), "--plan", plan, "--case", case.name, "--out", str(out)]
    return [sys.executable, str(HERE / f"{case.kind}.py"), *case.options, "--out", str(out / f"{case.name}.json")]


def run_case_process(case: Case, plan: str, out: Path, left_s: float) -> dict[str, Any]:
    """Runs a command; after the deadline it kills the command with all processes that it started."""
    command = script_for(case, plan, out)
    deadline_s = min(case.deadline_s, left_s)
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment["PYTHONPATH"] = os.pathsep.join(
        item for item in (str(HERE.parent / "src"), environment.get("PYTHONPATH", "")) if item
    )
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code: int | str = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        code = f"still running after {deadline_s:.0f} s"
    finally:
        _end(process)
    result = out / f"{case.name}.json"
    return {
        "name": case.name,
        "code": code,
        "seconds": round(time.monotonic() - started, 1),
        "result": result.name if result.is_file() else None,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process group of a command that this script started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _say(text: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=sorted(PLANS), required=True)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="time limit of all cases together, in seconds")
    parser.add_argument("--only", action="append", default=[], help="name of a case to run; may be repeated")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="print phases of N updates, and a profile, of one --only"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cases = PLANS[arguments.plan]()
    if arguments.case:
        case = next(case for case in cases if case.name == arguments.case)
        result = measure(case)
        result["machine"]["command"] = shlex.join(
            ["python", "benchmarks/run.py", "--plan", arguments.plan, "--only", case.name]
        )
        (arguments.out / f"{case.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        return 0 if result["ok"] else 1

    if arguments.profile:
        case = next(case for case in cases if [case.name] == arguments.only)
        found = profile(case, turns=arguments.profile)
        (arguments.out / f"profile-{case.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        return 0

    until = time.monotonic() + arguments.limit_s
    log: list[dict[str, Any]] = []
    for case in cases:
        if arguments.only and case.name not in arguments.only:
            continue
        left_s = until - time.monotonic()
        if left_s < _LEAST_S:
            log.append({"name": case.name, "code": "the time was used up", "seconds": 0.0, "result": None})
        else:
            print(f"{case.name}, {left_s:.0f} s left", file=sys.stderr, flush=True)
            log.append(run_case_process(case, arguments.plan, arguments.out, left_s))
            print(json.dumps(log[-1]), file=sys.stderr, flush=True)
        (arguments.out / f"run-{arguments.plan}.json").write_text(json.dumps(log, indent=1) + "\n")
    bad = [entry["name"] for entry in log if entry["code"] != 0]
    print(json.dumps({"plan": arguments.plan, "cases": len(log), "failed": bad}))
    return min(len(bad), 100)


if __name__ == "__main__":
    sys.exit(main())
