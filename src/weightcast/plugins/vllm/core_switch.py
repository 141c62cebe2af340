"""The switch of weights in vLLM's engine core: one call, which the core's loop takes between two steps.

It lets batches in flight end, takes the KV cache from running requests, has every worker switch, and lets vLLM go on.
vLLM has no plug-in point in its engine core, so ``install`` adds methods to its class.  ``owner`` and ``stay_paused``
are for several API servers, which have nothing in common but the cores.
"""

from __future__ import annotations

import importlib
from typing import Any

from weightcast.plugins.vllm import cached_prefixes, token_versions
from weightcast.plugins.vllm.worker_hooks import SWITCH

# Names of the methods for ``call_utility_async``.
ASK = "weightcast_core"
SWITCH_BETWEEN = "weightcast_switch_between_steps"
OWNER = "weightcast_owner"
STAY_PAUSED = "weightcast_stay_paused"
# Answers to ASK.
ALONE, LOCKSTEP = "alone", "lockstep"

_MODULE = "vllm.v1.engine.core"
_NEEDED = (
    "scheduler",
    "model_executor",
    "batch_queue",
    "reset_prefix_cache",
    "resume_scheduler",
    "_process_engine_step",
)


def install() -> None:
    """Adds our methods to the engine core's class; does nothing if this vLLM has none.  Safe to call twice.

    It imports the class, since vLLM may load plug-ins before: then it forks the engine core's process, which takes the
    plug-ins for loaded.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return
    core_class = getattr(module, "EngineCore", None)
    if core_class is not None:
        setattr(core_class, ASK, kind)
        setattr(core_class, SWITCH_BETWEEN, switch_between_steps)
        setattr(core_class, OWNER, owner)
        setattr(core_class, STAY_PAUSED, stay_paused)
        cached_prefixes.install(core_class)
        token_versions.install(core_class)


def kind(core: Any) -> str:
    """Says how an engine core steps: ``alone``, or in ``lockstep`` with others that share its experts.

    Raises:
        AttributeError: This version of vLLM has another engine core.
    """
    for name in _NEEDED:
        getattr(core, name)
    _ = core.scheduler.pause_state
    return LOCKSTEP if getattr(core, "dp_group", None) is not None else ALONE


def switch_between_steps(
    core: Any,
    rest: bool,
    keep_cache: bool,
    drop_cache: bool,
    drop_encoders: bool,
    resume: bool,
    timeout_s: float,
    stamp: str,
) -> list[Any]:
    """Has every worker switch its weights while this core schedules nothing.

    Running requests stay.  If a worker fails, the core stays paused: its weights may be a mixture.

    Args:
        rest: Whether batches in flight end first.
        keep_cache: Whether the KV cache of the old weights stays: running requests keep theirs, and others find none.
        drop_cache: Whether requests lose their KV cache, which vLLM then computes again, and cached prefixes go.
        drop_encoders: Whether cached outputs of encoders go.
        resume: Whether a pause from before ends; otherwise it stays.
        stamp: Weight version of the answers from now on, also vLLM's own; empty leaves it.

    Returns:
        The failure in words, or nothing; whether the core was paused before; and whether it has the stamp.

    Raises:
        Exception: A worker is gone or late.  The core stays paused.
    """
    scheduler = core.scheduler
    before = scheduler.pause_state
    states = type(before)  # vLLM's ``PauseState``
    why = ""
    if keep_cache:
        cached_prefixes.next_generation(core)
    try:
        if rest and core.batch_queue:
            scheduler.set_pause_state(states.PAUSED_ALL)
            while core.batch_queue:
                core._process_engine_step()  # schedules nothing, and takes one result
        if drop_cache and not core.reset_prefix_cache(True, True):
            why = "vLLM could not drop the KV caches outside of it"
        if drop_encoders:
            core.reset_encoder_cache()
    except Exception as error:  # noqa: BLE001  vLLM's errors have no common class
        why = f"vLLM could not drop what the old weights computed: {type(error).__name__}: {error}"
    after = states.UNPAUSED if resume and not why else before
    try:
        # With a reason no worker switches, and each of them answers the API server with it.
        said = core.model_executor.collective_rpc(SWITCH, timeout=timeout_s, args=(why,))
    except BaseException:
        scheduler.set_pause_state(states.PAUSED_ALL)
        raise
    failed = "" if why else "; ".join(dict.fromkeys(words for words in said if words))
    stamped = bool(stamp) and not failed and not why
    if stamped:
        token_versions.say_version(core, stamp)
        if hasattr(core, "set_weight_version"):
            core.set_weight_version(stamp)
    after = states.PAUSED_ALL if failed else after
    if after == states.UNPAUSED and before != after:
        core.resume_scheduler()
    elif scheduler.pause_state != after:
        scheduler.set_pause_state(after)
    return [failed, before != states.UNPAUSED, stamped]


def owner(core: Any, name: str) -> str:
    """Notes the socket of the API server that owns the sessions; returns its name, empty if nobody has told it.

    Args:
        name: The name, from the owner itself; empty to ask for it.
    """
    if name:
        core.weightcast_owner_name = name
    return getattr(core, "weightcast_owner_name", "")


def stay_paused(core: Any, stay: bool) -> None:
    """Keeps a paused core from resuming, as it does by itself when the last of its memory wakes, or lets it again."""
    if stay:
        core.resume_scheduler = lambda: None
    else:
        del core.resume_scheduler
