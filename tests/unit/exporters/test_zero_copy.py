"""Zero-copy exports: tensors whose memory already has the wire format are sent from there, with the same bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.exports import ALONE, CPU, export, raw
from tests.helpers.ranks import allocate_slots
from weightcast.exporters import gather
from weightcast.exporters.bucketize import bucketize
from weightcast.exporters.module import ModuleExporter
from weightcast.wire.layout import Packing, plan_buckets


class Some(nn.Module):
    """Tensors of every kind that matters here; two of them are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(40, 16))
        self.small = nn.Parameter(torch.randn(3))
        self.turned = nn.Parameter(torch.randn(16, 24).t())
        self.short = nn.Parameter(torch.randn(20, 8, dtype=torch.bfloat16))
        self.head = self.embed
        self.register_buffer("count", torch.arange(64))


@pytest.fixture(autouse=True)
def _small_tensors_count_too(monkeypatch):
    monkeypatch.setattr(gather, "MIN_LENT_BYTES", 64)


def lending(exporter: ModuleExporter, *, bucket_bytes: int) -> tuple[dict[str, bytes], set[str]]:
    """Every tensor's bytes, from buckets that start full of noise, and the names of the zero-copy tensors."""
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=Packing())
    slots = allocate_slots(CPU, bucket_bytes)
    for slot in slots:
        slot.random_(0, 256)
    lent = exporter.lend(layouts, ALONE)
    parts: dict[str, list[bytes]] = {}
    for bucket in bucketize(exporter, layouts, ALONE, slots, lent):
        assert bucket is not None
        whole = torch.cat(bucket.runs())
        for slot, view in bucket.views():
            assert raw(view) == raw(whole[slot.offset_bytes : slot.end_bytes])
            parts.setdefault(slot.spec.name, []).append(raw(view))
    return {name: b"".join(pieces) for name, pieces in parts.items()}, {name for some in lent for name in some}


@pytest.mark.parametrize("bucket_bytes", [512, 1 << 16])
def test_zero_copy_gives_the_same_bytes(bucket_bytes):
    torch.manual_seed(0)
    exporter = ModuleExporter(Some())
    found, lent = lending(exporter, bucket_bytes=bucket_bytes)
    assert found == export(exporter, bucket_bytes=bucket_bytes)
    assert lent == {"embed", "short", "count"}


def test_cast_tensors_are_not_zero_copy():
    exporter = ModuleExporter(Some(), wire_dtype=torch.bfloat16)
    found, lent = lending(exporter, bucket_bytes=1 << 16)
    assert found == export(exporter)
    assert lent == {"short", "count"}


def test_zero_copy_tensors_are_the_models_current_memory():
    model = Some()
    exporter = ModuleExporter(model)
    lending(exporter, bucket_bytes=1 << 16)
    with torch.no_grad():
        model.embed.add_(1)
        model.short = nn.Parameter(model.short + 1)
    layouts = plan_buckets(exporter.specs(), bucket_bytes=1 << 16, packing=Packing())
    (lent,) = exporter.lend(layouts, ALONE)
    assert lent["embed"].data_ptr() == model.embed.data_ptr()
    assert lent["short"].data_ptr() == model.short.data_ptr()
    assert lending(exporter, bucket_bytes=1 << 16)[0] == export(exporter)


def test_a_buffer_is_filled_anew_when_fewer_tensors_are_zero_copy(monkeypatch):
    exporter = ModuleExporter(Some())
    right = export(exporter)
    for least in (64, 1 << 20, 64):
        monkeypatch.setattr(gather, "MIN_LENT_BYTES", least)
        assert lending(exporter, bucket_bytes=1 << 16)[0] == right
