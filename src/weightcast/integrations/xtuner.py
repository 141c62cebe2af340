"""xtuner's weight update with a ``WeightUpdater``: the class takes the place of ``xtuner.v1.rl.weight_update``'s own.

In xtuner's training worker::

    from weightcast.integrations.xtuner import UpdateWeighter

    self.update_weighter = UpdateWeighter(rank=self.rank, logger=self.logger, config=self.config, engine=self._engine)

xtuner calls ``bind_rollout_weight_update`` with the targets of its registry before every update, and
``weight_update`` (``update_weights`` before 21 August 2026) on every training rank.  xtuner still exports its model
itself, batch by batch; everything after that is ours: transport, pause, proof, switch and resume.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Unpack

import torch

from weightcast.config import Target, TransportName
from weightcast.errors import ConfigError
from weightcast.exporters.converter import BridgeExporter, NamedTensors
from weightcast.report import UpdateReport
from weightcast.update.arguments import UpdateOptions, config_of, wire_dtype_of
from weightcast.update.updater import WeightUpdater

_TRANSPORTS: dict[str, TransportName] = {"ipc": "ipc", "nccl": "broadcast", "checkpoint_engine": "checkpoint-engine"}


class UpdateTarget(Protocol):
    """The fields of xtuner's ``RolloutWeightUpdateTarget`` that matter here."""

    @property
    def server_url(self) -> str: ...

    @property
    def lifecycle_state(self) -> str:
        """State in xtuner's registry: ``active``, ``inactive`` or ``recovering``."""
        ...


