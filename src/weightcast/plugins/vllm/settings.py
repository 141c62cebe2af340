"""The plug-in's settings, from the key ``weightcast`` of vLLM's ``--additional-config``."""

from __future__ import annotations

import re
from typing import Any, Literal, cast

import msgspec

from weightcast.errors import ConfigError
from weightcast.plugins.vllm.rank_protocol import draft_of
from weightcast.receiver.rank import StagingChoice

_SECTION = "weightcast"
_HINT = (
    '--additional-config \'{"weightcast": {"staging": "auto|device|host|none", "draft": "keep|update", '
    '"secret_file": "PATH", '
    '"not_updated": "REGEX", "warm_up": true}}\''
)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings.

    Attributes:
        staging: Place in which a new version waits for its commit.
        draft: ``update`` makes the draft model's weights a part of every update; ``keep`` leaves them as they are, and
            reports name the draft as not updated.
        not_updated: Regular expression for names of the checkpoint's tensors that no update contains, such as those of
            a vision tower that is not trained.  They keep the checkpoint's values, and reports name them.  Empty for
            none.
        warm_up: Whether vLLM's start runs the model on batches of all sizes that kernels distinguish.
        secret_file: File with the secret of an engine on several hosts; empty for ``WEIGHTCAST_ENGINE_SECRET``.
    """

    staging: StagingChoice = "auto"
    draft: Literal["keep", "update"] = "keep"
    not_updated: str = ""
    warm_up: bool = False
    secret_file: str = ""


def settings_of(additional_config: object) -> Settings:
    """Reads the settings; those that are not set have their defaults.  Other keys belong to other plug-ins.

    Raises:
        ConfigError: A key or a value under ``weightcast`` is unknown.
    """
    everything = cast("dict[str, Any]", additional_config) if isinstance(additional_config, dict) else {}
    section = everything.get(_SECTION, {})
    try:
        settings = msgspec.convert(section, Settings)
        re.compile(settings.not_updated)
        return settings
    except (msgspec.ValidationError, re.error) as error:
        raise ConfigError(f"additional_config: {_SECTION} is {section!r}: {error}", hint=_HINT) from None


def keeps_draft(vllm_config: Any) -> bool:
    """Returns True if vLLM has a draft model that no update writes."""
    return draft_of(vllm_config.speculative_config) and settings_of(vllm_config.additional_config).draft == "keep"
