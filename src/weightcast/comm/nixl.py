"""NIXL's agents, each of which reads registered memory of others.  NIXL is the extra ``weightcast[rdma]``."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from weightcast.errors import ConfigError
from weightcast.runtime import blocking_threads

log = logging.getLogger("weightcast.comm")

_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")  # the first chooses one of the others
_CLOSE_S = 5.0
_NAP_US = 1000  # NIXL's thread wakes up when bytes come; UCX does not promise that, so it also looks from time to time


def missing() -> str:
    """Returns why this process cannot use NIXL; empty if NIXL is installed.  Imports nothing."""
    return "" if _installed() else "NIXL is not installed"


def _installed() -> list[str]:
    specs = {name: find_spec(name) for name in _MODULES}
    # Any folder named nixl on Python's path counts as a package, one without an origin.
    return [name for name, spec in specs.items() if spec is not None and spec.origin is not None]


def make_agent() -> tuple[str, Any]:
    """Makes an agent of NIXL's UCX backend, of random name; raises ConfigError if NIXL is missing or does not start."""
    api, name = _load(), f"weightcast-{secrets.token_hex(8)}"
    try:
        ours = _with_naps(api)
        agent = ours.nixl_agent(name, ours.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    except Exception as error:  # NIXL raises classes of its own
        raise ConfigError(
            f"NIXL does not start: {words_of(error)}", hint='use another transport: transport="direct"'
        ) from error
    if "UCX" not in agent.backends:
        raise ConfigError("this build of NIXL has no UCX backend", hint='pip install "weightcast[rdma]"')
    return name, agent


def let_go(release: Callable[[], object], kept: object) -> None:
    """Releases on a thread, and waits for it a little; ``kept`` lives until the thread ends."""

    def work() -> None:
        try:
            release()
        except Exception as error:  # noqa: BLE001  NIXL raises classes of its own, and nobody needs the memory
            log.debug("NIXL did not release memory: %s", words_of(error))
        del holds[:]

    holds = [kept]
    blocking_threads.start(work, name="weightcast-rdma-close").join(_CLOSE_S)


def this_process() -> str:
    """Returns this process's host and id, for errors."""
    return f"{socket.gethostname()} (process {os.getpid()})"


def words_of(error: BaseException) -> str:
    """Returns the first line of an error."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


class _Bindings:
    """NIXL's bindings, except that the thread of an agent sleeps while there is nothing to do.

    NIXL's Python always asks for a thread that polls without a pause.  Such a thread takes a whole processor in every
    trainer rank and engine rank.  Where processors are few, it also holds UCX's lock when it is preempted: reads that
    take a millisecond then take seconds.
    """

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        """An agent of NIXL."""
        config.pthrDelay = _NAP_US
        return self._bindings.nixlAgent(name, config)


@functools.cache
def _with_naps(api: ModuleType) -> Any:
    """Returns a copy of NIXL's module of our own: agents of other libraries in this process stay as they are."""
    spec = api.__spec__
    assert spec is not None
    assert spec.loader is not None
    copy: Any = module_from_spec(spec)
    spec.loader.exec_module(copy)
    copy.nixlBind = _Bindings(copy.nixlBind)
    return copy


def _load() -> ModuleType:
    found = _installed()
    if not found:
        raise ConfigError(missing(), hint='pip install "weightcast[rdma]"')
    name = found[0]
    first = f"{name}._api" not in sys.modules
    try:
        api = importlib.import_module(f"{name}._api")
    except ImportError as error:
        raise ConfigError(
            f"NIXL cannot be imported: {error}", hint="install the build of NIXL for torch's version of CUDA"
        ) from error
    if first:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints a line for each agent to standard output
    return api
