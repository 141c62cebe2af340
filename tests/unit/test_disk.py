"""The folder of the disk transport: there while it is needed, and never in parts afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightcast.errors import ConfigError
from weightcast.transports.disk import DiskTransport
from weightcast.wire.layout import TensorSpec

# The header alone is more than a file keeps back before it writes.
SPECS = [TensorSpec(name=f"layers.{number}.weight", dtype="uint8", shape=(1,)) for number in range(2000)]


def test_a_disk_that_is_full_at_the_header_keeps_no_folder(monkeypatch, tmp_path):
    whole = Path.open
    begun: list[Path] = []

    def full(path: Path, mode: str) -> Any:
        path.touch()
        begun.append(path)
        return whole(Path("/dev/full"), mode)

    transport = DiskTransport([], specs=SPECS, folder=str(tmp_path), timeout_s=5)
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
