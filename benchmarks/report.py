"""Makes RESULTS.md, and the tables of figures in other pages, from the JSON files of ``benchmarks/results``.

    python benchmarks/report.py

The functions from ``same_gpu`` to ``cpu`` name the cases, and each case the
files that it is taken from.  Ours is from the first file, the run that counts today.  Of other senders the best run
counts.  A page has a table of these between ``<!-- results: NAME -->`` and ``<!-- results end -->``, so no
figure is typed by hand and none stands in two forms.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDER = HERE / "results"
PAGES = ("RESULTS.md", "README.md", "docs/engines/vllm.md", "docs/engines/vllm-quantised.md")
Result = Mapping[str, Any]
_FOLDERS = re.compile(r"/(?:tmp|root)/(?:[\w.-]+/)*")  # of the machine of the run
_BLOCK = re.compile(r"<!-- results: (?P<name>[\w-]+) -->\n.*?<!-- results end -->", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of one case, in seconds.

    Attributes:
        title: The case in words.
        ours: Median of our updates after the first of a connection.
        files: Names of the result files, the one of ours first.
        limit: One copy or broadcast of the same bytes in the run of ours; None if it was not measured there.
        other: The best other sender; None if there was none.
        by: Name of the other sender.
        stall: Median time in which the engine generated nothing.
        gap: Median over updates of the longest time between two tokens of one stream.
    """

    title: str
    ours: float
    files: tuple[str, ...]
    limit: float | None = None
    other: float | None = None
    by: str = ""
    stall: float | None = None
    gap: float | None = None


def read(name: str) -> dict[str, Any]:
    """Reads one file of results by its name without the suffix."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def later(values: Sequence[float]) -> float:
    """Returns the median of the updates after the first one of a connection."""
    return statistics.median(values[1:])


def _steps(result: Result, case: str, step: str) -> list[Result]:
    return [each for each in result["steps"] if each.get("case") == case and each.get("step") == step]


def _stalls(step: Result) -> float:
    if "targets" in step:
        return max(target["stall_s"] for target in step["targets"])
    stall = step["stall_s"]
    return max(stall) if isinstance(stall, list) else stall


def engine(title: str, case: str, step: str, *files: str, ranks: int = 1) -> Row:
    """Makes a row from runs of ``engines.py``; files after the first count for the engine's own sender alone."""
    result = read(files[0])
    steps = _steps(result, case, step)
    way, _, pause = step.partition(", 32 streams, ")
    gaps = _steps(result, case, f"gaps, {way}, {pause}")
    theirs: list[float] = []
    by = "vLLM's own sender"
    load = "32 streams" if pause else "idle"
    for name in files:
        for each in read(name)["steps"]:
            said = str(each.get("step", ""))
            if each.get("case") == case and said.endswith(f"'s own sender, {load}") and "update_s" in each:
                theirs.append(later(each["update_s"]))
                by = said.partition(",")[0]
    rate = result.get("copy_bytes_per_s")
    return Row(
        title=title,
        ours=later([each["update_s"] for each in steps]),
        files=files,
        limit=steps[0]["bytes"] / rate if rate and ranks == 1 and not pause else None,
        other=min(theirs, default=None),
        by=by,
        stall=later([_stalls(each) for each in steps]),
        gap=later(_longest(gaps[0])) if pause and gaps else None,
    )


def _longest(gaps: Result) -> list[float]:
    found = gaps.get("longest_s")
    return found if isinstance(found, list) else [each["longest_s"] for each in gaps["around_each_update"]]


