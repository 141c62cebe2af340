"""Models of transformers under FSDP2 are exported as the whole model would be saved."""

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers import library
from tests.helpers.exports import CPU, export, raw
from tests.helpers.ranks import Ranks
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.exporters.module import ModuleExporter
from weightcast.protocols import BucketUse

# Stacked experts, and names that transformers finds by class, both under FSDP2.
SHARDED = ["OlmoeForCausalLM", "LlavaForConditionalGeneration"]


def built() -> None:
    """Imports the models' modules before a deadline starts to count."""
    for class_name in SHARDED:
        library.make(class_name)


def sharded(class_name: str, folder: str) -> None:
    """Exports each rank's shards, which together are the checkpoint of the whole model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = TrainerGroup.connect(CPU, timeout_s=60)
    model = library.make(class_name)
    want = load_file(f"{folder}/model.safetensors")
    for module in list(model.modules()):
        if type(module).__name__.endswith(("DecoderLayer", "EncoderLayer")):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert type(model).__name__ != class_name  # FSDP2's class hides the conversion from transformers
    got = export(ModuleExporter(model), group, BucketUse(receivers=(0, 1)))
    assert set(got) == set(want)
    assert [name for name in want if got[name] != raw(want[name])] == []
    group.close()


def test_shards_of_fsdp2_are_exported_as_the_whole_model_would_be_saved(tmp_path):
    ranks = Ranks(2)
    try:
        ranks.run(built)
        for class_name in SHARDED:
            library.written(library.make(class_name), tmp_path / class_name)
            ranks.run(sharded, class_name, str(tmp_path / class_name))
    finally:
        ranks.close()
