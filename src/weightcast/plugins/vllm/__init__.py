"""Our receiver inside vLLM: the entry point of vLLM's general plug-ins, and what it does once somebody asks for it.

``register`` (group ``vllm.general_plugins``) runs in every process of vLLM, also where nobody uses weightcast: in a
trainer that has vLLM beside it, or in a process that only inspects a model.  It imports nothing and raises nothing.
It waits for modules of vLLM: the backend of ``--weight-transfer-config '{"backend": "weightcast"}'`` is registered when
vLLM imports its own backends, the engine core gets our methods when vLLM imports it, and the API server gets the routes
under ``/weightcast`` if that option names our backend, or if ``VLLM_PLUGINS`` names weightcast.

vLLM has a group of plug-ins for routes as well, ``vllm.endpoint_plugins``, which it loads by ``VLLM_PLUGINS`` alone.
That variable is a list of all plug-ins that may load, so it would turn off those of others.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateUsage=false
from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from weightcast.plugins.vllm.endpoints import Endpoints

BACKEND = "weightcast"
FACTORY = "vllm.distributed.weight_transfer.factory"
CORE = "vllm.v1.engine.core"
_PLUGINS = "vllm.plugins"
_LOADER = "load_endpoint_plugins"
_SERVER = "vllm.entrypoints.openai.api_server"
_DONE = "_weightcast_routes"
_waiting: set[str] = set()


def register() -> None:
    """Waits for the modules of vLLM that ours needs, in this process.  Safe to call twice."""
    _after_import(FACTORY, _add_backend)
    _after_import(CORE, _add_methods)
    plugins = sys.modules.get(_PLUGINS)
    if plugins is not None and hasattr(plugins, _LOADER):
        _wrap_loader(plugins)
    else:
        add_routes(make_endpoints)


def asked_for(args: Any) -> bool:
    """True if the arguments of vLLM's API server name our backend, or ``VLLM_PLUGINS`` names weightcast."""
    config = getattr(args, "weight_transfer_config", None)
    return _is_ours(config) or BACKEND in os.environ.get("VLLM_PLUGINS", "").split(",")


def _is_ours(config: Any) -> bool:
    backend = config.get("backend") if isinstance(config, dict) else getattr(config, "backend", None)
    return backend == BACKEND


def share_log_handlers() -> None:
    """Sends our log lines where vLLM sends its own, unless somebody has configured our logger or the root logger.

    It is called where vLLM runs with our receiver, and not in a trainer.  Lines go on to the root logger as well, whose
    handlers may come later.
    """
    import logging

    ours, theirs = logging.getLogger("weightcast"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)


def make_endpoints() -> Endpoints:
    """Makes vLLM's endpoint plug-in with our routes; ``ConfigError`` if this vLLM cannot have it."""
    from weightcast.plugins.hook_points import VLLM
    from weightcast.plugins.vllm.core_switch import install
    from weightcast.plugins.vllm.endpoints import Endpoints

    VLLM.check("server")
    share_log_handlers()
    install()
    return Endpoints()


class _AfterImport(MetaPathFinder):
    """Calls a function with a module as soon as somebody has imported it."""

    def __init__(self, name: str, do: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._do = do

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds the module as others do, and has its loader call the function.

        It stays until the module has run: who asks for a spec may only want to know whether there is such a module.
        """
        if fullname != self._name:
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for find in others if (found := find(fullname, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _waiting.discard(self._name)
            self._do(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _after_import(name: str, do: Callable[[ModuleType], None]) -> None:
    module = sys.modules.get(name)
    if module is not None:
        do(module)
    elif name not in _waiting:
        _waiting.add(name)
        sys.meta_path.insert(0, _AfterImport(name, do))


def _add_backend(module: ModuleType) -> None:
    # In another vLLM it may be missing or differ; ``hook_points`` says so where somebody asks for our backend.
    factory: Any = getattr(module, "WeightTransferEngineFactory", None)
    if hasattr(factory, "register_engine") and BACKEND not in getattr(factory, "_registry", {}):
        factory.register_engine(BACKEND, "weightcast.plugins.vllm.worker", "WeightcastEngine")


def _add_methods(module: ModuleType) -> None:
    """Has an engine core get our methods while it is made, if its configuration names our backend."""
    core_class = getattr(module, "EngineCore", None)
    initialize = getattr(core_class, "_initialize_kv_caches", None)
    if core_class is None or initialize is None or hasattr(initialize, _DONE):
        return

    @functools.wraps(initialize)
    def with_ours(core: Any, *arguments: Any, **named: Any) -> Any:
        # vLLM 0.15 has no such field.
        if _is_ours(getattr(core.vllm_config, "weight_transfer_config", None)):
            from weightcast.plugins.vllm.core_switch import install

            install()
        return initialize(core, *arguments, **named)

    setattr(with_ours, _DONE, True)
    core_class._initialize_kv_caches = with_ours


class _IfAskedFor:
    """An endpoint plug-in of vLLM: our routes in a server that was started with our backend, else nothing."""

    name = BACKEND
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._endpoints: Endpoints | None = None

    def attach_router(self, app: Any) -> None:
        if asked_for(app.state.args):
            self._endpoints = make_endpoints()
            self._endpoints.attach_router(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if self._endpoints is not None:
            await self._endpoints.init_state(engine_client, state, args)


def _wrap_loader(plugins: ModuleType) -> None:
    """Adds ours to what vLLM's own loader of endpoint plug-ins finds, which needs ``VLLM_PLUGINS``."""
    load = getattr(plugins, _LOADER)
    if hasattr(load, _DONE):
        return

    @functools.wraps(load)
    def load_endpoint_plugins(supported_tasks: Any = None) -> list[Any]:
        found: list[Any] = load(supported_tasks)
        return [*found, _IfAskedFor()] if set(_IfAskedFor.required_tasks) & set(supported_tasks or ()) else found

    setattr(load_endpoint_plugins, _DONE, True)
    setattr(plugins, _LOADER, load_endpoint_plugins)


def add_routes(make: Callable[[], Endpoints]) -> None:
    """Adds our routes to versions of vLLM without endpoint plug-ins (before 0.26), as the API server starts.

    Safe to call twice.
    """
    # A server that was started with -m has its module under another name.
    for module in (sys.modules.get(_SERVER), sys.modules.get("__main__")):
        if module is not None and hasattr(module, "build_app") and hasattr(module, "init_app_state"):
            _wrap(module, make)


def _wrap(server: ModuleType, make: Callable[[], Endpoints]) -> None:
    if hasattr(server, _DONE):
        return
    build, init = server.build_app, server.init_app_state

    @functools.wraps(build)
    def build_app(args: Any, *more: Any, **named: Any) -> Any:
        app = build(args, *more, **named)
        if asked_for(args):
            app.state.weightcast = make()
            app.state.weightcast.attach_router(app)
        return app

    @functools.wraps(init)
    async def init_app_state(client: Any, state: Any, args: Any, *more: Any, **named: Any) -> None:
        await init(client, state, args, *more, **named)
        ours = getattr(state, "weightcast", None)
        if ours is not None:
            await ours.init_state(client, state, args)

    server.__dict__.update({"build_app": build_app, "init_app_state": init_app_state, _DONE: True})
