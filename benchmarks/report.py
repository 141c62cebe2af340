"""Makes tables and plots of the measurements; no figure is typed by hand.

    python benchmarks/report.py

Reads every JSON file in benchmarks/results, writes benchmarks/RESULTS.md and, with matplotlib (``weightcast[demo]``),
one plot for each case of updates. A reader can redo each of them: the command stands above its table.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--no-plots", action="store_true")
    arguments = parser.parse_args()
    results = read(arguments.results)
    plots: dict[str, str] = {}
    if not arguments.no_plots:
        plots = draw(results, arguments.results, arguments.out.parent)
    arguments.out.write_text(render(results, plots))
    print(arguments.out)
    return 0


def read(folder: Path) -> dict[str, Result]:
    """Reads the results that this script can show, by file name."""
    found: dict[str, Result] = {}
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and _kind(content):
            found[str(path.relative_to(folder).with_suffix(""))] = content
    return found


def render(results: dict[str, Result], plots: dict[str, str]) -> str:
    """Returns the whole page."""
    parts = [_HEAD]
    parts += _summary(results)
    for name, result in results.items():
        parts.append(f"## {name}\n")
        parts.append(_SHOW[_kind(result)](result))
        if name in plots:
            parts.append(f"![{name}]({plots[name]})\n")
    return "\n".join(parts).rstrip() + "\n"


_HEAD = """# Results

Made by `python benchmarks/report.py` from the JSON files in [results](results); nothing here is typed by hand.
How it was measured, and what the words mean: [docs/performance.md](../docs/performance.md).
"""


def _kind(result: Result) -> str:
    if result.get("what") == "updates beside limits":
        return "updates"
    if result.get("what") in ("limits", "loader", "direct", "revisions"):
        return str(result["what"])
    if str(result.get("what", "")).endswith("on two GPUs"):
        return "pairs"
    if "tests" in result:
        return "engine"
    if "spent_ms" in result:
        return "watching"
    return "digest" if "digest" in result else "gather" if "rank_to_rank_gb_per_s" in result else ""


def _summary(results: dict[str, Result]) -> list[str]:
    """Makes a row for each case of updates: weightcast with proof, the limit and the best peer."""
    rows: list[list[str]] = []
    for name, result in results.items():
        if _kind(result) != "updates":
            continue
        case = result["case"]
        proven = next(
            (row for row in result["methods"] if row["ours"] and row["settings"]["verify"] == "resident"), None
        )
        if proven is None:
            continue
        device = result["machine"]["gpus"][0] if result["machine"]["gpus"] else "CPU"
        rows.append(
            [
                f"[{name}](#{name.replace('/', '').replace('+', '')})",
                device,
                case["model"],
                f"{case['trainers']} + {case['engines']} {case['placement']}",
                _ms(result["floor_s"]),
                _ms(proven["usable_s"]["median"]),
                _ratio(proven["times_limit"]),
                f"{_ratio(proven['times_best_peer'])} ({proven['best_peer']})"
                if proven.get("best_peer")
                else "none ran",
            ]
        )
    if not rows:
        return []
    head = [
        "case",
        "device",
        "model",
        "layout",
        "limit, ms",
        "usable, ms",
        "times the limit",
        "faster than the best peer",
    ]
    return ["## Summary\n", "With proof of what engines keep, always on.\n", table(head, rows)]


def _machine(result: Result) -> str:
    facts = result["machine"]
    device = (
        f"{len(facts['gpus'])} x {facts['gpus'][0]}" if facts.get("gpus") else facts.get("cpu", facts.get("device"))
    )
    parts = [
        f"Machine: {device}, {facts.get('cores', '?')} cores; torch {facts['torch']}",
        f"python {facts['python']}",
    ]
    parts += [f"NCCL {facts['nccl']}"] if "nccl" in facts else []
    parts += [f"load average at the end {facts['load_average'][0]}"] if "load_average" in facts else []
    revision, date = facts.get("revision", "not recorded"), facts.get("date", facts.get("time", "not recorded"))
    text = wrapped(f"{'; '.join(parts)}. Revision `{revision}`, {date}.")
    return f"{text}\n\n{_command(facts['command'])}"


def wrapped(text: str) -> str:
    """Wraps a paragraph or list item at the line length of the docs."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _command(command: str) -> str:
    return f"```sh\n{command}\n```\n"


