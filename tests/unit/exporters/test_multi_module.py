"""Several exporters as one, and the estimate of an update's memory."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.helpers import families
from tests.helpers.exports import ALONE, export, raw
from weightcast.errors import ConfigError
from weightcast.exporters.checkpoint import CheckpointExporter
from weightcast.exporters.memory_estimate import bucket_bytes_for, peak_bytes
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter, Part
from weightcast.protocols import TO_HEAD
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets


def parts_of(seed: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(seed)
    return nn.Linear(8, 5), families.make("qwen3", seed=seed), nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))


def test_a_policy_a_vision_tower_and_a_draft_are_one_stream(tmp_path):
    vision, policy, draft = parts_of(0)
    save_file({name: tensor.detach().clone() for name, tensor in draft.named_parameters()}, tmp_path / "m.safetensors")
    with CheckpointExporter(tmp_path / "m.safetensors") as frozen:
        composed = ComposedExporter(
            {
                "vision": Part(exporter=ModuleExporter(vision), prefix="visual."),
                "policy": ModuleExporter(policy),
                "draft": Part(exporter=frozen, prefix="draft."),
            }
        )
        # Some buckets have the end of one part and the beginning of the next.
        got = export(composed, bucket_bytes=3000)
    want = {f"visual.{name}": raw(tensor) for name, tensor in vision.named_parameters()}
    want |= {name: raw(tensor) for name, tensor in policy.named_parameters()}
    want |= {f"draft.{name}": raw(tensor) for name, tensor in draft.named_parameters()}
    assert got == want
    assert composed.scores == composed.parts["vision"].exporter.scores


def test_device_and_logprobs_are_those_of_the_first_part():
    _, policy, draft = parts_of(0)
    composed = ComposedExporter({"policy": ModuleExporter(policy), "draft": ModuleExporter(draft)})
    assert composed.logprobs([3, 4, 5]) == ModuleExporter(policy).logprobs([3, 4, 5])


def test_incompatible_parts_are_refused():
    vision, policy, _ = parts_of(0)
    with pytest.raises(ConfigError, match=r"weight is in 'a' and in 'b'"):
        ComposedExporter({"a": ModuleExporter(vision), "b": ModuleExporter(nn.Linear(2, 2))})
    with pytest.raises(ConfigError, match="at least one"):
        ComposedExporter({})
    composed = ComposedExporter({"policy": ModuleExporter(policy)})
    [layout] = plan_buckets(ModuleExporter(vision).specs(), bucket_bytes=1 << 20, packing=Packing())
    with pytest.raises(ConfigError, match="which no part has"):
        composed.plan([layout], ALONE, TO_HEAD)


# -- ceiling

MIB = 1 << 20
SPECS = [
    TensorSpec(name="embed", dtype="bfloat16", shape=(10_000, 4096)),  # 78 MiB, rows of 8 KiB
    TensorSpec(name="norm", dtype="float32", shape=(4096,)),
    TensorSpec(name="up", dtype="bfloat16", shape=(4096, 1024)),  # 8 MiB
]


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("ceiling_mib", [3, 17, 64, 1000])
def test_a_ceiling_gives_the_largest_buckets_that_stay_under_it(world_size, ceiling_mib):
    options = {"packing": Packing(), "world_size": world_size, "work_bytes": 0}
    bucket_bytes = bucket_bytes_for(SPECS, ceiling_bytes=ceiling_mib * MIB, **options)
    assert peak_bytes(SPECS, bucket_bytes=bucket_bytes, **options) <= ceiling_mib * MIB
    if ceiling_mib < 200:
        # A sixteenth more is too much, if a bucket can be filled that far.
        larger = plan_buckets(SPECS, bucket_bytes=bucket_bytes * 17 // 16, packing=Packing())
        full = max(layout.size_bytes for layout in larger)
        assert 2 * full + (max(full // world_size, MIB) if world_size > 1 else 0) > ceiling_mib * MIB


@pytest.mark.parametrize(
    ("packing", "needed", "name"),
    [
        (Packing(), 2 * 4096 * 4 // 2 + MIB, "one row of embed"),
        (Packing(slices=False), 2 * 10_000 * 8192 + 10_000 * 8192 // 4, "embed"),
    ],
    ids=["slices", "whole"],
)
def test_a_ceiling_that_is_too_low_is_refused_with_the_bytes_needed(packing, needed, name):
    with pytest.raises(ConfigError, match=rf"^{name} has \d+ bytes, .*: {needed} bytes are needed\n") as caught:
        bucket_bytes_for(SPECS, ceiling_bytes=needed - 1, packing=packing, world_size=4, work_bytes=0)
    assert caught.value.hint == f"allow {needed} bytes or more"
    options = {"packing": packing, "world_size": 4, "work_bytes": 0}
    bucket_bytes = bucket_bytes_for(SPECS, ceiling_bytes=needed, **options)
    assert peak_bytes(SPECS, bucket_bytes=bucket_bytes, **options) <= needed
