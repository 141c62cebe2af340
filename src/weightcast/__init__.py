"""Move freshly trained weights from an RL trainer into running LLM rollout engines.

``WeightUpdater`` is the trainer's half, ``weightcast.receiver.WeightReceiver`` the engine's.  Importing this
module loads neither: each process imports the half that it is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from weightcast.config import Target, UpdateConfig
    from weightcast.errors import (
        ConfigError,
        DeadlineExceeded,
        TargetError,
        TargetRejected,
        TargetUnreachable,
        TrainerRankFailed,
        UpdateFailed,
        VerificationFailed,
        WeightcastError,
    )
    from weightcast.report import TargetReport, UpdateReport
    from weightcast.updater import WeightUpdater

__all__ = [
    "ConfigError",
    "DeadlineExceeded",
    "Target",
    "TargetError",
    "TargetRejected",
    "TargetReport",
    "TargetUnreachable",
    "TrainerRankFailed",
    "UpdateConfig",
    "UpdateFailed",
    "UpdateReport",
    "VerificationFailed",
    "WeightUpdater",
    "WeightcastError",
    "__version__",
]

_HOMES = {
    "Target": "config",
    "UpdateConfig": "config",
    "TargetReport": "report",
    "UpdateReport": "report",
    "WeightUpdater": "updater",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'weightcast' has no attribute {name!r}")
    return getattr(import_module(f"weightcast.{_HOMES.get(name, 'errors')}"), name)