def sglang(title: str, model: str, case: str, *files: str) -> Row:
    """Makes a row from runs of SGLang on one GPU; files after the first count for SGLang's own sender alone."""
    found = read(files[0])["models"][model]
    pushes = found["cases"][case]["pushes"]
    theirs: list[float] = []
    for name in files:
        own = read(name)["models"][model]["cases"].get("stock, SGLang's own sender, idle")
        if own is not None and not own["wrong"]:
            theirs.append(later([turn["seconds"] for turn in own["rounds"]]))
    loaded = "streams" in case
    gaps = [each["longest_s"] for each in found["cases"][case].get("clients", [])]
    return Row(
        title=title,
        ours=later([push["seconds"] for push in pushes]),
        files=files,
        limit=None if loaded else found["limits"]["copy_of_the_weights_s"],
        other=None if loaded else min(theirs, default=None),
        by="SGLang's own sender",
        stall=later([push["stall_s"] for push in pushes]),
        gap=later(gaps) if loaded else None,
    )


def pairs(title: str, case: str, by: str, *files: str) -> Row:
    """Makes a row from a run of an engine on the trainer's two GPUs."""
    result = read(files[0])
    ours = [step for step in _steps(result, case, "direct, idle, in_place") if "update_s" in step]
    theirs = [
        statistics.median(step["update_s"])
        for name in files
        for step in read(name)["steps"]
        if step.get("case") == case and str(step.get("step", "")).endswith("own sender, idle") and "update_s" in step
    ]
    return Row(
        title=title,
        ours=later([step["update_s"] for step in ours]),
        files=files,
        other=min(theirs, default=None),
        by=by,
        stall=later([_stalls(step) for step in ours]),
    )


def lmdeploy(title: str, case: str) -> Row:
    """Makes a row from the run of LMDeploy, which has one update for each case."""
    found = read("gpu-lmdeploy-receiver-h200")["cases"][case]
    return Row(title=title, ours=found["seconds"], files=("gpu-lmdeploy-receiver-h200",), stall=found["stall_s"])


def other_gpu(title: str, case: str, *files: str) -> Row:
    """Makes a row from a run of ``engines.py`` between two GPUs; the limit is the rate of a broadcast of 1 GiB."""
    step = "broadcast, idle, in_place"
    size = _steps(read(files[0]), case, step)[0]["bytes"]
    limit = size / 1e9 / read("limits-2")["gb_per_s"]["broadcast 1024 MiB"]
    return replace(engine(title, case, step, *files), limit=limit, files=(*files, "limits-2"))


def laboratory(title: str, *files: str, profile: str = "") -> Row:
    """Makes a row from comparisons with the peers; ours is the fastest way with proof in the first file."""
    result = read(files[0])
    ours = [row for row in result["methods"] if row["ours"] and row["settings"]["verify"] == "resident"]
    best = min(row["usable_s"]["median"] for row in ours)
    if profile:
        rows = [row for row in read(profile)["rows"] if row["method"] == "weightcast direct, shards, 2048 MiB"]
        best = later([row["usable_s"] for row in rows if "usable_s" in row and not row["profiled"]])
    peers = [row for name in files for row in read(name)["methods"] if not row["ours"]]
    peer = min(peers, key=lambda row: row["usable_s"]["median"], default=None)
    generates = result["case"]["generate"]
    return Row(
        title=title,
        ours=best,
        files=((profile,) if profile else ()) + files,
        limit=result["floor_s"],
        other=peer["usable_s"]["median"] if peer else None,
        by=re.split(r" (?:flattened|packed)", peer["name"])[0] if peer else "",
        stall=min(row["stall_s"]["median"] for row in ours) if generates else None,
    )


_IDLE, _LOADED = "direct, idle, in_place", "direct, 32 streams, in_place"


def same_gpu() -> list[Row]:
    return [
        engine("vLLM 0.25.1, Qwen3-8B, 16 GB", "8b", _IDLE, "gpu-vllm-8b-sender-h200"),
        engine(
            "vLLM 0.25.1, 16 layers of Qwen3-30B-A3B, 21 GB",
            "moe",
            _IDLE,
            "gpu-vllm-experts-h200",
            "gpu-vllm-experts-after-start-h200",
        ),
        sglang(
            "SGLang 0.5.17, Qwen3-8B, 16 GB",
            "qwen3-8b",
            "receiver, direct, idle",
            "gpu-sglang-h200",
            "gpu-sglang-receiver-mapped-h200",
        ),
        sglang(
            "SGLang 0.5.17, 16 layers of Qwen3-30B-A3B, 21 GB",
            "qwen3-30b-a3b-16-layers",
            "receiver, direct, idle",
            "gpu-sglang-h200",
            "gpu-sglang-experts-h200",
        ),
    ]


