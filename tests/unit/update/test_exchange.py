"""Trainer ranks send engine ranks their shares: all ranks of both sides are played in one process."""

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.exports import takers_of
from tests.helpers.playing import Game
from tests.unit.exporters.test_placements import jobs, model_of
from weightcast.comm.group_moves import Move
from weightcast.comm.rendezvous import Invited
from weightcast.comm.trainer_group import TrainerGroup
from weightcast.comm.update_group import UpdateGroup
from weightcast.digest.definition import tensor_digest
from weightcast.errors import Refused, WireError
from weightcast.exporters.gather import Gatherer
from weightcast.exporters.held_parts import InMemory
from weightcast.exporters.ownership import SharedParts
from weightcast.protocols import BucketUse
from weightcast.receiver.bucket_copies import BucketCopies
from weightcast.receiver.loader import Loader
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.update.exchange import Exchange
from weightcast.wire import pieces
from weightcast.wire.answers import RankAck
from weightcast.wire.box import Box, slices
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import BucketPart
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec, plan_buckets
from weightcast.wire.pieces import decode_wanted, encode_wanted, plan_message

CPU = torch.device("cpu")
ALIGNED = Packing(alignment_bytes=16)


class EngineRank(nn.Module):
    """One rank of an engine, which keeps each tensor in its own way.

    Ways: ``whole``; ``cut`` along a dimension; ``turned``, cut and stored transposed; ``padded``, cut along dimension 0
    into a parameter with more rows; ``shared``, a slice that pairs of ranks have in common, as key-value heads;
    ``fused``, cut, in one parameter beside a copy of itself; ``computed``, by the model's own loader.
    """

    def __init__(self, specs: list[TensorSpec], ways: list[tuple[str, int]], rank: int, size: int) -> None:
        super().__init__()
        self.ways = {spec.name: way for spec, way in zip(specs, ways, strict=True)}
        self.rank, self.size = rank, size
        for spec in specs:
            way, _ = self.ways[spec.name]
            kept = self.cut(spec.name, torch.zeros(spec.shape, dtype=spec.torch_dtype))
            shape = list(kept.shape)
            if way == "turned":
                shape.reverse()
            if way == "padded":
                shape[0] += 2
            if way == "fused":
                shape = [2, *shape]
            self.register_buffer(spec.name.replace(".", "_"), torch.zeros(shape, dtype=spec.torch_dtype))

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        way, dim = self.ways[name]
        if way == "whole" or not tensor.dim():
            return tensor
        rank, size = (self.rank // 2, -(-self.size // 2)) if way == "shared" else (self.rank, self.size)
        return tensor.tensor_split(size, 0 if way == "padded" else dim % tensor.dim())[rank]

    def place(self, name: str) -> list[torch.Tensor]:
        """Views of the parameter in which the cut tensor belongs."""
        way, _ = self.ways[name]
        kept = getattr(self, name.replace(".", "_"))
        if way == "turned":
            return [kept.permute(tuple(range(kept.dim() - 1, -1, -1)))]
        if way == "padded":
            return [kept[:-2]]
        return [kept[0], kept[1]] if way == "fused" else [kept]

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if self.ways[name][0] == "computed":
                tensor = tensor * 1
            for target in self.place(name):
                target.copy_(self.cut(name, tensor))


class Post:
    """The engine ranks' end of a group: keeps what is sent to each."""

    def __init__(self, trainers: int, wanted: list[bytes]) -> None:
        self.world_size = trainers + len(wanted)
        self.trainers, self.wanted = trainers, wanted
        self.messages: dict[int, list[bytes]] = {}

    def told(self, ranks) -> list[bytes]:
        return [self.wanted[rank - self.trainers] for rank in ranks]

    def start_moves(self, sends: list[Move]) -> list[Any]:
        for peer, data in sends:
            self.messages.setdefault(peer, []).append(bytes(data.numpy()))
        return ["works"]

    def finish_moves(self, works, **_) -> None:
        assert works == ["works"]


def invited(world_size: int, group: str = "g", **options: Any) -> Invited:
    """To the group of one cell."""
    return Invited(group=group, host="h", port=1, token="t", world_size=world_size, **options)


class Trainer:
    """One trainer rank of a played job, with values."""

    def __init__(self, job: dict, rank: int, group: TrainerGroup) -> None:
        self.group = group
        self.tensors, self.arranged, self.specs = model_of(job, rank)
        shared = SharedParts(self.tensors, self.arranged, self.specs)
        self.gatherer = Gatherer(self.specs, self._local, shared)
        self.gatherer.prepare(group)

    def _local(self, number: int) -> list[InMemory]:
        found = []
        for segment in self.arranged[number].segments:
            part = self.tensors.part(segment.source)
            box = segment.target_box(part[0]) if part is not None else None
            if part is not None and box is not None:
                view = segment.view(part[1], part[0].offset, box)
                found.append(InMemory(box, view))
        return found

    def fill(self, values: dict[str, torch.Tensor]) -> None:
        for number, spec in enumerate(self.specs):
            for held in self._local(number):
                held.memory.copy_(values[spec.name][slices(held.box, (0,) * len(held.box.shape))])


@st.composite
def exchanges(draw) -> dict:
    job = draw(jobs())
    job["computed"] = set()
    ways = ["whole", "cut", "turned", "padded", "shared", "fused", "computed"]
    return {
        "job": job,
        "tp": draw(st.integers(1, 4)),
        "ways": draw(st.lists(st.tuples(st.sampled_from(ways), st.integers(0, 2)), min_size=40, max_size=40)),
        "bucket_bytes": draw(st.sampled_from([256, 1 << 16])),
        "straight_bytes": draw(st.sampled_from([1, 64, 1 << 16])),
    }


@st.composite
def exchanges_between_hosts(draw) -> dict:
    """As ``exchanges``; trainer ranks are on some of four hosts, and so are engine ranks, or read no memory."""
    case = draw(exchanges())
    case["hosts"] = draw(st.lists(st.sampled_from("abc"), min_size=16, max_size=16))
    case["reads"] = draw(st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=4, max_size=4))
    return case


