"""Weights by a checkpoint folder, for engines that take them in no other way.

The transport writes the buckets one after the other into one safetensors file, so the model is never whole in memory.
The folder gets its final name when the file is complete, and is deleted when the engines have answered.  Trainer and
engines must see it under the same path.  Only the trainer's user may read it, unless the caller says otherwise.  A
trainer also deletes the folders that killed trainers of the same user have left.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from weightcast.comm.owned_folder import OwnedFolder, remove_abandoned
from weightcast.comm.shared_buckets import Shared
from weightcast.config import DiskReaders
from weightcast.errors import ConfigError
from weightcast.transports.blame import run_each
from weightcast.transports.link import Link, tell
from weightcast.transports.plan import UpdatePlan
from weightcast.transports.pump import Pumped, ThreadPump
from weightcast.transports.spec import Sender, TransportSpec
from weightcast.transports.topology import Topology
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import SAFETENSORS, TensorSpec, total_bytes

_HOW = 'advanced={"disk_folder": FOLDER}, --advanced disk_folder=FOLDER'
_MODES: dict[DiskReaders, tuple[int, int]] = {  # of the folder and of the file
    "user": (0o700, 0o600),
    "group": (0o750, 0o640),
    "all": (0o755, 0o644),
}
_OURS = re.compile(r"weightcast-[0-9a-f]{16}|\.weightcast-[0-9a-f]{16}\.part")


class DiskCarrier(Pumped):
    """Sends weights through one folder, which all targets load."""

    name = "disk"

    def __init__(
        self,
        links: Sequence[Link],
        *,
        specs: Sequence[TensorSpec],
        folder: str | None,
        timeout_s: float,
        readers: DiskReaders = "user",
    ) -> None:
        """Deletes the folders that killed trainers of this user have left.  Writes nothing yet.

        The checkpoint folder goes into ``folder``, under its path for trainer and engines, None the one for temporary
        files.  ConfigError says that it is no folder or too full.
        """
        super().__init__(ThreadPump(self._write))
        self._links = list(links)
        self._specs = tuple(specs)
        self._root = Path(folder or tempfile.gettempdir()).absolute()
        self._timeout_s = timeout_s
        self._folder_mode, self._file_mode = _MODES[readers]
        try:
            remove_abandoned(self._root, _OURS)
            free_bytes = shutil.disk_usage(self._root).free
        except OSError as error:
            raise ConfigError(f"{self._root}: {error.strerror or error}", hint=_HOW) from error
        if free_bytes < total_bytes(specs):
            raise ConfigError(
                f"{self._root} has {free_bytes} bytes of free space, and the weights need {total_bytes(specs)}",
                hint=f"choose another folder: {_HOW}",
            )
        self._lock = threading.Lock()
        self._folder: OwnedFolder | None = None
        self._file: BinaryIO | None = None
        self._left_bytes = 0
        self._staged = bytearray()  # host copy of a bucket: a file is written from host memory

    def connect(self) -> None:
        """Begins a new file; raises ConfigError if it cannot be written."""
        self._discard()
        header = _header(self._specs)
        self._left_bytes = total_bytes(self._specs)
        folder = self._root / f".weightcast-{secrets.token_hex(8)}.part"
        try:
            with self._lock:
                self._folder = OwnedFolder(folder)  # from here on ``_discard`` deletes it
                file = folder / "model.safetensors"
                self._file = file.open("wb")
                # In this order: until the second line no other user can reach the file.
                file.chmod(self._file_mode)
                folder.chmod(self._folder_mode)
                self._file.write(header)
        except OSError as error:
            self._discard()
            raise ConfigError(f"{folder}: {error.strerror or error}", hint=_HOW) from error

    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """As ``Carrier.send``.  The caller's current stream fills the bucket."""
        self._note_filled(bucket)
        self._pump.put(bucket, ())

    def drain(self) -> None:
        """Completes the file, asks every target to load it, and deletes it.

        It raises ConfigError if the file cannot be written, and as ``tell``, for every target that failed.
        """
        super().drain()
        try:
            folder = str(self._publish())
            run_each(lambda link: self._load(link, folder), self._links)
        finally:
            self._discard()

    def abort(self, reason: str) -> None:
        """Deletes the file.  No target waits for it."""
        self._discard()

    def _end(self) -> None:
        super()._end()
        self._discard()

    def _write(self, bucket: Bucket, _: tuple[Shared, ...]) -> None:
        filled = self._filled.pop(bucket.layout.index, None)
        if filled is not None:
            filled.synchronize()  # this thread's stream does not wait for the caller's
        with self._lock:
            file = self._file
            if file is None:
                return  # ``abort`` has deleted it in the meantime
            size_bytes = bucket.layout.size_bytes
            if len(self._staged) < size_bytes:
                self._staged = bytearray(size_bytes)
            torch.frombuffer(self._staged, dtype=torch.uint8)[:size_bytes].copy_(bucket.data[:size_bytes])
            data = memoryview(self._staged)
            try:
                for slot in bucket.layout.slots:
                    file.write(data[slot.offset_bytes : slot.end_bytes])
                    self._left_bytes -= slot.size_bytes
            except OSError as error:
                raise ConfigError(f"{self._root}: {error.strerror or error}") from error

    def _publish(self) -> Path:
        with self._lock:
            assert self._file is not None, "connect() comes first"
            assert self._folder is not None
            assert self._left_bytes == 0, "some weights were not sent"
            try:
                self._file.flush()
                os.fsync(self._file.fileno())  # other hosts see the data on a shared file system only after this
                self._file.close()
                self._file = None
                self._folder.rename(self._root / self._folder.path.name.removeprefix(".").removesuffix(".part"))
            except OSError as error:
                raise ConfigError(f"{self._root}: {error.strerror or error}") from error
            return self._folder.path

    async def _load(self, link: Link, folder: str) -> None:
        steps = link.adapter.load_folder(link.session.id, folder)
        await tell(link, steps, what=f"the folder {folder}", timeout_s=self._timeout_s)

    def _discard(self) -> None:
        with self._lock:
            folder, file = self._folder, self._file
            self._folder = self._file = None
            if file is not None:
                with suppress(OSError):
                    file.close()
            if folder is not None:
                folder.remove()


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """Returns the beginning of a safetensors file that holds these tensors end to end, in this order."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        table[spec.name] = {
            "dtype": SAFETENSORS[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (end, end + spec.size_bytes),
        }
        end += spec.size_bytes
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check(topology: Topology) -> None:
    far = topology.beyond("head")
    if far is not None and not topology.shared_folder:
        raise ConfigError(
            f"{far} runs on another host and cannot see this host's folder for temporary files",
            hint=f"name a folder that all hosts see under the same path: {_HOW}",
        )


def _build(links: Sequence[Link], _plan: UpdatePlan, sender: Sender) -> DiskCarrier:
    config = sender.config
    return DiskCarrier(
        links,
        specs=sender.specs,
        folder=config.disk_folder,
        timeout_s=config.timeout_s,
        readers=config.disk_readers,
    )


SPEC = TransportSpec(name="disk", carriers=("file",), build=_build, check=_check)
