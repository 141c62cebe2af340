"""``weightcast plan``: estimates the buckets, memory and time of an update, without a GPU or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightcast.cli.options import BucketBytes, Json, Traceback, WireDtype
from weightcast.cli.render import parse_size, say, say_json
from weightcast.config import ENGINE_KINDS
from weightcast.errors import ConfigError, some
from weightcast.report import count_of, format_bytes

if TYPE_CHECKING:
    from weightcast.update.estimate import Plan


def plan(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT-or-config.json",
            help="A safetensors checkpoint, or the config.json of a Hugging Face model.",
            show_default=False,
        ),
    ],
    bucket_bytes: BucketBytes = None,
    dtype: WireDtype = None,
    engine: Annotated[str, typer.Option(metavar="|".join(ENGINE_KINDS), help="Kind of the engines.")] = "native",
    trainer_ranks: Annotated[int, typer.Option("--trainer-ranks", metavar="N", help="Ranks of the trainer.")] = 1,
    ceiling: Annotated[
        str | None,
        typer.Option(
            "--max-extra-bytes",
            "--ceiling",
            metavar="SIZE",
            help="Extra memory allowed on a trainer rank; sets the size of a bucket.",
        ),
    ] = None,
    quantise: Annotated[
        str | None, typer.Option("--quantise", metavar="fp8", help="Quantise weights before they are sent.")
    ] = None,
    engines: Annotated[int, typer.Option("--targets", metavar="N", help="Number of engines.")] = 1,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Ranks of each engine.")] = 1,
    cell_ranks: Annotated[
        int | None,
        typer.Option(
            "--cell-ranks",
            metavar="N",
            help="Most engine ranks in one process group of a broadcast. An engine that fails ends its own group "
            "alone; weights are sent once to each group. Without it 256.",
        ),
    ] = None,
    hosts: Annotated[
        int,
        typer.Option("--hosts", metavar="N", help="Hosts that the trainer ranks are spread over, evenly."),
    ] = 1,
    engine_hosts: Annotated[
        int,
        typer.Option(
            "--engine-hosts",
            metavar="N",
            help="Other hosts that the engine ranks are spread over, evenly. Without it they are on the trainer's.",
        ),
    ] = 0,
    device: Annotated[str, typer.Option("--device", metavar="cuda|cpu", help="Where all weights are.")] = "cuda",
    link_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--link-gb-per-s",
            metavar="GB/S",
            help="Bandwidth of a link in 10^9 bytes per second; adds a transfer time to the estimate.",
        ),
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Estimates the buckets, memory, bytes per link and transfer time of an update. Needs no GPU and no engine.

    \b
    weightcast plan runs/step-412 --targets 4 --tp 2 --link-gb-per-s 45
    weightcast plan config.json --dtype bfloat16 --bucket-bytes 256MiB --json
    weightcast plan config.json --trainer-ranks 16 --hosts 2 --targets 8 --tp 4 --engine-hosts 4
    weightcast plan config.json --engine lmdeploy --trainer-ranks 8 --max-extra-bytes 1GiB --quantise fp8
    """
    from weightcast.adapters.registry import kind_named
    from weightcast.cli.plan_model import model_at
    from weightcast.update.estimate import make_plan

    size_bytes = None if bucket_bytes is None else parse_size(bucket_bytes)
    packing = kind_named(engine).speaks.packing
    if quantise not in (None, "fp8"):
        raise ConfigError(f"--quantise {quantise} is unknown: choose fp8, or leave it out")
    if min(engines, tp, trainer_ranks, hosts, 1 if cell_ranks is None else cell_ranks) < 1:
        cells = "" if cell_ranks is None else f"--cell-ranks {cell_ranks}, "
        raise ConfigError(
            f"--targets {engines}, --tp {tp}, --trainer-ranks {trainer_ranks}, {cells}"
            f"--hosts {hosts}: each of them must be at least 1"
        )
    if engine_hosts < 0 or device not in ("cuda", "cpu"):
        raise ConfigError(f"--engine-hosts {engine_hosts}, --device {device}: give a number, and cuda or cpu")
    if link_gb_per_s is not None and not link_gb_per_s > 0:
        raise ConfigError(f"--link-gb-per-s {link_gb_per_s} is not a positive number")

    asked = model_at(model, dtype, fp8=quantise is not None)
    most_bytes = None
    if ceiling is not None:
        from weightcast.exporters.memory_estimate import COMPUTED_BYTES, WORK_BYTES, bucket_bytes_for

        most_bytes = bucket_bytes_for(
            asked.specs,
            ceiling_bytes=parse_size(ceiling),
            packing=packing,
            world_size=trainer_ranks,
            work_bytes=WORK_BYTES + (COMPUTED_BYTES if quantise is not None else 0),
        )
    result = make_plan(
        asked.specs,
        model=str(model),
        engine=engine,
        packing=packing,
        bucket_bytes=size_bytes,
        most_bytes=most_bytes,
        engine_ranks=engines * tp,
        link_gb_per_s=link_gb_per_s,
        trainer_ranks=trainer_ranks,
        computed=quantise is not None,
        tp=tp,
        cell_ranks=cell_ranks,
        hosts=hosts,
        engine_hosts=engine_hosts,
        device=device,
        family=asked.family,
        not_covered=asked.not_covered,
    )
    if as_json:
        say_json(result)
    else:
        _show(result)


