"""Reads of another process's memory through NIXL: the runs that a box is, and what a reader does when a read fails."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.comm import nixl
from weightcast.comm.remote_memory import Arena
from weightcast.comm.remote_reads import Pull, RemoteReader, RemoteReadFailed
from weightcast.errors import ConfigError
from weightcast.wire.box import Box
from weightcast.wire.bucket_sources import RemoteMemory
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets
from weightcast.wire.pieces import Runs, runs_of

needs_nixl = pytest.mark.skipif(bool(nixl.missing()), reason=nixl.missing())
CPU = torch.device("cpu")
LONG_S = 120.0


def test_a_folder_that_is_named_nixl_is_not_nixl(tmp_path, monkeypatch):
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        (tmp_path / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    assert nixl.missing() == "NIXL is not installed"
    with pytest.raises(ConfigError, match="NIXL is not installed"):
        nixl.make_agent()


@st.composite
def boxes(draw) -> tuple[tuple[int, ...], Box, str]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    ends = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    box = Box(offset=tuple(first for first, _ in ends), shape=tuple(last - first for first, last in ends))
    return shape, box, draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]))


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(case=boxes(), rows=st.sampled_from([16, 64, 1 << 12]))
def test_runs_are_the_bytes_of_a_box_in_order_and_no_others(case, rows):
    shape, whole, dtype = case
    other = TensorSpec(name="before", dtype="float32", shape=(3,))
    specs = [other, TensorSpec(name="w", dtype=dtype, shape=shape)]
    found = []
    values = torch.arange(math.prod(shape) * specs[1].torch_dtype.itemsize, dtype=torch.int64)
    bucket_bytes = max(rows, *(spec.row_bytes for spec in specs))
    for layout in plan_buckets(specs, bucket_bytes=bucket_bytes, packing=Packing(alignment_bytes=16, slices=True)):
        bucket = torch.full((layout.size_bytes,), -1, dtype=torch.int64)
        for slot in layout.slots:
            if slot.spec.name == "before":
                continue
            row_bytes = math.prod(shape[1:]) * slot.spec.torch_dtype.itemsize
            first = slot.first_row * row_bytes
            bucket[slot.offset_bytes : slot.offset_bytes + slot.size_bytes] = values[first : first + slot.size_bytes]
            box = whole
            if shape:
                low = max(whole.offset[0], slot.first_row)
                high = min(whole.offset[0] + whole.shape[0], slot.first_row + slot.num_rows)
                box = Box(offset=(low, *whole.offset[1:]), shape=(max(high - low, 0), *whole.shape[1:]))
            for runs in runs_of(slot, box):
                for turn in range(runs.number):
                    start = runs.first_byte + turn * runs.stride_bytes
                    found += bucket[start : start + runs.size_bytes].tolist()
    itemsize = specs[1].torch_dtype.itemsize
    expected = values.reshape(*shape, itemsize)
    for dim, (first, extent) in enumerate(zip(whole.offset, whole.shape, strict=True)):
        expected = expected.narrow(dim, first, extent)
    assert found == expected.flatten().tolist()


def test_the_columns_of_a_matrix_are_one_row_of_the_table():
    [layout] = plan_buckets(
        [TensorSpec(name="w", dtype="bfloat16", shape=(512, 64))], bucket_bytes=1 << 20, packing=Packing()
    )
    assert runs_of(layout.slots[0], Box(offset=(0, 32), shape=(512, 32))) == [Runs(64, 64, 128, 512)]
    assert runs_of(layout.slots[0], Box(offset=(8, 0), shape=(4, 64))) == [Runs(1024, 512, 512, 1)]


@pytest.fixture
def reader() -> Iterator[RemoteReader]:
    made = RemoteReader(CPU)
    yield made
    made.close()


def read(reader: RemoteReader, *pulls: Pull, size_bytes: int = 4096, **options: Any) -> torch.Tensor:
    options = {"what": "bucket 3", "timeout_s": LONG_S, "interrupted": lambda: False} | options
    return reader.read(pulls, size_bytes, **options)


@needs_nixl
def test_agents_of_other_libraries_stay_as_nixl_makes_them():
    name, agent = nixl.make_agent()
    theirs = sys.modules[type(agent).__module__]
    assert name == agent.name
    assert not isinstance(agent, theirs.nixl_agent)
    assert type(theirs.nixlBind) is ModuleType


def test_a_process_without_nixl_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nixl, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="NIXL is not installed"):
        Arena(2, 4096, CPU)
    memory = RemoteMemory(
        agent="a", metadata=b"m", address=1, token=b"t" * 32, first_byte=0, size_bytes=64, owner="host (process 1)"
    )
    with pytest.raises(RemoteReadFailed, match="NIXL is not installed"):
        read(RemoteReader(CPU), Pull("a", memory, [(0, Runs(0, 64, 64, 1))]))
