"""The parts that adapters of stock engines have in common: they cannot stage, prove nothing and list no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Join


class StockAdapter:
    """One server without our receiver."""

    in_flight = 1
    proves: frozenset[Literal["received", "resident"]] = frozenset()
    leased = False

    def __init__(self, info: EngineInfo) -> None:
        self._info = info

    def renew(self, info: EngineInfo) -> None:
        """As ``Adapter.renew``."""
        self._info = info

    def specs(self) -> Sequence[TensorSpec]:
        """Always empty: stock engines do not list their tensors."""
        return ()


def group_body(join: Join) -> dict[str, Any]:
    """Body of ``/init_weights_update_group``, a route that SGLang and LMDeploy have alike."""
    return {
        "master_address": join.host,
        "master_port": join.port,
        "rank_offset": join.first_rank,
        "world_size": join.world_size,
        "group_name": join.group,
        "backend": join.backend,
    }