def apart() -> list[Row]:
    return [other_gpu("vLLM 0.25.1, Qwen3-8B, 16 GB", "apart", "gpu-vllm-8b-apart-2xh200")]


def more_engines() -> list[Row]:
    return [
        lmdeploy("LMDeploy 0.18.0, Qwen3-8B, `ipc`, one H200", "in_place idle again"),
        pairs(
            "vLLM 0.25.1, TP 2, Qwen3-8B, two H200s",
            "tp2",
            "vLLM's own sender",
            "gpu-vllm-pairs-mapped-2xh200",
            "gpu-vllm-pairs-2xh200",
        ),
        pairs("vLLM 0.25.1, DP 2, Qwen3-8B, two H100s", "dp2", "vLLM's own sender", "gpu-vllm-pairs-2xh100"),
        pairs(
            "vLLM 0.25.1, TP 2 and EP, 16 layers of Qwen3-30B-A3B, two H200s",
            "ep2",
            "vLLM's own sender",
            "gpu-vllm-pairs-2xh200",
        ),
        pairs("SGLang 0.5.17, TP 2, Qwen3-8B, two H200s", "tp2", "SGLang's own sender", "gpu-sglang-pairs-2xh200"),
        pairs(
            "SGLang 0.5.17, TP 2, 16 layers of Qwen3-30B-A3B, two H200s",
            "moe2",
            "SGLang's own sender",
            "gpu-sglang-pairs-2xh200",
        ),
    ]


def streams() -> list[Row]:
    loaded, kept = "direct, 32 streams, retract", "ipc, 32 streams, in_place"
    return [
        engine("vLLM, Qwen3-8B, `in_place`", "8b", _LOADED, "gpu-vllm-8b-gaps-h200"),
        engine("vLLM, Qwen3-8B, `retract`", "8b", loaded, "gpu-vllm-8b-h200"),
        engine("vLLM, Qwen3-8B, `abort`", "8b", "direct, 32 streams, abort", "gpu-vllm-8b-h200"),
        engine("vLLM, Qwen3-8B, `ipc`, `in_place`", "8b", kept, "gpu-vllm-8b-gaps-h200"),
        engine('vLLM, experts, `"warm_up": true`, `in_place`', "moe", _LOADED, "gpu-vllm-experts-warm-h200"),
        engine('vLLM, experts, `"warm_up": true`, `retract`', "moe", loaded, "gpu-vllm-experts-warm-h200"),
        engine("vLLM, Qwen3-8B, `--enable-sleep-mode`, `in_place`", "8b", _LOADED, "gpu-vllm-sleep-8b-h200"),
        engine("vLLM, experts, `--enable-sleep-mode`, `in_place`", "moe", _LOADED, "gpu-vllm-sleep-experts-h200"),
        engine("SGLang, Qwen3-8B, `in_place`", "8b", _LOADED, "gpu-sglang-8b-gaps-h200"),
        sglang(
            "SGLang, experts, `in_place`",
            "qwen3-30b-a3b-16-layers",
            "receiver, direct, in_place, streams",
            "gpu-sglang-experts-h200",
        ),
    ]


