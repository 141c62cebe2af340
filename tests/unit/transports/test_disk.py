"""The folder of the disk transport: there while it is needed, and never in parts afterwards."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightcast.comm.ipc import host_id
from weightcast.comm.owned_folder import OwnedFolder, remove_abandoned
from weightcast.errors import ConfigError
from weightcast.transports.disk import DiskCarrier
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets

# The header alone is more than a file keeps back before it writes.
SPECS = [TensorSpec(name=f"layers.{number}.weight", dtype="uint8", shape=(1,)) for number in range(2000)]


def test_full_disk_leaves_no_folder(monkeypatch, tmp_path):
    whole = Path.open
    begun: list[Path] = []

    def full(path: Path, mode: str) -> Any:
        path.touch()
        begun.append(path)
        return whole(Path("/dev/full"), mode)

    transport = DiskCarrier([], specs=SPECS, folder=str(tmp_path), timeout_s=5)
    try:
        monkeypatch.setattr(Path, "open", full)
        with pytest.raises(ConfigError, match="No space left"):
            transport.connect()
        assert len(begun) == 1
        assert list(tmp_path.iterdir()) == []
        monkeypatch.undo()
        transport.connect()
        assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
        transport.connect()  # again: what there is of the first goes away
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        transport.close()
    assert list(tmp_path.iterdir()) == []


# -- who may read it, and what is left of it


@pytest.fixture
def bucket() -> Bucket:
    [layout] = plan_buckets(tuple(SPECS[:100]), bucket_bytes=1 << 16, packing=Packing())
    # Slots begin at multiples of 256, and no two of the first hundred begin with the same byte.
    return Bucket(layout, (torch.arange(1 << 16) % 251).to(torch.uint8))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("readers", "folder_mode", "file_mode"), [("user", 0o700, 0o600), ("group", 0o750, 0o640), ("all", 0o755, 0o644)]
)
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_only_the_chosen_users_can_read_the_weights(tmp_path, readers, folder_mode, file_mode, umask):
    before = os.umask(umask)
    try:
        transport = DiskCarrier([], specs=SPECS, folder=str(tmp_path), timeout_s=5, readers=readers)
        transport.connect()
    finally:
        os.umask(before)
    [folder] = tmp_path.iterdir()
    assert (mode(folder), mode(folder / "model.safetensors")) == (folder_mode, file_mode)
    transport.close()


def test_folder_of_another_host_is_kept(tmp_path):
    folder = OwnedFolder(tmp_path / ".weightcast-0123456789abcdef.part")
    (folder.path / ".owner").write_text("another host")
    os.close(folder._lock)
    remove_abandoned(tmp_path, re.compile(".*"))
    assert folder.path.exists()
    (folder.path / ".owner").write_text(host_id())
    remove_abandoned(tmp_path, re.compile("[a-z]*"))  # another name than ours
    assert folder.path.exists()
    remove_abandoned(tmp_path, re.compile(".*"))
    assert not folder.path.exists()


def test_bucket_is_written_after_the_callers_stream_has_filled_it(monkeypatch, tmp_path, bucket):
    """A stand-in for a GPU: what the caller's stream has not done yet is done when its event is waited for."""

    class OnGpu:
        is_cuda = True
        device = torch.device("cuda", 0)

        def __getitem__(self, part: slice) -> torch.Tensor:
            return bucket.data[part]

    whole = bucket.data.clone()
    bucket.data.zero_()

    class Event:
        def record(self, stream: object) -> None:
            assert stream == "the caller's"

        def synchronize(self) -> None:
            bucket.data.copy_(whole)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    transport = DiskCarrier([], specs=SPECS[:100], folder=str(tmp_path), timeout_s=5)
    transport.connect()
    on_gpu: Any = SimpleNamespace(layout=bucket.layout, data=OnGpu())
    transport.send(on_gpu, ())
    transport._pump.drain()
    folder = transport._publish()
    data = (folder / "model.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    written = b"".join(whole[slot.offset_bytes : slot.end_bytes].numpy().tobytes() for slot in bucket.layout.slots)
    assert data[header_bytes:] == written
    transport.close()
