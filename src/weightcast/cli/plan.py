"""``weightcast plan``: what an update of a model would take.  Moves nothing, needs no GPU and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightcast.cli.options import BucketBytes, Json, Traceback, WireDtype, torch_dtype
from weightcast.cli.render import names, one_line, parse_size, say, say_json
from weightcast.errors import ConfigError
from weightcast.report import format_bytes

if TYPE_CHECKING:
    from weightcast.wire.layout import Packing, TensorSpec

_BUCKETS_HELD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an update would take.

    Attributes:
        model: What was asked about.
        engine: Whose packing was used.
        tensors: How many.
        size_bytes: Payload of one copy of the model.
        buckets: How many buckets it takes.
        bucket_bytes: No bucket is larger.
        largest_bucket_bytes: The largest one.
        cut: Names of the tensors that travel in several buckets, in order.
        alone: Names of the tensors that have a bucket to themselves, in order.
        packing: What the engine can read.
        trainer_peak_bytes: Most extra memory of a trainer rank: two buckets, or one if there is only one.
        engine_ranks: Engine ranks that receive.
        link_bytes: Bytes that arrive at each engine rank.
        all_links_bytes: Bytes that arrive at all of them.
        link_gb_per_s: The bandwidth that was assumed, in 10^9 bytes per second; None if none was given.
        seconds: Time of the wire alone at that bandwidth, every link busy at once.
    """

    model: str
    engine: str
    tensors: int
    size_bytes: int
    buckets: int
    bucket_bytes: int
    largest_bucket_bytes: int
    cut: tuple[str, ...]
    alone: tuple[str, ...]
    packing: Packing
    trainer_peak_bytes: int
    engine_ranks: int
    link_bytes: int
    all_links_bytes: int
    link_gb_per_s: float | None
    seconds: float | None


