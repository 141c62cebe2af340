"""Stores outside of vLLM's own caches from which it answers requests, and whether an update can empty them.

Connectors keep KV caches, or outputs of encoders, in host memory, files or other servers.  vLLM asks a connector to
drop what it keeps when weights change, and takes silence for success: most connectors do nothing then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightcast.errors import ConfigError

# Connectors of vLLM's that drop what they keep, with the value of the setting that must be so: with another one they
# also keep it in files or on other servers, and leave it there.
_EMPTIED: Mapping[str, tuple[str, str]] = {
    "OffloadingConnector": ("spec_name", "CPUOffloadingSpec"),
    "SimpleCPUOffloadConnector": ("kv_offload_backend", "cpu"),
}
_WHY = "keeps what the old weights computed and gives it to new requests, in every pause mode"


def store_outside(vllm_config: Any) -> str:
    """The store outside of vLLM's own KV cache that requests may be answered from, in words; empty if there is none."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is not None:
        return f"the KV connector {getattr(transfer, 'kv_connector', None) or 'of --kv-transfer-config'}"
    cache = getattr(vllm_config, "cache_config", None)
    return "the offloaded KV cache" if getattr(cache, "kv_offloading_size", None) else ""


def check_stores(vllm_config: Any) -> None:
    """Raises ``ConfigError`` if vLLM answers requests from a store that an update cannot empty."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is not None and not _is_emptied(transfer):
        raise ConfigError(
            f"{store_outside(vllm_config)} {_WHY}",
            hint="start vLLM without --kv-transfer-config; what vLLM itself offloads to host memory is emptied "
            "(--kv-offloading-size)",
        )
    encoders = getattr(vllm_config, "ec_transfer_config", None)
    connector = getattr(encoders, "ec_connector", None)
    if connector:
        raise ConfigError(f"the encoder connector {connector} {_WHY}", hint="start vLLM without --ec-transfer-config")


def _is_emptied(transfer: Any) -> bool:
    name = getattr(transfer, "kv_connector", None)
    if name is None:
        return True  # vLLM then has no connector
    if name not in _EMPTIED or getattr(transfer, "kv_connector_module_path", None):
        return False
    setting, value = _EMPTIED[name]
    return (getattr(transfer, "kv_connector_extra_config", None) or {}).get(setting, value) == value
