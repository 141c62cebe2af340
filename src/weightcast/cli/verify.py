"""``weightcast verify``: compares the weights that an engine keeps with a checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from weightcast.cli import options
from weightcast.cli.render import Advance, progress, say, say_json, table
from weightcast.errors import WireError, some
from weightcast.report import count_of, format_bytes

if TYPE_CHECKING:
    import torch

    from weightcast.protocols import Exporter
    from weightcast.wire.answers import Ack
    from weightcast.wire.engine_info import EngineInfo
    from weightcast.wire.layout import TensorSpec

# Read, cast and digested at a time; a larger row of a tensor is taken whole.
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor that differs.

    Attributes:
        why: ``missing`` (not in the checkpoint), ``extra`` (not in the engine), ``shape`` or ``digest``.
        checkpoint: Shape or digest in the checkpoint; empty if the tensor is not there.
        engine: Shape or digest in the engine; empty if the tensor is not there.
    """

    name: str
    why: str
    checkpoint: str = ""
    engine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of the comparison.

    Attributes:
        version: Weight version that the engine serves; None if it does not know.
        digest: Digest over all tensors that the engine reads back; None if it reads back none.
        tensors: Number of names in the checkpoint and in the engine together.
        equal: Number of tensors that are proven equal.
        size_bytes: Bytes of the checkpoint's tensors that were compared.
        unreadable: Names of tensors that the engine computes with while loading, and of which it does not know what it
            computed from: it started with random weights, or got them in an update without proof.
        not_kept: Names of tensors of the checkpoint that the engine does not use.
        ok: True if nothing differs and everything that the engine keeps could be read.
    """

    url: str
    checkpoint: str
    version: int | None
    digest: str | None
    tensors: int
    equal: int
    size_bytes: int
    differences: tuple[Difference, ...]
    unreadable: tuple[str, ...]
    not_kept: tuple[str, ...]
    ok: bool

    @property
    def exit_code(self) -> int:
        """``DIFFERS`` if a tensor differs, else ``FAILURE`` if some could not be read."""
        return options.DIFFERS if self.differences else options.FAILURE if self.unreadable else options.SUCCESS


def verify(
    checkpoint: options.Checkpoint,
    at: Annotated[str, typer.Option("--at", metavar="URL", help="Engine to compare.")],
    draft: options.Draft = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", envvar="WEIGHTCAST_API_KEY", help="API key of the engine.")
    ] = None,
    ca_file: options.CaFile = None,
    cert_file: options.CertFile = None,
    key_file: options.KeyFile = None,
    dtype: options.WireDtype = None,
    timeout: Annotated[float, typer.Option(metavar="S", help="Longest wait for an answer, in seconds.")] = 300.0,
    as_json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Compares the weights that an engine keeps with a checkpoint, tensor by tensor. Nothing is changed.

    Both sides compute a digest of every tensor in the engine's dtype; the engine digests its live parameters. The exit
    code is 0 if all tensors are equal and 3 if one differs. It is 1 if they could not all be compared: the engine does
    not answer, or cannot read some tensors back.

    \b
    weightcast verify runs/step-412 --at http://10.0.3.7:8000
    weightcast verify runs/step-412 --at http://10.0.3.7:8000 --json | jq -r .differences[].name
    """
    from weightcast.comm.http import Client
    from weightcast.exporters.checkpoint import CheckpointExporter
    from weightcast.exporters.multi_module import ComposedExporter, Part
    from weightcast.update.recognise import recognise
    from weightcast.wire.layout import DRAFT_PREFIX

    keys = [api_key] if api_key is not None else []
    target = options.targets([at], keys, ca_file=ca_file, cert_file=cert_file, key_file=key_file)[0]
    with (
        CheckpointExporter(checkpoint, wire_dtype=options.torch_dtype(dtype)) as of_model,
        nullcontext()
        if draft is None
        else CheckpointExporter(draft, wire_dtype=options.torch_dtype(dtype)) as of_draft,
    ):
        exporter: Exporter = of_model
        if of_draft is not None:
            exporter = ComposedExporter({"model": of_model, "draft": Part(exporter=of_draft, prefix=DRAFT_PREFIX)})
        client = Client(target, timeout_s=timeout)
        try:
            info = recognise(client)
            ack = _readback(client.get_json("/weightcast/digests", timeout_s=timeout), target.url)
        finally:
            client.close()
        result = _compare(str(checkpoint), target.url, exporter, info, ack)
    if as_json:
        say_json(result)
    else:
        _show(result)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def checkpoint_digests(
    exporter: Exporter, specs: Sequence[TensorSpec], dtypes: Mapping[str, torch.dtype], advance: Advance
) -> dict[str, str]:
    """Computes the fast digest of each tensor after a cast, by name.

    ``dtypes`` are those to cast to, by name, and ``specs`` have the source's.  ``advance`` gets the bytes done and the
    total bytes.
    """
    import torch

    from weightcast.comm.trainer_group import TrainerGroup
    from weightcast.digest.bucket_sums import piece_of
    from weightcast.digest.definition import add_partial, as_unsigned, finish, partial_sums
    from weightcast.protocols import TO_HEAD
    from weightcast.wire.bucket import Bucket
    from weightcast.wire.layout import Packing, plan_buckets, total_bytes

    chunk_bytes = max([_CHUNK_BYTES, *(spec.row_bytes for spec in specs)])
    layouts = plan_buckets(specs, bucket_bytes=chunk_bytes, packing=Packing())
    group = TrainerGroup(device=torch.device("cpu"), timeout_s=60.0)
    data = torch.empty(max([1, *(layout.size_bytes for layout in layouts)]), dtype=torch.uint8)
    totals = {spec.name: 0 for spec in specs}
    done, total = 0, total_bytes(specs)
    for planned in exporter.plan(layouts, group, TO_HEAD):
        planned.fill(data)
        for slot, view in Bucket(planned.layout, data).views():
            spec = slot.spec
            piece = piece_of(slot, view.to(dtypes[spec.name]), slot.first_row)
            totals[spec.name] = add_partial(totals[spec.name], as_unsigned(int(partial_sums([piece]).item())))
            done += slot.size_bytes
            advance(done, total)
    return {spec.name: finish(totals[spec.name], dtype=dtypes[spec.name], shape=spec.shape) for spec in specs}