def quantised() -> list[Row]:
    eight, experts, blocks = "gpu-vllm-fp8-8b-h200", "gpu-vllm-fp8-experts-h200", "gpu-vllm-fp8-blocks-8b-h200"
    return [
        engine("online fp8, Qwen3-8B, idle", "8b-online", _IDLE, eight),
        engine("online fp8, Qwen3-8B, 32 streams", "8b-online", _LOADED, eight),
        engine("the same, derived at the commit, idle", "8b-online", _IDLE, "gpu-vllm-fp8-8b-at-commit-h200"),
        engine("online fp8, experts, idle", "moe-online", _IDLE, experts),
        engine("online fp8, experts, 32 streams", "moe-online", _LOADED, experts),
        engine("the same, derived at the commit, idle", "moe-online", _IDLE, "gpu-vllm-fp8-experts-at-commit-h200"),
        engine("checkpoint in blocks, Qwen3-8B, `ipc`, idle", "8b-blocks", "ipc, idle, in_place", blocks),
        engine("checkpoint in blocks, Qwen3-8B, `ipc`, 32 streams", "8b-blocks", "ipc, 32 streams, in_place", blocks),
    ]


def lora() -> list[Row]:
    name = "gpu-vllm-lora-h100"
    folder = [each["update_s"] for each in _steps(read(name), "8b-lora", "folder, idle, a new name")]
    return [
        replace(
            engine("an adapter of rank 32, 175 MB, idle", "8b-lora", "idle, 1 adapters, in_place", name),
            limit=None,
            other=statistics.median(folder),
        )
    ]


def lab() -> list[Row]:
    return [
        laboratory(
            "Qwen3-8B, same GPU",
            "direct-colocated-1-8b",
            "colocated-1-8b",
            profile="profile-direct-colocated-1-8b-h200",
        ),
        laboratory(
            "Qwen3-8B, two trainers and two engines on the same two GPUs", "direct-colocated-2-8b", "colocated-2-8b"
        ),
        laboratory("65,536 tensors of 64 KiB, same GPU", "colocated-1-many"),
        laboratory("Qwen3-8B, GPU to GPU", "disaggregated-1+1-8b"),
        laboratory("Qwen3-8B, two trainer GPUs to two engine GPUs", "disaggregated-2+2-8b"),
        laboratory("20 layers of a Llama 70B, 38 GB, GPU to GPU", "disaggregated-1+1-70b"),
        laboratory("Qwen3-30B-A3B, 61 GB, GPU to GPU", "disaggregated-1+1-30b"),
        laboratory("65,536 tensors of 64 KiB, GPU to GPU", "disaggregated-1+1-many"),
        laboratory("Qwen3-8B, same GPU, the engine generates", "stall-colocated-1-8b"),
        laboratory("Qwen3-8B, GPU to GPU, the engine generates", "stall-disaggregated-1+1-8b"),
    ]


def cpu() -> list[Row]:
    return [
        laboratory("1 GiB, shared memory", "cpu-colocated-1g"),
        laboratory("256 MiB, shared memory", "cpu-colocated"),
        laboratory("2,048 tensors, shared memory", "cpu-colocated-many"),
        laboratory("1 GiB, broadcast", "cpu-disaggregated-1g"),
        laboratory("256 MiB, broadcast", "cpu-disaggregated"),
        laboratory("4 layers of a mixture of experts, broadcast", "cpu-disaggregated-moe"),
    ]


def shown(seconds: float | None) -> str:
    """Returns a time in milliseconds with three digits or more; a dash for none."""
    if seconds is None:
        return "-"
    ms = seconds * 1e3
    return f"{ms:.1f}" if ms < 99.95 else f"{ms:,.0f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _limits(
    rows: Sequence[Row], other: str, *, limit: str = "limit, ms", named: bool = False, linked: bool = True
) -> str:
    cells = [
        [
            f"{row.title}{_runs(row) if linked else ''}",
            shown(row.limit),
            f"**{shown(row.ours)}**",
            f"{shown(row.other)} ({row.by})" if named and row.other is not None else shown(row.other),
        ]
        for row in rows
    ]
    return table(["case", limit, "weightcast, ms", other], cells)


def _loads(rows: Sequence[Row], *, linked: bool = True) -> str:
    cells = [
        [f"{row.title}{_runs(row) if linked else ''}", shown(row.ours), shown(row.stall), shown(row.gap)]
        for row in rows
    ]
    return table(["case", "update, ms", "stall, ms", "longest gap, ms"], cells)


