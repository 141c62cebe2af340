"""The API server folds the greetings of vLLM's ranks into the engine's own facts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightcast.errors import ConfigError
from weightcast.plugins.rank_sockets import Hello, tables_of
from weightcast.plugins.vllm.rank_protocol import (
    check_replicas,
    draft_of,
    maps_weights,
    rank_among_replicas,
    reads_in_order,
)
from weightcast.wire.layout import TensorSpec


def hello(rank: int, dtypes: dict[str, str], *places: str) -> Hello:
    specs = tuple(TensorSpec(name=name, dtype=dtype, shape=(2,)) for name, dtype in dtypes.items())
    return Hello(rank=rank, pid=1, device="cpu", staging="device", staging_bytes=0, specs=specs, places=places)


def test_a_tensor_that_any_rank_keeps_is_part_of_a_full_update():
    first = hello(0, {"a": "bfloat16", "b": "float32", "mtp": "float32"}, "a")
    second = hello(1, {"a": "float32", "b": "bfloat16", "mtp": "float32"}, "b")
    kept, optional = tables_of([first, second])
    assert [(spec.name, spec.dtype) for spec in kept] == [("a", "bfloat16"), ("b", "bfloat16")]
    assert [spec.name for spec in optional] == ["mtp"]


@pytest.mark.parametrize(
    ("method", "draft"), [("ngram", False), ("ngram_gpu", False), ("suffix", False), ("mtp", True)]
)
def test_prompt_lookup_has_no_draft_model(method, draft):
    assert draft_of(SimpleNamespace(method=method)) is draft
    assert draft_of(None) is False


@pytest.mark.parametrize(
    ("layers", "halves", "in_order"), [(0, {}, True), (8, {}, False), (0, {"enable_dbo": True}, False)]
)
def test_weights_that_vllm_reads_on_other_streams_are_known(layers, halves, in_order):
    offload = SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=layers))
    config = SimpleNamespace(offload_config=offload, parallel_config=SimpleNamespace(**halves))
    assert reads_in_order(config) is in_order


@pytest.mark.parametrize(
    ("device", "pool", "layers", "setting", "maps"),
    [
        ("cuda", {}, 0, {}, True),
        ("cuda", {}, 0, {"map_with_sleep": False}, True),
        ("cuda", {"enable_sleep_mode": True}, 0, {}, True),
        ("cuda", {"enable_sleep_mode": True}, 0, {"map_with_sleep": False}, False),
        ("cuda", {"enable_cumem_allocator": True}, 0, {}, True),
        ("cuda", {"enable_cumem_allocator": True}, 0, {"map_with_sleep": False}, False),
        ("cuda", {}, 8, {}, False),
        ("cpu", {}, 0, {}, False),
    ],
)
def test_memory_is_mapped_where_vllm_frees_and_fetches_no_weights_itself(device, pool, layers, setting, maps):
    config = SimpleNamespace(
        additional_config={"weightcast": setting},
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(**pool),
        offload_config=SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=layers)),
        parallel_config=SimpleNamespace(),
    )
    assert maps_weights(config) is maps


def test_older_versions_of_vllm_read_weights_in_order():
    assert reads_in_order(SimpleNamespace(parallel_config=SimpleNamespace()))


def parallel(**changes: Any) -> Any:
    settings: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_size_local": 2, "data_parallel_index": 1}
    settings |= {"data_parallel_external_lb": False, "data_parallel_hybrid_lb": False, "world_size": 4, "rank": 3}
    return SimpleNamespace(**settings | changes)


def test_ranks_of_data_parallel_engines_are_counted_through():
    assert rank_among_replicas(parallel()) == 7
    check_replicas(parallel())
    check_replicas(parallel(data_parallel_size=1, data_parallel_external_lb=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_parallel_external_lb": True}, "with external load balancing"),
        ({"data_parallel_hybrid_lb": True}, "with hybrid load balancing"),
        ({"data_parallel_size": 4}, "2 of 4 data-parallel engines are on other hosts"),
    ],
)
def test_data_parallel_engines_out_of_reach_are_refused_by_name(changes, words):
    with pytest.raises(ConfigError, match=words) as refused:
        check_replicas(parallel(**changes))
    assert refused.value.hint
