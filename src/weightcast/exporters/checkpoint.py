"""Exports a safetensors file or a Hugging Face folder.  Reads the disk bucket by bucket and holds no tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.bucket_sums import PlanSums
from weightcast.digest.source_sums import Taker
from weightcast.errors import ConfigError, WeightcastError
from weightcast.exporters import casting
from weightcast.exporters.names import check_names
from weightcast.exporters.safetensors_file import Entry, Identity, SafetensorsFile, Staging, identity_at, unique
from weightcast.exporters.structure import check_same
from weightcast.protocols import BucketUse, Exporter, PlannedBucket
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import NAMES, BucketLayout, TensorSpec

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_NAMES = SINGLE_NAME, INDEX_NAME
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Read:
    """Adjacent elements of a file that become adjacent ones of a bucket, from ``first_byte`` on, in another dtype."""

    file: SafetensorsFile
    entry: Entry
    first_byte: int
    dtype: torch.dtype


class CheckpointExporter(Exporter):
    """The tensors of a checkpoint, in the order in which they lie on disk (files by name).

    A checkpoint whose ``config.json`` ties the embeddings may still have an ``lm_head.weight``.  Engines use the
    embedding instead, so the exporter leaves it out, whatever its values.  It also leaves out tensors that the index of
    a sharded checkpoint does not list.

    Args:
        path: A ``.safetensors`` file, or a folder with ``model.safetensors`` (preferred) or
            ``model.safetensors.index.json``.
        wire_dtype: Floating-point tensors of 16 bits or more travel in this dtype; None keeps each tensor's own.
        device: Device for the buckets of these weights.
        match: Regular expression for the names of the tensors to send, for one part of a composed model, such as a
            vision tower that is not trained; None sends all.

    Attributes:
        skipped: Names of tensors on disk that are left out, in order; not those that ``match`` leaves out.

    Raises:
        ConfigError: There is no whole and valid checkpoint at this path; the message says what is wrong.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        wire_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        match: str | None = None,
    ) -> None:
        casting.check_wire_dtype(wire_dtype)
        self.casts = wire_dtype is None
        self.path = Path(path)
        self.device = device or torch.device("cpu")
        self._wire_dtype = wire_dtype
        self._match = match
        self._staging = Staging(self.device)
        self._specs = ()
        self._files: list[SafetensorsFile] = []
        self._look()

    def _look(self) -> None:
        """Opens the files that are at the path now."""
        before, self._files = self._files, []
        beside = self._identities()
        try:
            entries, skipped = self._open()
            tied = _tied_head(self.path, entries)
            if tied is not None:
                del entries[tied]
                skipped.append(tied)
            match = self._match
            if match is not None:
                entries = {name: entry for name, entry in entries.items() if re.fullmatch(match, name)}
            if not entries:
                raise ConfigError(f"{self.path} has no tensors" + (f" that match {match!r}" if match else ""))
            check_names(entries)
            planned = {spec.name: spec.torch_dtype for spec in self._specs}
            specs = tuple(
                TensorSpec(
                    name=name,
                    dtype=NAMES[casting.wire_dtype(entry.dtype, planned.get(name, self._wire_dtype))],
                    shape=entry.shape,
                )
                for name, (_, entry) in entries.items()
            )
            if planned:
                check_same(self._specs, specs, what=f"the checkpoint at {self.path}")
        except ConfigError:
            self.close()
            self._files = before
            raise
        for file in before:
            file.close()
        self._entries, self._beside = entries, beside
        self._specs = self._specs or specs
        self.skipped = tuple(sorted(skipped))

    def _identities(self) -> list[Identity | None]:
        """Identities of the files at the path that say which files have the tensors, and which tensors travel."""
        folder, own = (self.path, ()) if self.path.is_dir() else (self.path.parent, (self.path,))
        return [identity_at(path) for path in (*own, *(folder / name for name in (*_NAMES, "config.json")))]

    def changed(self) -> bool:
        """Implements ``Exporter.changed``: True if a file was written, or another one is at its path."""
        return self._identities() != self._beside or any([file.changed(header=True) for file in self._files])

    def look_again(self) -> None:
        """Implements ``Exporter.look_again``: opens the checkpoint that is at the path now."""
        self._look()

    def __enter__(self) -> CheckpointExporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files.  Safe to call twice."""
        for file in self._files:
            file.close()

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the order in which they lie on disk."""
        return self._specs

    def computing_bytes(self) -> int:
        """As ``Exporter.computing_bytes``: nothing is computed."""
        return 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, in host memory and in the dtype of the file; each is read when it is asked for."""
        for spec in self._specs:
            file, entry = self._entries[spec.name]
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            file.read(entry, 0, tensor.view(-1), self._staging)
            yield spec.name, tensor

    def plan(self, layouts: Sequence[BucketLayout], group: TrainerGroup, use: BucketUse) -> Sequence[PlannedBucket]:
        """Implements ``Exporter.plan``: reads that follow each other, on disk and in a bucket, become one.

        Raises:
            ConfigError: A layout has a tensor that this checkpoint does not have.
        """
        sums = PlanSums(layouts)
        return [_ReadBucket(self, layout, group, use, self._reads_of(layout), sums) for layout in layouts]

    def read(self, data: torch.Tensor, reads: Sequence[_Read]) -> None:
        """Fills a bucket's memory.

        Raises:
            WeightcastError: A file of the checkpoint has changed since this update began, or the disk failed.
        """
        for read in reads:
            size_bytes = read.entry.shape[0] * read.dtype.itemsize
            target = data[read.first_byte : read.first_byte + size_bytes].view(read.dtype)
            read.file.read(read.entry, 0, target, self._staging)
        self._staging.wait()
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Refuses what was read if a file was replaced or written meanwhile, so that two checkpoints never mix."""
        changed = [file.path for file in self._files if file.changed()]
        if changed:
            raise WeightcastError(
                f"{changed[0]} was written or replaced while an update read it, so what was read may be of two "
                "checkpoints. No engine was told to switch to it; one without staging may hold parts of it",
                hint="update when the checkpoint has been saved, or save each one in a folder of its own",
            )

    def unsummed(self) -> Collection[str]:
        """Implements ``Exporter.unsummed``."""
        return ()

    def _reads_of(self, layout: BucketLayout) -> list[_Read]:
        reads: list[_Read] = []
        for slot in layout.slots:
            found = self._entries.get(slot.spec.name)
            if found is None or found[1].shape != slot.spec.shape:
                has = "does not have it" if found is None else f"has it as {list(found[1].shape)}"
                raise ConfigError(
                    f"bucket {layout.index} carries {slot.spec.name} {list(slot.spec.shape)}, and {self.path} {has}"
                )
            file, entry = found
            if not slot.size_bytes:
                continue
            row_bytes = entry.size_bytes // slot.spec.num_rows
            start, size_bytes = entry.start_bytes + slot.first_row * row_bytes, slot.num_rows * row_bytes
            dtype, first, before = slot.spec.torch_dtype, slot.offset_bytes, reads[-1] if reads else None
            if (
                before is not None
                and (before.file, before.entry.dtype, before.dtype) == (file, entry.dtype, dtype)
                and before.entry.start_bytes + before.entry.size_bytes == start
                and before.first_byte + before.entry.shape[0] * dtype.itemsize == first
            ):
                start, size_bytes, first = (
                    before.entry.start_bytes,
                    size_bytes + before.entry.size_bytes,
                    before.first_byte,
                )
                reads.pop()
            count = size_bytes // entry.dtype.itemsize
            run = Entry(dtype=entry.dtype, shape=(count,), start_bytes=start, size_bytes=size_bytes)
            reads.append(_Read(file, run, first, dtype))
        return reads

    def _open(self) -> tuple[dict[str, tuple[SafetensorsFile, Entry]], list[str]]:
        path = self.path
        if path.is_dir():
            if not (path / SINGLE_NAME).exists() and (path / INDEX_NAME).exists():
                return self._open_indexed(path / INDEX_NAME)
            path = _only_file(path)
        elif not path.exists():
            raise ConfigError(f"{path} does not exist", hint="pass a .safetensors file or a folder that has one")
        elif path.name.endswith(".index.json"):
            return self._open_indexed(path)
        file = SafetensorsFile(path)
        self._files.append(file)
        return {name: (file, entry) for name, entry in file.entries.items()}, []

    def _open_indexed(self, path: Path) -> tuple[dict[str, tuple[SafetensorsFile, Entry]], list[str]]:
        weight_map = _weight_map(path)
        entries: dict[str, tuple[SafetensorsFile, Entry]] = {}
        skipped: list[str] = []
        for file_name in sorted(set(weight_map.values())):
            if Path(file_name).name != file_name or not (path.parent / file_name).exists():
                raise ConfigError(f"{path} lists the file {file_name!r}, which is not beside it")
            file = SafetensorsFile(path.parent / file_name)
            self._files.append(file)
            for name, entry in file.entries.items():
                if weight_map.get(name) == file_name:
                    entries[name] = (file, entry)
                elif name not in weight_map:
                    skipped.append(name)
        missing = sorted(set(weight_map) - set(entries))
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(f"{path} lists {missing[0]}{more} in {weight_map[missing[0]]}, which does not have it")
        return entries, skipped