def _updates(result: Result) -> str:
    case, size = result["case"], result["case"]["bytes"]
    lines = [
        f"{case['placement']}, {case['trainers']} trainers, {case['engines']} engines, {case['model']}: "
        f"{size / 1e9:.2f} GB in {case['tensors']} tensors, kept as {case['parameters']} parameters.\n",
        _machine(result),
    ]
    if result["machine"]["load_average"][0] > result["machine"]["cores"]:
        lines.append("**The machine was loaded by others: only ratios within a row's own run mean anything.**\n")
    rows: list[list[str]] = []
    for name, found in result["limits"].items():
        usable = found["usable_s"]
        figures = [
            _ms(usable["median"]),
            _ms(usable["p95"]),
            _ms(usable["min"]),
            f"{size / usable['median'] / 1e9:.2f}",
        ]
        rows.append([f"limit: {name}", *figures, "", "", "", ""])
    for row in sorted(result["methods"], key=lambda row: row["usable_s"]["median"]):
        rows.append(
            [
                f"**{row['name']}**"
                if row["ours"]
                else row["name"] + (" (partly emulated)" if row["emulated"] else ""),
                _ms(row["usable_s"]["median"]),
                _ms(row["usable_s"]["p95"]),
                _ms(row["usable_s"]["min"]),
                f"{size / row['usable_s']['median'] / 1e9:.2f}",
                _ratio(row["times_limit"]),
                f"{row['settings']['bucket_bytes'] >> 20}",
                _ms(_stall(case, row)),
                _ms(row["returned_s"]["median"]),
            ]
        )
    head = ["", "usable, ms", "p95", "least", "GB/s", "times the limit", "bucket, MiB", "stall, ms", "returned, ms"]
    lines.append(table(head, rows))
    lines += _cost_of_proof(result)
    lines.append(_watched(result))
    if not case["generate"]:
        lines.append(
            "Nothing generated meanwhile: ours are the engine's own words, a peer holds still until it is done.\n"
        )
    for row in result["methods"]:
        if row["emulated"]:
            lines.append(wrapped(f"- emulated in {row['name']}: {'; '.join(row['emulated'])}"))
    lines += [wrapped(f"- not run: {name}: {why}") for name, why in result["not_run"].items()]
    lines += [wrapped(f"- failed: {name}: {why}") for name, why in result["failed"].items()]
    if result.get("peers"):
        versions = ", ".join(f"{name} {version}" for name, version in result["peers"].items())
        lines.append(f"- versions of the peers: {versions}")
    return "\n".join(lines) + "\n"


def _cost_of_proof(result: Result) -> list[str]:
    """Says for each level of proof how much later weights are usable, and what more it takes of the processors."""
    found: list[str] = []
    for key, words in (("usable_s", "until weights are usable"), ("processor_s", "of the processors of both sides")):
        spent = {row["settings"]["verify"]: row.get(key, {}).get("median") for row in result["methods"] if row["ours"]}
        without = spent.pop("none", None)
        if without and spent:
            costs = ", ".join(f"`{level}` {100 * (seconds / without - 1):+.1f} %" for level, seconds in spent.items())
            found.append(f"Proof, against `none`: {costs} {words}.\n")
    return found


def _stall(case: Result, row: Result) -> float:
    if case["generate"]:
        return float(row["stall_s"]["median"])
    return float(row["phases"].get("stall_s", row["usable_s"]["median"]))


def _watched(result: Result) -> str:
    keys = {
        "messages": ("trainer_messages", "engine_messages"),
        "metadata, KiB": ("trainer_metadata_bytes",),
        "handle opens": ("engine_handle_opens",),
        "launches, trainer": ("trainer_launches",),
        "launches, engine": ("engine_launches",),
        "kept, trainer, MB": ("trainer_held_bytes",),
        "kept, engine, MB": ("engine_held_bytes",),
        "peak, trainer, MB": ("trainer_peak_extra_bytes",),
        "peak, engine, MB": ("engine_peak_extra_bytes",),
    }
    rows: list[list[str]] = []
    for row in result["methods"]:
        cells = [row["name"]]
        for title, names in keys.items():
            values = [row["watched"][name] for name in names if name in row["watched"]]
            scale = 1e6 if title.endswith("MB") else 1024 if title.endswith("KiB") else 1
            cells.append(f"{sum(values) / scale:.0f}" if values else "")
        rows.append(cells)
    return table(["one turn, watched", *keys], rows)


