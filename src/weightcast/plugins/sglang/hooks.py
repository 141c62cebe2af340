"""Our hooks in SGLang: which of our functions is called where."""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from weightcast.plugins.engine_needs import dotted
from weightcast.plugins.sglang import rank
from weightcast.plugins.sglang.hook_points import ENGINE, FOLDER, HTTP, RECEIVER, RUNNER, SCHEDULER, SGLANG, UPDATER

log = logging.getLogger("weightcast.plugins.sglang")


def apply(*, main: bool) -> None:
    """Registers our hooks and applies them now.

    Args:
        main: As for ``hook_points.check``.

    Raises:
        ConfigError: SGLang did not apply one of them.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: list[tuple[str, Callable[..., Any], Any]] = [
        (f"{RUNNER}.load_model", rank.model_loaded, HookType.AFTER),
        (f"{SCHEDULER}.__init__", rank.scheduler_made, HookType.AFTER),
        (f"{SCHEDULER}._maybe_namespace_elastic_radix_cache", rank.request_made, HookType.AFTER),
        (f"{RECEIVER}._pull_raw_reqs", rank.requests_pulled, HookType.AFTER),
        (f"{UPDATER}.release_memory_occupation", rank.memory_released, HookType.BEFORE),
        (f"{UPDATER}.resume_memory_occupation", rank.memory_resumed, HookType.AFTER),
    ]
    if main:
        # Only here: to resolve the target imports the API server, which costs a scheduler process seconds.
        from weightcast.plugins.sglang import endpoints

        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="weightcast-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        hooks += [
            (f"{ENGINE}._launch_subprocesses", endpoints.before_loading, HookType.BEFORE),
            (f"{HTTP}_setup_and_run_http_server", endpoints.before_serving, HookType.BEFORE),
        ]
        if SGLANG.version() not in SGLANG.run_versions:
            log.warning("this is SGLang %s; our receiver was run in %s", SGLANG.version(), SGLANG.run_in_words)
    for place, hook, kind in hooks:
        HookRegistry.register(dotted(place), hook, kind)
    HookRegistry.apply_hooks()
    lost = [place for place, _, _ in hooks if dotted(place) not in HookRegistry._patched]
    if lost:
        raise SGLANG.other_version([f"the hook on {dotted(place)} did not take" for place in lost])
    # SGLang passes over a function that has hooks already, so a plug-in that comes later would lose its own there.
    for place, _, _ in hooks:
        HookRegistry._hooks.pop(dotted(place), None)
        HookRegistry._patched.discard(dotted(place))
