"""Shared by vLLM's API server and its ranks: the plug-in's settings, rules, and the end of a lost process."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from typing import Any, Literal, cast

import msgspec

from weightcast.errors import ConfigError
from weightcast.plugins.other_hosts import RankInvitation
from weightcast.receiver.rank import StagingChoice
from weightcast.wire.adapters import AdapterRequest

# Experts move to other places and ranks while vLLM serves; routes and vLLM's own loader know only their first places.
EPLB_REFUSED = (
    "vLLM balances experts over ranks (enable_eplb): an update would write experts to places that they have left"
)
EPLB_HINT = "start vLLM without --enable-eplb"
log = logging.getLogger("weightcast.plugins.vllm")

_SOON_S = 5.0  # those who wait for an answer get it
_ORDERLY_S = 20.0
_SECTION = "weightcast"
_HINT = (
    '--additional-config \'{"weightcast": {"staging": "auto|device|host|none", "draft": "keep|update", '
    '"secret_file": "PATH", '
    '"not_updated": "REGEX", "warm_up": true, "derive_ahead": false, "map_with_sleep": false}}\''
)


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
    invitation: RankInvitation | None = None
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


def loads_into_pool(vllm_config: Any) -> bool:
    """Returns True if vLLM loads weights into a pool of its own, which its sleep mode frees."""
    model = vllm_config.model_config
    return any(getattr(model, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator"))


def maps_weights(vllm_config: Any) -> bool:
    """Returns True if a commit may map memory to the addresses of parameters, which move once at the start for that.

    vLLM's sleep frees what it has allocated itself, and nothing else; the plug-in frees the rest if it is set so.
    """
    on_gpu = getattr(vllm_config.device_config, "device_type", "") == "cuda"
    moves = not loads_into_pool(vllm_config) or settings_of(vllm_config.additional_config).map_with_sleep
    return on_gpu and moves and reads_in_order(vllm_config)


def rank_among_replicas(parallel: Any) -> int:
    """Returns the number of a worker's rank among all ranks behind one API server."""
    # An engine of a dense model forgets the number of data-parallel engines, but keeps its own index.
    return int(parallel.data_parallel_index) * int(parallel.world_size) + int(parallel.rank)


def on_several_hosts(parallel: Any) -> bool:
    """Returns True if vLLM was told that one engine's ranks are on several hosts, which older versions do not know."""
    return int(getattr(parallel, "nnodes", 1)) > 1


def check_generates(vllm_config: Any) -> None:
    """Raises ``ConfigError`` for a model that generates nothing: vLLM's server of it would have none of our routes."""
    runner = getattr(vllm_config.model_config, "runner_type", "generate")
    if runner != "generate":
        raise ConfigError(
            f"vLLM was started with --runner {runner}, and weightcast updates models that generate text",
            hint='start vLLM without --weight-transfer-config \'{"backend": "weightcast"}\', or with --runner generate',
        )


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


def end_vllm(words: str) -> None:
    """Ends this process soon, in order if vLLM can; its other processes on this host end with it.

    Its main thread would wait for the other host for ever, and clients for their answers.
    """
    log.error("weightcast: %s; vLLM cannot go on without it and ends now, restart it on all its hosts", words)
    threading.Thread(target=_end, name="weightcast-end", daemon=True).start()


def _end() -> None:
    time.sleep(_SOON_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORDERLY_S)
    os._exit(1)  # the main thread is inside of a collective, where it hears no signal


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plug-in's settings, from the key ``weightcast`` of vLLM's ``--additional-config``.

    Attributes:
        staging: Place in which a new version waits for its commit.
        draft: ``update`` makes the draft model's weights a part of every update; ``keep`` leaves them as they are, and
            reports name the draft as not updated.
        not_updated: Regular expression for names of the checkpoint's tensors that no update contains, such as those of
            a vision tower that is not trained.  They keep the checkpoint's values, and reports name them.  Empty for
            none.
        warm_up: Whether vLLM's start runs the model on batches of all sizes that kernels distinguish.
        derive_ahead: Whether a second set of what is derived for quantised layers is kept, where there is memory for
            it, so that a commit does not derive them while the engine stands still.
        map_with_sleep: Whether a commit maps memory with vLLM's sleep mode too.  Weights then lie outside of vLLM's
            pool, and the plug-in frees them while vLLM sleeps.
        secret_file: File with the secret of an engine on several hosts; empty for ``WEIGHTCAST_ENGINE_SECRET``.
    """

    staging: StagingChoice = "auto"
    draft: Literal["keep", "update"] = "keep"
    not_updated: str = ""
    warm_up: bool = False
    derive_ahead: bool = True
    map_with_sleep: bool = True
    secret_file: str = ""


def settings_of(additional_config: object) -> VllmSettings:
    """Reads the settings; those that are not set have their defaults.  Other keys belong to other plug-ins.

    Raises:
        ConfigError: A key or a value under ``weightcast`` is unknown.
    """
    everything = cast("dict[str, Any]", additional_config) if isinstance(additional_config, dict) else {}
    section = everything.get(_SECTION, {})
    try:
        settings = msgspec.convert(section, VllmSettings)
        re.compile(settings.not_updated)
        return settings
    except (msgspec.ValidationError, re.error) as error:
        raise ConfigError(f"additional_config: {_SECTION} is {section!r}: {error}", hint=_HINT) from None


def keeps_draft(vllm_config: Any) -> bool:
    """Returns True if vLLM has a draft model that no update writes."""
    return draft_of(vllm_config.speculative_config) and settings_of(vllm_config.additional_config).draft == "keep"