def _limits(result: Result) -> str:
    rows = [[name, f"{value:.2f}"] for name, value in result["gb_per_s"].items()]
    return _machine(result) + "\n" + table(["", "GB/s"], rows)


def _loader(result: Result) -> str:
    rows = [
        [name, _ms(row["seconds"]), _ms(row["host_seconds"]), f"{row['gb_per_s']:.2f}"]
        for name, row in result["rows"].items()
    ]
    head = (
        f"{result['model']}: {result['bytes'] / 1e9:.2f} GB in {result['tensors']} tensors, {result['routes']} routes, "
        f"recorded in {result['record_s']:.2f} s.\n"
    )
    return head + "\n" + _machine(result) + "\n" + table(["", "ms", "until the call returns, ms", "GB/s"], rows)


def _digest(result: Result) -> str:
    rows = [[name, f"{row['gb_per_s']:.1f}", f"{row['of_read_limit']:.0%}"] for name, row in result["digest"].items()]
    text = _machine(result) + "\n" + table(["digest of", "GB/s", "of the read limit"], rows)
    moved = result.get("copied_and_summed")
    if moved:
        text += (
            f"\n\nCopied and summed by one launch, {moved['tensors']} tensors: {moved['gb_per_s']:.0f} GB/s, "
            f"{moved['of_copy']:.0%} of a plain copy. "
            f"Their copies alone, one by one: {moved['copies_alone_gb_per_s']:.0f} GB/s.\n"
        )
    return text


def _watching(result: Result) -> str:
    """Tables of ``benchmarks/watching.py``, in milliseconds of an update."""
    spent = result["spent_ms"]
    rows = [
        [
            words,
            *(f"{result[name][figure]:.2f}" for figure in ("without_ms", "with_ms")),
            f"{result[name]['difference_ms']:+.2f}",
            f"{result[name]['least_ms']:+.2f} to {result[name]['most_ms']:+.2f}",
        ]
        for name, words in (("processors", "processor time of trainer and engine"), ("returned", "time of `update()`"))
    ]
    parts = [
        [name.removesuffix("_s").replace("_", " "), f"{spent[name]:.2f}"]
        for name in spent
        if name not in ("waited_for", "allowed")
    ]
    return (
        _machine(result)
        + "\n"
        + table(["ms of an update", "without", "with", "difference", "95 % of its medians"], rows)
        + f"\nProcessor time in listeners, for which an update waits: {spent['waited_for']:.2f} ms. The limit is\n"
        f"{spent['allowed']:.2f} ms: 1 ms, or 1 % of `update()`. Other threads make and export spans.\n\n"
        + table(["part", "ms"], parts)
    )


def _gather(result: Result) -> str:
    rows = [[str(row["receivers"]), _ms(row["median_s"]), f"{row['gb_per_s']:.1f}"] for row in result["updates"]]
    lines = f"{result['device']}; one rank to another {result['rank_to_rank_gb_per_s']:.1f} GB/s.\n"
    machine = _machine(result) + "\n" if "machine" in result else ""
    return lines + "\n" + machine + table(["receivers", "ms", "GB/s"], rows)


def _direct(result: Result) -> str:
    asked = result["arguments"]
    size = result["model_bytes"]
    counted = all("processor_s" in run for row in result["ways"] for run in row["runs"])
    rows = [
        [
            row["way"],
            _ms(row["usable_s"]),
            _ms(row["returned_s"]),
            f"{row['times_faster']:.2f}",
            f"{row['loopback_bytes'] / size:.2f}",
        ]
        + ([f"{statistics.median(run['processor_s'] for run in row['runs']):.2f}"] if counted else [])
        for row in result["ways"]
    ]
    lines = (
        f"{asked['model']}, {size / 1e9:.2f} GB, from {asked['trainers']} trainer ranks to {asked['engines']} engines "
        f"of TP {asked['tp']}; every update proven `resident`. A plain copy of the model by one process takes "
        f"{_ms(result['plain_copy_s'])} ms.\n"
    )
    header = ["way", "usable, ms", "returned, ms", "times the first", "loopback, models"]
    header += ["processors, s"] if counted else []
    found = f"{lines}\n{_machine(result)}\n{table(header, rows)}"
    if result.get("reads"):
        ours, alone = (statistics.median(row[f"{what}_s"] for row in result["reads"]) for what in ("repeat", "alone"))
        found += "\n" + wrapped(
            f"The reads of an update by rdma, repeated without the rest of it, took {_ms(ours)} ms; NIXL alone, for as "
            f"many bytes in one prepared list for each pair of processes, {_ms(alone)} ms. That is {alone / ours:.2f} "
            "of NIXL's rate; medians in turns."
        )
        found += "\n"
    return found


