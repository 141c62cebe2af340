"""Stand-ins for the parts of miles and xtuner that our code for them meets.

Neither package is on an index in a version that has these interfaces.  The stand-ins have the names, the signatures
and the order of calls of the projects' sources: miles' ``weight_update/{protocol,updater,hf_weight_iterator}.py`` at
78669cf9c, xtuner's ``v1/rl/weight_update/{data,weight_iterator,update_weighter}.py`` at b934f4620.
``test_sources.py`` runs xtuner's sources themselves.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

Weights = dict[str, torch.Tensor]


# -- miles


@dataclass(frozen=True)
class WeightUpdatePlacement:
    gather_pp: bool
    gather_tp: bool = True
    gather_ep: bool = True


class WeightTransferProtocol(ABC):
    required_placement: ClassVar[WeightUpdatePlacement] = WeightUpdatePlacement(gather_pp=False)
    supports_lora: ClassVar[bool] = False
    use_weight_update_session: ClassVar[bool] = True
    needs_base_resync_for_lora: bool = False

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.rollout_engines: Any = None
        self.is_sender: bool | None = None
        self.group_name = "miles"
        self.update_weight_metrics: dict[str, float] = {}

    @abstractmethod
    def connect(
        self,
        rollout_engines: Any,
        engine_gpu_counts: Any,
        engine_gpu_offsets: Any,
        parallel_state: Any,
        placement: WeightUpdatePlacement,
        selector: str,
    ) -> None: ...

    def begin_sync(self, weight_version: int, iter_buckets: Callable[..., Iterator[Any]]) -> bool:
        return True

    @abstractmethod
    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]]) -> None: ...

    def after_base_weights(self) -> None: ...  # noqa: B027  # an optional hook

    def finalize(self, weight_version: int) -> None: ...  # noqa: B027  # an optional hook

    def after_engines_resumed(self) -> None: ...  # noqa: B027  # an optional hook

    def pop_metrics(self) -> dict[str, float]:
        metrics, self.update_weight_metrics = self.update_weight_metrics, {}
        return metrics


@dataclass(frozen=True)
class SGLangApiClient:
    server_url: str
    api_key: str | None = None


class MilesUpdater:
    """The driver: its calls of a protocol, in their order, on every training rank."""

    def __init__(self, protocol: Any, weights: Weights, *, bucket_tensors: int = 3) -> None:
        self.protocol = protocol
        self.weights = weights
        self.bucket_tensors = bucket_tensors
        self.weight_version = 0

    def connect_rollout_engines(self, urls: list[str]) -> None:
        engines = [SGLangApiClient(url) for url in urls]
        self.protocol.connect(engines, None, None, None, self.protocol.required_placement, "all")
        assert self.protocol.is_sender is not None

    def update_weights(self) -> None:
        if not self.protocol.begin_sync(self.weight_version + 1, self._iter_buckets):
            return
        self.weight_version += 1
        assert not self.protocol.use_weight_update_session  # the engines' session is the protocol's own
        for bucket in self._iter_buckets(materialize=bool(self.protocol.is_sender)):
            if self.protocol.is_sender:
                self.protocol.send_bucket(bucket)
        self.protocol.after_base_weights()
        dist.barrier()
        self.protocol.finalize(self.weight_version)
        self.protocol.after_engines_resumed()

    def _iter_buckets(self, *, materialize: bool) -> Iterator[list[tuple[str, torch.Tensor]]]:
        items = list(self.weights.items())
        for start in range(0, len(items), self.bucket_tensors):
            dist.barrier()  # reading is collective
            if materialize:  # "freshly allocated per bucket"
                yield [(name, tensor.clone()) for name, tensor in items[start : start + self.bucket_tensors]]


def miles_standin(settings: dict[str, Any], weights: Weights) -> MilesUpdater:
    """The stand-in for miles' updater, with the protocol of the page about miles.

    Args:
        settings: Fields of miles' arguments.
        weights: Tensors in Hugging Face names.
    """
    install_miles()
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "miles.md").read_text()
    _, _, rest = page.partition("```python\n")
    code, _, _ = rest.partition("```\n")
    protocol = ModuleType("weightcast_for_miles")
    exec(compile(code, "weightcast_for_miles.py", "exec"), protocol.__dict__)
    return MilesUpdater(protocol.build_protocol(Namespace(**settings)), weights)


def install_miles() -> None:
    """Makes ``import miles...`` find the stand-ins."""
    root = "miles.backends.training_utils.weight_update"
    parts = root.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for name, value in (("protocol", WeightTransferProtocol), ("hf_weight_iterator", WeightUpdatePlacement)):
        module = ModuleType(f"{root}.{name}")
        setattr(module, value.__name__, value)
        sys.modules[module.__name__] = module


# -- xtuner


@dataclass(frozen=True)
class RolloutWeightUpdateTarget:
    endpoint_rank: int
    update_ranks: tuple[int, ...]
    server_url: str
    lifecycle_state: str


@dataclass
class RolloutConfig:
    weight_transport_type: str | None
    api_key: list[str] | str | None = None


@dataclass(frozen=True)
class RolloutWeightUpdateInfo:
    rollout_config: RolloutConfig
    weight_update_targets: tuple[RolloutWeightUpdateTarget, ...]
    train_rank: int
    transport_type: str
    backend: str


@dataclass
class WeightUpdateBatch:
    state_dict: Weights
    train_enable_ep: bool = False
    finished: bool = False


class WeightIterator:
    """Splits ``engine.model`` in batches.  LMDeploy's pytorch and vLLM get an empty batch at the end."""

    def __init__(self, *, config: Any, engine: Any, rollout_info: Any, global_hf_keys_mapping_cache: Any) -> None:
        self.engine = engine
        self.info = rollout_info

    def iter_batch_groups(self) -> Iterator[Iterator[WeightUpdateBatch]]:
        yield self._batches()

    def _batches(self) -> Iterator[WeightUpdateBatch]:
        items = list(self.engine.model.items())
        for start in range(0, len(items), 4):
            dist.barrier()  # reading is collective
            yield WeightUpdateBatch(dict(items[start : start + 4]))
        if self.info.backend in ("pytorch", "vllm"):
            yield WeightUpdateBatch({}, finished=True)


def install_xtuner() -> None:
    """Makes ``import xtuner...`` find the stand-ins."""
    root = "xtuner.v1.rl.weight_update"
    parts = root.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for name, value in (("data", RolloutWeightUpdateInfo), ("weight_iterator", WeightIterator)):
        module = ModuleType(f"{root}.{name}")
        setattr(module, value.__name__, value)
        sys.modules[module.__name__] = module
