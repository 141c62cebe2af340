"""Lists what an update of a vLLM server with our receiver leaves as it is, or cannot prove, as it was started.

Settings that make an update wrong are refused at vLLM's start.  These here make it incomplete.
"""

from __future__ import annotations

from typing import Any

from weightcast.plugins import drafts


def hazards_of(vllm_config: Any, *, keeps_draft: bool, not_updated: str = "") -> tuple[str, ...]:
    """The hazards, one sentence each."""
    found: list[str] = []
    if not_updated:
        found.append(f"by its setting not_updated it keeps the tensors that match {not_updated!r}")
    if keeps_draft:
        found.append(drafts.keeps_draft("vLLM"))
    if vllm_config.lora_config is not None:
        found.append(
            "adapters that vLLM loads from folders stay as they are, also if they were trained for other weights"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        found.append("vLLM calculates the scales of its KV cache once (--calculate-kv-scales), with the first weights")
    return tuple(found)