def _pairs(result: Result) -> str:
    """Makes a table for each case: medians of the updates after the first of each way."""
    checks = [step for step in result["steps"] if "check" in step]
    good = sum(check["ok"] for check in checks)
    parts = [
        wrapped(
            f"{result['what']}: servers with the options `{result['options']}` and `{result['flags']}`. {good} of "
            f"{len(checks)} checks of proofs, answers and streams are good."
        ),
        "",
        _machine(result),
    ]
    sets: list[tuple[str, list[Result]]] = []  # a case has several where the trainer changes
    for step in result["steps"]:
        if step.get("step") == "trainer":
            sets.append((f"{step['case']}, {step['ranks']} trainer rank{'' if step['ranks'] == 1 else 's'}", []))
        elif "step" in step and sets:
            sets[-1][1].append(step)
    header = ["way, load, pause", "updates", "update, ms", "stall, ms", "longest gap, ms", "without, ms", "step, ms"]
    for title, steps in sets:
        parts += [f"### {title}\n", table(header, _pair_rows(steps))]
    parts += [wrapped(f"- Not finished: {line}.") for line in result["failed"]]
    parts += [f"- Not run: {name}." for name in result["skipped"]]
    return "\n".join(parts) + "\n"


def _pair_rows(steps: Sequence[Result]) -> list[list[str]]:
    gaps: dict[str, Result] = {}
    for step in steps:
        if "longest_s" in step:  # of several engines, the one with the longest
            name = step["step"].removeprefix("gaps, ").split(", engine")[0]
            gaps[name] = max(gaps.get(name, step), step, key=lambda each: statistics.median(each["longest_s"]))
    found: dict[str, list[Result]] = {}
    for step in steps:
        if "update_s" in step and not step["step"].startswith(("first update", "update with")):
            found.setdefault(step["step"], []).append(step)
    rows = []
    for name, updates in found.items():
        if isinstance(updates[0]["update_s"], list):  # the engine's own sender
            took, stalls = updates[0]["update_s"], updates[0]["paused_s"]
        else:
            took = [update["update_s"] for update in updates[1:]]
            stalls = [max(row["stall_s"] for row in update["targets"]) for update in updates[1:]]
        seen = gaps.get(name.replace(" 32 streams,", "").removesuffix(", 32 streams")) if "streams" in name else None
        told = ("longest_s", "longest_without_an_update_s")
        clients = [_ms(statistics.median(seen[key])) for key in told] if seen else ["", ""]
        step_ms = _ms(seen["step_s"]) if seen else ""
        times = [_ms(statistics.median(took)), _ms(statistics.median(stalls))]
        rows.append([name, str(len(took)), *times, *clients, step_ms])
    return rows


def _revisions(result: Result) -> str:
    """Makes a row for each case and method: medians over the rounds at both revisions."""
    found: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for row in result["rows"]:
        found.setdefault((row["case"], row["method"]), {}).setdefault(row["revision"], []).append(row)
    rows: list[list[str]] = []
    for (case, method), sides in found.items():
        if set(sides) != {"before", "after"}:
            continue
        middle = {
            side: {key: statistics.median(row[key] for row in turns) for key in ("usable_s", "cpu_s")}
            for side, turns in sides.items()
        }
        times = [_ms(middle[side][key]) for key in ("usable_s", "cpu_s") for side in ("before", "after")]
        rows.append([case, method, str(min(map(len, sides.values()))), *times])
    load = result["load_average"]
    words = (
        f"Revision `{result['before']}` (before) and the one named above (after), in turns. Load average of the "
        f"machine after each turn: {load['least']:.1f} to {load['most']:.1f}, median {load['median']:.1f}."
    )
    words += f" {result['note']}" if "note" in result else ""
    head = ["case", "", "rounds", "usable before, ms", "after", "processor before, ms", "after"]
    return _machine(result) + "\n" + wrapped(words) + "\n\n" + table(head, rows)


