"""Adapters of a sharded model, merged where the weights are."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers import families
from tests.helpers.exports import CPU
from tests.helpers.ranks import Ranks
from tests.unit.exporters.test_lora import MERGED, adapted, check, tensors_of, trained
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.lora_adapter import AdapterExporter
from weightcast.exporters.module import ModuleExporter
from weightcast.protocols import BucketUse

# PEFT uses deprecated parts of transformers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed"),
]


def sharded() -> None:
    """Exports a sharded model, where every rank merges its own rows."""
    want = adapted().merge_and_unload().state_dict()
    plain = families.make("qwen3").state_dict()
    model = adapted()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    group = TrainerGroup.connect(CPU, timeout_s=30)
    use = BucketUse(receivers=(0, 1))
    for _ in range(2):
        got = tensors_of(ModuleExporter(model), group, use=use, bucket_bytes=5000)
        check(got, want, plain)
    adapters = tensors_of(AdapterExporter(model), group, use=use)
    assert {name.split(".")[-2] for name in adapters} == {"lora_A", "lora_B"}
    group.close()


def sharded_otherwise() -> str:
    """The refusal of adapters that only PEFT can merge, on sharded weights."""
    model = trained(MERGED["loha"]())
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(ConfigError) as caught:
        ModuleExporter(model)
    return str(caught.value)


def test_a_sharded_model_merges_where_the_weights_are():
    ranks = Ranks(2)
    try:
        ranks.run(sharded)
        said = ranks.run(sharded_otherwise)
        assert all("q_proj has an adapter" in words and "loha on sharded weights" in words for words in said), said
    finally:
        ranks.close()
