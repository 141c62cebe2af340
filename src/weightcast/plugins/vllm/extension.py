"""For vLLM without a weight transfer of its own: what ``--worker-extension-cls`` mixes into every worker.

    vllm serve MODEL --worker-extension-cls weightcast.plugins.vllm.extension.Extension     (VLLM_SERVER_DEV_MODE=1)

Buckets go through vLLM's own loading into live weights: nothing is staged, proven or brought back.  Where vLLM has the
plug-in point for weight transfer, ``worker.py`` is the better way.  The trainer's half: ``engines/vllm/extension.py``.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import importlib.util
import threading
from typing import Any

import torch

from weightcast.errors import Refused, WeightcastError
from weightcast.receiver.sources.broadcast import BroadcastSource
from weightcast.receiver.sources.ipc import SharedMemorySource
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import BucketLayout
from weightcast.wire.messages import Announce, IpcSource, Join, Leave, decode

_PATIENCE_S = 120.0
_RELOAD = "vllm.model_executor.model_loader.reload"


class Extension:
    """Methods that ``/collective_rpc`` finds on a worker.  No name is vLLM's: it would refuse to start."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _weightcast: _Loading | None = None

    def weightcast_start(self) -> None:
        """An update begins; one that was left open is over."""
        if self._weightcast is None:
            self._weightcast = _Loading(self)
        self._weightcast.start()

    def weightcast_apply(self, message: str) -> None:
        """Join, Announce or Leave, as JSON; what goes wrong is raised, and vLLM answers with its words."""
        if self._weightcast is None:
            self._weightcast = _Loading(self)
        self._weightcast.apply(message)

    def weightcast_finish(self) -> None:
        """Every bucket has come."""
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
        """Put the parameters back into the form in which a checkpoint is loaded, where this vLLM knows how."""
        if self._started:
            self.finish()
        if importlib.util.find_spec(_RELOAD) is not None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self._model)
        self._started = True

    def apply(self, text: str) -> None:
        """Carry out a message.

        Raises:
            Refused: There is no update under way, or this message is none of those.
        """
        try:
            message = decode(text.encode())
        except WeightcastError as error:
            raise Refused(str(error)) from error
        if isinstance(message, Join):
            self._broadcast.join(message, rank=int(self._worker.rank))
        elif isinstance(message, Leave):
            self._leave(message.group)
        elif isinstance(message, Announce):
            self._load(message)
        else:
            raise Refused(f"{type(message).__name__} is not for a worker extension")

    def finish(self) -> None:
        """Process what was loaded, once."""
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
        # Loading layer by layer keeps what it is given until the layer is complete; the buffer is filled again before.
        tensors = [(slot.spec.name, view.clone()) for slot, view in bucket.views()]
        with self._configured():
            self._model.load_weights(tensors)
        if torch.device(self._worker.device).type == "cuda":
            torch.cuda.synchronize()

    def _read(self, layout: BucketLayout, message: Announce) -> Bucket:
        if isinstance(message.source, IpcSource):
            return self._shared.read(layout, message.source.handles)
        return self._broadcast.read(layout, message.source.group, timeout_s=_PATIENCE_S)

    def _leave(self, group: str | None) -> None:
        if group is not None:
            self._broadcast.leave(group)
        self._shared.close()

    def _configured(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._worker.vllm_config)