def _engine(result: Result) -> str:
    """Tables of GPU tests of real engines: the last update of a test, or the median of its last ten."""
    facts = result["machine"]
    rows: list[list[str]] = []
    for name, test in result["tests"].items():
        name = re.sub(r"^test_|_on_the_(pushed_)?weights", "", name)
        grown = ""
        if "case" in test:  # a stock engine, or vLLM with our receiver in it
            transport, size = test["case"]["via"], test["bytes"]
            seconds, stall = (statistics.median(test[key][-10:]) for key in ("seconds", "stall_s"))
            grown = f"{test['growth_over_20_bytes'] / 1e6:.0f}"
        elif test.get("reports"):
            report = test["reports"][-1]
            transport, size, seconds = report["transport"], report["bytes"], report["seconds"]
            stall = report["phases"]["stall"]
        else:
            continue
        rows.append(
            [name, transport, f"{size / 1e9:.2f}", _ms(seconds), f"{size / seconds / 1e9:.1f}", _ms(stall), grown]
        )
    head = ["test", "transport", "GB", "ms", "GB/s", "stall, ms", "engine's growth over 20, MB"]
    gathered = [
        [
            re.sub(r"^test_", "", name),
            *(str(update["receivers"]), f"{test['gather']['payload_bytes'] / 1e9:.2f}", _ms(update["median_s"])),
            *(f"{update['gb_per_s']:.1f}", f"{update['peak_extra_bytes'] / 1e6:.0f}"),
        ]
        for name, test in result["tests"].items()
        if "gather" in test
        for update in test["gather"]["updates"]
    ]
    versions = "".join(f", {name} {facts[name]}" for name in ("lmdeploy", "sglang", "vllm", "ray") if name in facts)
    machine = (
        f"Machine: {len(facts['gpus'])} x {facts['gpus'][0]}; torch {facts['torch']}, NCCL {facts['nccl']}{versions}."
    )
    note = [wrapped(result["note"]) + "\n"] if "note" in result else []
    parts = [wrapped(machine) + "\n", *note, _command(facts["command"])]
    if rows:
        parts += ["Whole `update()` calls with real engines, as the trainer sees them:\n", table(head, rows)]
    if gathered:
        head = ["test", "receivers", "GB", "ms", "GB/s", "peak extra, MB"]
        parts += ["Shards of the trainer ranks into buckets:\n", table(head, gathered)]
    return "\n".join(parts)


_SHOW: dict[str, Callable[[Result], str]] = {
    "engine": _engine,
    "updates": _updates,
    "limits": _limits,
    "loader": _loader,
    "digest": _digest,
    "gather": _gather,
    "direct": _direct,
    "pairs": _pairs,
    "revisions": _revisions,
    "watching": _watching,
}


def draw(results: dict[str, Result], folder: Path, base: Path) -> dict[str, str]:
    """Plots a bar for each method and limit; returns the path of each result's plot. Empty without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plots: matplotlib is not installed (weightcast[demo])", file=sys.stderr)
        return {}
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "weightcast"  # the same figures give the same file
    from matplotlib import pyplot as plt

    plots: dict[str, str] = {}
    for name, result in results.items():
        if _kind(result) != "updates" or not result["methods"]:
            continue
        bars = [(f"limit: {key}", found, "0.6") for key, found in result["limits"].items()]
        bars += [(row["name"], row, "tab:blue" if row["ours"] else "tab:orange") for row in result["methods"]]
        bars.sort(key=lambda bar: bar[1]["usable_s"]["median"], reverse=True)
        figure, axes = plt.subplots(figsize=(8, 0.6 + 0.35 * len(bars)))
        values = [bar[1]["usable_s"]["median"] * 1e3 for bar in bars]
        low = [value - bar[1]["usable_s"]["min"] * 1e3 for value, bar in zip(values, bars, strict=True)]
        high = [bar[1]["usable_s"]["p95"] * 1e3 - value for value, bar in zip(values, bars, strict=True)]
        axes.barh([bar[0] for bar in bars], values, xerr=[low, high], color=[bar[2] for bar in bars], height=0.6)
        axes.set_xscale("log")
        axes.set_xlabel("ms until the last engine's weights are usable (median; least to p95), log scale")
        figure.tight_layout()
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        plots[name] = str(path.relative_to(base)) if path.is_relative_to(base) else str(path)
    return plots


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
