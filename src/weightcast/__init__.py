"""Move freshly trained weights from an RL trainer into running LLM rollout engines.

The trainer uses ``WeightUpdater``; an engine uses ``weightcast.receiver.WeightReceiver``.  Importing this package loads
neither, so that each process imports only its own half.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightcast.version import __version__

if TYPE_CHECKING:
    from weightcast.config import AdvancedOptions, Target
    from weightcast.errors import (
        ConfigError,
        DeadlineExceeded,
        NotFinite,
        TargetError,
        TargetRejected,
        TargetUnreachable,
        TrainerMismatch,
        TrainerRankFailed,
        UpdateFailed,
        VerificationFailed,
        WeightcastError,
    )
    from weightcast.report import TargetReport, UpdateReport
    from weightcast.update.arguments import UpdateOptions
    from weightcast.update.peer_copy import PeerCopy, copy_from_peer
    from weightcast.update.pending import PendingUpdate
    from weightcast.update.updater import WeightUpdater

__all__ = [
    "AdvancedOptions",
    "ConfigError",
    "DeadlineExceeded",
    "NotFinite",
    "PeerCopy",
    "PendingUpdate",
    "Target",
    "TargetError",
    "TargetRejected",
    "TargetReport",
    "TargetUnreachable",
    "TrainerMismatch",
    "TrainerRankFailed",
    "UpdateFailed",
    "UpdateOptions",
    "UpdateReport",
    "VerificationFailed",
    "WeightUpdater",
    "WeightcastError",
    "__version__",
    "copy_from_peer",
]

_HOMES = {
    "AdvancedOptions": "config",
    "Target": "config",
    "UpdateOptions": "update.arguments",
    "TargetReport": "report",
    "UpdateReport": "report",
    "PeerCopy": "update.peer_copy",
    "PendingUpdate": "update.pending",
    "copy_from_peer": "update.peer_copy",
    "WeightUpdater": "update.updater",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'weightcast' has no attribute {name!r}")
    return getattr(import_module(f"weightcast.{_HOMES.get(name, 'errors')}"), name)
