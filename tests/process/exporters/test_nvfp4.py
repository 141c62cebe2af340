"""NVFP4 exports of shards over real gloo ranks."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers import families
from tests.helpers.exports import CPU, export
from tests.helpers.ranks import Ranks
from tests.helpers.sharded_experts import SIZES, sharded_experts
from tests.unit.exporters.test_nvfp4 import expected
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Nvfp4
from weightcast.protocols import BucketUse


def export_model(want: dict[str, bytes], *, experts_by: int) -> list[str]:
    """Names that a sharded export has otherwise than the reference: FSDP2, and experts over another dimension."""
    mesh = init_device_mesh("cpu", (4,))
    group = TrainerGroup.connect(CPU, timeout_s=30)
    model = sharded_experts(mesh, experts_by)
    got = export(ModuleExporter(model, quantise=Nvfp4()), group, BucketUse(receivers=(0, 2)), bucket_bytes=20_000)
    group.close()
    return sorted(set(got) ^ set(want)) + [n for n in got if n in want and got[n] != want[n]] if got else []


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The reference of the model that the ranks hold in shards."""
    model = families.make("qwen3_moe", **SIZES).to(torch.bfloat16)
    return expected(families.written(model, tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("experts_by", [0, 1, 2])
def test_shards_have_the_same_scales_as_whole_weights(four, whole, experts_by):
    assert four.run(partial(export_model, whole, experts_by=experts_by)) == [[]] * 4
