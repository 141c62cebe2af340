"""The worker extension for versions of vLLM without weight transfer.

    vllm serve MODEL --worker-extension-cls weightcast.plugins.vllm.worker_extension.Extension  (VLLM_SERVER_DEV_MODE=1)

Buckets go through vLLM's own loader into live weights, without staging, proof or rollback.  Versions with weight
transfer should use ``worker.py``.  The trainer's half is ``adapters/vllm/extension_adapter.py``.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import importlib.util
import threading
from typing import Any

import torch

from weightcast.errors import Refused, WeightcastError
from weightcast.plugins.vllm.rank_protocol import EPLB_HINT, EPLB_REFUSED
from weightcast.plugins.vllm.stores import why_never_emptied
from weightcast.receiver.sources.broadcast import BroadcastSource
from weightcast.receiver.sources.ipc import SharedMemorySource
from weightcast.wire import bucket_sources
from weightcast.wire.bucket import Bucket
from weightcast.wire.bucket_sources import IpcSource
from weightcast.wire.codec import decode
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Announce, Join, Leave

_PATIENCE_S = 120.0
_RELOAD = "vllm.model_executor.model_loader.reload"


class Extension:
    """Methods for ``/collective_rpc``.  vLLM refuses to start if it has a method of the same name."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _weightcast: _Loading | None = None

    def weightcast_start(self) -> None:
        """Begins an update and ends one that was left open.

        Raises:
            Refused: vLLM moves experts between ranks, and its loader would write them to their first places; or it
                answers requests from a store that nothing empties.
        """
        if getattr(self.vllm_config.parallel_config, "enable_eplb", False):
            raise Refused(EPLB_REFUSED, hint=EPLB_HINT)
        why, hint = why_never_emptied(self.vllm_config)
        if why:
            raise Refused(why, hint=hint)
        if self._weightcast is None:
            self._weightcast = _Loading(self)
        self._weightcast.start()

    def weightcast_apply(self, message: str) -> None:
        """Carries out a Join, Announce or Leave in JSON; vLLM answers with the words of an error."""
        if self._weightcast is None:
            self._weightcast = _Loading(self)
        self._weightcast.apply(message)

    def weightcast_finish(self) -> None:
        """Ends an update after its last bucket."""
        if self._weightcast is not None:
            self._weightcast.finish()


class _Loading:
    """One worker's groups, mapped buffers and the update under way."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model = worker.model_runner.get_model()
        device = torch.device(worker.device)
        self._broadcast = BroadcastSource(device, threading.Event())
        self._shared = SharedMemorySource(device)
        self._started = False

    def start(self) -> None:
        """Restores the parameters to the form in which a checkpoint is loaded, if this version of vLLM can."""
        if self._started:
            self.finish()
        if importlib.util.find_spec(_RELOAD) is not None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self._model)
        self._started = True

    def apply(self, text: str) -> None:
        """Carries out a message; raises ``Refused`` without an update, and for a message of another kind."""
        try:
            message = decode(text.encode())
        except WeightcastError as error:
            raise Refused(str(error)) from error
        if isinstance(message, Join):
            self._broadcast.join(message, rank=int(self._worker.rank))
        elif isinstance(message, Leave):
            if message.group is not None:
                self._broadcast.leave(message.group)
            self._shared.close()
        elif isinstance(message, Announce):
            self._load(message)
        else:
            raise Refused(f"{type(message).__name__} is not for a worker extension")

    def finish(self) -> None:
        self._started = False
        if importlib.util.find_spec(_RELOAD) is not None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            with self._configured():
                finalize_layerwise_reload(self._model, self._worker.vllm_config.model_config)
        else:
            from vllm.model_executor.model_loader.utils import process_weights_after_loading

            with self._configured():
                process_weights_after_loading(
                    self._model, self._worker.vllm_config.model_config, torch.device(self._worker.device)
                )
        self._broadcast.trim()

    def _load(self, message: Announce) -> None:
        if not self._started:
            raise Refused("no update is under way")
        bucket = self._read(message.layout, message)
        # vLLM keeps the tensors until a layer is complete, and the buffer is filled again before that: so clone them.
        tensors = [(slot.spec.name, view.clone()) for slot, view in bucket.views()]
        with self._configured():
            self._model.load_weights(tensors)
        if torch.device(self._worker.device).type == "cuda":
            torch.cuda.synchronize()

    def _read(self, layout: BucketLayout, message: Announce) -> Bucket:
        if isinstance(message.source, IpcSource):
            return self._shared.read(layout, message.source.handles)
        if not isinstance(message.source, bucket_sources.BroadcastSource):
            raise Refused(f"this engine takes no bucket from a source of the kind {message.source.transport}")
        return self._broadcast.read(layout, message.source.group, timeout_s=_PATIENCE_S)

    def _configured(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._worker.vllm_config)
