"""The size of a bucket where the caller gives none: it follows the model, the transport and the free memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.helpers.roster import Connecting, members_of
from tests.unit.update.test_mixed_choice import engine
from weightcast import protocols
from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError, TargetRejected
from weightcast.exporters.memory_estimate import WORK_BYTES, default_bucket_bytes, peak_bytes
from weightcast.update import diagnose
from weightcast.update.messages import RankDevice, least_free_bytes
from weightcast.wire.answers import MAPPING_FAILED
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets, total_bytes

GIB, MIB = 1 << 30, 1 << 20
CUT, WHOLE = Packing(), Packing(slices=False)
HERE, THERE = "http://here", "http://there"


def weights(size_bytes: int, *, tensors: int = 64, name: str = "w") -> tuple[TensorSpec, ...]:
    """Matrices of bfloat16 that have these bytes together; a row has 4 KiB."""
    rows = size_bytes // tensors // 4096
    return tuple(TensorSpec(name=f"{name}{number}", dtype="bfloat16", shape=(rows, 2048)) for number in range(tensors))


def size(specs: Any, *, packing: Packing = CUT, world_size: int = 1, large: bool = True, free_bytes: int = 0) -> int:
    return default_bucket_bytes(specs, packing=packing, world_size=world_size, large=large, free_bytes=free_bytes)


@pytest.mark.parametrize(
    ("model", "ranks", "bucket"),
    [
        (3 * GIB, 1, 512 * MIB),  # never below, unless the model is smaller
        (4 * GIB, 1, 512 * MIB),
        (6 * GIB, 1, 768 * MIB),
        (12 * GIB, 1, 1536 * MIB),
        (16 * GIB, 1, 2 * GIB),
        (500 * GIB, 1, 2 * GIB),  # never above
        (16 * GIB, 2, 1 * GIB),  # of the bytes of one rank
        (16 * GIB, 8, 512 * MIB),
        (512 * GIB, 64, 1 * GIB),
    ],
)
def test_a_bucket_is_an_eighth_of_a_ranks_part_of_the_model(model, ranks, bucket):
    assert size(weights(model), world_size=ranks) == bucket


@pytest.mark.parametrize("model", [3 * GIB, 16 * GIB, 500 * GIB])
def test_nothing_grows_where_larger_buckets_gain_nothing(model):
    assert size(weights(model), large=False) == 512 * MIB


@pytest.mark.parametrize("large", [True, False])
def test_a_bucket_is_not_larger_than_the_model(large):
    small = weights(40 * MIB, tensors=4)
    found = size(small, large=large)
    assert total_bytes(small) <= found <= total_bytes(small) + 4 * CUT.alignment_bytes
    assert len(plan_buckets(small, bucket_bytes=found, packing=CUT)) == 1


def test_a_model_without_bytes_still_has_a_possible_bucket():
    found = size((TensorSpec(name="empty", dtype="float32", shape=(0,)),))
    assert UpdateConfig(bucket_bytes=found).bucket_bytes == found


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("free", [1 * GIB, 3 * GIB, 6 * GIB, 11 * GIB])
def test_buckets_and_a_gathers_scratch_take_a_quarter_of_the_free_memory_at_most(free, ranks):
    specs = weights(200 * GIB)
    found = size(specs, world_size=ranks, free_bytes=free)
    taken = peak_bytes(specs, bucket_bytes=found, packing=CUT, world_size=ranks, work_bytes=0)
    assert taken <= free // 4
    assert found > free // 4 // 4
    assert found < size(specs, world_size=ranks, free_bytes=0)


def test_much_free_memory_changes_nothing():
    assert size(weights(21 * GIB), free_bytes=100 * GIB) == size(weights(21 * GIB)) == 2 * GIB


@pytest.mark.parametrize("large", [True, False])
def test_a_bucket_holds_the_largest_tensor_that_may_not_be_cut(large):
    specs = (*weights(2 * GIB), TensorSpec(name="embed", dtype="bfloat16", shape=(152_000, 4096)))
    assert size(specs, packing=WHOLE, large=large) == 152_000 * 4096 * 2
    assert size(specs, packing=CUT, large=large) == 512 * MIB
    # Little free memory does not make it smaller than the tensor, as long as two buckets fit.
    assert size(specs, packing=WHOLE, large=large, free_bytes=3 * GIB) == 152_000 * 4096 * 2
    with pytest.raises(ConfigError, match=r"embed has 1245184000 bytes.* 2147483648 bytes .* are free") as caught:
        size(specs, packing=WHOLE, large=large, free_bytes=2 * GIB)
    assert caught.value.hint is not None


# -- connect


def plan_of(infos: Any, places: list[str], specs: Any, **options: Any) -> Connecting:
    device = torch.device("cpu" if places[0] == "cpu" else "cuda:0")
    return members_of(infos, places, specs=specs, exporter=Exporter(device), **options)


class Exporter(protocols.Exporter):
    """An exporter that only knows the memory that it takes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def specs(self) -> Any:
        return ()

    def computing_bytes(self) -> int:
        return 0


