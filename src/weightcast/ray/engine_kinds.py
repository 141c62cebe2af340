"""The kinds of inference servers: the command that starts each, and its routes for health, sleep and wake-up.

The caller adds the arguments that depend on the model and the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """The command and the routes of one kind of engine.

    Attributes:
        command: Program and arguments; ``{host}``, ``{port}`` and ``{tp}`` are filled in.
        env: Additional environment variables.
        health: Path that answers 200 once the engine serves.
        sleep: Paths to POST ``{}`` to, in order, to free the accelerator; empty if the engine cannot sleep.
        wake: Paths to POST ``{}`` to, in order, to wake up.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    health: str = "/health"
    sleep: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()


def reference_engine(model: str, *arguments: str) -> EngineKind:
    """Describes ``weightcast serve``.

    Args:
        model: Hugging Face folder on the engine's node.
        *arguments: Further arguments of its command line.
    """
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
        model: Model argument of vLLM.
        *arguments: Further arguments of its command line; ``--enable-sleep-mode`` for ``RolloutEngines.sleep``.
        program: Command that starts vLLM, e.g. with the Python of another environment.
        receiver: Whether vLLM loads weightcast's receiver, which must be installed in its environment.
    """
    command = (*program, model, "--host", "{host}", "--port", "{port}", "--tensor-parallel-size", "{tp}")
    plugin = ("--weight-transfer-config", '{"backend": "weightcast"}') if receiver else ()
    return EngineKind(
        command=(*command, *plugin, *arguments),
        # vLLM has the routes for sleep and wake-up in its development mode only.
        env={"VLLM_SERVER_DEV_MODE": "1"} | ({"VLLM_PLUGINS": "weightcast"} if receiver else {}),
        sleep=("/sleep?level=1",),
        wake=("/wake_up",),
    )


def sglang_engine(
    model: str, *arguments: str, program: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")
) -> EngineKind:
    """Describes SGLang's server.

    Args:
        model: Model argument of SGLang.
        *arguments: Further arguments of its command line; ``--enable-memory-saver`` for ``RolloutEngines.sleep``.
        program: Command that starts SGLang, e.g. with the Python of another environment.
    """
    return EngineKind(
        command=(
            *(*program, "--model-path", model, "--host", "{host}", "--port", "{port}", "--tp-size", "{tp}"),
            *arguments,
        ),
        sleep=("/release_memory_occupation",),
        wake=("/resume_memory_occupation",),
    )


def lmdeploy_engine(model: str, *arguments: str, program: tuple[str, ...] = ("lmdeploy",)) -> EngineKind:
    """Describes ``lmdeploy serve api_server`` with the PyTorch engine.

    Args:
        model: Model argument of LMDeploy.
        *arguments: Further arguments of its command line.
        program: Command that starts LMDeploy, e.g. with the Python of another environment.
    """
    return EngineKind(
        command=(
            *(*program, "serve", "api_server", model, "--backend", "pytorch"),
            *("--server-name", "{host}", "--server-port", "{port}", "--tp", "{tp}", *arguments),
        ),
        sleep=("/sleep?level=1",),
        wake=("/wakeup",),
    )
