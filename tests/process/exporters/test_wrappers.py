"""Trainers' wrappers change nothing: two ranks export what ``save_pretrained`` writes of the model inside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from tests.helpers import library
from tests.helpers.exports import CPU, export, raw
from tests.helpers.ranks import Ranks
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.exporters.module import ModuleExporter
from weightcast.protocols import BucketUse

CLASSES = ["Qwen3MoeForCausalLM", "LlavaForConditionalGeneration"]
KINDS = ["ddp", "compile", "fsdp2", "fsdp2+compile", "fsdp2+offload", "fsdp2+checkpointing", "fsdp2+peft", "peft+ddp"]


def layers_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Parent, attribute and module of each layer."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__.endswith(("DecoderLayer", "EncoderLayer"))
    ]


def wrap(model: nn.Module, kind: str) -> nn.Module:
    """Wraps a model; adapters add nothing, because PEFT starts with B = 0."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if "peft" in kind:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    if "checkpointing" in kind:
        for parent, name, layer in layers_of(model):
            parent.register_module(name, checkpoint_wrapper(layer))
    if "fsdp2" in kind:
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if "offload" in kind else {}
        for _, _, layer in layers_of(model):
            fully_shard(layer, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
    if "ddp" in kind:
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if "compile" in kind:
        model = torch.compile(model, backend="eager")
    return model


def wrapped(class_name: str, folder: str, kinds: list[str]) -> dict[str, list[str]]:
    """Names of the tensors that an export has otherwise than the checkpoint, for each kind."""
    want = load_file(f"{folder}/model.safetensors")
    group = TrainerGroup.connect(CPU, timeout_s=60)
    found: dict[str, list[str]] = {}
    for kind in kinds:
        model = library.make(class_name)
        got = export(ModuleExporter(wrap(model, kind)), group, BucketUse(receivers=(0, 1)))
        found[kind] = sorted(set(got) ^ set(want)) + [n for n in got if n in want and got[n] != raw(want[n])]
    group.close()
    return found


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("class_name", [CLASSES[0], pytest.param(CLASSES[1], marks=pytest.mark.wide)])
def test_wrappers_of_trainers_change_nothing(class_name, tmp_path):
    ranks = Ranks(2)
    try:
        ranks.run(imported, class_name)
        library.written(library.make(class_name), tmp_path)
        for found in ranks.run(wrapped, class_name, str(tmp_path), KINDS):
            assert found == {kind: [] for kind in KINDS}
    finally:
        ranks.close()


def imported(class_name: str) -> None:
    """Imports the model's modules before a deadline starts to count."""
    library.make(class_name)
