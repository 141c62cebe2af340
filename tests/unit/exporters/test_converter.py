"""A bridge's stream becomes buckets; the bridge is a fake with Megatron's fused tensors and order."""

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.exports import ALONE, bucketize, export, plan, raw
from weightcast.errors import ConfigError, WeightcastError
from weightcast.exporters.converter import BridgeExporter
from weightcast.exporters.multi_module import ComposedExporter
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout, Packing, TensorSlot, TensorSpec, plan_buckets


class FakeBridge:
    """A bridge that keeps fused tensors and converts them one at a time."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.qkv = torch.randn(3, 2 + 1 + 1, 4, 8, dtype=dtype)  # groups, queries + key + value, head, hidden
        self.fc1 = torch.randn(2 * 6, 8, dtype=dtype)
        self.norm = torch.randn(8)
        self.runs = 0
        self.more = False

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.runs += 1
        yield "q_proj.weight", self.qkv[:, :2].reshape(-1, 8)
        yield "k_proj.weight", self.qkv[:, 2].reshape(-1, 8)
        yield "v_proj.weight", self.qkv[:, 3].reshape(-1, 8)
        yield "norm.weight", self.norm
        yield "gate_proj.weight", self.fc1[:6]
        yield "up_proj.weight", self.fc1[6:]
        if self.more:
            yield "surprise.weight", self.norm


def test_each_update_reads_the_stream_once():
    bridge = FakeBridge(0)
    exporter = BridgeExporter(bridge.export_weights)
    assert bridge.runs == 1
    for count in (2, 3):
        with torch.no_grad():
            bridge.fc1 += 1
        want = {name: raw(tensor) for name, tensor in FakeBridge.export_weights(bridge)}
        bridge.runs = count - 1
        assert export(exporter, bucket_bytes=300) == want  # tensors cut between buckets
        assert bridge.runs == count


def test_values_are_cast_and_specs_may_be_given():
    bridge = FakeBridge(1)
    specs = [
        TensorSpec(name=name, dtype="bfloat16", shape=tuple(tensor.shape)) for name, tensor in bridge.export_weights()
    ]
    exporter = BridgeExporter(bridge.export_weights, specs=specs)
    assert export(exporter) == {name: raw(tensor.bfloat16()) for name, tensor in bridge.export_weights()}
    assert {spec.dtype for spec in BridgeExporter(bridge.export_weights, wire_dtype=torch.bfloat16).specs()} == {
        "bfloat16"
    }


def give_up_after(exporter: BridgeExporter, count: int, *, bucket_bytes: int, packing: Packing) -> TensorSlot:
    """Fills a number of buckets and then abandons the update; returns the last slot that was filled."""
    layouts = plan_buckets(exporter.specs(), bucket_bytes=bucket_bytes, packing=packing)
    buckets = bucketize(exporter, layouts, ALONE, [torch.empty(bucket_bytes, dtype=torch.uint8)])
    for _ in range(count):
        next(buckets)
    return layouts[count - 1].slots[-1]


@pytest.mark.parametrize(
    ("bucket_bytes", "count", "last", "whole"),
    [
        (300, 1, "q_proj.weight", False),
        (300, 2, "q_proj.weight", False),
        (300, 3, "k_proj.weight", False),
        (384, 2, "q_proj.weight", False),  # its last piece
        (800, 1, "q_proj.weight", True),
        (800, 2, "k_proj.weight", True),
        (1 << 20, 1, "up_proj.weight", True),  # all of it
    ],
)
def test_an_abandoned_update_leaves_nothing_behind(bucket_bytes, count, last, whole):
    bridge = FakeBridge(2)
    exporter = BridgeExporter(bridge.export_weights)
    slot = give_up_after(exporter, count, bucket_bytes=bucket_bytes, packing=Packing())
    assert (slot.spec.name, slot.whole) == (last, whole)
    bridge.qkv += 1
    bridge.fc1 += 1
    want = {name: raw(tensor) for name, tensor in bridge.export_weights()}
    bridge.runs = 0
    assert export(exporter, bucket_bytes=bucket_bytes) == want
    assert bridge.runs == 1


def test_a_first_tensor_without_rows_begins_an_update_too():
    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    exporter = BridgeExporter(lambda: iter([("hollow", torch.zeros(0, 8)), ("weight", weight.clone())]))
    packing = Packing(one_dtype=True)  # otherwise they would share a bucket
    assert give_up_after(exporter, 1, bucket_bytes=64, packing=packing).spec.name == "hollow"
    weight += 1
    assert export(exporter, bucket_bytes=64, packing=packing) == {"hollow": b"", "weight": raw(weight)}


def test_a_slice_comes_only_from_the_tensor_that_was_read_last():
    bridge = FakeBridge(6)
    exporter = BridgeExporter(bridge.export_weights)
    first, second, *_ = exporter.specs()

    def fill(spec: TensorSpec, first_row: int) -> Bucket:
        slot = TensorSlot(spec=spec, offset_bytes=0, first_row=first_row, num_rows=2)
        layout = BucketLayout(index=0, slots=(slot,), size_bytes=slot.size_bytes)
        bucket = Bucket(layout, torch.zeros(slot.size_bytes, dtype=torch.uint8))
        plan(exporter, [layout])[0].fill(bucket.data)
        return bucket

    for spec in (first, second):
        with pytest.raises(ConfigError, match="out of the bridge's order"):
            fill(spec, 2)  # its first rows were not read
    fill(first, 0)
    with pytest.raises(ConfigError, match="out of the bridge's order"):
        fill(second, 2)
    fill(first, 0)
    rows = dict(bridge.export_weights())["q_proj.weight"][2:4]
    assert raw(fill(first, 2).data) == raw(rows)


def test_a_bridge_is_a_part_like_any_other():
    bridge = FakeBridge(3)
    composed = ComposedExporter({"policy": BridgeExporter(bridge.export_weights)})
    assert export(composed) == {name: raw(tensor) for name, tensor in bridge.export_weights()}
    assert not composed.scores


def test_a_bridge_that_yields_other_tensors_than_before_is_an_error():
    bridge = FakeBridge(4)
    exporter = BridgeExporter(bridge.export_weights)
    bridge.more = True
    with pytest.raises(WeightcastError, match=r"yields surprise\.weight after its last"):
        export(exporter)
    bridge.more = False
    bridge.norm = torch.ones(9)
    with pytest.raises(WeightcastError, match=r"yields norm\.weight \[9\] where it yielded norm\.weight \[8\]"):
        export(BridgeExporter(bridge.export_weights, specs=exporter.specs()))
    with pytest.raises(ConfigError, match="no tensors"):
        BridgeExporter(list)


def test_one_dtype_in_a_bucket_needs_one_dtype():
    bridge = FakeBridge(5, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"needs .*gate_proj\.weight out of the bridge") as caught:
        export(BridgeExporter(bridge.export_weights), packing=Packing(one_dtype=True))
    assert "wire_dtype" in (caught.value.hint or "")
