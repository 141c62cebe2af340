"""The switch of weights in vLLM's engine core: one call, which the core's loop takes between two steps.

It lets batches in flight end, takes the KV cache from running requests, has every worker switch, and lets vLLM go on.
vLLM has no plug-in point in its engine core, so ``install`` adds methods to its class.
"""

from __future__ import annotations

import importlib
from typing import Any

from weightcast.plugins.vllm.worker_hooks import SWITCH

# Names of the methods for ``call_utility_async``.
ASK = "weightcast_core"
SWITCH_BETWEEN = "weightcast_switch_between_steps"
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


def kind(core: Any) -> str:
    """Says how an engine core steps: ``alone``, or in ``lockstep`` with others that share its experts.

    Raises:
        AttributeError: This version of vLLM has another engine core; its caller then pauses vLLM instead.
    """
    for name in _NEEDED:
        getattr(core, name)
    getattr(core.scheduler, "pause_state")  # noqa: B009
    return LOCKSTEP if getattr(core, "dp_group", None) is not None else ALONE


def switch_between_steps(
    core: Any, rest: bool, drop_cache: bool, drop_encoders: bool, resume: bool, timeout_s: float
) -> list[Any]:
    """Has every worker switch its weights while this core schedules nothing.

    Running requests stay.  If a worker fails, the core stays paused: its weights may be a mixture.

    Args:
        rest: Whether batches in flight end first.
        drop_cache: Whether requests lose their KV cache, which vLLM then computes again, and cached prefixes go.
        drop_encoders: Whether cached outputs of encoders go.
        resume: Whether a pause from before ends; otherwise it stays.

    Returns:
        The failure in words, or nothing; and whether the core was paused before.

    Raises:
        Exception: A worker is gone or late.  The core stays paused.
    """
    scheduler = core.scheduler
    before = scheduler.pause_state
    states = type(before)  # vLLM's ``PauseState``
    why = ""
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
    try:
        # With a reason no worker switches, and each of them answers the API server with it.
        said = core.model_executor.collective_rpc(SWITCH, timeout=timeout_s, args=(why,))
    except BaseException:
        scheduler.set_pause_state(states.PAUSED_ALL)
        raise
    failed = "" if why else "; ".join(dict.fromkeys(words for words in said if words))
    after = states.PAUSED_ALL if failed else states.UNPAUSED if resume and not why else before
    if after == states.UNPAUSED and before != after:
        core.resume_scheduler()
    elif scheduler.pause_state != after:
        scheduler.set_pause_state(after)
    return [failed, before != states.UNPAUSED]