LARGE = weights(16 * GIB)


def fitting(*devices: str, **more: Any) -> Any:
    return engine(*devices, specs=LARGE, **more)


def test_engines_that_map_buckets_on_gpus_get_large_ones():
    assert plan_of({HERE: fitting("GPU-0")}, ["GPU-0"], LARGE).choose().bucket_bytes == 2 * GIB
    assert plan_of({HERE: fitting("GPU-0", "GPU-1")}, ["GPU-0", "GPU-1"], LARGE).choose().bucket_bytes == GIB


@pytest.mark.parametrize(
    ("infos", "places", "options"),
    [
        ({HERE: fitting("cpu")}, ["cpu"], {"transport": "ipc"}),
        ({HERE: fitting("cpu")}, ["cpu"], {"transport": "broadcast"}),
        ({HERE: fitting("GPU-0")}, ["GPU-1"], {"transport": "broadcast"}),
        ({HERE: fitting("GPU-0"), THERE: fitting("GPU-8", host="another")}, ["GPU-0"], {}),
        ({HERE: fitting("GPU-0", kind="sglang", staging="none")}, ["GPU-0"], {"transport": "ipc"}),
    ],
)
def test_other_updates_keep_buckets_of_512_mib(infos, places, options):
    assert plan_of(infos, places, LARGE, **options).choose().bucket_bytes == 512 * MIB


def test_free_memory_bounds_what_connect_chooses():
    assert plan_of({HERE: fitting("GPU-0")}, ["GPU-0"], LARGE, free_bytes=8 * GIB).choose().bucket_bytes == GIB


def test_a_limit_of_extra_memory_bounds_it_and_an_explicit_size_is_kept():
    infos = {HERE: fitting("GPU-0")}
    limited = plan_of(infos, ["GPU-0"], LARGE, max_extra_bytes=WORK_BYTES + 300 * MIB).choose()
    assert limited.bucket_bytes == 150 * MIB
    kept = plan_of(infos, ["GPU-0"], LARGE, max_extra_bytes=WORK_BYTES + 8 * GIB).choose()
    assert kept.bucket_bytes == 2 * GIB
    for asked in (64 * MIB, 3 * GIB):
        for free in (0, GIB):
            told = plan_of(infos, ["GPU-0"], LARGE, bucket_bytes=asked, free_bytes=free).choose()
            assert told.bucket_bytes == asked


def test_a_transport_that_gives_way_takes_its_size_along():
    plan = plan_of({HERE: fitting("GPU-1")}, ["GPU-0"], LARGE, max_extra_bytes=8 * GIB)
    assert plan.choose().bucket_bytes == 2 * GIB
    refused = TargetRejected(f"{HERE}: cannot map", url=HERE, status=MAPPING_FAILED)
    assert plan.give_way({HERE: refused}, if_all=True)
    assert plan.choose_again().bucket_bytes == 512 * MIB


@pytest.mark.parametrize(
    ("places", "free"),
    [
        ([RankDevice("GPU-0", 8), RankDevice("GPU-1", 6)], 6),
        ([RankDevice("GPU-0", 8), RankDevice("GPU-0", 8), RankDevice("GPU-1", 6)], 4),  # two ranks share a GPU
        ([RankDevice("cpu"), RankDevice("cpu")], 0),
    ],
)
def test_the_rank_with_least_free_memory_decides_for_all(places, free):
    assert least_free_bytes(places) == free


def test_the_log_names_the_size_and_the_reason(caplog):
    with caplog.at_level(logging.INFO, logger="weightcast"):
        plan_of({HERE: fitting("GPU-0")}, ["GPU-0"], LARGE, free_bytes=8 * GIB).choose()
    assert "buckets of 1.00 GiB" in caplog.text
    assert "8.00 GiB free" in caplog.text


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (fitting("GPU-0"), "with buckets of 2.00 GiB an update needs 4.06 GiB"),
        (fitting("GPU-0", host="another"), "with buckets of 512.0 MiB an update needs 1.06 GiB"),
        (fitting("cpu"), "with buckets of 512.0 MiB an update needs 1.06 GiB"),
    ],
)
def test_doctor_counts_with_what_connect_would_choose(info, words, monkeypatch):
    monkeypatch.setattr(diagnose, "free_host_bytes", lambda: 64 * GIB)
    assert words in diagnose._memory(info, None).text
    assert "with buckets of 64.0 MiB" in diagnose._memory(info, 64 * MIB).text
