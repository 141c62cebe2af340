"""Rules that vLLM's API server and its ranks share."""

from __future__ import annotations

from typing import Any

import msgspec

from weightcast.errors import ConfigError
from weightcast.plugins.other_hosts import Invitation
from weightcast.wire.adapters import AdapterRequest

# Experts move to other places and ranks while vLLM serves; routes and vLLM's own loader know only their first places.
EPLB_REFUSED = (
    "vLLM balances experts over ranks (enable_eplb): an update would write experts to places that they have left"
)
EPLB_HINT = "start vLLM without --enable-eplb"


class AdapterOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The API server's order to every worker.

    Attributes:
        request: Adapter that is to have a slot; None to take ``name`` out.
        lora_id: Number by which vLLM's requests name it.
        invitation: Where the worker meets the API server; None to take an adapter out.
        others: True if vLLM offers adapters from folders, which need a slot too.
    """

    name: str
    request: AdapterRequest | None = None
    lora_id: int = 0
    invitation: Invitation | None = None
    others: bool = False


def draft_of(speculative: object) -> bool:
    """Returns True if vLLM's speculative configuration has a draft model; prompt lookup and suffix trees have none."""
    return speculative is not None and getattr(speculative, "method", None) not in ("ngram", "ngram_gpu", "suffix")


def is_dummy(vllm_config: Any) -> bool:
    """Returns True if vLLM was started with random weights (``--load-format dummy``)."""
    return str(vllm_config.load_config.load_format) == "dummy"


def reads_in_order(vllm_config: Any) -> bool:
    """Returns True if whatever reads weights is ordered behind the current stream of a worker's main thread.

    Layers that vLLM fetches ahead (prefetch offloading) and half batches that overlap have streams of their own.
    """
    prefetch = getattr(getattr(vllm_config, "offload_config", None), "prefetch", None)
    parallel = vllm_config.parallel_config
    overlaps = getattr(parallel, "enable_dbo", False) or int(getattr(parallel, "ubatch_size", 0) or 0) > 1
    return not overlaps and int(getattr(prefetch, "offload_group_size", 0)) == 0


def maps_weights(vllm_config: Any) -> bool:
    """Returns True if a commit may map memory to the addresses of parameters, which move once at the start for that.

    vLLM's sleep frees what it has allocated itself, and nothing else.
    """
    on_gpu = getattr(vllm_config.device_config, "device_type", "") == "cuda"
    sleeps = getattr(vllm_config.model_config, "enable_sleep_mode", False)
    return on_gpu and not sleeps and reads_in_order(vllm_config)


def rank_among_replicas(parallel: Any) -> int:
    """Returns the number of a worker's rank among all ranks behind one API server."""
    # An engine of a dense model forgets the number of data-parallel engines, but keeps its own index.
    return int(parallel.data_parallel_index) * int(parallel.world_size) + int(parallel.rank)


def on_several_hosts(parallel: Any) -> bool:
    """Returns True if vLLM was told that one engine's ranks are on several hosts, which older versions do not know."""
    return int(getattr(parallel, "nnodes", 1)) > 1


def check_replicas(parallel: Any) -> None:
    """Raises ``ConfigError`` unless all data-parallel engines are behind one API server, on this host."""
    size, local = int(parallel.data_parallel_size), int(parallel.data_parallel_size_local)
    if size < 2:
        return
    for kind, option in (("hybrid", "--data-parallel-hybrid-lb"), ("external", "--data-parallel-rank")):
        if getattr(parallel, f"data_parallel_{kind}_lb", False):
            raise ConfigError(
                f"with {kind} load balancing ({option}) no API server reaches all data-parallel engines",
                hint="start them behind one API server (--data-parallel-size without that option); "
                "a dense model may also have independent servers, each of them a target",
            )
    if local != size:
        raise ConfigError(
            f"{size - local} of {size} data-parallel engines are on other hosts",
            hint="start them on one host; a dense model may also have independent servers, each of them a target",
        )
