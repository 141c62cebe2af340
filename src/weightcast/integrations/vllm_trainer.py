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
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightcast.errors import ConfigError
from weightcast.exporters import casting
from weightcast.exporters.converter import BridgeExporter
from weightcast.report import UpdateReport
from weightcast.update.arguments import Targets, wire_dtype_of
from weightcast.update.updater import WeightUpdater
from weightcast.wire.layout import TensorSpec, dtype_name


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
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
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
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
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
        if source.held_names() is not None:
            raise ConfigError(
                "the source holds a part of the model on each rank, and its iteration yields no whole tensors",
                hint="pass the sharded module to weightcast.WeightUpdater, which gathers it",
            )
        targets = init_info.targets or getattr(client, "base_url", "")
        if not targets:
            raise ConfigError(
                f"a {type(client).__name__} has no base_url that says where vLLM is",
                hint='name the servers: WeightcastTrainerInitInfo(rank=..., targets=["http://host:port"])',
            )
        options = dict(init_info.options)
        wire_dtype = wire_dtype_of(options.pop("wire_dtype", None))
        casting.check_wire_dtype(wire_dtype)
        specs = [
            TensorSpec(name=meta.name, dtype=dtype_name(casting.wire_dtype(meta.dtype, wire_dtype)), shape=meta.shape)
            for meta in source.metadata()
        ]
        device = torch.device(init_info.device) if init_info.device is not None else _device_of(source)
        exporter = BridgeExporter(lambda: _stream(source), specs=specs, wire_dtype=wire_dtype, device=device)
        return cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            updater=WeightUpdater.connect(exporter, targets, **options),
            version=init_info.first_version - 1,
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


def _stream(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in source:
        yield name, tensor.detach()


def _device_of(source: WeightSource) -> torch.device:
    """The device of a source's tensors; reading the first one is collective, as reading all of them is."""
    for _, tensor in source:
        return tensor.device
    raise ConfigError("the WeightSource has no tensors")


WeightTransferTrainerFactory.register_engine("weightcast", WeightcastTrainerEngine)
