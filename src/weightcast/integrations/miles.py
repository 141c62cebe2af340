"""A weight transfer protocol for miles.

::

    --custom-weight-transfer-protocol-path weightcast.integrations.miles.build_protocol

miles gathers its model to Hugging Face tensors, bucket by bucket, and hands each bucket to a protocol.  This one feeds
them to a ``WeightUpdater`` on rank 0, which brings every engine to the new version in one transaction: pause, buckets,
proof, switch, resume.  So miles' own session is off.

Options of ``WeightUpdater.connect`` come from ``args.weightcast``, a mapping that miles' ``--custom-config-path`` can
set.  The pause mode is that of ``--pause-generation-mode`` unless it is set there.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import queue
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from miles.backends.training_utils.weight_update.hf_weight_iterator import WeightUpdatePlacement
from miles.backends.training_utils.weight_update.protocol import WeightTransferProtocol

from weightcast.comm.trainer_group import TrainerGroup
from weightcast.config import Target
from weightcast.errors import ConfigError, DeadlineExceeded, TrainerRankFailed
from weightcast.exporters import casting
from weightcast.exporters.converter import BridgeExporter
from weightcast.report import UpdateReport
from weightcast.update.arguments import wire_dtype_of
from weightcast.update.updater import WeightUpdater
from weightcast.wire.layout import TensorSpec

_Bucket = list[tuple[str, torch.Tensor]]

_TIMEOUT_S = 120.0  # as WeightUpdater.connect's
_END_DEADLINES = 6  # what is left of an update after the last bucket: proof, switch, and the way back after a failure
_POLL_S = 0.1


class _Feed:
    """Hands buckets from the thread that makes them to the thread that sends them, one at a time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._buckets: queue.Queue[_Bucket | None] = queue.Queue(maxsize=1)
        self._reader_gone = threading.Event()

    def put(self, bucket: _Bucket | None) -> None:
        """Waits for room; returns at once if nobody reads any more.  None ends the feed."""
        while not self._reader_gone.is_set():
            try:
                self._buckets.put(bucket, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of every bucket until the feed ends.

        Raises:
            DeadlineExceeded: No bucket came in time.
        """
        while (bucket := self._next()) is not None:
            yield from bucket

    def stop_reading(self) -> None:
        """Says that nobody reads any more."""
        self._reader_gone.set()

    def _next(self) -> _Bucket | None:
        try:
            return self._buckets.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(who="miles", waiting_for="its next bucket", timeout_s=self._timeout_s) from None


class WeightcastProtocol(WeightTransferProtocol):
    """Sends miles' buckets to its rollout engines through a ``WeightUpdater`` on rank 0.

    Attributes:
        report: On rank 0, the report of the last sync; None before and elsewhere.
    """

    required_placement: ClassVar[WeightUpdatePlacement] = WeightUpdatePlacement(gather_pp=True)
    supports_lora: ClassVar[bool] = False
    use_weight_update_session: ClassVar[bool] = False

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.group_name = "weightcast"
        self.report: UpdateReport | None = None
        options = dict(getattr(args, "weightcast", None) or {})
        self._wire_dtype = wire_dtype_of(options.pop("wire_dtype", None))
        options.setdefault("pause", getattr(args, "pause_generation_mode", "abort"))
        self._options: dict[str, Any] = options
        self._timeout_s = float(options.get("timeout_s", _TIMEOUT_S))
        self._ranks: TrainerGroup | None = None
        self._targets: tuple[Target, ...] = ()
        self._updater: WeightUpdater | None = None
        self._specs: list[TensorSpec] | None = None  # empty on ranks that send nothing; None before the first sync
        self._device = torch.device("cpu")
        self._feed = _Feed(self._timeout_s)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightcast-update")
        self._update: Future[UpdateReport] | None = None

    def connect(
        self,
        rollout_engines: Sequence[Any],
        engine_gpu_counts: Sequence[int] | None,
        engine_gpu_offsets: Sequence[int] | None,
        parallel_state: Any,
        placement: WeightUpdatePlacement,
        selector: str,
    ) -> None:
        """Takes the engines.  Rank 0 sends; the model must be gathered there in full.

        Raises:
            ConfigError: miles does not gather the whole model.
        """
        if not (placement.gather_pp and placement.gather_tp and placement.gather_ep):
            raise ConfigError(
                f"miles gathers {placement}, and rank 0 must get every tensor whole",
                hint="use a weight iterator that honours required_placement",
            )
        self.rollout_engines = rollout_engines
        self._targets = tuple(
            Target(engine.server_url, api_key=getattr(engine, "api_key", None)) for engine in rollout_engines
        )
        if self._ranks is None:
            self._ranks = TrainerGroup.connect(torch.device("cpu"), timeout_s=self._timeout_s)
        self.is_sender = self._ranks.is_head

    def begin_sync(self, weight_version: int, iter_buckets: Callable[..., Iterator[_Bucket]]) -> bool:
        """Starts an update on rank 0.  The first time it reads the stream once, to learn the tensors.  Collective.

        Raises:
            WeightcastError: On rank 0, as ``WeightUpdater.connect``.
            TrainerRankFailed: On the other ranks, with rank 0's words.
        """
        specs: list[TensorSpec] = []
        if self._specs is None:
            for bucket in iter_buckets(materialize=bool(self.is_sender)):
                specs += [
                    TensorSpec.of(name, tensor, dtype=casting.wire_dtype(tensor.dtype, self._wire_dtype))
                    for name, tensor in bucket
                ]
                self._device = bucket[0][1].device
        self._together(lambda: self._begin(weight_version, self._specs or specs))
        self._specs = self._specs or specs
        return True

    def send_bucket(self, bucket: _Bucket) -> None:
        """Gives a bucket to the update.  An error of the update is raised by ``finalize``, on every rank."""
        self._feed.put(bucket)  # returns at once if the update has failed

    def after_base_weights(self) -> None:
        """Says that every bucket was given."""
        if self.is_sender:
            self._feed.put(None)

    def finalize(self, weight_version: int) -> None:
        """Waits until every engine serves the version.  Collective.

        Raises:
            UpdateFailed, WeightcastError: On rank 0, as ``WeightUpdater.update``.
            TrainerRankFailed: On the other ranks, with rank 0's words.
        """
        self._together(self._end)
        if self.report is not None:
            self.update_weight_metrics = {
                "weightcast/bytes": float(self.report.bytes),
                "weightcast/seconds": self.report.seconds,
            }

    def close(self) -> None:
        """Closes the updater and the ranks' group.  Safe to call twice."""
        if self._update is not None:
            self._feed.put(None)
        self._pool.shutdown(wait=True)
        for part in (self._updater, self._ranks):
            if part is not None:
                part.close()
        self._updater = self._ranks = None

    def _begin(self, version: int, specs: Sequence[TensorSpec]) -> None:
        feed = self._feed = _Feed(self._timeout_s)
        if self._updater is None:
            exporter = BridgeExporter(
                lambda: self._feed.tensors(), specs=specs, wire_dtype=self._wire_dtype, device=self._device
            )
            self._updater = WeightUpdater.connect(exporter, self._targets, alone=True, **self._options)
        else:
            self._updater.retarget(self._targets)
        self._update = self._pool.submit(self._updater.update, version=version)
        self._update.add_done_callback(lambda _: feed.stop_reading())

    def _end(self) -> None:
        update, self._update = self._update, None
        if update is None:
            raise ConfigError("there is no update to finish", hint="miles calls begin_sync() first")
        self.report = update.result()

    def _together(self, do: Callable[[], None]) -> None:
        """Runs something on rank 0; the other ranks wait for it, and fail if it fails."""
        ranks = self._ranks
        if ranks is None:
            raise ConfigError("this protocol is not connected", hint="miles calls connect() first")
        if not ranks.is_head:
            words = ranks.broadcast_bytes(None, timeout_s=_END_DEADLINES * self._timeout_s).decode()
            if words:
                raise TrainerRankFailed(f"rank 0 could not update the engines: {words}")
            return
        words = ""
        try:
            do()
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
            raise
        finally:
            ranks.broadcast_bytes(words.encode())


def build_protocol(args: Namespace) -> WeightcastProtocol:
    """Makes the protocol; miles calls it with its arguments."""
    return WeightcastProtocol(args)
