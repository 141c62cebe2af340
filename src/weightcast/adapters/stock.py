"""The parts that adapters of stock engines have in common: they cannot stage, prove nothing and list no tensors.

So a report could not name a vision tower as not updated, and an update of a language model alone is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from weightcast.comm.ipc import host_id_of
from weightcast.errors import ConfigError
from weightcast.wire.engine_info import EngineInfo, RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import PROTOCOL, Join

TAKES_IMAGES = (
    "it encodes images, and does not tell which of its tensors an update leaves as they are: an update must contain "
    "its vision tower"
)
KEPT_TOWER = "the vision tower, if this server has one"
_OF_VISION = re.compile(r"visual|vision|image|img|\bvit\b|\bvpm\b|siglip|clip|patch_embed|pixtral", re.IGNORECASE)

_OF_QWEN2 = "model.layers.0.self_attn.q_proj.bias"


def stock_info(url: str, devices: Sequence[str], **facts: Any) -> EngineInfo:
    """Describes an engine by the device of each rank, and by the facts that it tells."""
    return EngineInfo(
        protocol=PROTOCOL,
        state="serving",
        digest=None,
        tp_size=len(devices),
        host_id=host_id_of(url)[:200],
        ranks=tuple(RankInfo(rank=rank, pid=0, device=device) for rank, device in enumerate(devices)),
        staging="none",
        specs=(),
        **facts,
    )


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


def without_tower(specs: Sequence[TensorSpec]) -> bool:
    """True if an update may be the language model of a model that also has a vision tower, by names of its tensors.

    It may be meant so: some engines serve the language model of such a checkpoint alone.  The language models of
    Qwen2-VL and Qwen2.5-VL have the names of a Qwen2, so an update of a Qwen2 cannot be told from them.
    """
    names = {spec.name for spec in specs}
    inner = any("language_model." in name for name in names)
    qwen2 = _OF_QWEN2 in names and _OF_QWEN2.replace("q_proj", "o_proj") not in names
    return (inner or qwen2) and not any(_OF_VISION.search(name) for name in names)


def check_encoders(info: EngineInfo, specs: Sequence[TensorSpec]) -> None:
    """Raises ``ConfigError`` if the engine encodes images and no tensor's name has a word of vision towers."""
    if TAKES_IMAGES not in info.hazards or any(_OF_VISION.search(spec.name) for spec in specs):
        return
    raise ConfigError(
        f"{info.engine} encodes images, and no tensor of the update belongs to a vision tower, which would silently "
        "stay as it is; nothing was sent",
        hint="send the vision tower too: ComposedExporter({'language': ..., 'vision': CheckpointExporter(FOLDER, "
        "match=REGEX)})",
    )
