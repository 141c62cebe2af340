"""Adds our hooks to LMDeploy in its API server's process, and runs LMDeploy's command line."""

# LMDeploy is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import atexit
import functools
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from weightcast.errors import EngineFailure, WeightcastError
from weightcast.plugins.drafts import draft_setting
from weightcast.plugins.hook_points import LMDEPLOY
from weightcast.plugins.lmdeploy import engine_process
from weightcast.plugins.lmdeploy.endpoints import add_routes
from weightcast.plugins.lmdeploy.folder import FOLDER, failure_words, write_module_map
from weightcast.plugins.lmdeploy.settings import check_settings
from weightcast.receiver.api_keys import keys_of, warn_if_open


def run() -> None:
    """Runs ``lmdeploy serve api_server`` until it is stopped; ``WeightcastError`` if it cannot have our receiver."""
    LMDEPLOY.check("server")
    from lmdeploy.cli import entrypoint

    _patched(entrypoint.run)


def serve(*arguments: Any, **named: Any) -> Any:
    """Serves as LMDeploy's ``lmdeploy.serve.openai.api_server.serve`` does, with our receiver and the same arguments.

    For a server that is started from Python, in a Ray actor for one.  A process can have one such server.

    Raises:
        WeightcastError: This LMDeploy, its settings or the model cannot have our receiver.
    """
    LMDEPLOY.check("server")
    from lmdeploy.serve.openai import api_server

    def run() -> Any:
        return api_server.serve(*arguments, **named)

    return _patched(run)


def _patched(run: Callable[[], Any]) -> Any:
    folder = tempfile.mkdtemp(prefix="weightcast-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after LMDeploy has ended its processes
    os.environ[FOLDER] = folder
    write_module_map(folder, updates_draft=draft_setting())
    patch(folder)
    try:
        return run()
    except WeightcastError:
        raise
    except (Exception, SystemExit) as error:
        # LMDeploy's own error only says that its engine process is gone.
        words = failure_words(folder)
        if words:
            raise EngineFailure(words) from error
        raise


def patch(folder: str) -> None:
    """Replaces what LMDeploy's API server calls."""
    from lmdeploy.pytorch.engine.mp_engine.zmq_engine import ZMQMPEngine
    from lmdeploy.serve.openai import api_server

    ZMQMPEngine._mp_proc = staticmethod(engine_process.run)
    keys: list[list[str]] = []
    api_server.serve = _checked(api_server.serve, folder, keys.append)
    make_router = api_server.create_openai_router

    def create_openai_router(server_context: Any) -> Any:
        if not keys:
            raise LMDEPLOY.other_version(["the hook on serve did not take"])
        router = make_router(server_context)
        add_routes(router, server_context.async_engine, folder, keys[-1])
        return router

    api_server.create_openai_router = create_openai_router
    # The last call of LMDeploy's `serve`: nothing is served without our routes.
    api_server.uvicorn = SimpleNamespace(run=_with_our_routes(api_server.uvicorn.run))


def _checked(serve: Callable[..., Any], folder: str, note_keys: Callable[[list[str]], None]) -> Callable[..., Any]:
    """Checks the settings of a server before it starts, and gives its API keys to ``note_keys``."""

    @functools.wraps(serve)
    def checked(*arguments: Any, **named: Any) -> Any:
        config = named.get("backend_config")
        if config is None:
            raise LMDEPLOY.other_version(["`serve` is called without backend_config"])
        check_settings(named.get("backend", ""), config, named.get("speculative_config"))
        bound = inspect.signature(serve).bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        keys = keys_of(given.get("api_keys"), engine="LMDeploy 0.18", setting="api_keys")
        note_keys(keys)
        warn_if_open(keys, host=given["server_name"], port=given["server_port"], option="--api-keys")
        if config.mp_engine_backend == "ray":
            from weightcast.plugins.lmdeploy import ray_engine

            ray_engine.use(folder)
        return serve(*arguments, **named)

    return checked


def _with_our_routes(run: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any, app: Any, **named: Any) -> Any:
        if not any("/weightcast/info" in path for path in app.openapi().get("paths", {})):
            raise LMDEPLOY.other_version(["the hook on create_openai_router did not take"])
        return run(*arguments, app=app, **named)

    return checked
