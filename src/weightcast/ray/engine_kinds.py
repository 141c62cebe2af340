"""The kinds of inference servers: the command that starts each, and its routes for health, sleep and wake-up."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlencode

from weightcast.errors import ConfigError
from weightcast.wire.nccl_settings import COMPARED


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """The command and the routes of one kind of engine.

    Attributes:
        command: Program and arguments; ``{host}``, ``{port}`` and ``{tp}`` are filled in.
        health: Path that answers 200 once the engine serves.
        sleep: Paths to POST ``{}`` to, in order, to free the accelerator; empty if the engine cannot sleep.
        wake: Paths to POST ``{}`` to, in order, to wake up.
        nccl: Variables of NCCL that the server sets in its own processes, unless ``env`` has them.
        engine: Kind that updates take the engine for: ``Target.engine``.
        wake_tags: Where the last of these paths takes the names of the memory to wake, such as ``weights``: in its
            query (``?tags=weights&tags=kv_cache``), in its body (``{"tags": ["weights"]}``), or nowhere.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    nccl: Mapping[str, str] = field(default_factory=dict[str, str])
    health: str = "/health"
    sleep: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()
    wake_tags: Literal["query", "body"] | None = None
    engine: str = "auto"

    @property
    def trainer_env(self) -> dict[str, str]:
        """Variables of NCCL that trainers must have too, to be in one group with the engine."""
        return {**self.nccl, **{name: value for name, value in self.env.items() if name in COMPARED}}


def reference_engine(model: str, *arguments: str) -> EngineKind:
    """Describes ``weightcast serve`` of a Hugging Face folder on the engine's node, with further arguments."""
    return EngineKind(
        command=(
            *(sys.executable, "-m", "weightcast", "serve", model),
            *("--host", "{host}", "--port", "{port}", "--tp", "{tp}", *arguments),
        ),
        sleep=("/sleep",),
        wake=("/wake",),
    )


def vllm_engine(
    model: str, *arguments: str, program: tuple[str, ...] = ("vllm", "serve"), receiver: bool = True
) -> EngineKind:
    """Describes ``vllm serve``.

    Args:
        *arguments: Further arguments of its command line; ``--enable-sleep-mode`` for ``RolloutEngines.sleep``.
        program: Command that starts vLLM, e.g. with the Python of another environment.
        receiver: Whether vLLM loads weightcast's receiver, which must be installed in its environment.
    """
    command = (*program, model, "--host", "{host}", "--port", "{port}", "--tensor-parallel-size", "{tp}")
    plugin = ("--weight-transfer-config", '{"backend": "weightcast"}') if receiver else ()
    return EngineKind(
        command=(*command, *plugin, *arguments),
        # vLLM has the routes for sleep and wake-up in its development mode only.
        env={"VLLM_SERVER_DEV_MODE": "1"},
        sleep=("/sleep?level=1",),
        wake=("/wake_up",),
        wake_tags="query",
    )


def sglang_engine(
    model: str,
    *arguments: str,
    program: tuple[str, ...] = ("python3", "-m", "sglang.launch_server"),
    receiver: bool = False,
) -> EngineKind:
    """Describes SGLang's server.

    Args:
        *arguments: Further arguments of its command line; ``--enable-memory-saver`` for ``RolloutEngines.sleep``.
        program: Command that starts SGLang, e.g. with the Python of another environment.
        receiver: Whether SGLang loads weightcast's receiver, which must be installed in its environment.

    SGLang sets ``NCCL_CUMEM_ENABLE`` and ``NCCL_NVLS_ENABLE`` from its arguments, and ``nccl`` follows those that are
    known here.  With others, such as key-value shards or several nodes with multi-node NVLink, it may set other
    values.  Pass these to the trainers: ``TrainWorkers(..., env={...})``.
    """
    symmetric = "--enable-symm-mem" in arguments
    cumem = symmetric or any("deepep_v2" in argument for argument in arguments)
    nvls = symmetric or "--enable-nccl-nvls" in arguments
    return EngineKind(
        command=(
            *(*program, "--model-path", model, "--host", "{host}", "--port", "{port}", "--tp-size", "{tp}"),
            *arguments,
        ),
        env={"SGLANG_PLUGINS": "weightcast"} if receiver else {},
        nccl={"NCCL_CUMEM_ENABLE": str(int(cumem)), "NCCL_NVLS_ENABLE": str(int(nvls))},
        sleep=("/release_memory_occupation",),
        wake=("/resume_memory_occupation",),
        wake_tags="body",
    )


def lmdeploy_engine(model: str, *arguments: str, program: tuple[str, ...] = ("lmdeploy",)) -> EngineKind:
    """Describes ``lmdeploy serve api_server`` with the PyTorch engine; ``program`` starts LMDeploy."""
    return EngineKind(
        command=(
            *(*program, "serve", "api_server", model, "--backend", "pytorch"),
            *("--server-name", "{host}", "--server-port", "{port}", "--tp", "{tp}", *arguments),
        ),
        sleep=("/sleep?level=1",),
        wake=("/wakeup",),
        wake_tags="query",
    )


def wake_requests(kind: EngineKind, tags: Sequence[str]) -> list[tuple[str, bytes]]:
    """Paths and bodies that wake an engine, or the memory of these tags; ``ConfigError`` if its kind takes no tags."""
    requests = [(path, b"{}") for path in kind.wake]
    if not tags:
        return requests
    if not requests or kind.wake_tags is None:
        raise ConfigError(f"engines of this kind take no tags to wake ({', '.join(tags)})", hint="wake all of it")
    *before, (path, _) = requests
    if kind.wake_tags == "body":
        return [*before, (path, json.dumps({"tags": list(tags)}).encode())]
    return [*before, (f"{path}?{urlencode([('tags', tag) for tag in tags])}", b"{}")]
