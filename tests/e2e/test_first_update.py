"""``connect`` works out what updates need: the first update calls no function once for each tensor."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.e2e.call_counts import FEW, MANY, Calls, Served, counts_of, grown
from weightcast import UpdateReport, WeightUpdater
from weightcast.comm import nixl
from weightcast.digest.transfers import prepare_kernels
from weightcast.lab.bench.synthetic import nested
from weightcast.runtime.lru import Lru
from weightcast.wire import source_tables
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Prepare


@pytest.fixture
def calls() -> Iterator[Calls]:
    prepare_kernels(torch.device("cpu"))
    found = Calls()
    threading.setprofile(found)
    yield found
    threading.setprofile(None)  # type: ignore[arg-type]  # typeshed wants a function


def specs_of(count: int) -> list[TensorSpec]:
    return [TensorSpec(name=f"blocks.w{number}", dtype="bfloat16", shape=(8, 32)) for number in range(count)]


def weights(seed: int, count: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    return nested(
        {
            spec.name: nn.Parameter(torch.randn(spec.shape, generator=generator).bfloat16(), requires_grad=False)
            for spec in specs_of(count)
        }
    )


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)


def holds(served: Served, model: nn.Module) -> bool:
    return not served.differing(dict(model.named_parameters()))


def module_counts(
    calls: Calls, count: int, transport: Any, **options: Any
) -> tuple[list[Counter[str]], list[UpdateReport]]:
    model = weights(1, count)
    parameters = dict(model.named_parameters())
    return counts_of(calls, model, specs_of(count), lambda: train(model), lambda: parameters, transport, **options)


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "direct"])
@pytest.mark.parametrize("verify", ["resident", "none"])
def test_no_update_calls_a_function_for_each_tensor(calls, transport, verify):
    few, few_reports = module_counts(calls, FEW, transport, verify=verify)
    many, many_reports = module_counts(calls, MANY, transport, verify=verify)
    assert [report.buckets for report in few_reports] == [report.buckets for report in many_reports] == [4, 4, 4]
    assert grown(few[0], many[0]), "connect looks at each tensor, so this test can fail"
    for version, (first, second) in enumerate(zip(few[1:], many[1:], strict=True), start=1):
        assert not grown(first, second), f"update {version}"


def reads_of(counts: Counter[str], function: str) -> int:
    """Number of calls of a function that reads trainer ranks' memory through NIXL."""
    return sum(
        count
        for name, count in counts.items()
        if name.startswith("comm/remote_reads.py:") and name.endswith(f" {function}")
    )


@pytest.mark.parametrize(
    "way",
    [
        "messages",
        "relay",
        pytest.param("rdma", marks=pytest.mark.skipif(bool(nixl.missing()), reason=nixl.missing())),
    ],
)
def test_later_updates_repeat_messages_and_reads_without_a_look_at_each_tensor(calls, way):
    """Pieces are worked out in the first update, in which the group and the readers are new."""
    few, _ = module_counts(calls, FEW, "direct", direct_by=way)
    many, reports = module_counts(calls, MANY, "direct", direct_by=way)
    assert [report.targets[0].proof for report in reports] == ["resident"] * 3
    assert grown(few[0] + few[1], many[0] + many[1]), "the first looks at each tensor, so this test can fail"
    for version in (2, 3):
        assert not grown(few[version], many[version]), f"update {version}"
        assert reads_of(many[version], "_prepare") == 0, f"update {version}"
    if way == "rdma":
        assert reads_of(many[1], "_prepare") > 0
        assert reads_of(many[3], "_post") == reports[2].buckets


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "direct"])
def test_later_updates_send_nothing_for_each_tensor(transport):
    count = 4096
    served, model = Served(specs_of(count)), weights(1, count)
    try:
        sizes: list[int] = []
        with WeightUpdater.connect(model, served.url, transport=transport, bucket_bytes=512 * count // 4) as updater:
            assert served.metered.size_bytes > 10 * count, "connect sends the tables, so this test can fail"
            for version in (1, 2, 3):
                train(model)
                before = served.metered.size_bytes
                assert updater.update(version=version).buckets == 4
                sizes.append(served.metered.size_bytes - before)
                assert holds(served, model)
        assert max(sizes[1:]) < 2 * count
    finally:
        served.close()


def test_an_engine_that_forgot_a_source_gets_it_again(monkeypatch):
    count = 4096
    served, model = Served(specs_of(count)), weights(1, count)
    try:
        with WeightUpdater.connect(model, served.url, transport="direct", bucket_bytes=512 * count // 4) as updater:
            updater.update(version=1)
            monkeypatch.setattr(source_tables, "_decoded", Lru(1 << 20))
            train(model)
            assert updater.update(version=2).targets[0].proof == "resident"
        assert holds(served, model)
    finally:
        served.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "direct"])
def test_an_engine_hears_the_plan_once_and_serves_what_it_served(transport):
    served = Served(specs_of(FEW))
    try:
        model = weights(1, FEW)
        with torch.no_grad():
            served.model.load_weights(weights(0, FEW).named_parameters())
        before = served.handler.info()
        with WeightUpdater.connect(model, served.url, transport=transport, bucket_bytes=4096) as updater:
            assert [type(message) for message in served.heard] == [Prepare]
            assert served.handler.info() == before
            assert holds(served, weights(0, FEW))
            updater.update(version=1)
            assert sum(isinstance(message, Prepare) for message in served.heard) == 1
        assert holds(served, model)
    finally:
        served.close()


def test_an_engine_that_cannot_take_the_plan_is_updated_all_the_same(caplog):
    served = Served(specs_of(FEW))
    try:
        model = weights(1, FEW)
        served.receiver.sleep()
        caplog.set_level("INFO", logger="weightcast.update.prepare")
        with WeightUpdater.connect(model, served.url, transport="ipc") as updater:
            assert "asleep" in caplog.text
            served.receiver.wake()
            assert updater.update(version=1).targets[0].proof == "resident"
        assert holds(served, model)
    finally:
        served.close()


def test_what_one_trainer_has_prepared_is_not_in_the_way_of_another():
    served = Served(specs_of(FEW))
    try:
        model, other = weights(1, FEW), weights(2, FEW)
        with (
            WeightUpdater.connect(model, served.url, transport="ipc", bucket_bytes=4096) as first,
            WeightUpdater.connect(other, served.url, transport="ipc", bucket_bytes=8192) as second,
        ):
            first.update(version=1)
            assert holds(served, model)
            second.update(version=2)
            assert holds(served, other)
            train(model)
            assert first.update(version=3).targets[0].proof == "resident"
            assert holds(served, model)
    finally:
        served.close()


def test_memory_that_moves_after_connect_is_found(calls):
    served = Served(specs_of(FEW))
    try:
        model = weights(1, FEW)
        with WeightUpdater.connect(model, served.url, transport="ipc", bucket_bytes=4096) as updater:
            for parameter in (*model.parameters(), *served.model.parameters()):
                parameter.data = parameter.data.clone()
            train(model)
            assert updater.update(version=1).targets[0].proof == "resident"
        assert holds(served, model)
    finally:
        served.close()
