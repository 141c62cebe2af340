"""``weightcast plan``: what an update of a model would take.  Moves nothing, needs no GPU and no engine."""

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

    from weightcast.exporters.mapping import Family
    from weightcast.wire.layout import Packing, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What one kind of engine takes.

    Attributes:
        engine: Its kind.
        buckets: How many; 0 if it cannot take these tensors in buckets of this size.
        needs_bucket_bytes: How large a bucket has to be, at least.
    """

    engine: str
    buckets: int
    needs_bucket_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The tensors that are asked about.

    Attributes:
        specs: What travels.
        family: The table of names that was used; None for a checkpoint, which has its names already.
        not_covered: What is not in an update, and why, one sentence each.
    """

    specs: Sequence[TensorSpec]
    family: str | None = None
    not_covered: tuple[str, ...] = ()


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
        oversized: Names of the tensors that are larger than a bucket, in order.
        alone: Names of the tensors that have a bucket to themselves, in order.
        dtypes: Bytes of each dtype.
        packing: What the engine can read.
        others: What every kind of engine takes.
        family: The table of names that was used; None if there was none.
        not_covered: What is not in an update, and why.
        trainer_ranks: Ranks of the trainer.
        trainer_peak_bytes: Most extra memory of a trainer rank: two buckets, or one if there is only one, and the
            scratch buffer of a gather.
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
            "--ceiling", metavar="SIZE", help="Extra memory that a trainer rank may take; sets the size of a bucket."
        ),
    ] = None,
    quantise: Annotated[
        str | None, typer.Option("--quantise", metavar="fp8", help="Quantise weights before they are sent.")
    ] = None,
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
    weightcast plan config.json --engine lmdeploy --trainer-ranks 8 --ceiling 1GiB --quantise fp8
    """
    size_bytes = parse_size(bucket_bytes)
    packings = packings_of_engines()
    if engine not in packings:
        raise ConfigError(f"engine={engine!r}: choose one of {', '.join(packings)}")
    if quantise not in (None, "fp8"):
        raise ConfigError(f"quantise={quantise!r}: choose fp8, or leave it out")
    if engines < 1 or tp < 1 or trainer_ranks < 1:
        raise ConfigError(f"{engines} engines of {tp} ranks, {trainer_ranks} trainer ranks: at least one of each")
    if link_gb_per_s is not None and not link_gb_per_s > 0:
        raise ConfigError(f"a link of {link_gb_per_s} GB/s: give a positive number")

    asked = model_at(model, dtype, fp8=quantise is not None)
    if ceiling is not None:
        from weightcast.exporters.ceiling import bucket_bytes_for

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
    """What each kind of engine can read, as its adapter says."""
    from weightcast.engines.lmdeploy.adapter import LmdeployAdapter
    from weightcast.engines.native.adapter import NativeAdapter
    from weightcast.engines.sglang.adapter import SglangAdapter
    from weightcast.engines.vllm.adapter import VllmAdapter

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
    """The plan for some tensors; see ``Plan``.

    Args:
        specs: What travels.
        model: What to call it.
        engine: Kind of the engines.
        packing: What they can read.
        bucket_bytes: No bucket is larger.
        engine_ranks: Engine ranks that receive.
        link_gb_per_s: Bandwidth to predict seconds with.
        trainer_ranks: Ranks of the trainer.
        computed: Values are computed on the way.
        family: The table of names that was used.
        not_covered: What is not in an update.

    Raises:
        ConfigError: A tensor, or a row of it where tensors may be cut, is larger than a bucket.
    """
    from weightcast.exporters.ceiling import peak_bytes
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


def specs_of(model: Path, dtype: str | None) -> Sequence[TensorSpec]:
    """The tensors of a checkpoint, or those that a config describes; see ``model_at``."""
    return model_at(model, dtype).specs


def model_at(model: Path, dtype: str | None, *, fp8: bool = False) -> Model:
    """The tensors of a checkpoint, or those that a config describes, named as a checkpoint names them.

    Args:
        model: A checkpoint (file or folder), a ``config.json``, or a folder that has only that.
        dtype: Cast floating-point tensors to this; None keeps them.
        fp8: Quantise weights block by block.

    Raises:
        ConfigError: It is neither, names an unknown dtype, or is of a family whose experts nobody can name.
    """
    config = model / "config.json" if model.is_dir() and not any(model.glob("*.safetensors*")) else model
    if config.suffix == ".json" and not config.name.endswith(".index.json") and config.is_file():
        found = _model_of_config(config, dtype)
    else:
        from weightcast.exporters.checkpoint import CheckpointExporter

        with CheckpointExporter(model, wire_dtype=torch_dtype(dtype)) as checkpoint:
            left_out = tuple(f"{name}: in the checkpoint, not taken by engines" for name in checkpoint.skipped)
            found = Model(specs=checkpoint.specs(), not_covered=left_out)
    if not fp8:
        return found

    from weightcast.exporters.quantise import Fp8Blocks, quantised_specs

    return replace(found, specs=quantised_specs(found.specs, Fp8Blocks()))


def _model_of_config(config: Path, dtype: str | None) -> Model:
    import torch

    from weightcast.exporters.families import family_of

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
        several = hasattr(settings, "vision_config")
        kind = transformers.AutoModelForImageTextToText if several else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(settings)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, StrictDataclassError) as error:
        raise ConfigError(
            f"{config} describes no language model that transformers knows: {one_line(str(error))}"
        ) from None
    # A model made without weights has the default dtype; a checkpoint of it has the one in its config.
    written = getattr(settings, "dtype", None)
    wire = wanted or (written if isinstance(written, torch.dtype) else None)
    first: dict[int, str] = {}
    not_covered: list[str] = []
    tensors: list[tuple[str, torch.Tensor]] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            not_covered.append(f"{name}: tied to {first[id(tensor)]}, sent once")
        else:
            first[id(tensor)] = name
            tensors.append((name, tensor))
    text = getattr(settings, "text_config", settings)
    drafts = getattr(text, "num_nextn_predict_layers", None)
    if drafts:
        not_covered.append(f"{drafts} draft (MTP) layer{'s' if drafts > 1 else ''}: transformers' model has none")
    stored = [(name, tuple(tensor.shape)) for name, tensor in tensors]
    family = family_of(settings, stored)
    return Model(
        specs=_specs_of(tensors, family, settings, wire),
        family=family.name,
        not_covered=tuple(not_covered),
    )


def _specs_of(
    tensors: Sequence[tuple[str, torch.Tensor]], family: Family, settings: object, wire: torch.dtype | None
) -> list[TensorSpec]:
    import torch

    from weightcast.exporters import casting
    from weightcast.exporters.mapping import arrange, wire_dtype_of
    from weightcast.wire.layout import TensorSpec, dtype_name

    stored = [(name, tuple(tensor.shape)) for name, tensor in tensors]
    specs: list[TensorSpec] = []
    for found in arrange(stored, family, settings):
        # What a family never casts is float32 in its checkpoints; a model made without weights has the config's dtype.
        kept = wire_dtype_of(found.name, family, torch.float32) is None
        own = tensors[found.segments[0].source][1].dtype
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
        say(f"names: those of a checkpoint, by the table {result.family!r}")
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
    say(f"memory: {format_bytes(result.trainer_peak_bytes)} extra on {ranks}, at most two buckets{scratch}")
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
