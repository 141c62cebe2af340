"""The caller's limit of extra memory: the size of the buckets, and the refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError
from weightcast.exporters.memory_estimate import WORK_BYTES, peak_bytes
from weightcast.exporters.state_dict import StateDictExporter
from weightcast.protocols import Exporter
from weightcast.update.arguments import bytes_of
from weightcast.update.bucket_memory import choose_bucket_bytes, planned_bytes
from weightcast.wire.layout import Packing, plan_buckets

MIB = 1 << 20
WHOLE = Packing(slices=False)


@pytest.fixture
def exporter() -> StateDictExporter:
    return StateDictExporter({name: torch.zeros(1024, 1024) for name in "abcdefgh"})  # 4 MiB each


def choose(config, exporter):
    return choose_bucket_bytes(config, exporter, exporter.specs(), packing=WHOLE, world_size=1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_limit_makes_buckets_smaller_and_the_plan_keeps_to_it(exporter, world_size):
    limit = WORK_BYTES + 21 * MIB
    config = UpdateConfig(max_extra_bytes=limit)
    specs = exporter.specs()
    chosen = choose_bucket_bytes(config, exporter, specs, packing=WHOLE, world_size=world_size)
    assert 4 * MIB <= chosen < 12 * MIB
    layouts = plan_buckets(specs, bucket_bytes=chosen, packing=WHOLE)
    planned = planned_bytes(exporter, layouts, world_size=world_size)
    assert planned <= limit
    # The command line's estimate is the same number.
    assert planned == peak_bytes(specs, bucket_bytes=chosen, packing=WHOLE, world_size=world_size)


def test_a_wide_limit_leaves_small_buckets_as_they_are(exporter):
    config = UpdateConfig(max_extra_bytes=1 << 40, bucket_bytes=5 * MIB)
    assert choose(config, exporter) == 5 * MIB


def test_no_limit_changes_nothing(exporter):
    config = UpdateConfig(bucket_bytes=1 << 40)
    assert choose(config, exporter) == 1 << 40


def test_a_limit_that_is_too_low_is_refused_with_the_bytes_that_suffice(exporter):
    needed = WORK_BYTES + 8 * MIB
    with pytest.raises(ConfigError, match=rf"max_extra_bytes={needed - 1}: .* {needed} bytes are needed") as caught:
        choose(UpdateConfig(max_extra_bytes=needed - 1), exporter)
    assert caught.value.hint == f"allow {needed} bytes or more"
    config = UpdateConfig(max_extra_bytes=needed)
    assert choose(config, exporter) == 4 * MIB


def test_an_exporter_of_unknown_memory_is_refused_by_name(exporter):
    class Opaque(Exporter):
        device = exporter.device
        specs = staticmethod(exporter.specs)

    with pytest.raises(ConfigError, match="Opaque does not know the memory that it takes"):
        choose(UpdateConfig(max_extra_bytes=1 << 30), Opaque())
    assert planned_bytes(Opaque(), [], world_size=1) == 0


@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_byte_is_refused(value):
    with pytest.raises(ConfigError, match=f"max_extra_bytes={value}"):
        UpdateConfig(max_extra_bytes=value)


def test_a_limit_may_be_text():
    assert bytes_of("max_extra_bytes", "1.5GiB") == 3 << 29


def test_a_module_that_is_quantised_adds_what_that_takes():
    from weightcast.exporters.memory_estimate import COMPUTED_BYTES
    from weightcast.exporters.module import ModuleExporter
    from weightcast.exporters.quantise import Fp8Blocks

    model = nn.Linear(256, 256, bias=False)
    assert ModuleExporter(model).computing_bytes() == 0
    assert ModuleExporter(model, quantise=Fp8Blocks()).computing_bytes() == COMPUTED_BYTES
