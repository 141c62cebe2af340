"""Every rank finds out which rank holds what, from few bytes; all ranks of a job are played in one process."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.helpers.kimi import KIMI, kimi_module, stored_of
from tests.helpers.playing import Game, mesh_of
from weightcast.errors import ConfigError
from weightcast.exporters.families import family_named
from weightcast.exporters.local_shard import Within
from weightcast.exporters.mapping import arrange
from weightcast.exporters.module_tensors import PlacedTensors
from weightcast.exporters.ownership import SharedParts
from weightcast.exporters.placements import Table, agree, describe, model_hash
from weightcast.exporters.segments import Arranged, Segment
from weightcast.wire.box import Box
from weightcast.wire.layout import TensorSpec, dtype_name


def holder(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module with these tensors."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def sharded(shape: tuple[int, ...], mesh, placements, dtype=torch.float32, *, turned: bool = False) -> DTensor:
    """This rank's DTensor of zeros; ``turned`` lays its memory out with the dimensions in reverse order."""
    own = list(shape)
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim
            chunk = -(-own[dim] // mesh.shape[axis])
            start = min((coordinate or [0] * mesh.ndim)[axis] * chunk, own[dim])
            own[dim] = min(chunk, own[dim] - start)
    local = torch.zeros(own, dtype=dtype)
    if turned:
        local = torch.zeros(own[::-1], dtype=dtype).permute(tuple(range(len(own) - 1, -1, -1)))
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


@st.composite
def jobs(draw) -> dict:
    axes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    world = math.prod(axes)
    order = draw(st.permutations(range(world)))
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        kind = draw(st.sampled_from(["mesh", "part of the mesh", "plain", "placed"]))
        if not shape and kind == "placed":
            kind = "plain"
        dims = st.one_of(st.none(), st.integers(0, len(shape) - 1)) if shape else st.none()
        tensors.append(
            {
                "shape": shape,
                "kind": kind,
                "cuts": [draw(dims) for _ in axes],
                "axis": draw(st.integers(0, len(axes) - 1)),
                "turned_on": draw(st.sets(st.integers(0, world - 1), max_size=1)),
                "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
                "cut_up": draw(st.booleans()),
            }
        )
    return {"axes": axes, "order": order, "tensors": tensors, "computed": draw(st.sets(st.integers(0, 3)))}


def model_of(job: dict, rank: int) -> tuple[PlacedTensors, list[Arranged], list[TensorSpec]]:
    ranks = torch.tensor(job["order"]).reshape(job["axes"])
    [mine] = (ranks == rank).nonzero().tolist()
    whole = mesh_of(ranks, rank)
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, Within] = {}
    arranged: list[Arranged] = []
    specs: list[TensorSpec] = []
    for number, one in enumerate(job["tensors"]):
        name, shape, dtype, turned = f"t{number}", one["shape"], one["dtype"], rank in one["turned_on"]
        if one["kind"] == "mesh":
            placements = [Replicate() if dim is None else Shard(dim) for dim in one["cuts"]]
            tensors[name] = sharded(shape, whole, placements, dtype, turned=turned)
        elif one["kind"] == "part of the mesh":  # each row of ranks along one axis has a mesh of its own
            axis, dim = one["axis"], one["cuts"][0]
            index = [slice(None) if other == axis else at for other, at in enumerate(mine)]
            part = mesh_of(ranks[tuple(index)], rank)
            tensors[name] = sharded(shape, part, [Replicate() if dim is None else Shard(dim)], dtype, turned=turned)
        elif one["kind"] == "placed":  # experts over one axis, without DTensor
            size, at = job["axes"][one["axis"]], mine[one["axis"]]
            chunk = -(-shape[0] // size)
            start = min(at * chunk, shape[0])
            tensors[name] = torch.zeros((min(chunk, shape[0] - start), *shape[1:]), dtype=dtype)
            places[name] = Within(offset=(start, *(0 for _ in shape[1:])), shape=shape)
        else:
            tensors[name] = torch.zeros(shape, dtype=dtype)
        arranged += cut_up(name, number, shape) if one["cut_up"] and len(shape) == 3 else whole_of(name, number, shape)
        while len(specs) < len(arranged):
            tensor = arranged[len(specs)]
            specs.append(TensorSpec(name=tensor.name, dtype=dtype_name(dtype), shape=tensor.shape))
    return PlacedTensors(holder(tensors), shard_of=lambda name, _: places.get(name)), arranged, specs


def whole_of(name: str, number: int, shape: tuple[int, ...]) -> list[Arranged]:
    return [Arranged(name=name, shape=shape, segments=(Segment.whole(number, shape),))]


def cut_up(name: str, number: int, shape: tuple[int, ...]) -> list[Arranged]:
    """One tensor for each index of dimension 0, transposed, as of stacked experts."""
    return [
        Arranged(
            name=f"{name}.{index}",
            shape=(shape[2], shape[1]),
            segments=(
                Segment(source=number, box=Box(offset=(index, 0, 0), shape=(1, *shape[1:])), dims=(2, 1), at=(0, 0)),
            ),
        )
        for index in range(shape[0])
    ]


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(job=jobs())
def test_every_rank_knows_what_every_other_holds(job):
    world = math.prod(job["axes"])
    game = Game(world)

    def act(rank: int, group) -> list[list[tuple]]:
        tensors, arranged, specs = model_of(job, rank)
        shared = SharedParts(tensors, arranged, specs, computed=lambda number: number in job["computed"])
        shared.agree(group)
        return [[(p.box, p.holders, p.ready, p.computed) for p in shared.parts(n)] for n in range(len(specs))]

    heard = game.play(act)
    models = {rank: model_of(job, rank) for rank in range(world)}
    _, arranged, specs = models[0]
    want = []
    for tensor, _ in zip(arranged, specs, strict=True):
        held: dict[tuple, list] = {}
        computed = any(segment.source in job["computed"] for segment in tensor.segments)
        for rank, (tensors, _, _) in models.items():
            for segment in tensor.segments:
                part = tensors.part(segment.source)
                box = segment.target_box(part[0]) if part is not None else None
                if part is None or box is None or not box.numel:
                    continue
                view = segment.view(part[1], part[0].offset, box)
                # Memory that is in order only because few of its dimensions count may pass for one that is not.
                plain = part[1].is_contiguous()
                held.setdefault((box.offset, box.shape), []).append((rank, view.is_contiguous() and plain))
        want.append(
            [
                (
                    Box(offset=offset, shape=shape),
                    tuple(rank for rank, _ in holders),
                    not computed and all(ready for _, ready in holders),
                    computed,
                )
                for (offset, shape), holders in sorted(held.items())
            ]
        )
    assert all(parts == want for parts in heard.values())


def test_ranks_with_equal_tables_send_a_hash():
    def act(rank: int, group):
        mesh = mesh_of(torch.arange(64).reshape(8, 8), rank)
        weights = {f"w{n}": sharded((64, n + 1), mesh, [Replicate(), Shard(0)]) for n in range(200)}
        tensors = PlacedTensors(holder(weights))
        specs = [TensorSpec(name=p.name, dtype="float32", shape=p.shape) for p in tensors.places]
        return agree(tensors, specs, "model", group, lambda _: False).parts(7)

    game = Game(64)
    parts = game.play(act, [0, 63])
    assert parts[0].holders == tuple(tuple(range(row, 64, 8)) for row in range(8))
    assert parts[63].holders == parts[0].holders
    assert all(len(message) < 120 for messages in game.gathered for message in messages.values())
    assert len(game.gathered) == len(game.told) == 1
    assert len(game.told[0]) < 300


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "which is not the whole tensor exactly once"),
        ("twice", "which is not the whole tensor exactly once"),
        ("names", "trainer ranks 0 and 1 have different models: w float32 [4, 4] is v float32 [4, 4] there"),
        ("cut", "the same tensors are cut out of the trainers' tensors in different ways"),
        ("stored", "the trainers' own tensors have different shapes"),
        ("partial", "trainer rank 1: w lies nowhere"),
    ],
)
def test_models_that_differ_are_refused_on_every_rank(what, words):
    def shard_of(name, tensor, rank):
        if what == "partial" and rank == 1:
            raise ConfigError("w lies nowhere")
        starts = {"missing": (0, 0), "twice": (0, 1)}
        if what in starts:
            return Within(offset=(starts[what][rank], 0), shape=(4, 4))
        return None

    def act(rank: int, group):
        rows = {"missing": 2, "twice": 3}.get(what, 4)
        name = "v" if what == "names" and rank else "w"
        shape = (2, 8) if what == "stored" and rank else (rows, 4)
        tensors = PlacedTensors(holder({name: torch.zeros(shape)}), shard_of=lambda n, t: shard_of(n, t, rank))
        segments = (Segment.whole(0, (4, 4)),)
        if what == "cut" and rank:
            segments = (Segment(source=0, box=Box(offset=(0, 0), shape=(4, 4)), dims=(1, 0), at=(0, 0)),)
        arranged = [Arranged(name=name, shape=(4, 4), segments=segments)]
        SharedParts(tensors, arranged, [TensorSpec(name=name, dtype="float32", shape=(4, 4))]).agree(group)

    if what == "partial":  # the rank cannot even list its tensors: the constructor raises there
        shard_of_all = shard_of

        def act(rank: int, group):
            asked: list[str] = []

            def place(name, tensor):
                asked.append(name)
                return shard_of_all(name, tensor, rank) if len(asked) > 2 else None

            tensors = PlacedTensors(holder({"w": torch.zeros(4, 4)}), shard_of=place)
            arranged = whole_of("w", 0, (4, 4))
            SharedParts(tensors, arranged, [TensorSpec(name="w", dtype="float32", shape=(4, 4))]).agree(group)

    errors = Game(2).play(act)
    assert [type(error) for error in errors.values()] == [ConfigError] * 2
    assert all(words in str(error) for error in errors.values())