def _fp8(rows: Sequence[Row], *, linked: bool = True) -> str:
    cells = [
        [
            f"{row.title}{_runs(row) if linked else ''}",
            *map(shown, (row.ours, row.stall, row.gap, row.other)),
        ]
        for row in rows
    ]
    return table(["case", "update, ms", "stall, ms", "longest gap, ms", "vLLM's own sender, ms"], cells)


def _runs(row: Row) -> str:
    """Links a row of RESULTS.md to its runs, further down on the page."""
    return " " + " ".join(f"[{_number(name)}](#run-{_number(name)})" for name in row.files)


def _used() -> list[str]:
    groups = (same_gpu, apart, more_engines, streams, quantised, lora, lab, cpu)
    return list(dict.fromkeys(name for group in groups for row in group() for name in row.files))


def _number(name: str) -> int:
    return _used().index(name) + 1


def _run_list() -> str:
    lines = []
    for name in _used():
        result = read(name)
        facts = result["machine"] if isinstance(result.get("machine"), dict) else result
        gpus = facts.get("gpus") or []
        machine = f"{len(gpus)} x {gpus[0]}" if gpus else f"{facts.get('cpu', 'CPU')}, {facts.get('cores')} cores"
        versions = f"torch {facts['torch']}" + (f", NCCL {facts['nccl']}" if "nccl" in facts else "")
        revision = facts.get("revision", facts.get("weightcast_revision", "not recorded"))
        date = str(facts["date"])[:10] if "date" in facts else "not recorded"
        command = _FOLDERS.sub("", facts.get("command", result.get("command", "not recorded")))
        number = _number(name)
        lines.append(
            f'| <a id="run-{number}"></a>{number} | [{name}](benchmarks/results/{name}.json) | {date} | {machine} | '
            f"{versions}, revision `{revision}` | `{command}` |"
        )
    head = "| run | file | date | machine | versions | command |\n|---:|---|---|---|---|---|"
    return "\n".join([head, *lines])


def _conformance() -> str:
    rows = []
    for path in sorted((FOLDER / "conformance").glob("*.json")):
        found = json.loads(path.read_text())
        outcomes = [row["outcome"] for row in found["rows"]]
        counts = [str(outcomes.count(each)) for each in ("passed", "failed", "not applicable")]
        rows.append([found["title"], *counts])
    return table(["engine", "passed", "failed", "not applicable"], rows)


def _readme() -> list[Row]:
    return [
        *(replace(row, title=f"same GPU: {row.title}") for row in same_gpu()),
        *(replace(row, title=f"other GPU: {row.title}") for row in apart()),
    ]


TABLES: dict[str, Callable[[], str]] = {
    "readme": lambda: _limits(_readme(), "engine's own sender, ms", linked=False),
    "same-gpu": lambda: _limits(same_gpu(), "engine's own sender, ms"),
    "other-gpu": lambda: _limits(apart(), "engine's own sender, ms"),
    "more-engines": lambda: _limits(more_engines(), "engine's own sender, ms"),
    "streams": lambda: _loads(streams()),
    "streams-vllm": lambda: _loads([row for row in streams() if row.title.startswith("vLLM")][:4], linked=False),
    "quantised": lambda: _fp8(quantised()),
    "quantised-page": lambda: _fp8(quantised(), linked=False),
    "lora": lambda: _limits(lora(), "from a folder, by vLLM's own route, ms"),
    "laboratory": lambda: _limits(lab(), "best peer, ms", named=True),
    "cpu": lambda: _limits(cpu(), "best peer, ms", limit="plain copies or bare broadcast, ms", named=True),
    "conformance": _conformance,
    "runs": _run_list,
}


def filled(text: str) -> str:
    """Returns a page with each of its tables made anew."""
    return _BLOCK.sub(
        lambda found: f"<!-- results: {found['name']} -->\n\n{TABLES[found['name']]()}\n\n<!-- results end -->", text
    )


def main() -> int:
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text()))
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
