"""The parts that adapters of stock engines have in common: they cannot stage, prove nothing and list no tensors.

So a report could not name a vision tower as not updated, and an update of a language model alone is refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from weightcast.comm.ipc import host_id_of
from weightcast.errors import ConfigError, WireError
from weightcast.protocols import Adapter, Delivery
from weightcast.wire.answers import Ack
from weightcast.wire.engine_info import NO_RECEIVER, EngineInfo, RankInfo
from weightcast.wire.layout import TensorSpec

TAKES_IMAGES = (
    "it encodes images, and does not tell which of its tensors an update leaves as they are: an update must contain "
    "its vision tower"
)
KEPT_TOWER = "the vision tower, if this server has one"
_OF_VISION = re.compile(r"visual|vision|image|img|\bvit\b|\bvpm\b|siglip|clip|patch_embed|pixtral", re.IGNORECASE)

_OF_QWEN2 = "model.layers.0.self_attn.q_proj.bias"


class StockAdapter(Adapter):
    """Adapter of an engine that cannot stage: buckets go straight into live weights while it is paused.

    Attributes:
        delivery: Delivery of the updates to come, for a subclass whose ``check`` sets it.
        version: Version of this session.
        paused_at: Time at which this session paused the engine, of ``time.monotonic``; 0 if it has not.
        mixed: True if the live weights may be parts of two versions.
    """

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.delivery: Delivery = "group"
        self.version = 0
        self.paused_at = 0.0
        self.mixed = info.paused  # whoever paused the engine before us may have been in the middle of an update

    def updating(self, **facts: Any) -> Ack:
        """The answer to a step before the commit, with ``facts`` that this engine tells."""
        return Ack(ok=True, state="updating", ranks=self.info.tp_size, **facts)

    def committed(self, **facts: Any) -> Ack:
        """The answer to a commit, likewise."""
        self.mixed = False
        stall_s = time.monotonic() - self.paused_at if self.paused_at else 0.0
        return Ack(ok=True, version=self.version, ranks=self.info.tp_size, stall_s=stall_s, **facts)

    def ended(self) -> Ack:
        """The answer to an abort."""
        return Ack(ok=True, state="quarantined" if self.mixed else "serving", ranks=self.info.tp_size)


def stock_info(url: str, devices: Sequence[str], **facts: Any) -> EngineInfo:
    """Describes an engine by the device of each rank, and by the facts that it tells."""
    return EngineInfo(
        protocol=NO_RECEIVER,
        state="serving",
        digest=None,
        tp_size=len(devices),
        host_id=host_id_of(url)[:200],
        ranks=tuple(RankInfo(rank=rank, pid=0, device=device) for rank, device in enumerate(devices)),
        staging="none",
        specs=(),
        **facts,
    )


def number_of(version: object) -> int | None:
    """The number of a weight version that a trainer has stamped; None for other text."""
    return int(version) if isinstance(version, str) and version.isascii() and version.isdigit() else None


def prompt_logprobs(reply: bytes, token_ids: Sequence[int], *, engine: str, needs: str | None = None) -> list[float]:
    """Reads an answer of SGLang's or LMDeploy's ``/generate``; raises WireError if it scores another prompt.

    ``needs`` is the hint of this error.
    """
    try:
        entries = msgspec.json.decode(reply)["meta_info"]["input_token_logprobs"] or []
        found = [(float(entry[0]), int(entry[1])) for entry in entries[max(0, len(entries) - len(token_ids) + 1) :]]
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, IndexError) as error:
        raise WireError(f"{engine}'s answer to /generate has no log-probabilities of the prompt: {error}") from None
    if [token for _, token in found] != list(token_ids[1:]):
        raise WireError(
            f"{engine}'s answer to /generate has log-probabilities of other tokens than were sent", hint=needs
        )
    return [logprob for logprob, _ in found]


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
