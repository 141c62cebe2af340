"""Rules that vLLM's API server and its ranks share."""

from __future__ import annotations

from typing import Any

# Experts move to other places and ranks while vLLM serves; routes and vLLM's own loader know only their first places.
EPLB_REFUSED = (
    "vLLM balances experts over ranks (enable_eplb): an update would write experts to places that they have left"
)
EPLB_HINT = "start vLLM without --enable-eplb"


def draft_of(speculative: object) -> bool:
    """Returns True if vLLM's speculative configuration has a draft model; prompt lookup and suffix trees have none."""
    return speculative is not None and getattr(speculative, "method", None) not in ("ngram", "ngram_gpu", "suffix")


def is_dummy(vllm_config: Any) -> bool:
    """Returns True if vLLM was started with random weights (``--load-format dummy``)."""
    return str(vllm_config.load_config.load_format) == "dummy"
