"""Models under FSDP1: two ranks export what ``save_pretrained`` writes of the same model, also after a step."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests.helpers import library
from tests.helpers.exports import CPU, export, plan, raw, takers_of
from tests.helpers.ranks import Ranks, allocate_slots
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.errors import ConfigError
from weightcast.exporters.bucketize import bucketize
from weightcast.exporters.fsdp1 import Fsdp1Exporter
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.own_parts import OwnParts
from weightcast.protocols import BucketUse
from weightcast.update.arguments import exporter_of
from weightcast.wire.layout import Packing, plan_buckets

QWEN, LLAVA = "Qwen3MoeForCausalLM", "LlavaForConditionalGeneration"
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
KINDS: dict[str, dict[str, Any]] = {
    "layers": {"layers": True},
    "one unit": {},
    "mixed precision": {"layers": True, "mixed_precision": BF16},
    "gradients only": {"layers": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "checkpointed, compiled": {"layers": True, "checkpointed": True, "compiled": True},
}
# Odd sizes, so that ranks get parts of rows and the flat parameters are padded.
INPUT = torch.tensor([[3, 4, 5, 6, 7]])
EVERYBODY = BucketUse(receivers=(0, 1))


def wrap(model: nn.Module, *, layers: bool = False, checkpointed: bool = False, compiled: bool = False, **options: Any):
    kinds = {type(module) for module in model.modules() if type(module).__name__.endswith("Layer")}
    if checkpointed:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) in kinds:
                    parent.register_module(name, checkpoint_wrapper(child))
    if layers:
        options["auto_wrap_policy"] = partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU, **options)
    return torch.compile(model, backend="eager") if compiled else model


def exported(class_name: str, folder: str, kinds: list[str]) -> dict[str, list[str]]:
    """Names of the tensors that an export has otherwise than the checkpoint, for each kind and bucket size."""
    want = load_file(f"{folder}/model.safetensors")
    group = TrainerGroup.connect(CPU, timeout_s=60)
    found: dict[str, list[str]] = {}
    for kind in kinds:
        model = wrap(library.make(class_name), **KINDS[kind])
        exporter, _ = exporter_of(model, None)
        assert isinstance(exporter, Fsdp1Exporter)
        assert exporter.family.name.startswith("transformers"), "recorded, and not from a table"
        local = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        for bucket_bytes in (20_000, 1 << 20):
            got = export(exporter, group, EVERYBODY, bucket_bytes=bucket_bytes)
            wrong = sorted(set(got) ^ set(want)) + [n for n in got if n in want and got[n] != raw(want[n])]
            found.setdefault(kind, []).extend(wrong)
        assert {name: tuple(tensor.shape) for name, tensor in model.named_parameters()} == local, "sharded again"
    group.close()
    return found


def trained(class_name: str) -> tuple[list[str], int]:
    """Names that differ from a replica's after the same step, before which the exporter was made; changed names."""
    group = TrainerGroup.connect(CPU, timeout_s=60)
    replica = library.make(class_name)
    model = wrap(copy.deepcopy(replica), layers=True)
    exporter = Fsdp1Exporter(model)
    before = export(exporter, group)
    for each in (replica, model):
        optimiser = torch.optim.SGD(each.parameters(), lr=0.5)
        each(INPUT, labels=INPUT).loss.backward()
        optimiser.step()
    got, want = export(exporter, group), export(ModuleExporter(replica), TrainerGroup(device=CPU, timeout_s=5))
    group.close()
    if group.rank:
        return [], 0
    wrong = [name for name in want if not close(got[name], want[name])]
    return wrong, sum(got[name] != before[name] for name in got)


def close(one: bytes, other: bytes) -> bool:
    """The ranks' gradients are summed in another order than a replica's."""
    a, b = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (one, other))
    return torch.allclose(a, b, atol=1e-5)


