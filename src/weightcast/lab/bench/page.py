"""The page of ``weightcast bench updates``: measured methods beside the limits of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weightcast.page.bars import Bar, bars, stacks
from weightcast.page.charts import Figure
from weightcast.page.document import Document, Tile
from weightcast.page.svg import of_phases
from weightcast.page.updates import parts_of
from weightcast.page.words import digits, seconds, size

_MEMORY = {
    "trainer_peak_extra_bytes": "trainer, peak extra",
    "trainer_held_bytes": "trainer, kept",
    "engine_peak_extra_bytes": "engine, peak extra",
    "engine_held_bytes": "engine, kept",
}


def write_page(results: Sequence[Mapping[str, Any]], path: Path, *, command: str) -> Path:
    """Writes the page of all cases, as ``run_case`` returns them; ``command`` is the command line."""
    facts = results[0]["machine"]
    gpus = f"{len(facts['gpus'])} x {facts['gpus'][0]}" if facts.get("gpus") else facts.get("cpu", "CPU")
    page = Document(
        "Updates beside the limits of this machine",
        f"{gpus}, {facts.get('cores', '?')} cores, torch {facts['torch']}. Methods and limits took turns in the same "
        "processes; after every turn the engine's weights were compared bit for bit.",
    )
    for result in results:
        case = result["case"]
        page.heading(
            f"{case['placement'].capitalize()}: {case['trainers']} + {case['engines']}, {size(case['bytes'])} in "
            f"{case['tensors']} tensors"
        )
        page.tiles(_tiles(result))
        page.figures([_times(result), *_costs(result)])
        for name, why in result["failed"].items():
            page.remark(f"{name} failed: {why}")
    page.foot(command, code=True)
    page.foot(f"Python {facts['python']}, revision {facts.get('revision', 'not recorded')}, {facts.get('date', '')}")
    return page.write(path)


def _tiles(result: Mapping[str, Any]) -> list[Tile]:
    tiles: list[Tile] = []
    for row in result["methods"]:
        if not row["ours"]:
            continue
        median = row["usable_s"]["median"]
        ratio = f"{digits(row['times_limit'])} times the limit" if row["times_limit"] else "no limit was measured"
        tiles.append(Tile(name=row["name"], value=seconds(median), below=ratio))
        if row["settings"].get("verify") != "none":
            tiles.append(
                Tile(
                    name="rate", value=f"{size(result['case']['bytes'] / median)}/s", below="with proof of every tensor"
                )
            )
    if result["failed"]:
        tiles.insert(0, Tile(name="failed", value=str(len(result["failed"])), mood="bad"))
    return tiles


def _times(result: Mapping[str, Any]) -> Figure:
    """Plots the time of each limit and method, the fastest first."""
    found = [
        Bar(name=f"limit: {name}", colour="grey", **_spread(limit)) for name, limit in result["limits"].items()
    ] + [
        Bar(
            name=row["name"],
            colour="s1" if row["ours"] else "s8",
            note="partly emulated" if row["emulated"] else "",
            **_spread(row),
        )
        for row in result["methods"]
    ]
    legend = [("grey", "limit of the machine"), ("s1", "weightcast")]
    if any(not row["ours"] for row in result["methods"]):
        legend.append(("s8", "peers"))
    return bars(
        "Time until every engine can use the new weights",
        "Median; the line across a bar goes from the least to the 95th percentile.",
        sorted(found, key=lambda each: each.value),
        show=seconds,
        legend=legend,
        value_title="seconds",
        wide=True,
    )


def _spread(found: Mapping[str, Any]) -> dict[str, Any]:
    usable = found["usable_s"]
    return {"value": usable["median"], "low": usable["min"], "high": usable["p95"]}


def _costs(result: Mapping[str, Any]) -> list[Figure]:
    """Plots our phases and everybody's memory."""
    ours = [row for row in result["methods"] if row["ours"]]
    figures: list[Figure] = []
    if ours:
        phases = {
            row["name"]: parts_of(
                {name.removesuffix("_s"): float(took) for name, took in row["phases"].items()},
                float(row["phases"].get("own_seconds", 0.0)),
            )
            for row in ours
        }
        figures.append(
            stacks(
                "Time by phase",
                "Medians of the head's phases; what is left of the whole update is the check of all digests.",
                phases,
                colours=of_phases(next(iter(phases.values()))),
                show=seconds,
            )
        )
        figures.append(
            bars(
                "Stall",
                "Time in which the engine generated nothing, by its own clock; median.",
                [Bar(name=row["name"], value=float(row["phases"].get("stall_s", 0.0)), colour="p7") for row in ours],
                show=seconds,
                value_title="seconds",
            )
        )
    memory = {
        row["name"]: {name: float(row["watched"].get(key, 0)) for key, name in _MEMORY.items()}
        for row in result["methods"]
        if row["watched"]
    }
    if memory:
        colours = dict(zip(_MEMORY.values(), ("s1", "s3", "s5", "s7"), strict=True))
        caption = "One watched turn: memory kept between updates, and the most beside it during one."
        figures.append(stacks("Memory", caption, memory, colours=colours, show=size, wide=True))
    return figures