def plan(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT-or-config.json",
            help="A safetensors checkpoint, or the config.json of a Hugging Face model.",
            show_default=False,
        ),
    ],
    bucket_bytes: BucketBytes = "512MiB",
    dtype: WireDtype = None,
    engine: Annotated[str, typer.Option(metavar="native", help="Kind of the engines.")] = "native",
    engines: Annotated[int, typer.Option("--targets", metavar="N", help="How many engines.")] = 1,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Ranks of each engine.")] = 1,
    link_gb_per_s: Annotated[
        float | None,
        typer.Option(
            "--link-gb-per-s", metavar="GB/S", help="Bandwidth of a link in 10^9 bytes per second, to predict seconds."
        ),
    ] = None,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Say what an update would take: buckets, memory, bytes per link, seconds. Moves nothing, needs no GPU.

    \b
    weightcast plan runs/step-412 --targets 4 --tp 2 --link-gb-per-s 45
    weightcast plan config.json --dtype bfloat16 --bucket-bytes 256MiB --json
    """
    size_bytes = parse_size(bucket_bytes)
    if engine != "native":
        raise ConfigError(f"engine={engine!r}: choose one of native")
    if engines < 1 or tp < 1:
        raise ConfigError(f"{engines} engines of {tp} ranks: at least one of each")
    if link_gb_per_s is not None and not link_gb_per_s > 0:
        raise ConfigError(f"a link of {link_gb_per_s} GB/s: give a positive number")

    from weightcast.engines.native.adapter import NativeAdapter

    result = make_plan(
        specs_of(model, dtype),
        model=str(model),
        engine=engine,
        packing=NativeAdapter.packing,
        bucket_bytes=size_bytes,
        engine_ranks=engines * tp,
        link_gb_per_s=link_gb_per_s,
    )
    if as_json:
        say_json(result)
    else:
        _show(result)


def make_plan(
    specs: Sequence[TensorSpec],
    *,
    model: str,
    engine: str,
    packing: Packing,
    bucket_bytes: int,
    engine_ranks: int,
    link_gb_per_s: float | None = None,
) -> Plan:
    """The plan for some tensors; see ``Plan``.

    Raises:
        ConfigError: A tensor, or a row of it where tensors may be cut, is larger than a bucket.
    """
    from weightcast.wire.layout import plan_buckets, total_bytes

    layouts = plan_buckets(specs, bucket_bytes=bucket_bytes, packing=packing)
    size_bytes = total_bytes(specs)
    largest = max((layout.size_bytes for layout in layouts), default=0)
    cut = dict.fromkeys(slot.spec.name for layout in layouts for slot in layout.slots if not slot.whole)
    alone = [layout.slots[0].spec.name for layout in layouts if len(layout.slots) == 1 and layout.slots[0].whole]
    return Plan(
        model=model,
        engine=engine,
        tensors=len(specs),
        size_bytes=size_bytes,
        buckets=len(layouts),
        bucket_bytes=bucket_bytes,
        largest_bucket_bytes=largest,
        cut=tuple(cut),
        alone=tuple(alone),
        packing=packing,
        trainer_peak_bytes=min(_BUCKETS_HELD, len(layouts)) * largest,
        engine_ranks=engine_ranks,
        link_bytes=size_bytes,
        all_links_bytes=size_bytes * engine_ranks,
        link_gb_per_s=link_gb_per_s,
        seconds=None if link_gb_per_s is None else size_bytes / (link_gb_per_s * 1e9),
    )


def specs_of(model: Path, dtype: str | None) -> Sequence[TensorSpec]:
    """The tensors of a checkpoint, or those that a config describes.

    Args:
        model: A checkpoint (file or folder), a ``config.json``, or a folder that has only that.
        dtype: Cast floating-point tensors to this; None keeps them.

    Raises:
        ConfigError: It is neither, or names an unknown dtype.
    """
    config = model / "config.json" if model.is_dir() and not any(model.glob("*.safetensors*")) else model
    if config.suffix == ".json" and not config.name.endswith(".index.json") and config.is_file():
        return _specs_of_config(config, dtype)

    from weightcast.exporters.checkpoint import CheckpointExporter

    with CheckpointExporter(model, wire_dtype=torch_dtype(dtype)) as checkpoint:
        return checkpoint.specs()


def _specs_of_config(config: Path, dtype: str | None) -> list[TensorSpec]:
    import torch

    from weightcast.wire.layout import TensorSpec

    wanted = torch_dtype(dtype)
    try:
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ModuleNotFoundError:
        raise ConfigError(
            "a config.json is read with transformers, which is not installed",
            hint='pip install "weightcast[serve]", or give a checkpoint',
        ) from None
    try:
        settings = transformers.AutoConfig.from_pretrained(str(config))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, StrictDataclassError) as error:
        raise ConfigError(
            f"{config} describes no language model that transformers knows: {one_line(str(error))}"
        ) from None
    # A model made without weights has the default dtype; a checkpoint of it has the one in its config.
    written = getattr(settings, "dtype", None)
    wire = wanted or (written if isinstance(written, torch.dtype) else None)
    # named_parameters gives a tied weight once, under its first name.
    return [
        TensorSpec.of(name, parameter, dtype=wire if parameter.is_floating_point() else None)
        for name, parameter in model.named_parameters()
    ]


def _show(result: Plan) -> None:
    say(
        f"{result.tensors} tensors, {format_bytes(result.size_bytes)}, {result.buckets} "
        f"{_plural(result.buckets, 'bucket')} of at most {format_bytes(result.bucket_bytes)}"
    )
    for found, what in ((result.alone, "alone"), (result.cut, "in pieces")):
        if found:
            verb = "travels" if len(found) == 1 else "travel"
            say(f"{len(found)} {_plural(len(found), 'tensor')} {verb} {what}: {names(found)}")
    packing = result.packing
    say(
        f"packing: {'one dtype per bucket' if packing.one_dtype else 'any dtypes in a bucket'}, aligned to "
        f"{packing.alignment_bytes} bytes, large tensors {'cut by rows' if packing.slices else 'whole'} "
        f"({result.engine})"
    )
    say(f"memory: {format_bytes(result.trainer_peak_bytes)} extra on a trainer rank, at most two buckets")
    say(
        f"wire: {format_bytes(result.link_bytes)} into each of {result.engine_ranks} engine "
        f"{_plural(result.engine_ranks, 'rank')}, {format_bytes(result.all_links_bytes)} in all"
    )
    if result.seconds is not None:
        time = f"{result.seconds:.2f} s" if result.seconds >= 1 else f"{result.seconds * 1e3:.3g} ms"
        say(f"time: {time} on the wire at {result.link_gb_per_s:g} GB/s per link, nothing else counted")


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