def connect_kimi(replicas: int, experts_over: int, rows_over: int, *, layers: int) -> tuple[Game, float]:
    """Exchanges the placements of Kimi-K2 on every rank, and checks what the first, middle and last rank know."""
    world = replicas * experts_over * rows_over
    sizes = KIMI | {"layers": layers}
    stored = stored_of(sizes)
    arranged = arrange(stored, family_named("deepseek_v3"), None)
    specs = [TensorSpec(name=tensor.name, dtype="bfloat16", shape=tensor.shape) for tensor in arranged]
    model = model_hash(specs, arranged)
    game = Game(world)

    def act(rank: int, group):
        tensors = PlacedTensors(kimi_module(stored, rank, (replicas, experts_over, rows_over)))
        return agree(tensors, specs, model, group, lambda _: False)

    began = time.process_time()
    known = game.play(act, [0, world // 2 + 1, world - 1])
    seconds = time.process_time() - began
    experts = next(n for n, (name, _) in enumerate(stored) if name.endswith("experts.gate_up_proj"))
    for agreed in known.values():
        parts = agreed.parts(experts)
        assert parts.cover()
        assert len(parts.holders) == experts_over * rows_over
        own = rows_over * 3 + 1
        assert parts.holders[own] == tuple(range(own, world, experts_over * rows_over))
        assert agreed.parts(0).cover()
        assert len(agreed.parts(0).holders) == experts_over * rows_over
    return game, seconds


def test_kimi_k2_on_64_ranks_exchanges_kilobytes():
    game, _ = connect_kimi(2, 8, 4, layers=4)
    assert game.head_bytes < 200_000
    assert game.rank_bytes < 2_000


@pytest.mark.wide
def test_kimi_k2_on_2048_ranks_exchanges_less_than_a_megabyte():
    axes = 8, 32, 8
    # Messages do not grow with layers, as the end of the test shows; 61 layers on all ranks take a quarter of an hour.
    game, seconds = connect_kimi(*axes, layers=2)
    into = sum(len(message) for message in game.gathered[0].values())
    print(
        f"2048 ranks: {into} bytes into the head, {len(game.told[0])} bytes to each rank, {game.head_bytes} in all; "
        f"{seconds:.0f} s of processor for all ranks"
    )
    assert len(game.gathered) == len(game.told) == 1, "all ranks have the same table"
    assert game.head_bytes < 1 << 20
    assert game.rank_bytes < 1 << 10
    for rank in (1, 1025, 2047):
        (many, numbers), (few, few_numbers) = (described_kimi(rank, axes, layers=layers) for layers in (61, 2))
        assert len(many.class_of) == len(stored_of(KIMI)) > 20 * len(few.class_of)
        assert (many.meshes, many.classes, numbers) == (few.meshes, few.classes, few_numbers)


def described_kimi(rank: int, axes: tuple[int, int, int], *, layers: int) -> tuple[Table, tuple[int, ...]]:
    tensors = PlacedTensors(kimi_module(stored_of(KIMI | {"layers": layers}), rank, axes))
    return describe(tensors, "model", torch.device("cpu"), lambda _: False)
