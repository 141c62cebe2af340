"""In a worker of vLLM: the weight-transfer backend that holds our receiver.

Weight messages come over a Unix socket from the API server, on a thread of their own, so that vLLM goes on
generating while buckets arrive, and an interrupt reaches a rank that waits in a collective.  What switches weights
runs on the worker's main thread, inside vLLM's own ``start_weight_update`` and ``finish_weight_update``, which come
when nothing is generated.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import get_model_loader

from weightcast.comm.ipc import device_uuid
from weightcast.errors import ConfigError, WeightcastError
from weightcast.plugins.vllm.unpacked import UnpackedModel
from weightcast.plugins.vllm.words import Hello, meeting_place, needs_main
from weightcast.receiver import WeightReceiver
from weightcast.receiver.executor import serve_messages
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Abort, Commit, Message, RankAck, encode

log = logging.getLogger("vllm.weightcast")

_MAIN_S = 60.0


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the API server and the ranks meet.

    Attributes:
        folder: A folder of the API server's that only its user may enter.
    """

    folder: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: buckets are announced under ``/weightcast``."""


class _Errand:
    """A message that the main thread carries out."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.answer: RankAck | None = None
        self.done = threading.Event()


class WeightcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One rank's receiver, as vLLM knows it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        """Called by vLLM when the model is loaded and before it measures how much memory is left.

        Raises:
            ConfigError: This model, or vLLM as it was started, cannot be updated natively; vLLM does not start.
        """
        super().__init__(config, vllm_config, device, model)
        self._rank = int(vllm_config.parallel_config.rank)
        self._committed = ""
        self._errand: _Errand | None = None
        self._waiting = threading.Condition()
        self._listener: Listener | None = None
        self._places: tuple[str, ...] = ()
        try:
            with set_current_vllm_config(vllm_config):
                self._receiver = self._make_receiver()
        except WeightcastError as error:
            # vLLM's own words at the end of a failed start are far from the reason.
            log.error("weightcast cannot update this model: %s%s", error, f" ({error.hint})" if error.hint else "")
            raise

    # -- vLLM's side, on the main thread

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Listen for the API server."""
        if self._listener is not None:
            raise RuntimeError("weightcast listens already: more than one API server cannot update one engine")
        try:
            self._listener = Listener(meeting_place(init_info.folder, self._rank), family="AF_UNIX", backlog=1)
        except OSError as error:
            raise RuntimeError(f"rank {self._rank} cannot listen in {init_info.folder}: {error}") from error
        threading.Thread(target=self._serve, args=(self._listener,), name="weightcast", daemon=True).start()

    def start_weight_update(self) -> None:
        """vLLM's word that nothing is generated."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Refuse what does not come from us."""
        raise RuntimeError("with the backend weightcast, updates go to /weightcast, not to /update_weights")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """As ``update_weights``."""
        raise RuntimeError("with the backend weightcast, updates go to /weightcast, not to /update_weights")

    def finish_weight_update(self) -> None:
        """Carry out what waits for the main thread; what comes of it goes over the socket."""
        with self._waiting:
            self._waiting.wait_for(lambda: self._errand is not None, timeout=_MAIN_S)
            errand, self._errand = self._errand, None
        if errand is None:
            log.warning("finish_weight_update was called, but not by weightcast: nothing is done")
            return
        errand.answer = self._receiver.apply(errand.message)
        errand.done.set()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """The trainer's half, which versions before 0.29 or so want to see in this class."""
        raise RuntimeError("with the backend weightcast, updates are sent by weightcast.WeightUpdater")

    def shutdown(self) -> None:
        """Let go of groups and mapped memory; vLLM may call it twice."""
        self._receiver.interrupt("the engine is shutting down")
        self._receiver.close()
        if self._listener is not None:
            with suppress(FileNotFoundError):  # an API server that ended first has removed the meeting place
                self._listener.close()
            self._listener = None

    # -- the API server's side, on threads of their own

    def apply(self, message: Message) -> RankAck:
        """A weight message; one at a time."""
        main = needs_main(message, self._committed)
        if isinstance(message, Commit):
            self._committed = message.session
        elif isinstance(message, Abort) and message.session == self._committed:
            self._committed = ""
        ack = self._on_main(message) if main else self._receiver.apply(message)
        if self.vllm_config.speculative_config is not None:
            ack = msgspec.structs.replace(ack, not_updated=(*ack.not_updated, "the draft model"))
        return ack

    def interrupt(self, reason: str) -> None:
        """End a wait for the trainer."""
        self._receiver.interrupt(reason)

    def _on_main(self, message: Message) -> RankAck:
        errand = _Errand(message)
        with self._waiting:
            self._errand = errand
            self._waiting.notify_all()
        while not errand.done.wait(_MAIN_S):
            with self._waiting:
                if self._errand is errand:  # nobody came for it
                    self._errand = None
                    return RankAck(rank=self._rank, ok=False, error="vLLM's main loop did not come to switch weights")
        assert errand.answer is not None
        return errand.answer

    def _serve(self, listener: Listener) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        while True:
            try:
                connection = listener.accept()
            except (OSError, EOFError):
                return  # closed
            with connection:
                self._greet(connection)
                serve_messages(connection, self, rank=self._rank)
                self.interrupt("the API server is gone")

    def _greet(self, connection: Connection) -> None:
        loader = self._receiver.loader
        hello = Hello(
            rank=self._rank,
            pid=os.getpid(),
            device=device_uuid(self.device),
            staging=loader.staging.place,
            specs=tuple(loader.expected.values()),
            places=self._places,
        )
        try:
            connection.send_bytes(encode(hello))
        except OSError as error:
            log.error("the API server went away: %s", error)

    # -- once, when the model is loaded

    def _make_receiver(self) -> WeightReceiver:
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            raise ConfigError("data-parallel vLLM has several engines behind one URL", hint="one server for each")
        if self.device.type == "cpu" and not self.model_config.enforce_eager:
            # A compiled graph keeps the packed weights that it was compiled with.
            raise ConfigError(
                "on a CPU, weights can only be updated in eager mode", hint="start vLLM with --enforce-eager"
            )
        unpacked = UnpackedModel(self.model, device=self.device)
        found: list[TensorSpec] = []
        unpacked.load_weights(self._checkpoint(found))
        if not found:
            raise ConfigError("vLLM was started without a checkpoint, so the names of its weights are unknown")
        unpacked.check_layouts()
        unpacked.spot_check()
        finishers = (unpacked.pack, unpacked.spot_check)
        receiver = WeightReceiver(
            self.model,
            load_weights=unpacked.load_weights,
            expected=found,
            tp_rank=self._rank,
            tp_size=int(self.vllm_config.parallel_config.world_size),
            device=self.device,
            finishers=finishers,
            residents=unpacked.residents,
            checks=(unpacked.check,),
            keep_storage=True,
        )
        loader = receiver.loader
        self._places = tuple(name for name in loader.expected if loader.routes.get(name) or name in loader.computed)
        # The dtype that counts is the one that is kept.
        for name, routes in loader.routes.items():
            if routes:
                spec = loader.expected[name]
                kept = loader.residents[routes[0].parameter]
                loader.expected[name] = TensorSpec.of(name, torch.empty(spec.shape, device="meta"), dtype=kept.dtype)
        # vLLM's own constants (scales of an unquantised cache), which no checkpoint has.
        constants = {name for name, _ in self.model.named_buffers() if name.rpartition(".")[2].startswith("_")}
        loader.not_updated = tuple(name for name in loader.not_updated if name not in constants)
        if loader.computed:
            log.warning(
                "%d tensors are computed with while they load: %s", len(loader.computed), dict(loader.why_computed)
            )
        return receiver

    def _checkpoint(self, found: list[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """What vLLM has loaded, once more; its specs are left in ``found``."""
        loader = get_model_loader(self.vllm_config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise ConfigError(f"load format {self.vllm_config.load_config.load_format} has no checkpoint to read")
        for name, tensor in loader.get_all_weights(self.model_config, self.model):
            found.append(TensorSpec.of(name, tensor))
            yield name, tensor