def _show(result: Plan) -> None:
    say(
        f"{result.tensors} tensors, {format_bytes(result.size_bytes)}, "
        f"{count_of(result.buckets, 'bucket')} of at most {format_bytes(result.bucket_bytes)}"
    )
    if result.bucket_bytes == result.default_bucket_bytes["ipc"] != result.default_bucket_bytes["other"]:
        say(
            f"bucket size: {format_bytes(result.default_bucket_bytes['ipc'])} is what connect chooses for ipc on GPUs "
            f"with enough free memory; otherwise {format_bytes(result.default_bucket_bytes['other'])}"
        )
    if len(result.dtypes) > 1:
        say(f"dtypes: {', '.join(f'{format_bytes(size)} {dtype}' for dtype, size in result.dtypes.items())}")
    if result.family is not None:
        say(f"names: a checkpoint's names, from the table {result.family!r}")
    for found, what in ((result.alone, "alone"), (result.cut, "in pieces")):
        if found:
            verb = "travels" if len(found) == 1 else "travel"
            say(f"{count_of(len(found), 'tensor')} {verb} {what}: {some(found, 8)}")
    if result.oversized:
        verb = "is" if len(result.oversized) == 1 else "are"
        say(f"{len(result.oversized)} {verb} larger than a bucket: {some(result.oversized, 8)}")
    for sentence in result.not_covered:
        say(f"not covered: {sentence}")
    packing = result.packing
    say(
        f"packing: {'one dtype per bucket' if packing.one_dtype else 'any dtypes in a bucket'}, aligned to "
        f"{packing.alignment_bytes} bytes, large tensors {'cut by rows' if packing.slices else 'whole'} "
        f"({result.engine})"
    )
    ranks = f"each of {result.trainer_ranks} trainer ranks" if result.trainer_ranks > 1 else "a trainer rank"
    taken = "one bucket" if result.buckets == 1 else "two buckets"
    scratch = ", what a gather needs" if result.trainer_ranks > 1 else ""
    say(
        f"memory: {format_bytes(result.trainer_peak_bytes)} extra on {ranks}: {taken}{scratch}, "
        "and room for sums and casts"
    )
    of_each = "each of " * (result.engine_ranks > 1)
    say(
        f"wire: {format_bytes(result.link_bytes)} into {of_each}"
        f"{count_of(result.engine_ranks, 'engine rank')}, {format_bytes(result.all_links_bytes)} in all"
    )
    say(
        f"broadcast: {_cells(result.cells)}; trainer rank 0 sends each bucket to each cell, "
        f"{format_bytes(len(result.cells) * result.size_bytes)} in all"
    )
    _show_direct(result)
    _show_ways(result)
    for other in result.others:
        if other.engine != result.engine:
            takes = (
                f"{count_of(other.buckets, 'bucket')}"
                if other.buckets or not result.tensors
                else f"buckets of {format_bytes(other.needs_bucket_bytes)} or more are needed"
            )
            say(f"{other.engine}: {takes}")
    if result.seconds is not None:
        say(
            f"time: {_time(result.seconds)} on the wire at {result.link_gb_per_s:g} GB/s per link, nothing else counted"
        )


def _show_ways(result: Plan) -> None:
    from weightcast.transports.link_bytes import GAIN

    if not result.ways:
        return
    say("between hosts, with one link for each: bytes on the busiest link")
    for way in result.ways:
        where = f" {way.busiest_link}" if way.busiest_link else ""
        if way.cost_bytes > way.busiest_bytes:
            where += f", in the time of {format_bytes(way.cost_bytes)}, since its links wait for each other"
        takes = "" if way.seconds is None else f", {_time(way.seconds)} at {result.link_gb_per_s:g} GB/s"
        taken = f"; {' and '.join(way.taken_by)} {'takes' if len(way.taken_by) == 1 else 'take'} it"
        say(f"  {way.name}: {format_bytes(way.busiest_bytes)}{where}{takes}{taken * bool(way.taken_by)}")
    say(f"relay, and direct for auto, are taken where what is taken otherwise costs {GAIN:g} times as much or more")


def _show_direct(result: Plan) -> None:
    from weightcast.transports.direct import SLOW_BETWEEN_GPUS

    direct = result.direct
    if direct.refused:
        say(f"direct: not possible, because {direct.refused}")
        return
    takes = "" if direct.seconds is None else f", {_time(direct.seconds)} at {result.link_gb_per_s:g} GB/s"
    say(
        f"direct: {format_bytes(direct.into_engine_rank_bytes)} into each engine rank, "
        f"{format_bytes(direct.out_of_trainer_rank_bytes)} out of each trainer rank, if all hold equal parts; "
        f"the busiest link is that of {'a' if direct.busiest[0] == 't' else 'an'} {direct.busiest}{takes}"
    )
    if direct.memory_bytes or direct.message_bytes:
        say(
            f"direct over hosts: {format_bytes(direct.memory_bytes)} by memory within the hosts, "
            f"{format_bytes(direct.message_bytes)} by messages between them, if ranks are spread in their order"
        )
    if result.device == "cuda":
        say(f"{SLOW_BETWEEN_GPUS}; auto does not take it")
    if direct.computed:
        say(
            f"direct with keep_mapped: {count_of(len(direct.computed), 'tensor')} by bucket, because "
            f"their values are computed when they are sent: {some(direct.computed, 8)}"
        )


def _cells(sizes: Sequence[int]) -> str:
    """Numbers of engine ranks in each cell, in words."""
    most, least = max(sizes), min(sizes)
    ranks = count_of(most, "engine rank") if most == least else f"{least} to {most} engine ranks"
    return f"{count_of(len(sizes), 'cell')} of {ranks}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
