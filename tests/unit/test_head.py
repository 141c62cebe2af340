"""What the head says of an update to come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightcast.config import UpdateConfig
from weightcast.head import Head
from weightcast.kinds import adapter_for
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import PROTOCOL, EngineInfo, RankInfo

SPECS = (TensorSpec(name="t", dtype="float32", shape=(8,)),)


def info(kind: str) -> EngineInfo:
    return EngineInfo(
        protocol=PROTOCOL,
        kind=kind,
        engine="e 1",
        model="m",
        version=0,
        digest=None,
        state="serving",
        host_id="h",
        tp_size=1,
        ranks=(RankInfo(rank=0, pid=1, device="cpu"),),
        staging="device",
        transports=("broadcast",),
        specs=SPECS,
    )


@pytest.mark.parametrize(("kinds", "told"), [(("native",), (32, 16)), (("native", "vllm"), ()), (("sglang",), ())])
def test_bucket_sizes_are_told_only_where_no_answer_is_waited_for_before_the_next_broadcast(kinds, told):
    head: Any = object.__new__(Head)
    head._config = UpdateConfig()
    head._links = [SimpleNamespace(adapter=adapter_for(info(kind))) for kind in kinds]
    assert head._open_message(1, SPECS, (32, 16)).bucket_sizes == told
