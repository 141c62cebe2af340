"""Facts from a vLLM server's ``/server_info`` that matter for an update.

The server is the only source: the packages installed in this process may differ from the server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weightcast.adapters.requests import json_object
from weightcast.adapters.stock import TAKES_IMAGES
from weightcast.comm.run_steps import EngineRequest
from weightcast.config import PauseMode

SERVER_INFO = EngineRequest(method="GET", path="/server_info?config_format=json")
Backend = Literal["nccl", "ipc"]

DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1"
CONFIG = '--weight-transfer-config \'{"backend": "nccl"}\' (broadcast) or \'{"backend": "ipc"}\' (same GPU)'
INSECURE = "start vLLM with VLLM_ALLOW_INSECURE_SERIALIZATION=1: its backend ipc reads handles from a pickle"
MOVES = (
    "it moves experts between ranks (enable_eplb), and vLLM would load new weights into places that experts have left: "
    "start vLLM without --enable-eplb"
)
# vLLM's own connectors that drop what they keep when its caches are dropped, with the setting that must be so.
_EMPTIED = {
    "OffloadingConnector": ("spec_name", "CPUOffloadingSpec"),
    "SimpleCPUOffloadConnector": ("kv_offload_backend", "cpu"),
}
OPEN_ROUTES = "vLLM's --api-key does not cover its weight routes: whoever reaches this port can replace the weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The options with which a server was started, as far as it tells.

    Attributes:
        backend: Backend of its weight transfer; None without one.
        told: True if the server told its options.
        other: Name of a backend that weightcast does not support.
        on_cpu: True if its weights are on a CPU.
        pickles: True if it reads pickles; None if it does not tell.
        prefix_caching: True if it reuses the KV cache across requests; None if it does not tell.
        draft: True if it has a speculative draft model.
        experts_apart: True if experts are spread over all of its ranks.
        moves_experts: True if it moves experts between ranks while it serves.
        experts: How it was told to compute experts; empty if it has none.
        offloads: True if it keeps KV caches outside of its own.
        never_emptied: Store that answers requests and that no pause empties, in words; empty for none.
        adapters: True if it serves LoRA adapters.
        fixed_scales: True if it calculates the scales of its KV cache once.
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
    experts: str = ""
    offloads: bool = False
    never_emptied: str = ""
    adapters: bool = False
    fixed_scales: bool = False
    takes_images: bool = False
    quantised: str = ""
    instance: str = ""

    @staticmethod
    def of(server_info: bytes | None) -> Facts:
        """Reads the answer to ``SERVER_INFO``; None if there is no such route."""
        if server_info is None:
            return Facts()
        answer = json_object(server_info) or {}
        config = _table(answer.get("vllm_config"))
        if not config:
            return Facts()
        environment = _table(answer.get("vllm_env"))
        transfer = _table(config.get("weight_transfer_config")).get("backend")
        parallel = _table(config.get("parallel_config"))
        replicas = parallel.get("data_parallel_size")
        backend: Backend | None = None
        other = ""
        if transfer in ("nccl", "ipc"):
            backend = transfer
        elif transfer:
            other = str(transfer)
        pickles = environment.get("VLLM_ALLOW_INSECURE_SERIALIZATION")
        cache = _table(config.get("cache_config"))
        caching = cache.get("enable_prefix_caching")
        connector = _table(config.get("kv_transfer_config"))
        return Facts(
            backend=backend,
            told=True,
            other=other,
            on_cpu=_table(config.get("device_config")).get("device") == "cpu",
            pickles=None if pickles is None else bool(pickles),
            prefix_caching=None if caching is None else bool(caching),
            draft=_has_draft(config.get("speculative_config")),
            moves_experts=parallel.get("enable_eplb") is True,
            experts=str(_table(config.get("kernel_config")).get("moe_backend") or "auto")
            if parallel.get("is_moe_model") is True
            else "",
            offloads=bool(connector.get("kv_connector") or cache.get("kv_offloading_size")),
            never_emptied=_never_emptied(connector, _table(config.get("ec_transfer_config"))),
            adapters=bool(config.get("lora_config")),
            fixed_scales=cache.get("calculate_kv_scales") is True,
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
        if self.moves_experts or self.never_emptied:
            return ()
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
        if self.experts and not self.on_cpu:
            found.append(
                f"its kernels for experts (--moe-backend {self.experts}) may keep a layout of their own: vLLM makes it "
                'again from what is sent, without a proof; verify="behaviour" compares answers'
            )
        if self.adapters:
            found.append(
                "adapters that vLLM loads from folders stay as they are, also if they were trained for other weights"
            )
        if self.fixed_scales:
            found.append(
                "vLLM calculates the scales of its KV cache once (--calculate-kv-scales), with the first weights"
            )
        if self.quantised:
            found.append(
                f"its weights are quantised ({self.quantised}): vLLM computes them from what is sent, without a proof"
            )
        return tuple(found)

    def no_pause(self) -> dict[PauseMode, str]:
        """Pause modes that it cannot be updated with, each with the reason."""
        if self.prefix_caching:
            return {
                "in_place": "it keeps the KV cache, and prefix caching would give results of the old weights to new "
                'requests; use pause="retract", or start vLLM with --no-enable-prefix-caching'
            }
        kept = (
            "KV caches outside of its own"
            if self.offloads
            else "the encoder's outputs for images that it has seen"
            if self.takes_images
            else ""
        )
        if not kept:
            return {}
        return {"in_place": f'it keeps {kept}, which would answer new requests; use pause="retract"'}

    def advice(self) -> str:
        """Options to set for a missing transport, and warnings."""
        words: list[str] = []
        if self.moves_experts:
            words.append(MOVES)
        if self.never_emptied:
            words.append(self.never_emptied)
        if self.told and self.on_cpu and self.backend in ("nccl", "ipc"):
            words.append(
                f"vLLM's backend {self.backend} needs a GPU; on a CPU use weightcast's: "
                '--weight-transfer-config \'{"backend": "weightcast"}\''
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


def _never_emptied(connector: Mapping[str, Any], encoders: Mapping[str, Any]) -> str:
    """The store that keeps what old weights computed, in words with the remedy; empty if there is none."""
    name = connector.get("kv_connector")
    setting, value = _EMPTIED.get(str(name), ("", ""))
    emptied = setting and _table(connector.get("kv_connector_extra_config")).get(setting, value) == value
    if name and (not emptied or connector.get("kv_connector_module_path")):
        kept, option = f"the KV connector {name}", "--kv-transfer-config"
    elif encoders.get("ec_connector"):
        kept, option = f"the encoder connector {encoders['ec_connector']}", "--ec-transfer-config"
    else:
        return ""
    return (
        f"{kept} keeps what the old weights computed and gives it to new requests, in every pause mode: "
        f"start vLLM without {option}"
    )


def _has_draft(speculative: object) -> bool:
    """True for a draft model; prompt lookup and suffix trees have none."""
    if not isinstance(speculative, dict):
        return speculative is not None
    method: object = speculative.get("method")  # type: ignore[reportUnknownMemberType]
    return method not in ("ngram", "ngram_gpu", "suffix")


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}  # type: ignore[return-value]