def planned(class_name: str) -> tuple[dict[str, int], list[str]]:
    """How often a rank worked out its copies, while it planned and while it exported; and names with other bytes."""
    group = TrainerGroup.connect(CPU, timeout_s=60)
    model = wrap(library.make(class_name), layers=True)
    want = export(Fsdp1Exporter(model), group, EVERYBODY)
    exporter = Fsdp1Exporter(model)
    exporter.prepare(group)
    local = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    counts: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_plan_copies", "_plan_sums"):
            made = getattr(OwnParts, name)

            def counting(self: OwnParts, *options: Any, name: str = name, made: Any = made) -> Any:
                counts[name] = counts.get(name, 0) + 1
                return made(self, *options)

            patch.setattr(OwnParts, name, counting)
        layouts = plan_buckets(exporter.specs(), bucket_bytes=20_000, packing=Packing())
        planned = plan(exporter, layouts, group, replace(EVERYBODY, sums=True))
        for one in planned:
            one.prepare(None)
        assert {name: tuple(tensor.shape) for name, tensor in model.named_parameters()} == local
        before = dict(counts)
        slots = allocate_slots(CPU, 20_000)
        got: dict[str, bytes] = {}
        for bucket in bucketize(planned, slots, takers_of(planned)):
            assert bucket is not None
            for slot, view in bucket.views():
                got[slot.spec.name] = got.get(slot.spec.name, b"") + raw(view)
    group.close()
    after = {f"{name} while it exports": count - before.get(name, 0) for name, count in counts.items()}
    return {"buckets": len(layouts), **before, **after}, [name for name in want if got[name] != want[name]]


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.scalar = nn.Parameter(torch.ones(3))
        self.register_buffer("bias_of_router", torch.linspace(0.1, 0.7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.bias_of_router * self.scalar.sum()


def buffers() -> tuple[list[str], list[str]]:
    """Names whose values differ from torch's own full state dict, before and after a pass that casts buffers."""
    torch.manual_seed(0)
    group = TrainerGroup.connect(CPU, timeout_s=60)
    model = wrap(WithBuffer(), mixed_precision=BF16)
    exporter = Fsdp1Exporter(model)
    found: list[list[str]] = []
    for _ in range(2):
        sent = export(exporter, group, EVERYBODY)
        got = {
            spec.name: torch.frombuffer(bytearray(sent[spec.name]), dtype=spec.torch_dtype).view(spec.shape)
            for spec in exporter.specs()
        }
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            want = model.state_dict()
        wrong = [name for name in got if name not in want or not torch.equal(got[name].float(), want[name])]
        found.append(sorted(set(got) ^ set(want)) + wrong)
        model(torch.randn(2, 7))
    group.close()
    return found[0], found[1]


def refusals() -> list[str]:
    import peft

    found: list[str] = []
    for model in (
        FullyShardedDataParallel(library.make(QWEN), use_orig_params=False, device_id=CPU),
        FullyShardedDataParallel(
            peft.get_peft_model(library.make(QWEN), peft.LoraConfig(target_modules=["q_proj"], r=2)),
            use_orig_params=True,
            device_id=CPU,
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            exporter_of(model, None)
        found.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        ModuleExporter(wrap(library.make(QWEN)))
    found.append(f"{caught.value} {caught.value.hint}")
    return found


@pytest.fixture(scope="module")
def two() -> Any:
    ranks = Ranks(2)
    ranks.run(imported)
    yield ranks
    ranks.close()


def imported() -> None:
    """Imports the models' modules before a deadline starts to count."""
    for name in (QWEN, LLAVA):
        library.make(name)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("class_name", [QWEN, pytest.param(LLAVA, marks=pytest.mark.wide)])
def test_every_rank_exports_what_save_pretrained_writes(two: Ranks, class_name: str, tmp_path: Path) -> None:
    library.written(library.make(class_name), tmp_path)
    for found in two.run(exported, class_name, str(tmp_path), list(KINDS)):
        assert found == {kind: [] for kind in KINDS}


def test_a_step_of_training_is_in_the_next_update(two: Ranks) -> None:
    (wrong, changed), _ = two.run(trained, QWEN)
    assert wrong == []
    assert changed > 20


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_values_of_buffers_are_those_of_torch_s_own_state_dict(two: Ranks) -> None:
    assert two.run(buffers) == [([], [])] * 2


def test_forms_of_fsdp1_that_hide_parameters_are_refused_by_name(two: Ranks) -> None:
    for hidden, adapted, elsewhere in two.run(refusals):
        assert "FSDP1 without use_orig_params" in hidden
        assert "the model has adapters, and FSDP1 has partitioned them" in adapted
        assert "Fsdp1Exporter" in elsewhere
        assert "fully_shard" in elsewhere


def test_copies_are_worked_out_before_anything_is_gathered(two):
    for counts, wrong in two.run(planned, QWEN):
        assert wrong == []
        assert counts["buckets"] > 1
        assert counts["_plan_copies"] == counts["buckets"]
        assert counts["_plan_copies while it exports"] == 0
        assert counts.get("_plan_sums while it exports", 0) == 0
