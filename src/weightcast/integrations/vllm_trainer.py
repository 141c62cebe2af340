"""A trainer-side engine for vLLM's ``WeightTransferTrainerFactory``: the backend ``weightcast``.

::

    import weightcast.integrations.vllm_trainer as ours          # registers the backend

    engine = WeightTransferTrainerFactory.trainer_init(
        ours.WeightcastTrainerInitInfo(rank=rank, options={"wire_dtype": "bf16"}),
        client=HTTPVLLMWeightSyncClient("http://10.0.3.8:8000"),
        source=ModuleSource(model),
    )
    engine.send_weights()

vLLM itself runs with our receiver (``--weight-transfer-config '{"backend": "weightcast"}'``).  The session goes over
the receiver's own routes, so it needs none of vLLM's development routes, and the client is only asked for its address.

vLLM's ``WeightSource`` has had two forms: until 0.32 a method ``metadata()``, iteration and (from 0.30) ``held_names``;
from 0.33 a property ``metadata``, ``iter_full`` and ``owned_names``.  ``_Source`` reads both.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

try:
    from vllm.distributed.weight_transfer.base import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        VLLMWeightSyncClient,
        WeightSource,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if "config_cls" in TrainerWeightTransferEngine.__annotations__:
        raise ImportError("its engines take a config beside their init info")  # 0.26 alone
except ImportError as error:
    raise ImportError(
        f"this vLLM has no trainer-side factory of the form that vLLM has from 0.27: {error}; "
        "update vLLM, or pass the model to weightcast.WeightUpdater.connect, which needs no vLLM in the trainer"
    ) from error

from weightcast.errors import ConfigError
from weightcast.exporters import casting
from weightcast.exporters.converter import BridgeExporter
from weightcast.report import UpdateReport
from weightcast.update.arguments import Targets, UpdateOptions, wire_dtype_of
from weightcast.update.updater import WeightUpdater
from weightcast.wire.layout import TensorSpec, dtype_name

_GATHERED = "pass the sharded module to weightcast.WeightUpdater.connect, which gathers it"


@dataclass
class WeightcastTrainerInitInfo(TrainerInitInfo):
    """Settings of the engine.

    Attributes:
        targets: The vLLM servers, as ``WeightUpdater.connect`` takes them; empty takes the client's ``base_url``.
        options: Keyword arguments of ``WeightUpdater.connect``, ``wire_dtype`` included.
        first_version: Version of the first ``send_weights``; every call counts one up.
        device: Device of the buckets; None takes that of the first weight.
    """

    backend: ClassVar[str] = "weightcast"
    targets: Targets = ()
    options: UpdateOptions = field(default_factory=UpdateOptions)
    first_version: int = 1
    device: str | None = None


class WeightcastTrainerEngine(TrainerWeightTransferEngine[WeightcastTrainerInitInfo]):
    """Sends a ``WeightSource`` to vLLM servers with our receiver.  Every trainer rank has one and calls it in step.

    Attributes:
        version: Version of the last ``send_weights``, one less than ``first_version`` before that.
        report: Report of the last ``send_weights``; None before.
    """

    init_info_cls = WeightcastTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        is_sender: bool,
        updater: WeightUpdater,
        version: int,
        rank: int = 0,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.rank = rank
        self.version = version
        self.report: UpdateReport | None = None
        self._updater = updater

    @classmethod
    def trainer_init(
        cls,
        init_info: WeightcastTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Connects to the servers.  Collective over all trainer ranks.

        Raises:
            ConfigError: There is no source or no address, each rank holds only a part of the model, or the options
                cannot work.
            TargetUnreachable, TargetRejected: A server does not answer, or refuses.
        """
        if source is None:
            raise ConfigError("there is no WeightSource", hint="pass source=ModuleSource(model)")
        whole = _Source(source)
        whole.check(init_info.rank)
        targets = init_info.targets or getattr(client, "base_url", "")
        if not targets:
            raise ConfigError(
                f"a {type(client).__name__} has no base_url that says where vLLM is",
                hint='name the servers: WeightcastTrainerInitInfo(rank=..., targets=["http://host:port"])',
            )
        options: UpdateOptions = {**init_info.options}
        wire_dtype = wire_dtype_of(options.pop("wire_dtype", None))
        casting.check_wire_dtype(wire_dtype)
        specs = [
            TensorSpec(name=meta.name, dtype=dtype_name(casting.wire_dtype(meta.dtype, wire_dtype)), shape=meta.shape)
            for meta in whole.metadata()
        ]
        device = torch.device(init_info.device) if init_info.device is not None else whole.device()
        exporter = BridgeExporter(whole.tensors, specs=specs, wire_dtype=wire_dtype, device=device)
        return cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            updater=WeightUpdater.connect(exporter, targets, **options),
            version=init_info.first_version - 1,
            rank=init_info.rank,
        )

    def send_weights(self) -> None:
        """Sends the weights as the next version, and returns when every server serves it.  Collective.

        Raises:
            UpdateFailed, TrainerRankFailed, ConfigError: As ``WeightUpdater.update``.
        """
        version = self.version + 1
        self.report = self._updater.update(version=version)
        self.version = version

    def shutdown(self) -> None:
        """Closes groups, buffers and connections.  Safe to call twice."""
        self._updater.close()


class _Source:
    """Reads a ``WeightSource`` in the form that this vLLM's sources have."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def metadata(self) -> list[Any]:
        """vLLM's ``ParamMeta`` of every tensor."""
        found: Any = self._source.metadata
        found = found() if callable(found) else found
        return list(found)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every name with its whole tensor."""
        full = getattr(self._source, "iter_full", None)
        for name, tensor in self._source if full is None else full():
            yield name, tensor.detach()

    def device(self) -> torch.device:
        """Device of the tensors; reading the first one is collective, as reading all of them is."""
        for _, tensor in self.tensors():
            return tensor.device
        raise ConfigError("the WeightSource has no tensors")

    def check(self, rank: int) -> None:
        """Raises ``ConfigError`` if a trainer rank cannot read every tensor whole from its source."""
        source = self._source
        if not getattr(source, "implements_iter_full", lambda: True)():
            raise ConfigError(
                f"a {type(source).__name__} yields only this rank's pieces of the tensors (iter_local)",
                hint=f"implement iter_full, or {_GATHERED}",
            )
        why = self._part_of_a_rank(rank)
        if why:
            raise ConfigError(
                f"the source holds a part of the model on each rank, and yields no whole model: {why}",
                hint=_GATHERED,
            )

    def _part_of_a_rank(self, rank: int) -> str:
        """Says what a rank does not hold, from what every rank knows if it can: all should refuse; else empty."""
        if hasattr(self._source, "owned_names"):
            owners = {meta.name: set(meta.owners) for meta in self.metadata() if meta.owners is not None}
            everybody = set[int]().union(*owners.values())
            for name, ranks in owners.items():
                if ranks != everybody:
                    return f"of its ranks {sorted(everybody)}, only {sorted(ranks)} own {name}"
            owned = set(self._source.owned_names(rank))
            missing = [meta.name for meta in self.metadata() if meta.name not in owned]
            return f"rank {rank} does not own {missing[0]}" if missing else ""
        held = getattr(self._source, "held_names", lambda: None)()
        return "" if held is None else f"held_names() of rank {rank} has {len(held)} of {len(self.metadata())} tensors"


WeightTransferTrainerFactory.register_engine("weightcast", WeightcastTrainerEngine)
