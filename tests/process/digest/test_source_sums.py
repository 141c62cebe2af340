"""The sums that trainer ranks take of their shards are the digest of the whole tensor; real gloo ranks."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.helpers.exports import CPU
from tests.helpers.ranks import trainer_jobs
from tests.helpers.source_sums import summed
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.digest.definition import tensor_digest
from weightcast.exporters import gather, own_parts
from weightcast.exporters.local_shard import experts_over
from weightcast.exporters.mapping import Family, Rule
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.multi_module import ComposedExporter, Part
from weightcast.exporters.quantise import Fp8Blocks
from weightcast.protocols import BucketUse

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@pytest.fixture(scope="module")
def jobs():
    with trainer_jobs() as job:
        yield job


def connected() -> TrainerGroup:
    return TrainerGroup.connect(CPU, timeout_s=60)


def random_model(seed: int, mesh) -> nn.Module:
    """Tensors of random shapes, dtypes and placements, the same whole values on every rank."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    model = nn.Module()
    for number in range(6):
        shape = [rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))]
        dtype = rng.choice(DTYPES)
        whole = (torch.randn(shape, generator=generator) * 50).to(dtype)
        kinds = [rng.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in range(mesh.ndim)]
        tensor = distribute_tensor(whole, mesh, kinds) if rng.random() < 0.8 else whole
        model.register_parameter(f"w{number}", nn.Parameter(tensor, requires_grad=False))
    return model


def sum_random_models(seeds, meshes, receivers, wire_dtype):
    group = connected()
    made = {shape: init_device_mesh("cpu", shape) for shape in meshes}
    found = []
    for number, seed in enumerate(seeds):
        model = random_model(seed, made[meshes[number % len(meshes)]])
        exporter = ModuleExporter(model, family="plain", wire_dtype=wire_dtype)
        result = summed(exporter, group, BucketUse(receivers=receivers), bucket_bytes=512 if seed % 2 else 8192)
        whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
        specs = {spec.name: spec.torch_dtype for spec in exporter.specs()}
        right = {name: tensor_digest(value.detach().to(specs[name])) for name, value in whole.items()}
        if result is not None:
            found.append((seed, result[0] == right, result[1] == right, result[2]))
    group.close()
    return found


@pytest.mark.parametrize(("receivers", "wire_dtype"), [((0,), None), ((0, 2), None), ((0,), torch.bfloat16)])
@pytest.mark.parametrize(("world_size", "meshes"), [(4, [(4,), (2, 2), (1, 4)]), (3, [(3,), (3, 1)])])
def test_sums_of_shards_are_the_digest_of_the_whole_on_any_mesh(jobs, world_size, meshes, receivers, wire_dtype):
    seeds = list(range(24))
    found = jobs(world_size).run(sum_random_models, seeds, meshes, receivers, wire_dtype)[0]
    assert found == [(seed, True, True, []) for seed in seeds]


def sum_casts_in_blocks():
    model = nn.Module()
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(300.0).view(20, 15) / 7
    model.w = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]), requires_grad=False)
    group = connected()
    own_parts._CAST_BYTES = 24
    result = summed(ModuleExporter(model, family="plain", wire_dtype=torch.float16), group, bucket_bytes=4096)
    group.close()
    return result and result[0] == {"w": tensor_digest(whole.half())}


def test_what_is_cast_is_summed_in_blocks_as_it_travels(jobs):
    assert jobs(4).run(sum_casts_in_blocks)[0]


def gather_with_a_flip():
    group = connected()
    model = nn.Module()
    mesh = init_device_mesh("cpu", (2,))
    model.w = nn.Parameter(distribute_tensor(torch.arange(36.0).view(9, 4), mesh, [Shard(0)]), requires_grad=False)
    result = summed(ModuleExporter(model, family="plain"), group, bucket_bytes=4096, flip=True)
    whole = tensor_digest(model.w.full_tensor())
    group.close()
    return result and (result[0]["w"] == whole, result[1]["w"] == whole, result[2], result[3])


def test_a_bit_that_flips_in_the_gather_is_not_in_the_sums(jobs):
    # The ranks' own sums are right, what was gathered is wrong, and nobody's replica is.
    assert jobs(2).run(gather_with_a_flip)[0] == (True, False, [], 1)


