"""What a vLLM server says of itself, as facts that matter for an update.  The server is asked; nothing is assumed of
the packages that this process happens to have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightcast.engines.vllm.steps import decoded
from weightcast.errors import WireError

EXTENSION = "weightcast.plugins.vllm.extension.Extension"
Backend = Literal["nccl", "ipc", "extension"]

DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"
CONFIG = '--weight-transfer-config \'{"backend": "nccl"}\' (broadcast) or \'{"backend": "ipc"}\' (same GPU)'
INSECURE = "start vLLM with VLLM_ALLOW_INSECURE_SERIALIZATION=1: its backend ipc reads handles from a pickle"
OPEN_ROUTES = "vLLM's --api-key does not cover its weight routes: whoever reaches this port can replace the weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """How a server was started, as far as it says.

    Attributes:
        backend: Of its weight transfer, or ``extension`` for our worker extension; None for neither.
        told: True if it says how it was started.
        other: Name of a backend that is not spoken here.
        on_cpu: True if its weights are on a CPU.
        pickles: True if it reads pickles; None if it does not say.
        prefix_caching: Likewise for reusing the cache of one request for another.
        draft: True if it has a speculative draft model.
        quantization: How its weights are quantised; empty for not at all.
        dp_size: Data-parallel replicas.
        experts_apart: True if experts are spread over all of its ranks.
        instance: Changes whenever it is started; empty if it does not say.
    """

    backend: Backend | None = None
    told: bool = False
    other: str = ""
    on_cpu: bool = False
    pickles: bool | None = None
    prefix_caching: bool | None = None
    draft: bool = False
    quantization: str = ""
    dp_size: int = 1
    experts_apart: bool = False
    instance: str = ""

    @staticmethod
    def of(server_info: bytes | None) -> Facts:
        """From the answer to ``/server_info?config_format=json``; None if there is no such route."""
        if server_info is None:
            return Facts()
        try:
            answer = decoded(server_info)
        except WireError:
            return Facts()
        config = _table(answer.get("vllm_config"))
        if not config:  # it says so in prose only
            return Facts()
        environment = _table(answer.get("vllm_env"))
        transfer = _table(config.get("weight_transfer_config")).get("backend")
        parallel = _table(config.get("parallel_config"))
        extension = parallel.get("worker_extension_cls")
        replicas = parallel.get("data_parallel_size")
        backend: Backend | None = None
        other = ""
        if transfer in ("nccl", "ipc"):
            backend = transfer
        elif extension == EXTENSION:
            backend = "extension"
        elif transfer:
            other = str(transfer)
        pickles = environment.get("VLLM_ALLOW_INSECURE_SERIALIZATION")
        caching = _table(config.get("cache_config")).get("enable_prefix_caching")
        return Facts(
            backend=backend,
            told=True,
            other=other,
            on_cpu=_table(config.get("device_config")).get("device") == "cpu",
            pickles=None if pickles is None else bool(pickles),
            prefix_caching=None if caching is None else bool(caching),
            draft=config.get("speculative_config") is not None,
            quantization=str(_table(config.get("model_config")).get("quantization") or ""),
            dp_size=replicas if isinstance(replicas, int) and replicas > 0 else 1,
            experts_apart=parallel.get("enable_expert_parallel") is True,
            instance=str(config.get("instance_id") or ""),
        )

    def transports(self) -> tuple[str, ...]:
        """What it can take an update by, as it was started."""
        if not self.told:
            return ("broadcast", "ipc")
        if self.backend == "extension":
            return ("broadcast", "ipc")
        if self.backend == "nccl" and not self.on_cpu:
            return ("broadcast",)
        if self.backend == "ipc" and not self.on_cpu and self.pickles is not False:
            return ("ipc",)
        return ()

    def advice(self) -> str:
        """What to set for what is missing, and what else is worth knowing."""
        words: list[str] = []
        if self.told and self.on_cpu and self.backend in ("nccl", "ipc"):
            words.append(
                f"vLLM's backend {self.backend} needs a GPU; on a CPU use weightcast's: "
                'VLLM_PLUGINS=weightcast, --weight-transfer-config \'{"backend": "weightcast"}\''
            )
        elif self.told and self.backend is None:
            has = f"its weight-transfer backend is {self.other}, which is not spoken here; " if self.other else ""
            words.append(f"{has}start vLLM with {CONFIG}")
        elif self.backend == "ipc" and self.pickles is False:
            words.append(INSECURE)
        if self.draft:
            words.append("its draft model is not updated")
        words.append(OPEN_ROUTES)
        return "; ".join(words)


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}  # type: ignore[return-value]
