"""Engine ranks read their shares out of trainer ranks' registered buffers, through NIXL itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.exports import takers_of
from tests.unit.update.test_exchange import exchanges, play, values_of, wanted_bytes
from weightcast.comm import nixl
from weightcast.comm.remote_memory import Arena
from weightcast.comm.remote_reads import Pull
from weightcast.digest.definition import tensor_digest
from weightcast.protocols import BucketUse
from weightcast.receiver.rank_answers import ResidentFold
from weightcast.receiver.sources.remote import RemoteMemorySource
from weightcast.update.packs import Packs
from weightcast.wire.answers import RankAck
from weightcast.wire.blobs import hash_of
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import BucketPart, Pack, RemoteBuffer
from weightcast.wire.pieces import decode_wanted, encode_wanted

pytestmark = [pytest.mark.wide, pytest.mark.skipif(bool(nixl.missing()), reason=nixl.missing())]
CPU = torch.device("cpu")
BUFFER_BYTES = 1 << 17
SCATTERED = BucketUse(scattered=True)
LONG_S = 120.0


@pytest.fixture(scope="module")
def arenas() -> Iterator[list[Arena]]:
    """One for each trainer rank; a test adds those that it needs."""
    made: list[Arena] = []
    yield made
    for arena in made:
        arena.close()


@settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=exchanges(), packed=st.sampled_from(["none", "some", "all"]))
def test_each_engine_rank_reads_its_share_and_nothing_else(arenas, case, packed):
    trainers, loaders, models, layouts, specs = play(case | {"bucket_bytes": 4096})
    wanted = [encode_wanted(loader.copier.wanted) for loader in loaders]
    kinds = list(dict.fromkeys(wanted))[: {"none": 0, "some": 1, "all": None}[packed]]
    while len(arenas) < len(trainers):
        arenas.append(Arena(2, BUFFER_BYTES, CPU))
    sources = [RemoteMemorySource(CPU) for _ in loaders]
    asked = [count_bytes(source) for source in sources]
    packers = [Packs([decode_wanted(kind) for kind in kinds], read=True) for _ in trainers]
    try:
        for seed in range(2):  # the second time by reads that are prepared
            values = values_of(specs, seed)
            for trainer in trainers:
                trainer.fill(values)
            for loader in loaders:
                loader.begin()
            for counts in asked:
                counts.clear()
            kept_bytes = [0] * len(loaders)
            for layout in layouts:
                buffers = []
                for trainer, arena, packs in zip(trainers, arenas, packers, strict=False):
                    slot = arena.slot(layout.index % 2)
                    slot.random_(0, 256)
                    planned = trainer.gatherer.plan(layout, trainer.group, SCATTERED)
                    planned.fill(slot[: layout.size_bytes], *takers_of([planned]))
                    served = planned.serves
                    parts = tuple(BucketPart(slot=number, offset=box.offset, shape=box.shape) for number, box in served)
                    plan = packs.plan(layout, served)
                    first = -(-layout.size_bytes // 16) * 16
                    packs.pack(Bucket(layout, slot), plan, slot[first : first + plan.packed_bytes])
                    places = tuple(
                        Pack(wanted=hash_of(kind), first_byte=first + start)
                        for kind, start in zip(kinds, plan.starts, strict=True)
                    )
                    told = msgspec.json.encode(
                        RemoteBuffer(memory=arena.memory(layout.index % 2), parts=parts, packs=places)
                    )
                    buffers.append(msgspec.json.decode(told, type=RemoteBuffer))
                for number, (loader, source, own, counts) in enumerate(
                    zip(loaders, sources, wanted, asked, strict=True)
                ):
                    plan = loader.copier.plan_exchange(layout, tuple(buffer.parts for buffer in buffers), read=True)
                    before = len(counts)
                    received = source.read(
                        layout, buffers, plan, wanted=hash_of(own), timeout_s=LONG_S, interrupted=lambda: False
                    )
                    if own in kinds:  # runs are short here, so all of them are in one pack
                        assert len(counts) - before <= len(buffers)
                    kept_bytes[number] += wanted_bytes(plan.copies)
                    loader.load_from([received], plan.copies)
            for counts, kept, own in zip(asked, kept_bytes, wanted, strict=True):
                gaps = 16 * sum(len(boxes) for boxes in decode_wanted(own).values()) * len(trainers) * len(layouts)
                assert sum(counts) <= kept + (gaps if own in kinds else 0)
            written = [RankAck(rank=rank, ok=True, **loader.written().fields) for rank, loader in enumerate(loaders)]
            for model, loader in zip(models, loaders, strict=True):
                assert loader.missing(specs) == []
                loader.live.commit()
                for name, tensor in values.items():
                    assert all(torch.equal(place, model.cut(name, tensor)) for place in model.place(name))
            found = ResidentFold().fold(written)
            assert not found.broken
            placed = {name for name, (way, _) in models[0].ways.items() if way != "computed"}
            assert {name: digest for name, digest in found.digests.items() if name in placed} == {
                name: tensor_digest(tensor) for name, tensor in values.items() if name in placed
            }
    finally:
        for source in sources:
            source.close()


def count_bytes(source: RemoteMemorySource) -> list[int]:
    """Sizes of all that is read from now on, in bytes."""
    read = source.reader.read
    sizes: list[int] = []

    def counting(pulls: Sequence[Pull], size_bytes: int, **options):
        sizes.extend(runs.size_bytes * runs.number for pull in pulls for _, runs in pull.runs)
        return read(pulls, size_bytes, **options)

    source.reader.read = counting  # type: ignore[method-assign]
    return sizes
