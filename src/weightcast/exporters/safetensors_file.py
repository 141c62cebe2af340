"""Reads one safetensors file: checks its header, and reads tensors straight into the caller's memory.

The file is never mapped, because mapped pages count as resident memory.  ``preadv`` reads into the destination.  Bytes
that are cast or moved to a GPU pass through a buffer of a few MiB.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from weightcast.errors import ConfigError, WeightcastError
from weightcast.wire.layout import DTYPES, MAX_DIMS, SAFETENSORS

_DTYPES = {stored: DTYPES[name] for name, stored in SAFETENSORS.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_CHUNK_BYTES = 4 << 20  # two of these at most, on the way to a GPU
_MAX_READ_BYTES = 1 << 30  # the kernel reads at most 2 GiB in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file; ``start_bytes`` is its offset in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int
    size_bytes: int


class _Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Staging:
    """Host buffers, allocated on first use: 8 MiB on the way to a GPU, 4 MiB on the way to another dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    @contextmanager
    def chunk(self, size_bytes: int) -> Generator[torch.Tensor]:
        """Yields a flat uint8 buffer; the caller fills it and, inside the block, copies it on the current stream."""
        on_gpu = self._device.type == "cuda"
        if not self._buffers:
            self._buffers = [
                torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2 if on_gpu else 1)
            ]
            self._copied = [torch.cuda.Event() for _ in self._buffers] if on_gpu else []
        self._turn = (self._turn + 1) % len(self._buffers)
        if on_gpu:
            self._copied[self._turn].synchronize()  # the previous copy out of this buffer
        yield self._buffers[self._turn][:size_bytes]
        if on_gpu:
            self._copied[self._turn].record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Waits until every copy is complete."""
        for event in self._copied:
            event.synchronize()


class SafetensorsFile:
    """An open safetensors file with a valid header.

    Attributes:
        entries: Every tensor by name, in the order of their bytes.

    Raises:
        ConfigError: The file cannot be opened or is not a valid safetensors file; the message says what is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = b""
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # open for as long as this object lives
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            self._identity = identity_of(os.fstat(self._file.fileno()))
            self.entries = self._read_header()
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file.  Safe to call twice."""
        self._file.close()

    def changed(self, *, header: bool = False) -> bool:
        """True if the path leads to another file by now, or this one was written.  With ``header``, reads that too."""
        if self._file.closed or identity_at(self.path) != self._identity:
            return True
        if identity_of(os.fstat(self._file.fileno())) != self._identity:
            return True
        return header and os.pread(self._file.fileno(), len(self._header), 0) != self._header

    def read(self, entry: Entry, first_byte: int, target: torch.Tensor, staging: Staging) -> None:
        """Reads a run of a tensor's elements into a tensor of any dtype and device.

        Args:
            first_byte: Offset of the run in the tensor, in bytes; a multiple of the item size.
            target: Flat, contiguous tensor; its length is the length of the run.

        Raises:
            WeightcastError: The file has changed since it was opened, or the disk failed.
        """
        start = entry.start_bytes + first_byte
        if target.dtype == entry.dtype and target.device.type == "cpu":
            self._read_into(start, target)
            return
        size_bytes = target.numel() * entry.dtype.itemsize
        for done in range(0, size_bytes, _CHUNK_BYTES):
            with staging.chunk(min(_CHUNK_BYTES, size_bytes - done)) as raw:
                chunk = raw.view(entry.dtype)
                self._read_into(start + done, chunk)
                first = done // entry.dtype.itemsize
                target[first : first + chunk.numel()].copy_(chunk, non_blocking=True)

    def _read_into(self, start: int, target: torch.Tensor) -> None:
        size = target.nbytes
        if not size:
            return
        memory = memoryview((ctypes.c_char * size).from_address(target.data_ptr())).cast("B")
        done = 0
        while done < size:
            try:
                count = os.preadv(self._file.fileno(), [memory[done : done + _MAX_READ_BYTES]], start + done)
            except OSError as error:
                raise WeightcastError(f"{self.path} cannot be read: {error.strerror}") from error
            if not count:
                raise WeightcastError(f"{self.path} became shorter while it was being read")
            done += count

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._file.fileno()).st_size
        prefix = self._file.read(8)
        if len(prefix) < 8:
            raise ConfigError(f"{self.path} has {size} bytes and is not a safetensors file")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ConfigError(f"{self.path} is not a safetensors file: its header would have {header_bytes} bytes")
        if 8 + header_bytes > size:
            raise ConfigError(
                f"{self.path} is not a safetensors file, or is truncated: "
                f"it has {size} bytes, and its header would have {header_bytes}"
            )
        raw = b""
        while len(raw) < header_bytes and (more := self._file.read(header_bytes - len(raw))):
            raw += more
        self._header = prefix + raw
        described = self._decode(raw)
        entries: dict[str, Entry] = {}
        for name, what in sorted(described.items(), key=lambda item: item[1].data_offsets):
            entries[name] = self._entry(name, what, 8 + header_bytes)
        end = 8 + header_bytes
        previous = ""
        for name, entry in entries.items():
            if entry.start_bytes < end:
                raise ConfigError(f"{self.path}: {name} overlaps {previous or 'the header'}")
            if entry.start_bytes > end:
                raise ConfigError(f"{self.path}: {entry.start_bytes - end} bytes before {name} belong to no tensor")
            end, previous = entry.start_bytes + entry.size_bytes, name
        if end > size:
            raise ConfigError(f"{self.path} is truncated: it has {size} bytes, and {previous} ends at byte {end}")
        if end < size:
            raise ConfigError(f"{self.path}: the last {size - end} bytes belong to no tensor")
        return entries

    def _decode(self, raw: bytes) -> dict[str, _Described]:
        try:
            fields: Any = json.loads(raw, object_pairs_hook=unique)
            if not isinstance(fields, dict):
                raise ValueError("it is not an object")
            fields.pop("__metadata__", None)
            return {name: msgspec.convert(what, _Described) for name, what in fields.items()}
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            raise ConfigError(f"{self.path} is not a safetensors file, its header is not valid: {error}") from error

    def _entry(self, name: str, what: _Described, data_start: int) -> Entry:
        dtype = _DTYPES.get(what.dtype)
        if dtype is None:
            raise ConfigError(f"{self.path}: {name} has dtype {what.dtype}, which cannot be sent")
        if len(what.shape) > MAX_DIMS or any(extent < 0 for extent in what.shape):
            raise ConfigError(f"{self.path}: {name} has shape {list(what.shape)}, which cannot be sent")
        start, end = what.data_offsets
        needed = math.prod(what.shape) * dtype.itemsize
        if start < 0 or end - start != needed:
            raise ConfigError(
                f"{self.path}: {name}, {what.dtype} {list(what.shape)}, needs {needed} bytes and has {start} to {end}"
            )
        return Entry(dtype=dtype, shape=what.shape, start_bytes=data_start + start, size_bytes=needed)


Identity = tuple[int, int, int, int, int]


def identity_of(found: os.stat_result) -> Identity:
    """Device, inode, size and two times: they differ for another file, and after this one was written."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def identity_at(path: Path) -> Identity | None:
    """The identity of the file at a path; None if there is none."""
    try:
        return identity_of(os.stat(path))
    except OSError:
        return None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object; an ``object_pairs_hook`` that raises ``ValueError`` for a key that occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return fields
