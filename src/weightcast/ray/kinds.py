"""What to know of an inference server to keep one alive: how it is started, asked, put to sleep and woken.

Words only.  Arguments that belong to the caller's model and machine are the caller's to add.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """How to run one kind of engine.

    Attributes:
        command: Program and arguments; ``{host}``, ``{port}`` and ``{tp}`` are filled in.
        env: Added to the environment.
        health: Path that answers 200 once the engine serves.
        sleep: Paths to POST ``{}`` to, in order, to free the accelerator; empty if it cannot.
        wake: The same to come back.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    health: str = "/health"
    sleep: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()


def reference_engine(model: str, *arguments: str) -> EngineKind:
    """``weightcast serve``.

    Args:
        model: Hugging Face folder, where the engine will run.
        *arguments: More of its command line.
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
    """``vllm serve``.

    Args:
        model: As vLLM takes it.
        *arguments: More of its command line; ``--enable-sleep-mode`` for ``RolloutEngines.sleep``.
        program: How vLLM is started, e.g. by the Python of an environment of its own.
        receiver: With weightcast's receiver in it, which must be installed there.
    """
    command = (*program, model, "--host", "{host}", "--port", "{port}", "--tensor-parallel-size", "{tp}")
    plugin = ("--weight-transfer-config", '{"backend": "weightcast"}') if receiver else ()
    return EngineKind(
        command=(*command, *plugin, *arguments),
        # Sleep and wake are routes of its development mode.
        env={"VLLM_SERVER_DEV_MODE": "1"} | ({"VLLM_PLUGINS": "weightcast"} if receiver else {}),
        sleep=("/sleep?level=1",),
        wake=("/wake_up",),
    )


def sglang_engine(
    model: str, *arguments: str, program: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")
) -> EngineKind:
    """SGLang's server.

    Args:
        model: As SGLang takes it.
        *arguments: More of its command line; ``--enable-memory-saver`` for ``RolloutEngines.sleep``.
        program: How SGLang is started, e.g. by the Python of an environment of its own.
    """
    return EngineKind(
        command=(
            *(*program, "--model-path", model, "--host", "{host}", "--port", "{port}", "--tp-size", "{tp}"),
            *arguments,
        ),
        sleep=("/release_memory_occupation",),
        wake=("/resume_memory_occupation",),
    )
