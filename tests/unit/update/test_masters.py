"""Plans for float32 masters and engines that keep bfloat16: who casts, and where the masters are read."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.helpers.roster import Bare, members_of
from tests.unit.update.test_gpus_apart import engine
from weightcast.comm.ipc import host_id
from weightcast.errors import ConfigError
from weightcast.transports.plan import UpdatePlan
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import TensorSpec

ONE, OTHER, THIRD = "GPU-1", "GPU-2", "GPU-3"
MASTERS = tuple(TensorSpec(name=name, dtype="float32", shape=(4, 4)) for name in ("up", "norm"))


class Sharded(Bare):
    scatters = True
    casts = True

    def whole_on(self, hosts: object) -> object:
        return hosts


def keeping(info: EngineInfo, dtype: str = "bfloat16") -> EngineInfo:
    """An engine that keeps the norm in float32, and the rest in this dtype."""
    specs = tuple(msgspec.structs.replace(spec, dtype=dtype if spec.name == "up" else "float32") for spec in MASTERS)
    return msgspec.structs.replace(info, specs=specs)


def plan(places: list[str], *engines: EngineInfo, hosts: tuple[str, ...] = (), **options: object) -> UpdatePlan:
    device = torch.device("cpu" if places[0] == "cpu" else "cuda:0")
    infos = {f"http://e{number}": info for number, info in enumerate(engines)}
    chosen = {"keep_mapped": True} | options
    return members_of(
        infos, places, nccl=[None] * len(places), hosts=hosts, specs=MASTERS, exporter=Sharded(device), **chosen
    ).choose()


@pytest.mark.parametrize("transport", ["direct", "auto"])
@pytest.mark.parametrize(
    ("places", "devices", "in_place"),
    [
        (["cpu", "cpu"], [["cpu"], ["cpu", "cpu"]], True),
        ([ONE], [[ONE]], True),
        ([ONE, ONE], [[ONE, ONE], [ONE]], True),  # ranks that share a GPU
        ([ONE, OTHER], [[ONE, OTHER]], False),  # half of what a rank keeps comes from the other GPU
        ([ONE], [[OTHER]], False),
        ([ONE], [[ONE], [OTHER]], False),
    ],
    ids=["cpus", "one gpu", "ranks on one gpu", "two gpus", "apart", "one engine apart"],
)
def test_engines_cast_where_they_and_the_trainer_use_one_memory(transport, places, devices, in_place):
    found = plan(places, *(keeping(engine(*each)) for each in devices), transport=transport)
    assert (found.transport, found.mapped) == ("direct", True)
    assert found.cast == {"bfloat16": (0,)}
    assert found.casts_in_place is in_place


def test_each_host_counts_by_itself():
    here, there = host_id(), "b"
    engines = keeping(engine(ONE, host=here)), keeping(engine(OTHER, host=there))
    assert plan([ONE, OTHER], *engines, hosts=(here, there), transport="direct").casts_in_place
    crossed = keeping(engine(OTHER, host=here)), keeping(engine(ONE, host=there))
    assert not plan([ONE, OTHER], *crossed, hosts=(here, there), transport="direct").casts_in_place


@pytest.mark.parametrize("options", [{"keep_mapped": False}, {"direct_by": "messages"}, {"direct_by": "memory"}])
def test_the_trainer_casts_what_goes_by_messages_and_buckets(options):
    found = plan(["cpu"], keeping(engine("cpu")), transport="direct", **options)
    assert (found.cast, found.casts_in_place) == ({"bfloat16": (0,)}, False)


def test_float16_is_left_to_the_engines_that_can_tell_what_overflows():
    narrow = keeping(engine("cpu"), "float16")
    with pytest.raises(ConfigError, match="keeps up in float16, and it travels in float32"):
        plan(["cpu"], narrow, transport="direct")
    assert plan(["cpu"], narrow, transport="auto").transport == "ipc"
