"""Facts from a vLLM server's ``/server_info`` that matter for an update.

The server is the only source: the packages installed in this process may differ from the server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightcast.adapters.encoders import TAKES_IMAGES
from weightcast.adapters.vllm.requests import decoded
from weightcast.comm.run_steps import EngineRequest
from weightcast.config import PauseMode
from weightcast.errors import WireError

SERVER_INFO = EngineRequest(method="GET", path="/server_info?config_format=json")
EXTENSION = "weightcast.plugins.vllm.worker_extension.Extension"
Backend = Literal["nccl", "ipc", "extension"]

DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"
CONFIG = '--weight-transfer-config \'{"backend": "nccl"}\' (broadcast) or \'{"backend": "ipc"}\' (same GPU)'
INSECURE = "start vLLM with VLLM_ALLOW_INSECURE_SERIALIZATION=1: its backend ipc reads handles from a pickle"
MOVES = (
    "it moves experts between ranks (enable_eplb), and vLLM would load new weights into places that experts have left: "
    "start vLLM without --enable-eplb"
)
OPEN_ROUTES = "vLLM's --api-key does not cover its weight routes: whoever reaches this port can replace the weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The options with which a server was started, as far as it tells.

    Attributes:
        backend: Backend of its weight transfer, or ``extension`` for our worker extension; None without either.
        told: True if the server told its options.
        other: Name of a backend that weightcast does not support.
        on_cpu: True if its weights are on a CPU.
        pickles: True if it reads pickles; None if it does not tell.
        prefix_caching: True if it reuses the KV cache across requests; None if it does not tell.
        draft: True if it has a speculative draft model.
        experts_apart: True if experts are spread over all of its ranks.
        moves_experts: True if it moves experts between ranks while it serves.
        takes_images: True if its model has an encoder beside the language model.
        quantised: vLLM's name of the quantisation of its weights; empty for none.
        instance: Id that changes with every start; empty if it does not tell.
    """

    backend: Backend | None = None
    told: bool = False
    other: str = ""
    on_cpu: bool = False
    pickles: bool | None = None
    prefix_caching: bool | None = None
    draft: bool = False
    dp_size: int = 1
    experts_apart: bool = False
    moves_experts: bool = False
    takes_images: bool = False
    quantised: str = ""
    instance: str = ""

    @staticmethod
    def of(server_info: bytes | None) -> Facts:
        """Reads the answer to ``SERVER_INFO``; None if there is no such route."""
        if server_info is None:
            return Facts()
        try:
            answer = decoded(server_info)
        except WireError:
            return Facts()
        config = _table(answer.get("vllm_config"))
        if not config:  # older versions give it as text
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
            draft=_has_draft(config.get("speculative_config")),
            moves_experts=parallel.get("enable_eplb") is True,
            takes_images=bool(_table(_table(config.get("model_config")).get("multimodal_config"))),
            quantised=str(_table(config.get("model_config")).get("quantization") or ""),
            dp_size=replicas if isinstance(replicas, int) and replicas > 0 else 1,
            experts_apart=parallel.get("enable_expert_parallel") is True,
            instance=str(config.get("instance_id") or ""),
        )

    def transports(self) -> tuple[str, ...]:
        """Transports that this server can use as it was started."""
        if not self.told:
            return ("broadcast", "ipc")
        if self.moves_experts:
            return ()
        if self.backend == "extension":
            return ("broadcast", "ipc")
        if self.backend == "nccl" and not self.on_cpu:
            return ("broadcast",)
        if self.backend == "ipc" and not self.on_cpu and self.pickles is not False:
            return ("ipc",)
        return ()

    def hazards(self) -> tuple[str, ...]:
        """Lists what an update leaves as it is, or cannot prove; one sentence each."""
        found: list[str] = []
        if self.draft:
            found.append("its draft model is not updated: answers stay right, and fewer of its tokens are accepted")
        if self.takes_images:
            found.append(TAKES_IMAGES)
        if self.quantised:
            found.append(
                f"its weights are quantised ({self.quantised}): vLLM computes them from what is sent, without a proof"
            )
        if self.backend == "extension" and self.on_cpu:
            found.append(
                "on a CPU vLLM 0.32 loads new weights next to those that it has packed: a tied lm_head stays old and "
                'experts stay unpacked; verify="behaviour" shows it, and the plug-in has no such defect'
            )
        return tuple(found)

    def no_pause(self) -> dict[PauseMode, str]:
        """Pause modes that it cannot be updated with, each with the reason."""
        if not self.prefix_caching:
            return {}
        return {
            "in_place": "it keeps the KV cache, and prefix caching would give results of the old weights to new "
            'requests; use pause="retract", or start vLLM with --no-enable-prefix-caching'
        }

    def advice(self) -> str:
        """Options to set for a missing transport, and warnings."""
        words: list[str] = []
        if self.moves_experts:
            words.append(MOVES)
        if self.told and self.on_cpu and self.backend in ("nccl", "ipc"):
            words.append(
                f"vLLM's backend {self.backend} needs a GPU; on a CPU use weightcast's: "
                'VLLM_PLUGINS=weightcast, --weight-transfer-config \'{"backend": "weightcast"}\''
            )
        elif self.told and self.backend is None:
            if self.other:
                words.append(f"its weight-transfer backend is {self.other}, which weightcast does not support")
            words.append(f"start vLLM with {CONFIG}")
        elif self.backend == "ipc" and self.pickles is False:
            words.append(INSECURE)
        if self.draft:
            words.append("its draft model is not updated")
        words.append(OPEN_ROUTES)
        return "; ".join(words)


def _has_draft(speculative: object) -> bool:
    """True for a draft model; prompt lookup and suffix trees have none."""
    if not isinstance(speculative, dict):
        return speculative is not None
    method: object = speculative.get("method")  # type: ignore[reportUnknownMemberType]
    return method not in ("ngram", "ngram_gpu", "suffix")


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}  # type: ignore[return-value]