class _ReadBucket(PlannedBucket):
    """A bucket that every receiver reads from its own disk.

    A receiver sums in its bucket the bytes that it has read, and receivers compare their sums.
    """

    def __init__(
        self,
        exporter: CheckpointExporter,
        layout: BucketLayout,
        group: TrainerGroup,
        use: BucketUse,
        reads: Sequence[_Read],
        sums: PlanSums,
    ) -> None:
        super().__init__(layout, group)
        self._exporter = exporter
        self._group = group
        self._use = use
        self._reads = reads
        self._sums = sums
        mine = layout.slots if group.rank in use.receivers else ()
        place = self.sum_places.place
        places = [place(slot.spec.name, number, use.receivers) for number, slot in enumerate(mine)]
        self._places = torch.tensor(places, dtype=torch.int64)

    def prepare(self, data: torch.Tensor | None) -> None:
        """Implements ``PlannedBucket.prepare``."""
        if self._use.sums and self._group.rank in self._use.receivers:
            self._sums.prepare(self._exporter.device)

    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> None:
        """Implements ``PlannedBucket.fill``.  No communication; errors as for ``CheckpointExporter.read``."""
        if data is None:
            return
        self._exporter.read(data, self._reads)
        if taker is not None:
            taker.add(self._places, self._sums.of(Bucket(self.layout, data)))


