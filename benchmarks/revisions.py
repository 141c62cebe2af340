"""Measures weightcast's own rows of CPU cases at two revisions in turns, on one machine.

    python benchmarks/revisions.py cdda491 --rounds 3 --only cpu-colocated --only cpu-disaggregated \
        --out benchmarks/results/cpu-revisions.json

Each turn is a whole ``run.py`` of one revision, so that a load which comes and goes meets both.  The older revision is
checked out into a temporary folder.  ``report.py`` makes a table of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from weightcast.lab.bench.machine import facts  # noqa: E402

CASES = ("cpu-colocated", "cpu-disaggregated")


def measure(tree: Path, case: str, folder: Path) -> list[dict[str, Any]]:
    """Runs one case of a revision and returns its rows of weightcast."""
    command = [sys.executable, "benchmarks/run.py", "--plan", "cpu", "--only", case, "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    subprocess.run(command, cwd=tree, env=environment, check=True)
    result = json.loads((folder / f"{case}.json").read_text())
    return [
        {
            "method": row["name"],
            "bucket_bytes": row["settings"]["bucket_bytes"],
            "turns": row["turns"],
            "usable_s": row["usable_s"]["median"],
            "cpu_s": row["phases"]["trainer_cpu_s"] + row["phases"]["engine_cpu_s"],
            "load_average": os.getloadavg()[0],
        }
        for row in result["methods"]
        if row["ours"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="the older revision")
    parser.add_argument("--only", action="append", choices=CASES, help="a case; all without")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    before = _git("rev-parse", "--short=12", arguments.revision)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        old = Path(temporary) / "old"
        _git("worktree", "add", "--detach", str(old), before)
        try:
            for number in range(arguments.rounds):
                for case in arguments.only or CASES:
                    for name, tree in (("before", old), ("after", ROOT))[:: 1 if number % 2 else -1]:
                        found = measure(tree, case, Path(temporary) / f"{number}-{name}")
                        rows += [{"case": case, "round": number, "revision": name, **row} for row in found]
                        arguments.out.write_text(json.dumps(_result(arguments, before, rows), indent=1) + "\n")
        finally:
            _git("worktree", "remove", "--force", str(old))
    return 0


def _result(arguments: argparse.Namespace, before: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    loads = [row["load_average"] for row in rows]
    only = "".join(f" --only {case}" for case in arguments.only or ())
    options = f"{arguments.revision} --rounds {arguments.rounds}{only} --out {arguments.out.name}"
    return {
        "what": "revisions",
        "machine": facts() | {"command": f"python benchmarks/revisions.py {options}"},
        "before": before,
        "load_average": {"least": min(loads), "median": statistics.median(loads), "most": max(loads)},
        "rows": rows,
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