def play(case: dict) -> tuple[list[Trainer], list[Loader], list[EngineRank], list[BucketLayout], list[TensorSpec]]:
    job = case["job"]
    game = Game(math.prod(job["axes"]))
    found = game.play(lambda rank, group: Trainer(job, rank, group))
    trainers = [found[rank] for rank in range(game.world_size)]
    specs = trainers[0].specs
    ways = [("whole", 0) if not spec.shape else way for spec, way in zip(specs, case["ways"], strict=False)]
    models = [EngineRank(specs, ways, rank, case["tp"]) for rank in range(case["tp"])]
    loaders = [Loader(model, load_weights=model.load_weights, expected=specs) for model in models]
    for loader in loaders:
        loader.stage("none" if loader.computed else "device")
    return trainers, loaders, models, plan_buckets(specs, bucket_bytes=case["bucket_bytes"], packing=ALIGNED), specs


def values_of(specs: list[TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(spec.torch_dtype) for spec in specs}


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(case=exchanges())
def test_each_engine_rank_gets_its_share_and_nothing_else(case):
    before, pieces.STRAIGHT_BYTES = pieces.STRAIGHT_BYTES, case["straight_bytes"]
    try:
        exchange_and_compare(case)
    finally:
        pieces.STRAIGHT_BYTES = before


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(case=exchanges_between_hosts())
def test_each_engine_rank_reads_what_its_host_has_and_gets_messages_for_the_rest(case):
    before, pieces.STRAIGHT_BYTES = pieces.STRAIGHT_BYTES, case["straight_bytes"]
    try:
        exchange_and_compare(case)
    finally:
        pieces.STRAIGHT_BYTES = before


def wanted_bytes(plan: BucketCopies) -> int:
    """Bytes of a bucket that a rank copies, and of those that its model's own loader takes whole."""
    kept = [(share.slot, share.box) for shares in plan.buffers for share in shares]
    wholes = [(slot, slot.box) for slot in map(plan.layout.slots.__getitem__, plan.wholes)]
    return sum(slot.spec.torch_dtype.itemsize * box.numel for slot, box in (*kept, *wholes))


def exchange_and_compare(case: dict) -> None:
    trainers, loaders, models, layouts, specs = play(case)
    wanted = [encode_wanted(loader.copier.wanted) for loader in loaders]
    post = Post(len(trainers), wanted)
    hosts = [case["hosts"][rank % 16] if "hosts" in case else "" for rank in range(len(trainers))]
    reads = [host if host in hosts else "" for host in case.get("reads", [""] * 4)[: len(loaders)]]
    for trainer in trainers:
        trainer.group.hosts = tuple(hosts)  # type: ignore[misc]
    use = BucketUse(scattered=True, leg_hosts=(*sorted(set(reads) - {""}), ""))
    ends = [
        Exchange(rank=n, num_trainers=len(trainers), device=CPU, timeout_s=1.0, host=hosts[n])
        for n in range(len(trainers))
    ]
    for end in ends:
        assert end.use({invited(post.world_size, reads=tuple(reads)): cast(UpdateGroup, post)}) == {}
    largest = max(layout.size_bytes for layout in layouts)
    slots = [[torch.empty(largest, dtype=torch.uint8) for _ in range(2)] for _ in trainers]
    for seed in range(3):  # from the second time on from plans that are known, in the same buffers
        values = values_of(specs, seed)
        for trainer in trainers:
            trainer.fill(values)
        for loader in loaders:
            loader.begin()
        num_pieces, received_bytes, kept_bytes = ([0] * len(loaders) for _ in range(3))
        for end in ends:
            end.begin()
        for layout in layouts:
            post.messages.clear()
            parts: dict[str, list[tuple[BucketPart, ...]]] = {host: [] for host in use.leg_hosts}
            filled = []
            for trainer, end, buffers in zip(trainers, ends, slots, strict=True):
                bucket = Bucket(layout, buffers[layout.index % 2].random_(0, 256))
                planned = trainer.gatherer.plan(layout, trainer.group, use)
                planned.fill(bucket.data, *takers_of([planned]))
                served = planned.serves_to
                for host, own in served.items():
                    parts[host].append(
                        tuple(BucketPart(slot=slot, offset=box.offset, shape=box.shape) for slot, box in own)
                    )
                filled.append(bucket.data)
                end.send(bucket, served)
                assert end.failures == {}
            for number, (loader, host) in enumerate(zip(loaders, reads, strict=True)):
                near = tuple(rank for rank, its in enumerate(hosts) if host and its == host)
                plan = loader.copier.plan_exchange(layout, tuple(parts[host]), near=near)
                assert not any(plan.messages[rank].pieces for rank in near)
                received = torch.zeros(max(plan.size_bytes, 1), dtype=torch.uint8)
                arriving = iter(post.messages.get(len(trainers) + number, []))
                for message, start in zip(plan.messages, plan.starts, strict=True):
                    for first, size_bytes in message.runs:
                        data = next(arriving)
                        assert len(data) == size_bytes
                        received[start + first : start + first + size_bytes] = torch.frombuffer(
                            bytearray(data), dtype=torch.uint8
                        )
                assert next(arriving, None) is None, "more was sent than is wanted"
                received_bytes[number] += plan.size_bytes
                kept_bytes[number] += wanted_bytes(plan.copies)
                loader.load_from([received, *(filled[rank] for rank in near)], plan.copies)
                num_pieces[number] += sum(len(message.pieces) for message in plan.messages)
        written = [RankAck(rank=rank, ok=True, **loader.written().fields) for rank, loader in enumerate(loaders)]
        for number in range(len(loaders)):
            gaps = num_pieces[number] * (pieces.ALIGNMENT_BYTES - 1)
            assert received_bytes[number] <= kept_bytes[number] + gaps
        for model, loader in zip(models, loaders, strict=True):
            assert loader.missing(specs) == []
            loader.live.commit()
            for name, tensor in values.items():
                assert all(torch.equal(place, model.cut(name, tensor)) for place in model.place(name))
        found = ResidentFold().fold(written)
        assert not found.broken
        kept = {name for name, (way, _) in models[0].ways.items() if way != "computed"}
        assert {name: digest for name, digest in found.digests.items() if name in kept} == {
            name: tensor_digest(tensor) for name, tensor in values.items() if name in kept
        }


def slot_layout(shape: tuple[int, ...], dtype: str = "bfloat16") -> BucketLayout:
    specs = [TensorSpec(name="w", dtype=dtype, shape=shape)]
    [layout] = plan_buckets(specs, bucket_bytes=1 << 24, packing=ALIGNED)
    return layout


def test_a_large_run_of_the_bucket_travels_by_itself_and_the_rest_in_one_message():
    layout = slot_layout((512, 512))
    wanted = decode_wanted(encode_wanted({"w": (pieces.WantedBox((0, 0), (512, 512)),)}))
    rows = plan_message(layout, [(0, Box(offset=(0, 0), shape=(256, 512)))], wanted)
    assert rows.packed_bytes == 0
    assert rows.runs == [(0, 256 * 512 * 2)]
    columns = plan_message(layout, [(0, Box(offset=(0, 0), shape=(512, 256)))], wanted)
    assert columns.runs == [(0, columns.packed_bytes)]
    assert columns.packed_bytes == 512 * 256 * 2
    few = plan_message(layout, [(0, Box(offset=(row, 0), shape=(1, 512))) for row in range(8)], wanted)
    assert few.runs == [(0, 8 * 1024)]


def test_an_engine_rank_that_reads_by_itself_finds_short_runs_in_one_pack_and_long_ones_in_the_bucket():
    half = pieces.RUN_BYTES // 2
    layout = slot_layout((8, 2 * half))
    left = decode_wanted(encode_wanted({"w": (pieces.WantedBox((0, 0), (8, half)),)}))
    whole = [(0, Box(offset=(0, 0), shape=(8, 2 * half)))]
    assert [(piece.straight, piece.size_bytes) for piece in plan_message(layout, whole, left, read=True).pieces] == [
        (True, 8 * half * 2)  # eight runs of RUN_BYTES
    ]
    less = decode_wanted(encode_wanted({"w": (pieces.WantedBox((0, 0), (8, half - 1)),)}))
    short = plan_message(layout, whole, less, read=True)
    assert [piece.straight for piece in short.pieces] == [False]
    assert short.packed_bytes == 8 * (half - 1) * 2 + -(8 * (half - 1) * 2) % 16


def test_a_share_of_many_small_tensors_costs_few_bytes_beside_it():
    specs = [TensorSpec(name=f"w{n}", dtype="bfloat16", shape=(4, 130)) for n in range(200)]
    [layout] = plan_buckets(specs, bucket_bytes=1 << 24, packing=ALIGNED)
    wanted = {spec.name: (pieces.WantedBox((0, 0), (2, 130)),) for spec in specs}
    parts = [(n, Box(offset=(0, 0), shape=(4, 130))) for n in range(200)]
    message = plan_message(layout, parts, wanted)
    assert message.size_bytes <= 1.05 * 200 * 2 * 130 * 2


@pytest.mark.parametrize("words", [b"", b"[]", b'{"kinds": 1}', b'{"kinds": ["%"]}'])
def test_what_is_no_answer_of_an_engine_about_boxes_is_refused(words):
    with pytest.raises(WireError, match="not the boxes that an engine wants"):
        pieces.decode_boxes(words)


@pytest.mark.parametrize("words", [b"", b"[]", b'{"w": [[1]]}', b'{"w": [[[-1], [2]]]}', b'{"w": [[[1], ["x"]]]}'])
def test_what_is_no_table_of_boxes_is_refused(words):
    with pytest.raises(WireError, match="not the boxes that an engine rank wants"):
        decode_wanted(words)


def test_parts_that_leave_out_an_element_are_refused_before_anything_is_asked_for():
    spec = TensorSpec(name="w", dtype="float32", shape=(4, 2))
    model = EngineRank([spec], [("cut", 0)], 0, 2)
    loader = Loader(model, load_weights=model.load_weights, expected=[spec])
    loader.stage("device")
    loader.begin()
    [layout] = plan_buckets([spec], bucket_bytes=1 << 10, packing=ALIGNED)
    with pytest.raises(Refused, match="w: the trainer ranks do not have rows 0 and on exactly once"):
        loader.copier.plan_exchange(layout, ((BucketPart(0, (0, 0), (2, 2)),), (BucketPart(0, (2, 0), (1, 2)),)))