def diverge(placements, wrong_rank, where):
    group = connected()
    model = nn.Module()
    mesh = init_device_mesh("cpu", (2, 2))
    model.good = nn.Parameter(torch.arange(6.0), requires_grad=False)
    whole = torch.arange(24.0).view(8, 3)
    value = whole.clone() if placements is None else distribute_tensor(whole, mesh, placements)
    model.bad = nn.Parameter(value, requires_grad=False)
    if group.rank == wrong_rank:
        local = model.bad.to_local() if isinstance(model.bad, DTensor) else model.bad
        local.view(-1).view(torch.uint8)[where] ^= 4
    result = summed(ModuleExporter(model, family="plain"), group, bucket_bytes=4096)
    group.close()
    return result and result[2]


@pytest.mark.parametrize(
    ("placements", "wrong_rank", "ranks"),
    [
        (None, 2, ((0, 1, 3), (2,))),
        (None, 0, ((0,), (1, 2, 3))),
        ([Replicate(), Shard(0)], 3, ((1,), (3,))),
        ([Shard(1), Replicate()], 1, ((0,), (1,))),
    ],
)
def test_a_diverged_replica_is_named_with_its_ranks(jobs, placements, wrong_rank, ranks):
    assert jobs(4).run(diverge, placements, wrong_rank, 5)[0] == [("bad", ranks, False)]


FUSED = Family(
    name="fused",
    model_types=frozenset({"fused"}),
    rules=(
        Rule(match=r"(.*)\.qkv", names=(r"\1.q", r"\1.k"), groups=lambda _: 2, sizes=lambda _: [3, 1]),
        Rule(match=r"(.*\.experts)\.up", names=(r"\1.{index}.up",), stacked=True, transposed=True),
    ),
)