def _only_file(folder: Path) -> Path:
    if (folder / SINGLE_NAME).exists():
        return folder / SINGLE_NAME
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{folder} has {len(found)} .safetensors files and no {INDEX_NAME}")
    raise ConfigError(
        f"{folder} is not a safetensors checkpoint: it has no {SINGLE_NAME} and no {INDEX_NAME}",
        hint="save the model with save_pretrained(..., safe_serialization=True)",
    )


def _weight_map(path: Path) -> dict[str, str]:
    try:
        return msgspec.convert(_read_json(path), _Index).weight_map
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is not an index of safetensors files: {error}") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=unique)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _tied_head(path: Path, entries: dict[str, tuple[SafetensorsFile, Entry]]) -> str | None:
    """Name of an output projection on disk that the configuration ties to the embedding; None if there is none."""
    config_path = (path if path.is_dir() else path.parent) / "config.json"
    head = next((name for name in entries if name == "lm_head.weight" or name.endswith(".lm_head.weight")), None)
    if head is None or not config_path.exists():
        return None
    config = _read_json(config_path)
    if not isinstance(config, dict):
        raise ConfigError(f"{config_path} is not a model configuration")
    nested: Any = config.get("text_config")
    tied = any(isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in (config, nested))
    shape = entries[head][1].shape
    embedded = any(name.endswith(_INPUT_EMBEDDINGS) and entry.shape == shape for name, (_, entry) in entries.items())
    return head if tied and embedded else None