def _readback(reply: bytes, url: str) -> Ack:
    from weightcast.wire.answers import Ack

    try:
        return msgspec.json.decode(reply, type=Ack)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"{url} answers /weightcast/digests with a malformed document: {error}") from None


def _compare(checkpoint: str, url: str, exporter: Exporter, info: EngineInfo, ack: Ack) -> Comparison:
    from weightcast.digest.definition import model_digest
    from weightcast.wire.layout import total_bytes

    kept = {spec.name: spec for spec in info.specs}
    optional = {spec.name for spec in info.optional}
    offered = {spec.name: spec for spec in exporter.specs() if spec.name not in optional}
    not_kept = tuple(spec.name for spec in exporter.specs() if spec.name in optional)
    same_shape = [spec for name, spec in offered.items() if name in kept and kept[name].shape == spec.shape]
    with progress("verify") as advance:
        digests = checkpoint_digests(
            exporter, same_shape, {spec.name: kept[spec.name].torch_dtype for spec in same_shape}, advance
        )
    differences = tuple(_differences(kept, offered, digests, ack))
    differing = {found.name for found in differences}
    unreadable = tuple(name for name in kept if name not in ack.resident and name not in differing)
    tensors = len(kept.keys() | offered.keys()) + len(not_kept)
    return Comparison(
        url=url,
        checkpoint=checkpoint,
        version=ack.version,
        digest=model_digest(ack.resident) if ack.resident else None,
        tensors=tensors,
        equal=tensors - len(differences) - len(unreadable) - len(not_kept),
        size_bytes=total_bytes(same_shape),
        differences=differences,
        unreadable=unreadable,
        not_kept=not_kept,
        ok=not differences and not unreadable,
    )


def _differences(
    kept: Mapping[str, TensorSpec], offered: Mapping[str, TensorSpec], digests: Mapping[str, str], ack: Ack
) -> Iterator[Difference]:
    for name, spec in kept.items():
        if name not in offered:
            yield Difference(name=name, why="missing", engine=str(list(spec.shape)))
        elif name not in digests:
            shape = str(list(offered[name].shape))
            yield Difference(name=name, why="shape", checkpoint=shape, engine=str(list(spec.shape)))
        elif name in ack.mismatched:
            yield Difference(name=name, why="digest", checkpoint=digests[name], engine="differs between ranks")
        elif name in ack.resident and ack.resident[name] != digests[name]:
            yield Difference(name=name, why="digest", checkpoint=digests[name], engine=ack.resident[name])
    for name, spec in offered.items():
        if name not in kept:
            yield Difference(name=name, why="extra", checkpoint=str(list(spec.shape)))


def _show(result: Comparison) -> None:
    version = "an unknown version" if result.version is None else f"version {result.version}"
    if result.ok:
        say(
            f"{result.url} keeps {result.checkpoint}: {result.equal} of {result.tensors} tensors equal, "
            f"{format_bytes(result.size_bytes)}, {version}, digest {result.digest}"
        )
    elif not result.differences:
        say(
            f"no tensor differs between {result.url} and {result.checkpoint}, but some could not be read back: "
            f"{result.equal} of {result.tensors} tensors equal, {version}"
        )
    else:
        rows = [(found.why, found.name, found.checkpoint or "-", found.engine or "-") for found in result.differences]
        say(table(("why", "tensor", "checkpoint", "engine"), rows))
        say(
            f"{result.url} does not keep {result.checkpoint}: {len(result.differences)} of {result.tensors} tensors "
            f"differ, it serves {version}"
        )
    if result.unreadable:
        say(f"{count_of(len(result.unreadable), 'tensor')} cannot be read back: {some(result.unreadable, 8)}")
    if result.not_kept:
        verb = "is" if len(result.not_kept) == 1 else "are"
        say(f"{count_of(len(result.not_kept), 'tensor')} {verb} not kept by this engine: {some(result.not_kept, 8)}")