class UpdateWeighter:
    """Keeps xtuner's rollout servers at the training weights.  Every training rank has one and calls it in step.

    Args:
        logger: xtuner's logger; the reports go there, on rank 0.
        config: xtuner's training worker config, for its weight iterator.
        engine: xtuner's training engine, for its weight iterator.
        weights: Function that yields (Hugging Face name, whole tensor) on every rank in step; None takes xtuner's own
            ``WeightIterator``.
        **options: Keyword arguments of ``WeightUpdater.connect``.  ``transport`` is that of xtuner's
            ``weight_transport_type`` unless it is given here; ``pause`` is ``abort``, as xtuner pauses.

    Attributes:
        version: Version that was sent last; 0 before the first.  ``weight_update`` counts it up.
        report: Report of the last update; None before.
    """

    def __init__(
        self,
        *,
        rank: int,
        logger: Any,
        config: Any = None,
        engine: Any = None,
        weights: NamedTensors | None = None,
        **options: Unpack[UpdateOptions],
    ) -> None:
        config_of(options)  # refuses what is wrong now, not at the first update
        self.version = 0
        self.report: UpdateReport | None = None
        self._rank = rank
        self._logger = logger
        self._config = config
        self._engine = engine
        self._weights = weights
        self._options = options
        self._targets: tuple[Target, ...] = ()
        self._transport: TransportName | None = None
        self._read: NamedTensors | None = None
        self._registered: list[tuple[str, torch.Tensor]] | None = None
        self._updater: WeightUpdater | None = None

    def bind_rollout_weight_update(
        self,
        *,
        targets: Sequence[UpdateTarget],
        rollout_config: Any,
        weight_transport_type: str | None = None,
        **_addresses: Any,
    ) -> None:
        """Takes the targets of xtuner's registry; only active ones are updated.  Nothing is sent yet.

        A server that is not active is left out and becomes a target again once xtuner says that it is active.  It then
        gets the full weights with the next update.

        Args:
            rollout_config: xtuner's rollout config; its API key is used, and its transport.
            weight_transport_type: xtuner's transport, in versions that pass it here (July and August 2026).
            **_addresses: Host and port of xtuner's own process group, in the same versions; not used.

        Raises:
            ConfigError: No target is active, or xtuner's transport has no counterpart.
        """
        active = [target for target in targets if target.lifecycle_state == "active"]
        if not active:
            states = ", ".join(f"{target.server_url} {target.lifecycle_state}" for target in targets) or "no targets"
            raise ConfigError(
                f"no rollout server is active: {states}", hint="restart the rollout workers before the weight update"
            )
        key = rollout_config.api_key
        key = key[0] if isinstance(key, list) else key
        urls = dict.fromkeys(target.server_url for target in active)  # one server may be the endpoint of several ranks
        theirs = weight_transport_type or getattr(rollout_config, "weight_transport_type", None)
        transport = self._options.get("transport") or _transport_of(theirs)
        if transport != self._transport:
            self.close()
        self._targets, self._transport = tuple(Target(url, api_key=key) for url in urls), transport
        # The iterator of this rollout configuration; the updater reads whichever is bound when it sends.
        self._read = self._weights or _xtuner_weights(self._config, self._engine, targets, rollout_config, self._rank)

    def weight_update(self, **kwargs: Any) -> UpdateReport | None:
        """Sends the weights as the next version.  Collective over all training ranks.

        Where trainer and rollout share GPUs through a checkpoint engine, xtuner calls this twice: it registers the
        weights, moves its model off the GPUs, and then has them sent.  In between every training rank keeps the whole
        weights in host memory.

        Args:
            **kwargs: xtuner's own.  ``need_update=False`` keeps the weights and sends nothing; ``need_register=False``
                sends what was kept and does not read the model.  All others are ignored.

        Returns:
            The report; None if nothing was to be sent.

        Raises:
            ConfigError: ``bind_rollout_weight_update`` was not called, or the weights that are to be sent were not
                registered.
            UpdateFailed, TargetError, TrainerRankFailed: As ``WeightUpdater.connect`` and ``update``.
        """
        if self._read is None:
            raise ConfigError("no rollout servers are bound", hint="call bind_rollout_weight_update() first")
        if kwargs.get("need_register", True):
            self._registered = None
            if not kwargs.get("need_update", True):
                self._registered = [(name, tensor.to("cpu", copy=True)) for name, tensor in self._read()]
                return None
        elif self._registered is None:
            raise ConfigError(
                "need_register=False sends registered weights, and none are registered",
                hint="call weight_update(need_register=True, need_update=False) while the model is on its device",
            )
        if self._updater is None:
            self._updater = self._connect()
        else:
            self._updater.retarget(self._targets)
        self.report = self._updater.update(version=self.version + 1)
        self.version += 1
        self._registered = None
        if self._rank == 0:
            self._logger.info(f"weights updated\n{self.report}")
        return self.report

    def update_weights(self) -> UpdateReport | None:
        """Does the same as ``weight_update``; xtuner called it by this name before 21 August 2026."""
        return self.weight_update()

    def close(self) -> None:
        """Closes groups, buffers and connections.  Safe to call twice."""
        updater, self._updater = self._updater, None
        if updater is not None:
            updater.close()

    def _connect(self) -> WeightUpdater:
        options: UpdateOptions = {"pause": "abort", **self._options, "transport": self._transport or "auto"}
        exporter = BridgeExporter(
            self._tensors,
            wire_dtype=wire_dtype_of(options.pop("wire_dtype", None)),
            device=_device(),
        )
        return WeightUpdater.connect(exporter, self._targets, **options)

    def _tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        assert self._read is not None  # weight_update() refuses first
        return self._read() if self._registered is None else self._registered


def _transport_of(name: str | None) -> TransportName:
    if name is None:
        return "auto"
    try:
        return _TRANSPORTS[name.lower()]
    except KeyError:
        raise ConfigError(
            f"weight_transport_type={name!r} has no counterpart: choose one of {', '.join(_TRANSPORTS)}"
        ) from None


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _xtuner_weights(
    config: Any, engine: Any, targets: Sequence[Any], rollout_config: Any, rank: int
) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """Returns a function that reads xtuner's own export."""
    from xtuner.v1.rl.weight_update.data import RolloutWeightUpdateInfo
    from xtuner.v1.rl.weight_update.weight_iterator import WeightIterator

    # Whole tensors in Hugging Face names, without an end marker: what xtuner exports for SGLang over NCCL.  Its
    # ``from_targets`` would refuse what its own transports cannot do, such as NCCL to vLLM.
    info = RolloutWeightUpdateInfo(
        rollout_config=rollout_config,
        weight_update_targets=tuple(targets),
        train_rank=rank,
        transport_type="nccl",
        backend="sglang",
    )
    names: dict[str, list[str]] = {}

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        iterator = WeightIterator(config=config, engine=engine, rollout_info=info, global_hf_keys_mapping_cache=names)
        for group in iterator.iter_batch_groups():
            for batch in group:
                yield from batch.state_dict.items()

    return read
