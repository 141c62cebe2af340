"""Ranks on three Ray nodes with addresses of their own: whose order they come in, and mistakes in placement."""

from __future__ import annotations

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from tests.helpers.clock import PATIENCE_S
from tests.helpers.raycluster import HEAD, HIGH, LOW, three_nodes  # noqa: F401  a fixture
from tests.process.receiver.test_executor import Echo
from weightcast.errors import ConfigError
from weightcast.ray import Bundles, EngineKind, RayExecutor, RolloutEngines
from weightcast.ray.cluster import named_group
from weightcast.wire.messages import Readback

pytestmark = [pytest.mark.example]


@pytest.fixture(scope="module")
def spread(three_nodes):  # noqa: F811
    """A group of ours, a bundle on each node, not in the order of their addresses."""
    group = placement_group([{"CPU": 1}] * 3, strategy="STRICT_SPREAD")
    assert group.wait(PATIENCE_S)
    yield group
    remove_placement_group(group)


def test_ranks_come_in_the_order_of_addresses_or_in_the_callers(spread):
    by_address = Bundles.of(spread, 3)
    chosen = [by_address.indices[place] for place in (2, 0, 1)]
    executor = RayExecutor(Echo, 3, bundles=Bundles.of(spread, 3, indices=chosen))
    assert [place.address for place in executor.places] == [HIGH, LOW, HEAD]  # so by_address is LOW, HEAD, HIGH
    assert executor.run(b"step") == b"step on 0 of 3"
    assert [ack.rank for ack in executor.apply(Readback(), timeout_s=20)] == [0, 1, 2]
    executor.close()
    assert spread.wait(5)  # the caller's group is still there


def test_mistakes_in_placement(spread):
    bundles = Bundles.of(spread, 2)
    with pytest.raises(ConfigError, match="2 bundles for 3 ranks"):
        RayExecutor(Echo, 3, bundles=bundles)
    with pytest.raises(ConfigError, match="bundle index 3 for rank 1: the group has bundles 0 to 2"):
        Bundles.of(spread, 2, indices=[0, 3])
    with pytest.raises(ConfigError, match=r"bundle 0 for rank 0 holds .*a rank takes 1 GPU"):
        Bundles.of(spread, 1, indices=[0], resource="GPU")
    with pytest.raises(ConfigError, match=r"no 1 bundles of .*GPU.* after 1 s; free now"):
        Bundles.create(1, resource="GPU", timeout_s=1)
    with pytest.raises(ConfigError, match="a server is one process on one node"):
        RolloutEngines(EngineKind(command=("true",)), [bundles])
    with pytest.raises(ConfigError, match="no placement group 'theirs'"):
        named_group("theirs")