class Fused(nn.Module):
    def __init__(self, rank: int, size: int, mesh) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        qkv = torch.randn(8, 5, generator=generator)
        self.attn = nn.Module()
        self.attn.qkv = nn.Parameter(distribute_tensor(qkv, mesh, [Shard(0)]), requires_grad=False)
        up = torch.randn(5, 4, 6, generator=generator)
        chunk = -(-5 // size)
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.up = nn.Parameter(up[rank * chunk : (rank + 1) * chunk].clone(), requires_grad=False)


def sum_fused(bucket_bytes, quantise):
    group = connected()
    model = Fused(group.rank, group.world_size, init_device_mesh("cpu", (group.world_size,)))
    exporter = ModuleExporter(
        model,
        family=FUSED,
        shard_of=experts_over(group.rank, group.world_size, total=5, match=r".*experts\.up"),
        quantise=Fp8Blocks(match=r".*\.(q|k|up)", block=2) if quantise else None,
    )
    draft = nn.Linear(3, 2)
    nn.init.constant_(draft.weight, 0.5)
    nn.init.constant_(draft.bias, 0.25)
    composed = ComposedExporter({"policy": exporter, "draft": Part(exporter=ModuleExporter(draft), prefix="draft.")})
    result = summed(composed, group, bucket_bytes=bucket_bytes)
    group.close()
    return result and (result[0] == result[1], len(result[1]), result[2])


@pytest.mark.parametrize("bucket_bytes", [128, 4096])
@pytest.mark.parametrize(("world_size", "quantise"), [(2, False), (4, False), (2, True), (4, True)])
def test_experts_and_fused_parts_add_up(jobs, world_size, bucket_bytes, quantise):
    count = 2 * 7 + 2 if quantise else 7 + 2  # each quantised tensor has its scales
    assert jobs(world_size).run(sum_fused, bucket_bytes, quantise)[0] == (True, count, [])


class Adapted(nn.Module):
    """A linear layer as PEFT leaves it."""

    def __init__(self, base: nn.Module, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = (
            nn.ModuleDict({"default": nn.Linear(w.shape[1], w.shape[0], bias=False)}) for w in (a, b)
        )
        for half, w in ((self.lora_A, a), (self.lora_B, b)):
            half["default"].weight = nn.Parameter(w, requires_grad=False)
        self.scaling = {"default": 0.5}
        self.active_adapters = ["default"]
        self.merged_adapters = []


def adapted(mesh, base_placements, adapter_placements, quantise):
    generator = torch.Generator().manual_seed(5)
    base = nn.Linear(6, 8, bias=False)
    whole = torch.randn(8, 6, generator=generator)
    base.weight = nn.Parameter(distribute_tensor(whole, mesh, base_placements), requires_grad=False)
    a, b = torch.randn(2, 6, generator=generator), torch.randn(8, 2, generator=generator)
    a, b = (distribute_tensor(w, mesh, adapter_placements) for w in (a, b))
    model = nn.Module()
    model.proj = Adapted(base, a, b)
    blocks = Fp8Blocks(match=r".*proj\.weight", block=4) if quantise else None
    return model, ModuleExporter(model, family="plain", quantise=blocks)


def sum_adapted(base_placements, adapter_placements, quantise, wrong, receivers):
    group = connected()
    mesh = init_device_mesh("cpu", (2,))
    model, exporter = adapted(mesh, base_placements, adapter_placements, quantise)
    proj = model.proj
    tensors = {"base": proj.base_layer.weight, "a": proj.lora_A["default"].weight}
    if wrong in tensors and group.rank == 1:
        tensors[wrong].to_local().view(-1)[0] += 1
    if wrong == "gathered" and group.rank == 1:
        fill = gather.GatherBucket.fill

        def then_flip(self, data, taker=None):
            value = fill(self, data, taker)
            if data is not None and any("lora_" in slot.spec.name for slot in self.layout.slots):
                data[1] ^= 1
            return value

        gather.GatherBucket.fill = then_flip
        try:
            result = summed(exporter, group, BucketUse(receivers=receivers), bucket_bytes=4096)
        finally:
            gather.GatherBucket.fill = fill
    else:
        result = summed(exporter, group, BucketUse(receivers=receivers), bucket_bytes=4096)
    group.close()
    return result and (result[0] == result[1], result[2])


A_NAME = "proj.lora_A.default.weight"


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("receivers", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("base", [[Shard(0)], [Shard(1)], [Replicate()]])
def test_merged_and_quantised_values_are_summed_where_they_are_computed(jobs, base, receivers, quantise):
    if 0 not in receivers:
        # The digest of what was gathered is then not on the head; ranks must agree all the same.
        _, mismatches = jobs(2).run(sum_adapted, base, [Shard(0)], quantise, "", receivers)[0]
        assert mismatches == []
        return
    assert jobs(2).run(sum_adapted, base, [Shard(0)], quantise, "", receivers)[0] == (True, [])


@pytest.mark.parametrize(
    ("adapters", "wrong", "found"),
    [
        ([Replicate()], "base", ("proj.weight", ((0,), (1,)), False)),
        ([Replicate()], "a", (A_NAME, ((0,), (1,)), False)),
        ([Shard(0)], "gathered", (A_NAME, ((1,),), True)),
    ],
)
def test_what_values_are_computed_from_is_compared_between_ranks(jobs, adapters, wrong, found):
    _, mismatches = jobs(2).run(sum_adapted, [Replicate()], adapters, False, wrong, (0,))[0]
    assert found in mismatches


def differing_scales():
    """Rank 1 receives another maximum than rank 0 has sent."""
    group = connected()
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    whole = torch.arange(1.0, 25.0).view(6, 4)
    model.w = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=False)
    exporter = ModuleExporter(model, family="plain", quantise=Fp8Blocks(match="w", block=4))
    exporter.prepare(group)
    move = TrainerGroup.move

    def wrong_maxima(self, sends, receives, *, what):
        move(self, sends, receives, what=what)
        if what.startswith("the scales") and self.rank == 1:
            receives[0].data.mul_(64)

    TrainerGroup.move = wrong_maxima
    try:
        result = summed(exporter, group, bucket_bytes=4096)
    finally:
        TrainerGroup.move = move
    group.close()
    return result and result[2]


def test_ranks_that_quantise_with_different_scales_are_named(jobs):
    assert ("w_scale_inv", ((0,), (1,)), False) in jobs(2).run(differing_scales)[0]
