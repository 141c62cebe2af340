"""A safetensors checkpoint posing as a trainer: one file, or a Hugging Face folder with one file or an index.

Reads the disk bucket by bucket and holds no tensor.  Does not know who wants the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from weightcast.comm.local import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters import casting
from weightcast.exporters.names import check_names
from weightcast.exporters.safetensors_file import Entry, SafetensorsFile, Staging, unique
from weightcast.protocols import Shard
from weightcast.wire.bucket import Bucket
from weightcast.wire.digest import Box
from weightcast.wire.layout import NAMES, BucketLayout, TensorSpec

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class CheckpointExporter:
    """The tensors of a checkpoint, in the order in which they lie on disk (files by name).

    A checkpoint whose ``config.json`` ties the embeddings may still have an ``lm_head.weight``.  Engines take the
    embedding and ignore it, so it is left out, whatever its values; ``skipped`` names it.  So are tensors of a sharded
    checkpoint's files that its index does not list.

    Args:
        path: A ``.safetensors`` file, or a folder with ``model.safetensors`` (which wins) or
            ``model.safetensors.index.json``.
        wire_dtype: Floating-point tensors of 16 bits or more travel in this dtype; None keeps each tensor's own.
        device: Where buckets for these weights should be.

    Attributes:
        skipped: Names of tensors that are on disk and are not sent, in order.

    Raises:
        ConfigError: There is no whole and valid checkpoint at this path; the message says what is wrong.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        wire_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        casting.check_wire_dtype(wire_dtype)
        self.path = Path(path)
        self._device = device or torch.device("cpu")
        self._staging = Staging(self._device)
        self._files: list[SafetensorsFile] = []
        try:
            self._entries, skipped = self._open()
            tied = _tied_head(self.path, self._entries)
            if tied is not None:
                del self._entries[tied]
                skipped.append(tied)
            if not self._entries:
                raise ConfigError(f"{self.path} has no tensors")
            check_names(self._entries)
        except ConfigError:
            self.close()
            raise
        self.skipped = tuple(sorted(skipped))
        self._specs = tuple(
            TensorSpec(name=name, dtype=NAMES[casting.wire_dtype(entry.dtype, wire_dtype)], shape=entry.shape)
            for name, (_, entry) in self._entries.items()
        )

    def __enter__(self) -> CheckpointExporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files.  Safe to call twice."""
        for file in self._files:
            file.close()

    @property
    def device(self) -> torch.device:
        """Where buckets for these weights should be."""
        return self._device

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the order of the disk."""
        return self._specs

    def shards(self) -> Iterator[Shard]:
        """Every tensor, whole, in host memory, its dtype that of the disk.  Read when it is asked for, one by one."""
        for spec in self._specs:
            file, entry = self._entries[spec.name]
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            file.read(entry, 0, tensor.view(-1), self._staging)
            yield Shard(spec=spec, box=Box(offset=(0,) * len(entry.shape), shape=entry.shape), tensor=tensor)

    def prepare(self, group: TrainerGroup) -> None:
        """Nothing to find out: every rank reads the same files."""

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> None:
        """Read the layout's tensors into the bucket.  No communication: every receiver reads its own disk.

        Args:
            bucket: Where to; None on a rank that has nothing to do.
            layout: Which tensors, or rows of them.
            group: Not used.

        Raises:
            ConfigError: The layout is not of this checkpoint.
            WeightcastError: The files have changed since they were opened, or the disk failed.
        """
        if bucket is None:
            return
        for slot, view in bucket.views():
            found = self._entries.get(slot.spec.name)
            if found is None or found[1].shape != slot.spec.shape:
                raise ConfigError(f"bucket {layout.index} carries {slot.spec.name}, which {self.path} does not have so")
            file, entry = found
            row_bytes = entry.size_bytes // slot.spec.num_rows if slot.spec.num_rows else 0
            file.read(entry, slot.first_row * row_bytes, view.view(-1), self._staging)
        self._staging.wait()

    def _open(self) -> tuple[dict[str, tuple[SafetensorsFile, Entry]], list[str]]:
        path = self.path
        if path.is_dir():
            if not (path / SINGLE_NAME).exists() and (path / INDEX_NAME).exists():
                return self._open_indexed(path / INDEX_NAME)
            path = _only_file(path)
        elif not path.exists():
            raise ConfigError(f"{path} does not exist", hint="give a .safetensors file or a folder that has one")
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
                raise ConfigError(f"{path} names the file {file_name!r}, which is not beside it")
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
            raise ConfigError(f"{path} puts {missing[0]}{more} into {weight_map[missing[0]]}, which does not have it")
        return entries, skipped


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
    """The name of an output projection that the model's configuration ties to the embedding, if it is there."""
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
