"""``weightcast plan``: estimates the buckets, memory and time of an update, without a GPU or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightcast.cli.options import BucketBytes, Json, Traceback, WireDtype, torch_dtype
from weightcast.cli.render import names, one_line, parse_size, say, say_json
from weightcast.errors import ConfigError
from weightcast.report import format_bytes

if TYPE_CHECKING:
    import torch

    from weightcast.exporters.checkpoint_layout import Stored
    from weightcast.exporters.mapping import Family
    from weightcast.exporters.segments import Arranged
    from weightcast.wire.layout import Packing, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Buckets that one kind of engine needs.

    Attributes:
        engine: Kind of engine.
        buckets: Number of buckets; 0 if these tensors do not fit into buckets of this size.
        needs_bucket_bytes: Smallest possible bucket, in bytes.
    """

    engine: str
    buckets: int
    needs_bucket_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Tensors to plan for.

    Attributes:
        specs: Tensors that are sent.
        family: Table of names that was used; None for a checkpoint, which has its names already.
        not_covered: Tensors that no update contains, with the reason, one sentence each.
    """

    specs: Sequence[TensorSpec]
    family: str | None = None
    not_covered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Estimate of one update.

    Attributes:
        model: Name of the model.
        engine: Kind of engine whose packing was used.
        tensors: Number of tensors.
        size_bytes: Payload of one copy of the model.
        buckets: Number of buckets.
        bucket_bytes: Limit of one bucket.
        largest_bucket_bytes: Size of the largest bucket.
        cut: Names of the tensors that are sent in several buckets, in order.
        oversized: Names of the tensors that are larger than a bucket, in order.
        alone: Names of the tensors that have a bucket to themselves, in order.
        dtypes: Bytes of each dtype.
        packing: Packing that the engine can read.
        others: Buckets for every kind of engine.
        family: Table of names that was used, if any.
        not_covered: Tensors that no update contains, with the reason.
        trainer_ranks: Number of trainer ranks.
        trainer_peak_bytes: Extra memory of a trainer rank at its peak: two buckets (one if there is only one), and the
            scratch buffer of a gather.
        engine_ranks: Number of engine ranks that receive.
        link_bytes: Bytes that each engine rank receives.
        all_links_bytes: Bytes that all engine ranks receive.
        link_gb_per_s: Assumed bandwidth in 10^9 bytes per second; None if none was given.
        seconds: Transfer time alone at that bandwidth, with every link busy at once.
    """

    model: str
    engine: str
    tensors: int
    size_bytes: int
    buckets: int
    bucket_bytes: int
    largest_bucket_bytes: int
    cut: tuple[str, ...]
    oversized: tuple[str, ...]
    alone: tuple[str, ...]
    dtypes: dict[str, int]
    packing: Packing
    others: tuple[EnginePlan, ...]
    family: str | None
    not_covered: tuple[str, ...]
    trainer_ranks: int
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
    engine: Annotated[str, typer.Option(metavar="native|sglang|vllm|lmdeploy", help="Kind of the engines.")] = "native",
    trainer_ranks: Annotated[int, typer.Option("--trainer-ranks", metavar="N", help="Ranks of the trainer.")] = 1,
    ceiling: Annotated[
        str | None,
        typer.Option(
            "--ceiling", metavar="SIZE", help="Extra memory allowed on a trainer rank; sets the size of a bucket."
        ),
    ] = None,
    quantise: Annotated[
        str | None, typer.Option("--quantise", metavar="fp8", help="Quantise weights before they are sent.")
    ] = None,
    engines: Annotated[int, typer.Option("--targets", metavar="N", help="Number of engines.")] = 1,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Ranks of each engine.")] = 1,
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
    weightcast plan config.json --engine lmdeploy --trainer-ranks 8 --ceiling 1GiB --quantise fp8
    """
    size_bytes = parse_size(bucket_bytes)
    packings = packings_of_engines()
    if engine not in packings:
        raise ConfigError(f"--engine {engine} is unknown: choose one of {', '.join(packings)}")
    if quantise not in (None, "fp8"):
        raise ConfigError(f"--quantise {quantise} is unknown: choose fp8, or leave it out")
    if engines < 1 or tp < 1 or trainer_ranks < 1:
        raise ConfigError(
            f"--targets {engines}, --tp {tp} and --trainer-ranks {trainer_ranks}: each of them must be at least 1"
        )
    if link_gb_per_s is not None and not link_gb_per_s > 0:
        raise ConfigError(f"--link-gb-per-s {link_gb_per_s} is not a positive number")

    asked = model_at(model, dtype, fp8=quantise is not None)
    if ceiling is not None:
        from weightcast.exporters.memory_estimate import bucket_bytes_for

        size_bytes = bucket_bytes_for(
            asked.specs,
            ceiling_bytes=parse_size(ceiling),
            packing=packings[engine],
            world_size=trainer_ranks,
            computed=quantise is not None,
        )
    result = make_plan(
        asked.specs,
        model=str(model),
        engine=engine,
        packing=packings[engine],
        bucket_bytes=size_bytes,
        engine_ranks=engines * tp,
        link_gb_per_s=link_gb_per_s,
        trainer_ranks=trainer_ranks,
        computed=quantise is not None,
        family=asked.family,
        not_covered=asked.not_covered,
    )
    if as_json:
        say_json(result)
    else:
        _show(result)


def packings_of_engines() -> dict[str, Packing]:
    """Returns the packing that each kind of engine can read, from its adapter."""
    from weightcast.adapters.lmdeploy.adapter import LmdeployAdapter
    from weightcast.adapters.native.adapter import NativeAdapter
    from weightcast.adapters.sglang.adapter import SglangAdapter
    from weightcast.adapters.vllm.adapter import VllmAdapter

    return {
        "native": NativeAdapter.packing,
        "sglang": SglangAdapter.packing,
        "vllm": VllmAdapter.packing,
        "lmdeploy": LmdeployAdapter.packing,
    }


def make_plan(
    specs: Sequence[TensorSpec],
    *,
    model: str,
    engine: str,
    packing: Packing,
    bucket_bytes: int,
    engine_ranks: int,
    link_gb_per_s: float | None = None,
    trainer_ranks: int = 1,
    computed: bool = False,
    family: str | None = None,
    not_covered: tuple[str, ...] = (),
) -> Plan:
    """Makes the plan for some tensors.  ``Plan`` explains the arguments of the same names.

    Args:
        specs: Tensors that are sent.
        computed: True if values are computed on the way, such as by quantising.

    Raises:
        ConfigError: A tensor, or a row of it where tensors may be cut, is larger than a bucket.
    """
    from weightcast.exporters.memory_estimate import peak_bytes
    from weightcast.wire.layout import plan_buckets, total_bytes

    layouts = plan_buckets(specs, bucket_bytes=bucket_bytes, packing=packing)
    size_bytes = total_bytes(specs)
    largest = max((layout.size_bytes for layout in layouts), default=0)
    cut = dict.fromkeys(slot.spec.name for layout in layouts for slot in layout.slots if not slot.whole)
    alone = [layout.slots[0].spec.name for layout in layouts if len(layout.slots) == 1 and layout.slots[0].whole]
    dtypes: dict[str, int] = {}
    for spec in specs:
        dtypes[spec.dtype] = dtypes.get(spec.dtype, 0) + spec.size_bytes
    return Plan(
        model=model,
        engine=engine,
        tensors=len(specs),
        size_bytes=size_bytes,
        buckets=len(layouts),
        bucket_bytes=bucket_bytes,
        largest_bucket_bytes=largest,
        cut=tuple(cut),
        oversized=tuple(spec.name for spec in specs if spec.size_bytes > bucket_bytes),
        alone=tuple(alone),
        dtypes=dtypes,
        packing=packing,
        others=tuple(_engine_plan(kind, other, specs, bucket_bytes) for kind, other in packings_of_engines().items()),
        family=family,
        not_covered=not_covered,
        trainer_ranks=trainer_ranks,
        trainer_peak_bytes=peak_bytes(
            specs, bucket_bytes=bucket_bytes, packing=packing, world_size=trainer_ranks, computed=computed
        ),
        engine_ranks=engine_ranks,
        link_bytes=size_bytes,
        all_links_bytes=size_bytes * engine_ranks,
        link_gb_per_s=link_gb_per_s,
        seconds=None if link_gb_per_s is None else size_bytes / (link_gb_per_s * 1e9),
    )


def _engine_plan(kind: str, packing: Packing, specs: Sequence[TensorSpec], bucket_bytes: int) -> EnginePlan:
    from weightcast.wire.layout import plan_buckets

    needed = max((spec.row_bytes if packing.slices else spec.size_bytes for spec in specs), default=0)
    buckets = 0
    if needed <= bucket_bytes:
        buckets = len(plan_buckets(specs, bucket_bytes=bucket_bytes, packing=packing))
    return EnginePlan(engine=kind, buckets=buckets, needs_bucket_bytes=needed)


def model_at(model: Path, dtype: str | None, *, fp8: bool = False) -> Model:
    """Reads the tensors of a checkpoint, or those that a config describes, under a checkpoint's names.

    Args:
        model: A checkpoint (file or folder), a ``config.json``, or a folder that has only that.
        dtype: Dtype to cast floating-point tensors to; None keeps theirs.
        fp8: Quantise weights block by block.

    Raises:
        ConfigError: The path is neither, the dtype is unknown, or the family's experts have no known names.
    """
    config = model / "config.json" if model.is_dir() and not any(model.glob("*.safetensors*")) else model
    if config.suffix == ".json" and not config.name.endswith(".index.json") and config.is_file():
        found = _model_of_config(config, dtype)
    else:
        from weightcast.exporters.checkpoint import CheckpointExporter

        with CheckpointExporter(model, wire_dtype=torch_dtype(dtype)) as checkpoint:
            left_out = tuple(f"{name}: in the checkpoint, but engines do not load it" for name in checkpoint.skipped)
            found = Model(specs=checkpoint.specs(), not_covered=left_out)
    if not fp8:
        return found

    from weightcast.exporters.quantise import Fp8Blocks, quantised_specs

    return replace(found, specs=quantised_specs(found.specs, Fp8Blocks()))


def _model_of_config(config: Path, dtype: str | None) -> Model:
    import torch

    from weightcast.exporters.checkpoint_layout import Stored, arrange_as_saved

    wanted = torch_dtype(dtype)
    try:
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ModuleNotFoundError:
        raise ConfigError(
            "reading a config.json needs transformers, which is not installed",
            hint='pip install "weightcast[serve]", or give a checkpoint',
        ) from None
    try:
        settings = transformers.AutoConfig.from_pretrained(str(config))
        several = hasattr(settings, "vision_config")
        kind = transformers.AutoModelForImageTextToText if several else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(settings)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, StrictDataclassError) as error:
        raise ConfigError(f"transformers cannot build a language model from {config}: {one_line(str(error))}") from None
    # A model built without weights has torch's default dtype; its checkpoint has the dtype of the config.
    written = getattr(settings, "dtype", None)
    wire = wanted or (written if isinstance(written, torch.dtype) else None)
    first: dict[int, str] = {}
    not_covered: list[str] = []
    stored: list[Stored] = []
    numbers: dict[int, int] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            not_covered.append(f"{name}: tied to {first[id(tensor)]}, sent once")
        else:
            first[id(tensor)] = name
            numbers[id(tensor)] = len(stored)
            stored.append(Stored(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype))
    text = getattr(settings, "text_config", settings)
    drafts = getattr(text, "num_nextn_predict_layers", None)
    if drafts:
        not_covered.append(f"{drafts} draft (MTP) layer{'s' if drafts > 1 else ''}: transformers' model has none")
    family, arranged = arrange_as_saved(model, stored, numbers, settings)
    return Model(
        specs=_specs_of(stored, arranged, family, wire),
        family=family.name,
        not_covered=tuple(not_covered),
    )


def _specs_of(
    stored: Sequence[Stored], arranged: Sequence[Arranged], family: Family, wire: torch.dtype | None
) -> list[TensorSpec]:
    import torch

    from weightcast.exporters import casting
    from weightcast.exporters.mapping import wire_dtype_of
    from weightcast.wire.layout import TensorSpec, dtype_name

    specs: list[TensorSpec] = []
    for found in arranged:
        # Tensors that a family never casts are float32 in its checkpoints; without weights they get the config's dtype.
        kept = wire_dtype_of(found.name, family, torch.float32) is None
        own = stored[found.segments[0].source].dtype
        dtype = torch.float32 if kept else casting.wire_dtype(own, wire)
        specs.append(TensorSpec(name=found.name, dtype=dtype_name(dtype), shape=found.shape))
    return specs


def _show(result: Plan) -> None:
    say(
        f"{result.tensors} tensors, {format_bytes(result.size_bytes)}, {result.buckets} "
        f"{_plural(result.buckets, 'bucket')} of at most {format_bytes(result.bucket_bytes)}"
    )
    if len(result.dtypes) > 1:
        say(f"dtypes: {', '.join(f'{format_bytes(size)} {dtype}' for dtype, size in result.dtypes.items())}")
    if result.family is not None:
        say(f"names: a checkpoint's names, from the table {result.family!r}")
    for found, what in ((result.alone, "alone"), (result.cut, "in pieces")):
        if found:
            verb = "travels" if len(found) == 1 else "travel"
            say(f"{len(found)} {_plural(len(found), 'tensor')} {verb} {what}: {names(found)}")
    if result.oversized:
        verb = "is" if len(result.oversized) == 1 else "are"
        say(f"{len(result.oversized)} {verb} larger than a bucket: {names(result.oversized)}")
    for sentence in result.not_covered:
        say(f"not covered: {sentence}")
    packing = result.packing
    say(
        f"packing: {'one dtype per bucket' if packing.one_dtype else 'any dtypes in a bucket'}, aligned to "
        f"{packing.alignment_bytes} bytes, large tensors {'cut by rows' if packing.slices else 'whole'} "
        f"({result.engine})"
    )
    ranks = f"each of {result.trainer_ranks} trainer ranks" if result.trainer_ranks > 1 else "a trainer rank"
    scratch = " and what a gather needs" if result.trainer_ranks > 1 else ""
    say(
        f"memory: {format_bytes(result.trainer_peak_bytes)} extra on {ranks}, at most two buckets{scratch}; "
        "on a CPU up to 40 MiB more for sums"
    )
    say(
        f"wire: {format_bytes(result.link_bytes)} into each of {result.engine_ranks} engine "
        f"{_plural(result.engine_ranks, 'rank')}, {format_bytes(result.all_links_bytes)} in all"
    )
    for other in result.others:
        if other.engine != result.engine:
            takes = (
                f"{other.buckets} {_plural(other.buckets, 'bucket')}"
                if other.buckets or not result.tensors
                else f"buckets of {format_bytes(other.needs_bucket_bytes)} or more are needed"
            )
            say(f"{other.engine}: {takes}")
    if result.seconds is not None:
        time = f"{result.seconds:.2f} s" if result.seconds >= 1 else f"{result.seconds * 1e3:.3g} ms"
        say(f"time: {time} on the wire at {result.link_gb_per_s:g} GB/s per link, nothing else counted")


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
